//! Admission: how many readers may come at a time.
//!
//! When a hub comes back, all of its readers do. Those that the rate has no room for are told a time
//! of their own each, so that they come back spread out and not together once more.

use std::time::Duration;

use tokio::time::Instant;

/// A bucket of admissions that fills at a rate.
#[derive(Debug)]
pub struct Admission {
    /// Time that one admission takes.
    cost: Duration,
    burst: Duration,
    /// When the bucket would be full.
    full_at: Instant,
    /// Up to when the refused were told to come back.
    promised: Instant,
}

/// The least a refused reader waits: enough for one that came a little early.
const LEAST: Duration = Duration::from_secs(1);

/// The longest it is told to wait; the queue beyond is longer than anybody waits for.
const MOST: Duration = Duration::from_secs(60);

impl Admission {
    /// So many readers a second, and as many at once; both at least 1.
    pub fn new(rate: u32, burst: u32, now: Instant) -> Self {
        let cost = Duration::from_secs(1) / rate.max(1);
        Self { cost, burst: cost.saturating_mul(burst.max(1)), full_at: now, promised: now }
    }

    /// Lets one in.
    ///
    /// # Errors
    /// How long this one is to wait: each is told a later time than the one before.
    pub fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        let full_at = self.full_at.max(now) + self.cost;
        if full_at - now <= self.burst {
            self.full_at = full_at;
            return Ok(());
        }
        // Not before what is promised already; beyond the longest wait all are promised the same.
        let least = now + LEAST;
        self.promised = (self.promised.max(least) + self.cost).min(now + MOST);
        Err(self.promised - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_crowd_is_let_in_at_the_rate_when_each_comes_when_it_was_told() {
        let start = Instant::now();
        let mut admission = Admission::new(100, 50, start);
        let mut due: Vec<Instant> = vec![start; 1000];
        let mut admitted = Vec::new();
        let mut refusals = 0;
        while !due.is_empty() {
            due.sort_unstable();
            let now = due.remove(0);
            match admission.admit(now) {
                Ok(()) => admitted.push(now - start),
                Err(wait) => {
                    refusals += 1;
                    due.push(now + wait);
                }
            }
        }
        // 50 at once, then 100 a second: 9.5 s, and one second that the first refused wait.
        let last = *admitted.last().unwrap();
        assert!(last <= Duration::from_secs(12), "{last:?}");
        assert_eq!(refusals, 950, "nobody is refused twice who comes when it was told");
        for window in admitted.windows(151) {
            assert!(window[150] - window[0] >= Duration::from_secs(1), "{:?}", window[0]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_wait_is_longer_than_a_minute_and_the_bucket_fills_up_to_its_burst() {
        let start = Instant::now();
        let mut admission = Admission::new(1, 2, start);
        let waits: Vec<_> = (0..200).filter_map(|_| admission.admit(start).err()).collect();
        assert_eq!(waits.len(), 198);
        assert!(waits.iter().all(|wait| (LEAST..=MOST).contains(wait)));
        let later = start + Duration::from_secs(1000);
        assert_eq!((0..10).filter(|_| admission.admit(later).is_ok()).count(), 2);
    }
}
