//! What is decided about deadlines: whom a server refuses, and when a body is over.

use std::time::Duration;

use tokio::time::Instant;

use super::StreamOptions;

/// How long refusals are counted against their cap.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

/// Requests and refusals of the present stretch of time.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    since: Option<Instant>,
    requests: u32,
    refused: u32,
}

impl Refusals {
    /// Counts a request.
    pub(super) fn count(&mut self, now: Instant) {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            *self = Self { since: Some(now), requests: 0, refused: 0 };
        }
        self.requests = self.requests.saturating_add(1);
    }

    /// Whether one more may be refused, of a share of at most `max`.
    pub(super) fn refuse(&mut self, max: f64) -> bool {
        let refused = self.refused.saturating_add(1);
        let may = f64::from(refused) <= max * f64::from(self.requests);
        if may {
            self.refused = refused;
        }
        may
    }
}

/// Until when a body may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// To a moment, as part of its call.
    Whole(Instant),
    /// While something comes: a stream that is well has no end of its own.
    Stream {
        /// Its lifetime.
        last: Instant,
        /// The longest silence.
        idle: Duration,
        /// Until when the frame that is awaited may take; none is awaited after one has come, since
        /// a reader that is slow is not the stream's silence.
        quiet: Option<Instant>,
    },
}

impl Span {
    /// A stream whose head has just been given.
    pub(crate) fn stream(now: Instant, options: &StreamOptions, last: Instant) -> Self {
        Self::Stream { last, idle: options.idle, quiet: Some(now + options.first_byte) }
    }

    /// A frame came.
    pub(super) fn came(&mut self) {
        if let Self::Stream { quiet, .. } = self {
            *quiet = None;
        }
    }

    /// Until when to wait for the next frame. Only a stream asks for the time, and once a frame.
    pub(super) fn ends(&mut self, now: impl FnOnce() -> Instant) -> Instant {
        match self {
            Self::Whole(end) => *end,
            Self::Stream { last, idle, quiet } => {
                let idle = *idle;
                (*last).min(*quiet.get_or_insert_with(|| now() + idle))
            }
        }
    }

    /// Whether even a body that always has more is over.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        let (Self::Whole(end) | Self::Stream { last: end, .. }) = self;
        now >= *end
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    proptest! {
        #[test]
        fn never_more_than_the_share_of_a_window_is_refused(
            late in prop::collection::vec(any::<bool>(), 1..500),
            millis in prop::collection::vec(0..100u64, 500),
            max in 0.0..=1.0,
        ) {
            let mut refusals = Refusals::default();
            let mut now = Instant::now();
            let (mut began, mut requests, mut refused) = (None, 0, 0);
            for (late, millis) in late.into_iter().zip(millis) {
                now += Duration::from_millis(millis);
                if began.is_none_or(|began| now - began >= WINDOW) {
                    (began, requests, refused) = (Some(now), 0, 0);
                }
                requests += 1;
                refusals.count(now);
                if late {
                    let may = f64::from(refused + 1) <= max * f64::from(requests);
                    prop_assert_eq!(refusals.refuse(max), may, "as many as may be, and no more");
                    refused += i32::from(may);
                }
            }
        }
    }

    #[test]
    fn at_its_ends_the_share_is_nobody_and_everybody() {
        let mut refusals = Refusals::default();
        for _ in 0..100 {
            refusals.count(Instant::now());
            assert!(!refusals.refuse(0.0));
        }
        let mut refusals = Refusals::default();
        for _ in 0..100 {
            refusals.count(Instant::now());
            assert!(refusals.refuse(1.0));
        }
    }

    #[test]
    fn the_silence_of_a_stream_is_counted_from_when_a_frame_is_awaited() {
        let start = Instant::now();
        let mut span = Span::stream(
            start,
            &StreamOptions { first_byte: 2 * SECOND, idle: 5 * SECOND, lifetime: 60 * SECOND },
            start + 60 * SECOND,
        );
        assert_eq!(span.ends(|| start + SECOND), start + 2 * SECOND, "the first has its own time");
        span.came();
        // Its reader was slow for nine seconds: the stream was not silent.
        assert_eq!(span.ends(|| start + 10 * SECOND), start + 15 * SECOND);
        assert_eq!(span.ends(|| start + 12 * SECOND), start + 15 * SECOND, "asked again, no later");
        span.came();
        assert_eq!(
            span.ends(|| start + 58 * SECOND),
            start + 60 * SECOND,
            "its life is over first"
        );
        assert!(!span.is_over(start + 59 * SECOND) && span.is_over(start + 60 * SECOND));
        let whole = Span::Whole(start + SECOND);
        assert!(!whole.is_over(start) && whole.is_over(start + SECOND));
    }
}
