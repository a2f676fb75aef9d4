//! How much the consumer holds at a time: what runs, and what is fetched ahead.
//!
//! Fetching ahead hides the broker's latency, but what is queued here waits where no other worker
//! can take it. So the queue is bounded by time: as much as is handled within the latency target,
//! by the handling times measured lately. Slow handlers fetch nothing ahead, fast ones hundreds.

use std::time::Duration;

/// Weight of the newest handling time in the mean: about the last 16 count.
const WEIGHT: f64 = 1.0 / 16.0;

/// Derives the length of the local queue from measured handling times.
#[derive(Debug)]
pub(super) struct Bound {
    concurrency: usize,
    prefetch: usize,
    target: Duration,
    mean: Option<f64>,
}

impl Bound {
    pub(super) fn new(concurrency: usize, prefetch: usize, target: Duration) -> Self {
        Self { concurrency, prefetch, target, mean: None }
    }

    /// Takes in how long a handler ran.
    pub(super) fn handled(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.mean = Some(self.mean.map_or(took, |mean| mean + (took - mean) * WEIGHT));
    }

    /// How many events may be queued here: none before the first measurement.
    pub(super) fn ahead(&self) -> usize {
        let Some(mean) = self.mean else { return 0 };
        // A mean of zero would divide by it; no handler is faster than the clock can tell.
        let mean = mean.max(1e-6);
        let ahead = self.target.as_secs_f64() / mean * self.concurrency as f64;
        // The cast saturates, and the minimum is what bounds it.
        (ahead as usize).min(self.prefetch)
    }

    /// Mean handling time.
    pub(super) fn mean(&self) -> Option<Duration> {
        self.mean.map(Duration::from_secs_f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(took: Duration, expected: usize) {
        let mut bound = Bound::new(64, 500, Duration::from_millis(100));
        assert_eq!(bound.ahead(), 0, "nothing is known yet");
        bound.handled(took);
        assert_eq!(bound.ahead(), expected, "{took:?}");
    }

    #[test]
    fn the_queue_is_what_gets_handled_within_the_latency_target() {
        check(Duration::ZERO, 500);
        check(Duration::from_millis(1), 500);
        check(Duration::from_millis(100), 64);
        check(Duration::from_secs(1), 6);
        check(Duration::from_secs(60), 0);
        check(Duration::MAX, 0);
    }

    #[test]
    fn handlers_that_become_slow_shrink_the_queue() {
        let mut bound = Bound::new(1, 500, Duration::from_millis(100));
        bound.handled(Duration::from_millis(1));
        for _ in 0..64 {
            bound.handled(Duration::from_millis(50));
        }
        assert!(bound.ahead() <= 2, "{}", bound.ahead());
    }
}
