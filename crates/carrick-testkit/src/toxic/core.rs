//! A lane: which bytes go on, and when.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::Way;

/// Bytes that a direction of a connection holds at most. As much as a socket's own buffer: enough for a
/// bulk transfer, little enough that a hundred connections are a few megabytes.
pub const MOST_HELD: usize = 64 * 1024;

/// Longer waits are as good as for ever, and sums of them must not overflow.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Timers are late by up to so much; a lane that is paced makes up for it.
const LATE: Duration = Duration::from_millis(5);

/// Bytes on their way in one direction.
#[derive(Debug, Default)]
pub(super) struct Lane {
    queue: VecDeque<Piece>,
    held: usize,
    /// When pacing lets the next byte go.
    free_at: Option<Instant>,
    passed: u64,
    swallowed: u64,
    ended: Option<Instant>,
}

#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    done: usize,
    at: Instant,
    /// Its draw in [0, 1], that jitter is multiplied by.
    draw: f64,
}

/// What a lane does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, until something comes.
    Idle,
    /// Nothing until then.
    Wait(Instant),
    /// This many of [`Lane::bytes`] go on.
    Write(usize),
    /// This direction ends as its source did.
    End,
    /// The connection is closed: its limit is reached.
    Close,
    /// The connection is reset: it lost bytes.
    Reset,
}

impl Lane {
    /// How many bytes may be read.
    pub(super) fn room(&self) -> usize {
        if self.ended.is_some() { 0 } else { MOST_HELD.saturating_sub(self.held) }
    }

    /// Takes bytes that were read.
    pub(super) fn push(&mut self, bytes: &[u8], draw: f64, now: Instant) {
        self.held += bytes.len();
        self.queue.push_back(Piece { bytes: bytes.to_vec(), done: 0, at: now, draw });
    }

    /// Takes the end of the stream.
    pub(super) fn end(&mut self, now: Instant) {
        self.ended = Some(now);
    }

    /// What is to be done now.
    pub(super) fn next(&mut self, way: &Way, now: Instant) -> Step {
        if way.black_hole {
            self.swallow();
            return Step::Idle;
        }
        if self.swallowed > 0 {
            return Step::Reset;
        }
        let left = way.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.passed));
        if left == 0 {
            return Step::Close;
        }
        let Some(piece) = self.queue.front() else {
            let Some(ended) = self.ended else { return Step::Idle };
            return at(later(later(ended, way.latency), way.slow_close), now, Step::End);
        };
        let jitter =
            Duration::try_from_secs_f64(way.jitter.min(LONGEST).as_secs_f64() * piece.draw);
        let due = later(later(piece.at, way.latency), jitter.unwrap_or_default());
        let paced = self.free_at.filter(|_| way.rate.is_some());
        let most = way.rate.map_or(u64::MAX, |rate| part(rate.get())).min(left);
        let there = piece.bytes.len() - piece.done;
        let write = there.min(usize::try_from(most).unwrap_or(usize::MAX));
        at(paced.map_or(due, |paced| paced.max(due)), now, Step::Write(write))
    }

    /// The first bytes that go on.
    pub(super) fn bytes(&self, most: usize) -> &[u8] {
        let piece = self.queue.front().map(|piece| &piece.bytes[piece.done..]).unwrap_or_default();
        &piece[..most.min(piece.len())]
    }

    /// Of [`Lane::bytes`], so many have gone.
    pub(super) fn wrote(&mut self, count: usize, way: &Way, now: Instant) {
        let Some(piece) = self.queue.front_mut() else { return };
        piece.done = (piece.done + count).min(piece.bytes.len());
        if piece.done == piece.bytes.len() {
            self.queue.pop_front();
        }
        self.held = self.held.saturating_sub(count);
        self.passed = self.passed.saturating_add(count as u64);
        self.free_at = way.rate.map(|rate| {
            let on_time = now.checked_sub(LATE).unwrap_or(now);
            let from = self.free_at.map_or(now, |free_at| free_at.max(on_time));
            later(from, Duration::from_secs_f64(count as f64 / rate.get() as f64))
        });
    }

    /// Bytes that a black hole has had.
    pub(super) fn swallowed(&self) -> u64 {
        self.swallowed
    }

    fn swallow(&mut self) {
        self.swallowed = self.swallowed.saturating_add(self.held as u64);
        self.held = 0;
        self.queue.clear();
    }
}

/// Bytes that go at once at a rate: those of a twentieth of a second.
fn part(rate: u64) -> u64 {
    (rate / 20).max(1)
}

fn later(at: Instant, span: Duration) -> Instant {
    at.checked_add(span.min(LONGEST)).unwrap_or(at)
}

fn at(due: Instant, now: Instant, step: Step) -> Step {
    if due <= now { step } else { Step::Wait(due) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Runs a lane alone, to its end or until nothing happens any more; returns what came out and when
    /// the last of it did.
    fn drain(lane: &mut Lane, way: &Way, start: Instant) -> (Vec<u8>, Duration, Step) {
        let (mut now, mut last, mut out) = (start, start, Vec::new());
        loop {
            match lane.next(way, now) {
                Step::Wait(until) => now = until,
                Step::Write(count) => {
                    out.extend_from_slice(lane.bytes(count));
                    lane.wrote(count, way, now);
                    last = now;
                }
                step => return (out, last.max(now) - start, step),
            }
        }
    }

    #[track_caller]
    fn check(way: Way, bytes: usize, expected: (usize, Duration, Step)) {
        let (mut lane, start) = (Lane::default(), Instant::now());
        lane.push(&vec![7; bytes], 0.5, start);
        lane.end(start);
        let (out, took, step) = drain(&mut lane, &way, start);
        assert_eq!((out.len(), took, step), expected, "{way:?}");
    }

    #[test]
    fn each_kind_of_harm_does_what_it_says() {
        let way = Way::default();
        check(way, 10, (10, Duration::ZERO, Step::End));
        check(Way { latency: SECOND, ..way }, 10, (10, SECOND, Step::End));
        check(Way { jitter: SECOND, ..way }, 10, (10, SECOND / 2, Step::End));
        check(Way { slow_close: SECOND, ..way }, 10, (10, SECOND, Step::End));
        check(Way { black_hole: true, ..way }, 10, (0, Duration::ZERO, Step::Idle));
        check(Way { limit: Some(4), ..way }, 10, (4, Duration::ZERO, Step::Close));
        check(Way { limit: Some(0), ..way }, 10, (0, Duration::ZERO, Step::Close));
        check(Way { limit: Some(11), ..way }, 10, (10, Duration::ZERO, Step::End));
        check(Way { latency: Duration::MAX, ..way }, 1, (1, LONGEST, Step::End));
        let rate = NonZeroU64::new(100);
        // The first part goes at once, so that a hundred bytes take 95 hundredths.
        check(Way { rate, ..way }, 100, (100, SECOND * 95 / 100, Step::End));
        check(Way { rate: NonZeroU64::new(1), ..way }, 3, (3, 2 * SECOND, Step::End));
        check(Way { rate: NonZeroU64::new(u64::MAX), ..way }, 99, (99, Duration::ZERO, Step::End));
    }

    #[test]
    fn toxiproxy_159_558_a_wait_ends_when_its_cause_is_removed() {
        let (mut lane, now) = (Lane::default(), Instant::now());
        lane.push(b"late", 1.0, now);
        let slow = Way { latency: LONGEST, jitter: LONGEST, ..Way::default() };
        assert!(matches!(lane.next(&slow, now), Step::Wait(_)));
        assert_eq!(lane.next(&Way::default(), now), Step::Write(4));
    }

    #[test]
    fn a_stream_that_lost_bytes_is_never_continued() {
        let (mut lane, now) = (Lane::default(), Instant::now());
        lane.push(b"lost", 0.0, now);
        let hole = Way { black_hole: true, ..Way::default() };
        assert_eq!(lane.next(&hole, now), Step::Idle);
        lane.push(b"found", 0.0, now);
        assert_eq!((lane.next(&Way::default(), now), lane.swallowed()), (Step::Reset, 4));
    }

    proptest! {
        #[test]
        fn whatever_the_way_bytes_come_in_order_and_none_is_early(
            pieces in prop::collection::vec((1..2000_usize, 0..=100_u32, 0..500_u64), 1..20),
            latency in 0..2000_u64,
            jitter in 0..2000_u64,
            rate in prop::option::of(1..100_000_u64),
            limit in prop::option::of(0..20_000_u64),
        ) {
            let way = Way {
                latency: Duration::from_millis(latency),
                jitter: Duration::from_millis(jitter),
                rate: rate.and_then(NonZeroU64::new),
                limit,
                ..Way::default()
            };
            let (mut lane, start) = (Lane::default(), Instant::now());
            let (mut at, mut sent) = (start, Vec::new());
            for (length, draw, wait) in pieces {
                at += Duration::from_millis(wait);
                let bytes: Vec<u8> = (sent.len()..sent.len() + length).map(|n| n as u8).collect();
                lane.push(&bytes, f64::from(draw) / 100.0, at);
                sent.extend(bytes);
            }
            prop_assert_eq!(lane.held, sent.len());
            lane.end(at);
            let (out, took, step) = drain(&mut lane, &way, start);
            let expected = limit.map_or(sent.len(), |limit| sent.len().min(limit as usize));
            prop_assert_eq!(&out[..], &sent[..expected]);
            prop_assert_eq!(step == Step::Close, limit.is_some_and(|limit| limit <= sent.len() as u64));
            if let Some(rate) = rate {
                let parts = (expected as u64).saturating_sub(part(rate)) as f64 / rate as f64;
                prop_assert!(took.as_secs_f64() >= parts * 0.99, "{:?} < {} s", took, parts);
            }
            if expected > 0 {
                prop_assert!(took >= way.latency);
            }
        }
    }
}
