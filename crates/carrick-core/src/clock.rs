//! The clock, as an argument: what needs the time asks a [`Clock`], so that a test can set it.

use std::{fmt, sync::Mutex, time::Duration};

use jiff::Timestamp;
use tokio::time::Instant;

/// Tells the time: monotonic for spans of it, wall for what other machines and people read.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Monotonic time.
    fn now(&self) -> Instant;
    /// Wall time, which may jump.
    fn wall(&self) -> Timestamp;
}

/// The machine's clock; its monotonic side follows a paused tokio runtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads it")]
    fn wall(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// A clock that stands until it is moved.
///
/// ```
/// # use carrick_core::clock::{Clock, ManualClock};
/// # use std::time::Duration;
/// let clock = ManualClock::at("2026-12-01T00:00:00Z".parse().unwrap());
/// clock.advance(Duration::from_secs(60));
/// assert_eq!(clock.wall().to_string(), "2026-12-01T00:01:00Z");
/// ```
#[derive(Debug)]
pub struct ManualClock(Mutex<(Instant, Timestamp)>);

impl ManualClock {
    /// A clock that shows this wall time.
    pub fn at(wall: Timestamp) -> Self {
        Self(Mutex::new((Instant::now(), wall)))
    }

    /// Moves both sides forward.
    pub fn advance(&self, by: Duration) {
        let mut time = self.time();
        time.0 += by;
        time.1 += by;
    }

    /// Sets the wall time alone, as an administrator or NTP does.
    pub fn set_wall(&self, wall: Timestamp) {
        self.time().1 = wall;
    }

    fn time(&self) -> std::sync::MutexGuard<'_, (Instant, Timestamp)> {
        // A panic elsewhere cannot leave two numbers half-written in a way that matters here.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.time().0
    }

    fn wall(&self) -> Timestamp {
        self.time().1
    }
}
