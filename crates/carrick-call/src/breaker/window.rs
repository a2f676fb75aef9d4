//! What became of recent calls: the last so many, or those of the last so long.

#[cfg(carrick_loom)]
use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Parts of a time window: with ten, what leaves it does so within a tenth of its length.
const PARTS: usize = 10;

const EMPTY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const SLOW: u8 = 4;

/// How a call counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Result {
    pub(super) failed: bool,
    pub(super) slow: bool,
}

/// What a window holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) calls: u32,
    pub(super) failed: u32,
    pub(super) slow: u32,
}

/// Recent calls. Exact for one thread; with several, calls that end while the window is cleared may
/// be counted in the new one.
#[derive(Debug)]
pub(super) enum Window {
    Count(Count),
    Time(Time),
}

impl Window {
    pub(super) fn count(calls: u32) -> Self {
        Self::Count(Count {
            slots: (0..calls).map(|_| AtomicU8::new(EMPTY)).collect(),
            next: Apart(AtomicU32::new(0)),
            failed: AtomicU32::new(0),
            slow: AtomicU32::new(0),
        })
    }

    /// A window of `length`, in any unit that [`Window::record`] is told the time in.
    pub(super) fn time(length: u64) -> Self {
        Self::Time(Time {
            length: (length / PARTS as u64).max(1),
            parts: std::array::from_fn(|_| Part::default()),
        })
    }

    /// Notes a call; `now` matters to a time window only. Returns what the window holds, if that
    /// could be reason to open.
    pub(super) fn record(&self, result: Result, now: u64) -> Option<Sums> {
        match self {
            Self::Count(count) => count.record(result),
            Self::Time(time) => time.record(result, now),
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        match self {
            Self::Count(count) => count.clear(),
            Self::Time(time) => time.parts.iter().for_each(|part| part.begin(0)),
        }
    }
}

/// The one number that every call writes, in a cache line of its own: what calls only read must not be
/// taken from one core by another each time.
#[derive(Debug)]
#[repr(align(128))]
struct Apart(AtomicU32);

#[derive(Debug)]
pub(super) struct Count {
    slots: Box<[AtomicU8]>,
    /// How many calls there were; wraps.
    next: Apart,
    failed: AtomicU32,
    slow: AtomicU32,
}

impl Count {
    fn record(&self, result: Result) -> Option<Sums> {
        let place = self.next.0.fetch_add(1, Relaxed);
        let size = self.slots.len() as u32;
        let slot = &self.slots[(place % size) as usize];
        let new = DONE | (u8::from(result.failed) * FAILED) | (u8::from(result.slow) * SLOW);
        // Where all is well the slots say so already, and stay in every core's cache.
        if slot.load(Relaxed) != new {
            let old = slot.swap(new, Relaxed);
            shift(&self.failed, old & FAILED != 0, result.failed);
            shift(&self.slow, old & SLOW != 0, result.slow);
        }
        let read = |sum: &AtomicU32| Some(sum.load(Relaxed)).filter(|sum| *sum <= size);
        let (failed, slow) = (read(&self.failed).unwrap_or(0), read(&self.slow).unwrap_or(0));
        if failed == 0 && slow == 0 {
            return None;
        }
        Some(Sums { calls: place.saturating_add(1).min(size), failed, slow })
    }

    fn clear(&self) {
        for slot in &self.slots {
            let old = slot.swap(EMPTY, Relaxed);
            shift(&self.failed, old & FAILED != 0, false);
            shift(&self.slow, old & SLOW != 0, false);
        }
        self.next.0.store(0, Relaxed);
    }
}

/// Counts what a slot turned from and to. Each swap is counted once, so the sum is right in the end;
/// in between it may be below zero.
fn shift(sum: &AtomicU32, before: bool, after: bool) {
    match (before, after) {
        (false, true) => {
            sum.fetch_add(1, Relaxed);
        }
        (true, false) => {
            sum.fetch_sub(1, Relaxed);
        }
        _ => {}
    }
}

#[derive(Debug)]
pub(super) struct Time {
    length: u64,
    parts: [Part; PARTS],
}

#[derive(Debug)]
struct Part {
    /// Which stretch of time it counts; 0 for none.
    stretch: AtomicU64,
    calls: AtomicU32,
    failed: AtomicU32,
    slow: AtomicU32,
}

impl Default for Part {
    fn default() -> Self {
        let zero = || AtomicU32::new(0);
        Self { stretch: AtomicU64::new(0), calls: zero(), failed: zero(), slow: zero() }
    }
}

impl Part {
    fn begin(&self, stretch: u64) {
        self.stretch.store(stretch, Relaxed);
        for sum in [&self.calls, &self.failed, &self.slow] {
            sum.store(0, Relaxed);
        }
    }
}

impl Time {
    fn record(&self, result: Result, now: u64) -> Option<Sums> {
        let stretch = now / self.length + 1;
        let part = &self.parts[(stretch % PARTS as u64) as usize];
        let seen = part.stretch.load(Relaxed);
        if seen < stretch && part.stretch.compare_exchange(seen, stretch, Relaxed, Relaxed).is_ok()
        {
            // Who comes in between is forgotten: a call or two of a part that just began.
            part.begin(stretch);
        } else if seen > stretch {
            return None; // a caller whose clock is a whole window behind
        }
        part.calls.fetch_add(1, Relaxed);
        if result.failed {
            part.failed.fetch_add(1, Relaxed);
        }
        if result.slow {
            part.slow.fetch_add(1, Relaxed);
        }
        let mut sums = Sums::default();
        for part in &self.parts {
            let seen = part.stretch.load(Relaxed);
            if seen + PARTS as u64 > stretch && seen <= stretch && seen > 0 {
                sums.calls += part.calls.load(Relaxed);
                sums.failed += part.failed.load(Relaxed);
                sums.slow += part.slow.load(Relaxed);
            }
        }
        (sums.failed > 0 || sums.slow > 0).then_some(sums)
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a list of the last calls.
        #[test]
        fn a_count_window_holds_the_last_calls(
            size in 1..20_u32,
            calls in prop::collection::vec((any::<bool>(), any::<bool>()), 0..100),
        ) {
            let window = Window::count(size);
            let mut last = VecDeque::new();
            for (failed, slow) in calls {
                last.push_back((failed, slow));
                if last.len() > size as usize {
                    last.pop_front();
                }
                let sums = window.record(Result { failed, slow }, 0).unwrap_or_default();
                prop_assert_eq!(sums.failed, last.iter().filter(|one| one.0).count() as u32);
                prop_assert_eq!(sums.slow, last.iter().filter(|one| one.1).count() as u32);
                if sums != Sums::default() {
                    prop_assert_eq!(sums.calls, last.len() as u32);
                }
            }
        }

        /// Against a list of all calls with their times.
        #[test]
        fn a_time_window_holds_between_nine_and_ten_tenths_of_its_length(
            calls in prop::collection::vec((0..400_u64, any::<bool>()), 0..100),
        ) {
            let window = Window::time(1000);
            let mut all: Vec<(u64, bool)> = Vec::new();
            let mut now = 0;
            for (wait, failed) in calls {
                now += wait;
                all.push((now, failed));
                let sums = window.record(Result { failed, slow: false }, now).unwrap_or_default();
                let start = (now / 100 + 1).saturating_sub(10) * 100;
                let expected = all.iter().filter(|(at, failed)| *at >= start && *failed).count();
                prop_assert_eq!(sums.failed, expected as u32);
            }
        }
    }
}

#[cfg(all(test, carrick_loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn loom_a_window_counts_what_its_slots_hold() {
        loom::model(|| {
            let window = Arc::new(Window::count(2));
            let bad = Result { failed: true, slow: false };
            let good = Result { failed: false, slow: false };
            window.record(bad, 0);
            let other = Arc::clone(&window);
            let there = thread::spawn(move || {
                other.record(good, 0);
            });
            window.record(good, 0);
            there.join().unwrap();
            // Three calls in two slots: the failure, the oldest, is gone.
            let Window::Count(count) = &*window else { unreachable!() };
            assert_eq!(count.failed.load(Relaxed), 0);
        });
    }
}
