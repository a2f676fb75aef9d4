//! What is known of one host: counters that calls write without a lock and a sweep takes.

use std::time::Duration;

use carrick_core::outcome::Outcome;

#[cfg(carrick_loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{Kind, Origin, OutlierOptions, Verdict};

/// Buckets of the latency histogram: eight a power of two, from 1 us to over two minutes, so that a
/// percentile is off by an eighth at most.
const BUCKETS: usize = 27 * 8;

/// The counters of one host. Every word stands alone, so relaxed order is enough: a call that lands
/// beside a sweep counts in the one interval or the other.
#[derive(Debug)]
pub(super) struct Stats {
    pub(super) ejected: AtomicBool,
    failures: AtomicU32,
    gateway: AtomicU32,
    local: AtomicU32,
    /// Good answers in the low half and failures in the high half, so that a sweep takes both at one
    /// moment. Half a word holds four milliards in one interval.
    window: AtomicU64,
    latency: Option<Box<[AtomicU32]>>,
}

/// What happened to a host in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) good: u32,
    pub(super) bad: u32,
    /// Ninety-fifth percentile and how many it is made of; `None` if nobody asks for it.
    pub(super) p95: Option<(Duration, u32)>,
}

impl Window {
    pub(super) fn total(self) -> u32 {
        self.good.saturating_add(self.bad)
    }

    pub(super) fn success_rate(self) -> f64 {
        f64::from(self.good) / f64::from(self.total().max(1))
    }
}

impl Stats {
    pub(super) fn new(options: &OutlierOptions) -> Self {
        let latency = options.latency.then(|| (0..BUCKETS).map(|_| AtomicU32::new(0)).collect());
        Self {
            ejected: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            gateway: AtomicU32::new(0),
            local: AtomicU32::new(0),
            window: AtomicU64::new(0),
            latency,
        }
    }

    /// Counts one call; tells the kind whose limit it reached. It is told again at each multiple of
    /// the limit, not at each call after it: if the cap spares the host, callers of a sick fleet must
    /// not all queue at the detector's lock.
    pub(super) fn record(
        &self,
        verdict: Verdict,
        latency: Duration,
        options: &OutlierOptions,
    ) -> Option<Kind> {
        // Nothing was learnt about the host.
        if matches!(verdict.outcome, Outcome::Rejected | Outcome::Cancelled) {
            return None;
        }
        let bad = verdict.is_failure();
        self.window.fetch_add(if bad { 1 << 32 } else { 1 }, Relaxed);
        if !bad || verdict.outcome == Outcome::Expired {
            self.sample(latency);
        }
        let reached = |count: &AtomicU32, limit: u32| {
            let count = count.fetch_add(1, Relaxed).wrapping_add(1);
            limit > 0 && count.is_multiple_of(limit)
        };
        if verdict.origin == Origin::Local {
            // A call that got no answer says nothing about the answers.
            return (bad && reached(&self.local, options.consecutive_local))
                .then_some(Kind::ConsecutiveLocal);
        }
        clear(&self.local);
        if !bad {
            clear(&self.failures);
            clear(&self.gateway);
            return None;
        }
        let failures = reached(&self.failures, options.consecutive_failures);
        let gateway = if verdict.gateway {
            reached(&self.gateway, options.consecutive_gateway)
        } else {
            clear(&self.gateway);
            false
        };
        match (failures, gateway) {
            (true, _) => Some(Kind::ConsecutiveFailures),
            (false, true) => Some(Kind::ConsecutiveGateway),
            (false, false) => None,
        }
    }

    /// The kind of failures in a row that this host has reached, if any.
    pub(super) fn in_a_row(&self, options: &OutlierOptions) -> Option<Kind> {
        let over = |count: &AtomicU32, limit| limit > 0 && count.load(Relaxed) >= limit;
        if over(&self.failures, options.consecutive_failures) {
            Some(Kind::ConsecutiveFailures)
        } else if over(&self.gateway, options.consecutive_gateway) {
            Some(Kind::ConsecutiveGateway)
        } else if over(&self.local, options.consecutive_local) {
            Some(Kind::ConsecutiveLocal)
        } else {
            None
        }
    }

    /// Takes the interval's counts and starts the next one; failures in a row go on.
    pub(super) fn take(&self) -> Window {
        let counts = self.window.swap(0, Relaxed);
        Window { good: counts as u32, bad: (counts >> 32) as u32, p95: self.take_p95() }
    }

    /// Forgets everything: a host that comes back is judged by what it does then.
    pub(super) fn forget(&self) {
        clear(&self.failures);
        clear(&self.gateway);
        clear(&self.local);
        self.take();
    }

    fn sample(&self, latency: Duration) {
        if let Some(buckets) = &self.latency {
            buckets[bucket(latency)].fetch_add(1, Relaxed);
        }
    }

    fn take_p95(&self) -> Option<(Duration, u32)> {
        let buckets = self.latency.as_ref()?;
        let mut counts = [0; BUCKETS];
        let mut total = 0u32;
        for (count, bucket) in counts.iter_mut().zip(buckets) {
            if bucket.load(Relaxed) != 0 {
                *count = bucket.swap(0, Relaxed);
            }
            total = total.saturating_add(*count);
        }
        let rank = (f64::from(total) * 0.95).ceil() as u32;
        let mut seen = 0u32;
        let index = counts.iter().position(|count| {
            seen = seen.saturating_add(*count);
            seen >= rank
        });
        Some((lower_end(index.unwrap_or(0)), total))
    }
}

fn clear(count: &AtomicU32) {
    // A write takes the cache line from other cores, and mostly there is nothing to clear.
    if count.load(Relaxed) != 0 {
        count.store(0, Relaxed);
    }
}

/// The bucket of a latency: its power of two in microseconds, then the three bits below the first.
fn bucket(latency: Duration) -> usize {
    let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX).max(1);
    let power = micros.ilog2();
    let eighth = if power >= 3 { micros >> (power - 3) } else { micros << (3 - power) } & 7;
    (power as usize * 8 + eighth as usize).min(BUCKETS - 1)
}

fn lower_end(bucket: usize) -> Duration {
    let (power, eighth) = (bucket / 8, (bucket % 8) as u64);
    let nanos = ((8 + eighth) * 1000) << power >> 3;
    Duration::from_nanos(nanos)
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_off_by_an_eighth_at_most() {
        for micros in [1, 2, 3, 7, 9, 100, 1_001, 12_345, 999_999, 100_000_000] {
            let true_one = Duration::from_micros(micros);
            let found = lower_end(bucket(true_one));
            assert!(found <= true_one && true_one.as_secs_f64() < found.as_secs_f64() * 1.1251);
        }
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
        assert_eq!(bucket(Duration::ZERO), 0);
    }

    #[test]
    fn the_ninety_fifth_of_a_hundred_is_found() {
        let options = OutlierOptions { latency: true, ..OutlierOptions::default() };
        let stats = Stats::new(&options);
        for n in 0..100 {
            let latency = Duration::from_millis(if n < 94 { 1 } else { 100 });
            stats.record(Verdict::peer(Outcome::Success), latency, &options);
        }
        let (p95, count) = stats.take().p95.unwrap();
        assert_eq!(count, 100);
        assert!(p95 > Duration::from_millis(85) && p95 <= Duration::from_millis(100), "{p95:?}");
    }
}

#[cfg(all(test, carrick_loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn loom_a_call_beside_a_sweep_counts_exactly_once() {
        loom::model(|| {
            let options = OutlierOptions::default();
            let stats = Arc::new(Stats::new(&options));
            let caller = {
                let stats = Arc::clone(&stats);
                thread::spawn(move || {
                    let options = OutlierOptions::default();
                    stats.record(Verdict::peer(Outcome::Transient), Duration::ZERO, &options);
                    stats.record(Verdict::peer(Outcome::Success), Duration::ZERO, &options);
                })
            };
            let first = stats.take();
            caller.join().unwrap();
            let second = stats.take();
            assert_eq!((first.good + second.good, first.bad + second.bad), (1, 1));
        });
    }

    #[test]
    fn loom_of_two_calls_that_reach_the_limit_one_is_told() {
        loom::model(|| {
            let limit = || OutlierOptions { consecutive_failures: 2, ..OutlierOptions::default() };
            let stats = Arc::new(Stats::new(&limit()));
            let other = Arc::clone(&stats);
            let failure = Verdict::peer(Outcome::Transient);
            let caller = thread::spawn(move || other.record(failure, Duration::ZERO, &limit()));
            let ours = stats.record(failure, Duration::ZERO, &limit());
            let theirs = caller.join().unwrap();
            assert_eq!(ours.iter().chain(theirs.iter()).count(), 1);
        });
    }
}
