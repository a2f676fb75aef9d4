//! Latencies of the last half minute, to an eighth of their size.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;

/// Eight steps to each doubling, from a microsecond to an hour and more.
const STEPS: usize = 8;
const PLACES: usize = 40 * STEPS;

/// Calls without which nothing is concluded.
const ENOUGH: u32 = 20;

/// How long one half of the window is.
const HALF: u64 = 15_000;

/// How often the percentile is looked up anew, in milliseconds.
const AGAIN: u64 = 100;

#[derive(Debug)]
pub(super) struct Latencies {
    halves: [Half; 2],
    /// When it was looked up last, in milliseconds from 1.
    looked: AtomicU64,
    /// What was found, in microseconds; 0 for nothing.
    found: AtomicU64,
    looking: Mutex<()>,
}

#[derive(Debug)]
struct Half {
    /// Which stretch it counts, from 1.
    stretch: AtomicU64,
    calls: AtomicU32,
    places: Box<[AtomicU32]>,
}

impl Default for Latencies {
    fn default() -> Self {
        let half = || Half {
            stretch: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            places: (0..PLACES).map(|_| AtomicU32::new(0)).collect(),
        };
        Self {
            halves: [half(), half()],
            looked: AtomicU64::new(0),
            found: AtomicU64::new(0),
            looking: Mutex::new(()),
        }
    }
}

/// Where a latency is counted.
fn place(micros: u64) -> usize {
    let micros = micros.max(STEPS as u64);
    let doublings = micros.ilog2() as usize;
    let step = (micros >> (doublings - 3)) as usize & (STEPS - 1);
    ((doublings - 3) * STEPS + step).min(PLACES - 1)
}

/// The largest latency that is counted there.
fn most(place: usize) -> u64 {
    let (doublings, step) = (place / STEPS, (place % STEPS) as u64);
    (((STEPS as u64 + step + 1) << doublings) - 1).max(1)
}

impl Latencies {
    pub(super) fn record(&self, elapsed: Duration, now: u64) {
        let stretch = now / HALF + 1;
        let half = &self.halves[(stretch % 2) as usize];
        let seen = half.stretch.load(Relaxed);
        if seen < stretch && half.stretch.compare_exchange(seen, stretch, Relaxed, Relaxed).is_ok()
        {
            // A call or two that come in between are forgotten.
            half.calls.store(0, Relaxed);
            half.places.iter().for_each(|place| place.store(0, Relaxed));
        }
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        half.places[place(micros)].fetch_add(1, Relaxed);
        half.calls.fetch_add(1, Relaxed);
    }

    /// The latency that a share of calls does not exceed; `None` while there are too few.
    pub(super) fn percentile(&self, share: f64, now: u64) -> Option<Duration> {
        let looked = self.looked.load(Relaxed);
        // Looking is a walk over all places: one caller in a tenth of a second does it.
        if (looked == 0 || now + 1 >= looked + AGAIN)
            && let Some(_one) = self.looking.try_lock()
        {
            self.found.store(self.look(share, now).unwrap_or(0), Relaxed);
            // While too little is known, the next caller looks again.
            let known = self.found.load(Relaxed) > 0;
            self.looked.store(if known { now + 1 } else { 0 }, Relaxed);
        }
        let found = self.found.load(Relaxed);
        (found > 0).then(|| Duration::from_micros(found))
    }

    fn look(&self, share: f64, now: u64) -> Option<u64> {
        let stretch = now / HALF + 1;
        let is_alive = |half: &&Half| half.stretch.load(Relaxed) + 1 >= stretch;
        let halves: Vec<&Half> = self.halves.iter().filter(is_alive).collect();
        let calls: u32 = halves.iter().map(|half| half.calls.load(Relaxed)).sum();
        if calls < ENOUGH {
            return None;
        }
        let wanted = (f64::from(calls) * share).ceil() as u32;
        let mut below = 0;
        for place in 0..PLACES {
            below += halves.iter().map(|half| half.places[place].load(Relaxed)).sum::<u32>();
            if below >= wanted {
                return Some(most(place));
            }
        }
        None
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_latency_is_counted_where_it_belongs_to_an_eighth(micros in 1..10_000_000_000_u64) {
            let most = most(place(micros));
            prop_assert!(most >= micros && most <= micros.max(8) + micros / 8 + 1, "{most}");
        }

        #[test]
        fn a_percentile_is_that_of_the_calls(mut calls in prop::collection::vec(1..1_000_000_u64, 20..200)) {
            let latencies = Latencies::default();
            calls.iter().for_each(|micros| latencies.record(Duration::from_micros(*micros), 5));
            calls.sort_unstable();
            let exact = calls[(calls.len() as f64 * 0.95).ceil() as usize - 1];
            let found = latencies.percentile(0.95, 5).unwrap().as_micros() as u64;
            prop_assert!(found >= exact && found <= exact.max(8) + exact / 8 + 1, "{found} for {exact}");
        }
    }

    #[test]
    fn old_latencies_are_forgotten_within_half_a_minute() {
        let latencies = Latencies::default();
        let record = |millis, now| {
            (0..100).for_each(|_| latencies.record(Duration::from_millis(millis), now));
        };
        record(1000, 0);
        record(1, 15_000);
        let found = latencies.percentile(0.95, 15_000).unwrap();
        assert!(found >= Duration::from_millis(1000), "both halves count");
        record(1, 30_000);
        assert!(latencies.percentile(0.95, 30_200).unwrap() < Duration::from_millis(2));
        assert_eq!(latencies.percentile(0.95, 100_000), None);
    }
}
