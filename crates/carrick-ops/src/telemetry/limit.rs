//! A limit for repeated log lines: thirty thousand lines that say the same hide the one that differs.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Lets a repeated log line through a few times per period, and counts what it holds back.
///
/// One value is one place in the code, usually a `static`:
///
/// ```
/// use std::time::Duration;
/// use carrick_ops::telemetry::RateLimit;
/// use tokio::time::Instant;
///
/// static CANNOT_CONNECT: RateLimit = RateLimit::new(1, Duration::from_secs(10));
///
/// fn complain(error: &str) {
///     if let Some(repeat) = CANNOT_CONNECT.admit(Instant::now()) {
///         tracing::warn!(error, held_back = repeat.held_back, "cannot connect");
///     }
/// }
/// # complain("refused");
/// # assert!(CANNOT_CONNECT.admit(Instant::now()).is_none());
/// ```
#[derive(Debug)]
pub struct RateLimit {
    burst: u32,
    period: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Start of the present period; `None` before the first line.
    since: Option<Instant>,
    admitted: u32,
    held_back: u64,
}

/// Leave to log, and what was not logged since the last time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// Lines held back since the last one that got through.
    pub held_back: u64,
}

impl RateLimit {
    /// Lets `burst` lines through per `period`.
    pub const fn new(burst: u32, period: Duration) -> Self {
        let state = State { since: None, admitted: 0, held_back: 0 };
        Self { burst, period, state: parking_lot::const_mutex(state) }
    }

    /// Asks to log a line now.
    pub fn admit(&self, now: Instant) -> Option<Repeat> {
        let mut state = self.state.lock();
        let fresh =
            state.since.is_none_or(|since| now.saturating_duration_since(since) >= self.period);
        if fresh {
            state.since = Some(now);
            state.admitted = 0;
        }
        if state.admitted >= self.burst {
            state.held_back += 1;
            return None;
        }
        state.admitted += 1;
        Some(Repeat { held_back: std::mem::take(&mut state.held_back) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_gets_through_and_the_rest_is_counted() {
        let limit = RateLimit::new(2, Duration::from_secs(10));
        let start = Instant::now();
        let admitted =
            (0..30_000).filter(|n| limit.admit(start + Duration::from_micros(*n)).is_some());
        assert_eq!(admitted.count(), 2);
        let later = start + Duration::from_secs(10);
        assert_eq!(limit.admit(later), Some(Repeat { held_back: 29_998 }));
        assert_eq!(limit.admit(later), Some(Repeat { held_back: 0 }), "told once");
        assert_eq!(limit.admit(later), None);
    }

    #[test]
    fn a_limit_of_zero_says_nothing_and_a_period_of_zero_holds_nothing_back() {
        let now = Instant::now();
        assert_eq!(RateLimit::new(0, Duration::from_secs(1)).admit(now), None);
        let open = RateLimit::new(1, Duration::ZERO);
        assert!((0..10).all(|_| open.admit(now) == Some(Repeat { held_back: 0 })));
    }
}
