//! A clock that goes with Tokio's, so that a paused test also moves the wall clock.

use carrick_core::clock::Clock;
use jiff::Timestamp;
use tokio::time::Instant;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PausedClock {
    start: Instant,
    wall: Timestamp,
}

impl PausedClock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), wall: "2026-12-01T10:00:00Z".parse().unwrap() }
    }
}

impl Clock for PausedClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wall(&self) -> Timestamp {
        self.wall + self.start.elapsed()
    }
}
