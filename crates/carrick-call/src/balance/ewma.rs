//! A host's expected latency in one word, so that no call waits for another to note its own.

#[cfg(carrick_loom)]
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One tick is 2^16 ns, about 66 us: fine against a decay of seconds, and 32 bits of them are 78 h. A
/// host that was asked for nothing so long may seem asked a moment ago, which the next call mends.
pub(super) const TICK_BITS: u32 = 16;

/// An exponentially weighted average that a higher sample replaces at once: the seconds (as `f32`) in
/// the high half, the tick of the last sample in the low half. Zero seconds is no history.
#[derive(Debug)]
pub(super) struct PeakEwma(AtomicU64);

impl PeakEwma {
    pub(super) fn empty() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn starting_at(seconds: f32, tick: u32) -> Self {
        Self(AtomicU64::new(pack(seconds, tick)))
    }

    /// The expected seconds at a tick; `None` without history. `rate` is decays per tick.
    pub(super) fn read(&self, tick: u32, rate: f32) -> Option<f32> {
        let (seconds, age) = unpack(self.0.load(Relaxed), tick);
        (seconds > 0.0).then(|| seconds * kept(age, rate))
    }

    /// Notes a call that took `peak` seconds and counts as `mean`: the average moves towards the
    /// mean, but is not below the peak.
    pub(super) fn observe(&self, tick: u32, rate: f32, peak: f32, mean: f32) {
        self.change(tick, |seconds, age| {
            if seconds == 0.0 {
                return Some(mean.max(peak));
            }
            let kept = kept(age, rate);
            Some((seconds * kept + mean * (1.0 - kept)).max(peak))
        });
    }

    /// Notes a call that would have taken no less than this.
    pub(super) fn raise(&self, tick: u32, rate: f32, at_least: f32) {
        self.change(tick, |seconds, age| {
            (at_least > seconds * kept(age, rate)).then_some(at_least)
        });
    }

    fn change(&self, tick: u32, next: impl Fn(f32, u32) -> Option<f32>) {
        let mut word = self.0.load(Relaxed);
        loop {
            let (seconds, age) = unpack(word, tick);
            let Some(next) = next(seconds, age) else { return };
            // A call that read the clock before the last one does not set it back.
            let at = if age == 0 { word as u32 } else { tick };
            let next = pack(next, if seconds == 0.0 { tick } else { at });
            match self.0.compare_exchange_weak(word, next, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

fn pack(seconds: f32, tick: u32) -> u64 {
    // Above zero, because zero is "no history".
    let seconds = seconds.clamp(1e-9, 1e9);
    u64::from(seconds.to_bits()) << 32 | u64::from(tick)
}

fn unpack(word: u64, tick: u32) -> (f32, u32) {
    let age = tick.wrapping_sub(word as u32);
    (f32::from_bits((word >> 32) as u32), if age > u32::MAX / 2 { 0 } else { age })
}

/// The share of an average that is left after so many ticks.
fn kept(age: u32, rate: f32) -> f32 {
    if age == 0 { 1.0 } else { (-(age as f32) * rate).exp() }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    const RATE: f32 = 0.01;

    #[track_caller]
    fn check(samples: &[(u32, f32)], at: u32, expected: Option<f32>) {
        let ewma = PeakEwma::empty();
        for (tick, seconds) in samples {
            ewma.observe(*tick, RATE, *seconds, *seconds);
        }
        match (ewma.read(at, RATE), expected) {
            (Some(found), Some(expected)) => {
                assert!((found - expected).abs() < expected * 1e-3, "{found} is not {expected}");
            }
            (found, expected) => assert_eq!(found, expected),
        }
    }

    #[test]
    fn a_higher_sample_replaces_and_a_lower_one_pulls() {
        check(&[], 5, None);
        check(&[(0, 1.0)], 0, Some(1.0));
        check(&[(0, 1.0), (0, 3.0)], 0, Some(3.0));
        check(&[(0, 1.0), (100, 0.1)], 100, Some(0.3679 + 0.1 * 0.6321));
        check(&[(0, 1.0)], 100, Some(0.3679));
    }

    #[test]
    fn a_late_sample_does_not_set_the_time_back_and_the_tick_may_wrap() {
        check(&[(100, 1.0), (50, 2.0)], 100, Some(2.0));
        check(&[(u32::MAX, 1.0)], 99, Some(0.3679));
    }

    #[test]
    fn a_lower_bound_only_raises() {
        let ewma = PeakEwma::starting_at(1.0, 0);
        ewma.raise(0, RATE, 0.5);
        assert_eq!(ewma.read(0, RATE), Some(1.0));
        ewma.raise(0, RATE, 2.0);
        assert_eq!(ewma.read(0, RATE), Some(2.0));
    }

    #[test]
    fn no_input_makes_it_anything_but_a_time() {
        for seconds in [0.0, -1.0, f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE] {
            let ewma = PeakEwma::empty();
            for tick in [0, 1, u32::MAX] {
                ewma.observe(tick, RATE, seconds, seconds);
                assert!(ewma.read(tick, RATE).is_none_or(|found| found.is_finite()));
            }
        }
    }
}

#[cfg(all(test, carrick_loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn loom_the_highest_of_two_samples_at_once_is_never_lost() {
        loom::model(|| {
            let ewma = Arc::new(PeakEwma::starting_at(1.0, 0));
            let other = Arc::clone(&ewma);
            let high = thread::spawn(move || other.observe(1, 0.01, 5.0, 5.0));
            ewma.observe(1, 0.01, 2.0, 2.0);
            high.join().unwrap();
            assert_eq!(ewma.read(1, 0.01), Some(5.0));
        });
    }

    #[test]
    fn loom_a_first_sample_and_a_lower_bound_leave_the_higher_one() {
        loom::model(|| {
            let ewma = Arc::new(PeakEwma::empty());
            let other = Arc::clone(&ewma);
            let bound = thread::spawn(move || other.raise(7, 0.01, 3.0));
            ewma.observe(7, 0.01, 1.0, 1.0);
            bound.join().unwrap();
            assert_eq!(ewma.read(7, 0.01), Some(3.0));
        });
    }
}
