//! Moves the bytes of one direction.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    Toxics, Way,
    core::{Lane, Step},
};

/// What holds now, for all connections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rules {
    pub(super) toxics: Toxics,
    /// How often all connections were cut.
    pub(super) cuts: u64,
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Up,
    Down,
}

/// How a direction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// As its source did.
    Ended,
    /// Its limit is reached.
    Close,
    /// It was cut, it broke, or it lost bytes.
    Reset,
}

/// What a connection knows of the rules.
#[derive(Clone, Debug)]
pub(super) struct Lot {
    pub(super) rules: watch::Receiver<Rules>,
    /// Its draw in [0, 1): whether a toxicity includes it.
    pub(super) draw: f64,
    /// How often connections had been cut when it was made.
    pub(super) cuts: u64,
}

impl Lot {
    /// What is done to this connection now; `None` if it was cut.
    pub(super) fn toxics(&mut self) -> Option<Toxics> {
        let rules = *self.rules.borrow_and_update();
        if rules.cuts != self.cuts {
            return None;
        }
        // Less than zero and not a number include none.
        Some(if self.draw < rules.toxics.toxicity { rules.toxics } else { Toxics::default() })
    }

    fn way(&mut self, side: Side) -> Option<Way> {
        let toxics = self.toxics()?;
        Some(match side {
            Side::Up => toxics.up,
            Side::Down => toxics.down,
        })
    }

    /// Waits for other rules; for ever if there will be none.
    pub(super) async fn changed(&mut self) {
        if self.rules.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Moves bytes until this direction ends. A change of the rules wakes it, whatever it waits for.
pub(super) async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    side: Side,
    mut lot: Lot,
    mut dice: Xoshiro256PlusPlus,
    (passed, swallowed): (&AtomicU64, &AtomicU64),
) -> End {
    let (mut lane, mut buffer) = (Lane::default(), vec![0; 8 * 1024]);
    let mut told = 0;
    loop {
        let Some(way) = lot.way(side) else { return End::Reset };
        let step = lane.next(&way, Instant::now());
        swallowed.fetch_add(lane.swallowed() - told, Relaxed);
        told = lane.swallowed();
        let (write, until) = match step {
            Step::Idle => (0, None),
            Step::Wait(until) => (0, Some(until)),
            Step::Write(count) => (count, None),
            Step::Close => return End::Close,
            Step::Reset => return End::Reset,
            Step::End => {
                return if to.shutdown().await.is_ok() { End::Ended } else { End::Reset };
            }
        };
        let room = lane.room().min(buffer.len());
        tokio::select! {
            // In order, so that what is seeded is the same each time.
            biased;
            () = lot.changed() => {}
            wrote = to.write(lane.bytes(write)), if write > 0 => match wrote {
                Ok(count) if count > 0 => {
                    passed.fetch_add(count as u64, Relaxed);
                    lane.wrote(count, &way, Instant::now());
                }
                _ => return End::Reset,
            },
            () = wait(until), if until.is_some() => {}
            read = from.read(&mut buffer[..room]), if room > 0 => match read {
                Ok(0) => lane.end(Instant::now()),
                Ok(count) => lane.push(&buffer[..count], dice.random(), Instant::now()),
                Err(_) => return End::Reset,
            },
        }
    }
}

async fn wait(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU64, time::Duration};

    use rand::SeedableRng;
    use tokio::{
        io::{DuplexStream, duplex},
        task::JoinHandle,
    };

    use super::{super::MOST_HELD, *};

    const SECOND: Duration = Duration::from_secs(1);

    struct Pipe {
        near: DuplexStream,
        far: DuplexStream,
        rules: watch::Sender<Rules>,
        end: JoinHandle<(End, u64, u64)>,
    }

    /// A direction that stands alone, whose connection drew one half.
    fn pipe(toxics: Toxics) -> Pipe {
        let ((near, from), (to, far)) = (duplex(1024), duplex(1024));
        let (rules, receiver) = watch::channel(Rules { toxics, cuts: 0 });
        let lot = Lot { rules: receiver, draw: 0.5, cuts: 0 };
        let end = tokio::spawn(async move {
            let (passed, swallowed) = (AtomicU64::new(0), AtomicU64::new(0));
            let dice = Xoshiro256PlusPlus::seed_from_u64(1);
            let end = pump(from, to, Side::Up, lot, dice, (&passed, &swallowed)).await;
            (end, passed.into_inner(), swallowed.into_inner())
        });
        Pipe { near, far, rules, end }
    }

    fn up(way: Way) -> Toxics {
        Toxics { up: way, ..Toxics::default() }
    }

    /// Sends so much and its end; returns how much arrived, how long that took, and how it ended.
    async fn send(toxics: Toxics, bytes: usize) -> (usize, Duration, End) {
        let Pipe { mut near, mut far, rules: _rules, end } = pipe(toxics);
        let start = Instant::now();
        let writer = tokio::spawn(async move {
            near.write_all(&vec![1; bytes]).await.ok();
        });
        let mut found = Vec::new();
        far.read_to_end(&mut found).await.unwrap();
        let took = start.elapsed();
        writer.await.unwrap();
        (found.len(), took, end.await.unwrap().0)
    }

    #[tokio::test(start_paused = true)]
    async fn latency_delays_and_does_not_slow_down() {
        let way = Way { latency: SECOND, ..Way::default() };
        let (count, took, end) = send(up(way), 50_000).await;
        assert_eq!((count, end), (50_000, End::Ended));
        assert!(took >= SECOND && took < SECOND + SECOND / 100, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_is_kept() {
        let way = Way { rate: NonZeroU64::new(10_000), ..Way::default() };
        let (count, took, _) = send(up(way), 100_000).await;
        assert_eq!(count, 100_000);
        assert!(took > 9 * SECOND && took < 11 * SECOND, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn jitter_is_bounded_and_the_same_for_the_same_seed() {
        let way = Way { jitter: SECOND, ..Way::default() };
        let (_, first, _) = send(up(way), 10).await;
        let (_, second, _) = send(up(way), 10).await;
        assert!(first == second && first > Duration::ZERO && first <= SECOND, "{first:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_comes_late_when_closing_is_slow() {
        let way = Way { slow_close: 5 * SECOND, ..Way::default() };
        let (count, took, end) = send(up(way), 10).await;
        assert_eq!((count, took, end), (10, 5 * SECOND, End::Ended));
    }

    #[tokio::test(start_paused = true)]
    async fn toxiproxy_603_toxicity_zero_is_inert() {
        let way = Way { black_hole: true, limit: Some(0), latency: SECOND, ..Way::default() };
        for toxicity in [0.0, 0.5, -1.0, f64::NAN] {
            let sent = send(Toxics { toxicity, ..up(way) }, 1000).await;
            assert_eq!(sent, (1000, Duration::ZERO, End::Ended), "{toxicity}");
        }
        let limited = Toxics { toxicity: 0.51, ..up(Way { limit: Some(3), ..Way::default() }) };
        assert_eq!(send(limited, 1000).await, (3, Duration::ZERO, End::Close));
    }

    #[tokio::test(start_paused = true)]
    async fn toxiproxy_159_558_new_rules_reach_a_pump_that_waits_for_something_else() {
        let wait = Way { latency: 3600 * SECOND, ..Way::default() };
        let mut pipe = pipe(up(wait));
        pipe.near.write_all(b"hello").await.unwrap();
        tokio::time::sleep(SECOND).await;
        pipe.rules.send_replace(Rules::default());
        let (start, mut found) = (Instant::now(), [0; 5]);
        pipe.far.read_exact(&mut found).await.unwrap();
        assert_eq!((&found, start.elapsed()), (b"hello", Duration::ZERO));
        // It waits for more to read; a cut ends that too.
        pipe.rules.send_replace(Rules { cuts: 1, ..Rules::default() });
        assert_eq!(pipe.end.await.unwrap(), (End::Reset, 5, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_black_hole_swallows_all_and_keeps_the_connection() {
        let mut pipe = pipe(up(Way { black_hole: true, ..Way::default() }));
        pipe.near.write_all(&[1; 100_000]).await.unwrap();
        drop(pipe.near);
        let mut found = [0];
        let read = tokio::time::timeout(3600 * SECOND, pipe.far.read(&mut found)).await;
        assert!(read.is_err() && !pipe.end.is_finished(), "not even its end goes on");
        pipe.rules.send_replace(Rules::default());
        assert_eq!(pipe.end.await.unwrap(), (End::Reset, 0, 100_000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_does_not_read_is_felt_by_the_writer() {
        for way in [Way::default(), Way { latency: SECOND, ..Way::default() }] {
            let mut pipe = pipe(up(way));
            let mut sent = 0;
            let write = async {
                loop {
                    sent += pipe.near.write(&[1; 512]).await.unwrap();
                }
            };
            assert!(tokio::time::timeout(60 * SECOND, write).await.is_err());
            assert!((MOST_HELD..=MOST_HELD + 2 * 1024).contains(&sent), "{sent}");
        }
    }
}
