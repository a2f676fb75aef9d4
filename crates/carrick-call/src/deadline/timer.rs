//! The coarse timer.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Waker,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, time::Instant};

/// How late a deadline may be noticed. Clients wait for milliseconds and not for less; ticking more
/// often would cost more than it gives.
pub const TICK: Duration = Duration::from_millis(2);

/// Slots of the wheel. A deadline further away than this many ticks (4 s) is met again each round.
const SLOTS: usize = 2048;

/// Wakes tasks whose deadlines have come. Clones share it.
///
/// ```
/// # use std::{future::poll_fn, task::Poll, time::Duration};
/// # use carrick_call::deadline::Timer;
/// # use tokio::time::Instant;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let timer = Timer::new();
/// let end = Instant::now() + Duration::from_millis(100);
/// let mut armed = None;
/// poll_fn(|cx| timer.poll_at(end, &mut armed, cx.waker())).await;
/// assert!(Instant::now() >= end);
/// # }
/// ```
#[derive(Clone)]
pub struct Timer(Arc<Wheel>);

struct Wheel {
    start: Instant,
    /// The last tick whose slot was served.
    tick: AtomicU64,
    armed: AtomicUsize,
    is_ticking: AtomicBool,
    slots: Box<[Mutex<Slot>]>,
}

/// Wakers of one slot, with places that are free again. It keeps as much memory as it once needed.
#[derive(Default)]
struct Slot {
    places: Vec<Option<(u64, Waker)>>,
    free: Vec<usize>,
}

/// A deadline that is armed; dropping it takes it back.
#[must_use = "a deadline is armed only while this lives"]
pub struct Armed {
    wheel: Arc<Wheel>,
    tick: u64,
    place: usize,
}

impl Timer {
    /// A timer that does nothing until a deadline is armed.
    pub fn new() -> Self {
        Self(Arc::new(Wheel {
            start: Instant::now(),
            tick: AtomicU64::new(0),
            armed: AtomicUsize::new(0),
            is_ticking: AtomicBool::new(false),
            slots: (0..SLOTS).map(|_| Mutex::default()).collect(),
        }))
    }

    /// Ready when a deadline has come; until then the task is woken for it. Keep `armed` with the
    /// deadline, and drop it when it is of no interest any more.
    ///
    /// # Panics
    /// If there is no runtime to tick on.
    pub fn poll_at(
        &self,
        deadline: Instant,
        armed: &mut Option<Armed>,
        waker: &Waker,
    ) -> std::task::Poll<()> {
        match armed {
            Some(one) if one.has_come() => std::task::Poll::Ready(()),
            Some(one) => {
                one.set_waker(waker);
                std::task::Poll::Pending
            }
            None => {
                let tick = self.0.tick_of(deadline);
                *armed = Some(Wheel::arm(&self.0, tick, waker));
                std::task::Poll::Pending
            }
        }
    }

    /// Deadlines that are armed.
    pub fn armed(&self) -> usize {
        self.0.armed.load(Ordering::Relaxed)
    }
}

impl Default for Timer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").field("armed", &self.armed()).finish_non_exhaustive()
    }
}

impl Wheel {
    /// The first tick that is not before a moment.
    fn tick_of(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.start);
        let ticks = since.as_micros().div_ceil(TICK.as_micros());
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    fn slot(&self, tick: u64) -> &Mutex<Slot> {
        &self.slots[(tick % SLOTS as u64) as usize]
    }

    fn arm(wheel: &Arc<Self>, tick: u64, waker: &Waker) -> Armed {
        wheel.armed.fetch_add(1, Ordering::SeqCst);
        if !wheel.is_ticking.swap(true, Ordering::SeqCst) {
            // Ticks while nobody was armed were not served.
            let now = wheel.tick_of(Instant::now()).saturating_sub(1);
            wheel.tick.fetch_max(now, Ordering::SeqCst);
            Handle::current().spawn(Ticking { wheel: Arc::clone(wheel), is_over: false }.run());
        }
        // A tick that is over, or just being served, would be met a whole round later.
        let next = wheel.tick.load(Ordering::SeqCst) + 1;
        let mut at = tick.max(next);
        loop {
            let mut slot = wheel.slot(at).lock();
            // Seen under the lock of the slot: its tick is yet to come.
            let served = wheel.tick.load(Ordering::SeqCst);
            if at <= served {
                at = served + 1;
                continue;
            }
            let entry = Some((at, waker.clone()));
            let place = match slot.free.pop() {
                Some(place) => {
                    slot.places[place] = entry;
                    place
                }
                None => {
                    slot.places.push(entry);
                    slot.places.len() - 1
                }
            };
            drop(slot);
            return Armed { wheel: Arc::clone(wheel), tick: at, place };
        }
    }

    /// Wakes everybody whose tick this is.
    fn serve(&self, tick: u64, due: &mut Vec<Waker>) {
        let slot = self.slot(tick).lock();
        // Before the slot is free again: who comes later sees that it is too late for this tick.
        self.tick.fetch_max(tick, Ordering::SeqCst);
        for place in slot.places.iter().flatten() {
            // Those of a later round stay; so do those that are woken, until they take it back.
            if place.0 <= tick {
                due.push(place.1.clone());
            }
        }
        drop(slot);
        // Not under the lock: a waker is somebody else's code.
        due.drain(..).for_each(Waker::wake);
    }
}

/// The task that ticks; whenever it ends, another may begin.
struct Ticking {
    wheel: Arc<Wheel>,
    is_over: bool,
}

impl Ticking {
    async fn run(mut self) {
        let wheel = Arc::clone(&self.wheel);
        let mut due = Vec::new();
        loop {
            let next = wheel.tick.load(Ordering::SeqCst) + 1;
            let micros = next.saturating_mul(TICK.as_micros() as u64);
            tokio::time::sleep_until(wheel.start + Duration::from_micros(micros)).await;
            let now = wheel.tick_of(Instant::now() + Duration::from_micros(1)).saturating_sub(1);
            // After a long sleep every slot is served once, and no more.
            let first = next.max(now.saturating_sub(SLOTS as u64));
            for tick in first..=now.max(next) {
                wheel.serve(tick, &mut due);
            }
            if wheel.armed.load(Ordering::SeqCst) == 0 {
                // Whoever arms from here on either sees that nobody ticks, or is seen below.
                wheel.is_ticking.store(false, Ordering::SeqCst);
                let late = wheel.armed.load(Ordering::SeqCst) > 0;
                if !late || wheel.is_ticking.swap(true, Ordering::SeqCst) {
                    self.is_over = true; // another ticks already, or need not
                    return;
                }
            }
        }
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        // The runtime ended, or a waker panicked: the next who arms starts another.
        if !self.is_over {
            self.wheel.is_ticking.store(false, Ordering::SeqCst);
        }
    }
}

impl Armed {
    fn has_come(&self) -> bool {
        self.wheel.tick.load(Ordering::Acquire) >= self.tick
    }

    fn set_waker(&mut self, waker: &Waker) {
        let mut slot = self.wheel.slot(self.tick).lock();
        if let Some((_, known)) = &mut slot.places[self.place]
            && !known.will_wake(waker)
        {
            known.clone_from(waker);
        }
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        let mut slot = self.wheel.slot(self.tick).lock();
        let gone = slot.places[self.place].take();
        slot.free.push(self.place);
        drop(slot);
        self.wheel.armed.fetch_sub(1, Ordering::SeqCst);
        drop(gone); // not under the lock
    }
}

impl fmt::Debug for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Armed").field("tick", &self.tick).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::future::poll_fn;

    use rand::{RngExt, SeedableRng, rngs::SmallRng};

    use super::*;

    async fn sleep(timer: &Timer, span: Duration) -> Duration {
        let start = Instant::now();
        let mut armed = None;
        poll_fn(|cx| timer.poll_at(start + span, &mut armed, cx.waker())).await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_is_noticed_within_a_tick_and_never_early() {
        let timer = Timer::new();
        let mut rng = SmallRng::seed_from_u64(3);
        let sleepers = (0..500).map(|_| {
            let span = Duration::from_micros(rng.random_range(0..20_000_000));
            let timer = timer.clone();
            tokio::spawn(async move { (span, sleep(&timer, span).await) })
        });
        for sleeper in sleepers.collect::<Vec<_>>() {
            let (span, took) = sleeper.await.unwrap();
            assert!(took >= span, "{took:?} for {span:?}");
            // The runtime's own timer rounds up to a millisecond.
            let most = span + 2 * TICK + Duration::from_millis(2);
            assert!(took <= most, "{took:?} for {span:?}");
        }
        assert_eq!(timer.armed(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ticks_only_while_somebody_waits_and_starts_again() {
        let timer = Timer::new();
        for _ in 0..3 {
            sleep(&timer, Duration::from_millis(10)).await;
            tokio::time::sleep(3600 * Duration::from_secs(1)).await;
            assert!(!timer.0.is_ticking.load(Ordering::SeqCst));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_is_taken_back_wakes_nobody_and_leaves_its_place() {
        let timer = Timer::new();
        let end = Instant::now() + Duration::from_millis(100);
        for _ in 0..1000 {
            let mut armed = None;
            let waker = Waker::noop();
            assert!(timer.poll_at(end, &mut armed, waker).is_pending());
        }
        assert_eq!(timer.armed(), 0);
        let slots = timer.0.slots.iter().map(|slot| slot.lock().places.len());
        assert_eq!(slots.sum::<usize>(), 1, "one place, a thousand times");
    }

    #[test]
    fn a_runtime_that_ends_takes_nothing_with_it() {
        let timer = Timer::new();
        for _ in 0..2 {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_time()
                .build()
                .unwrap();
            runtime.spawn({
                let timer = timer.clone();
                async move { sleep(&timer, Duration::from_secs(3600)).await }
            });
            assert!(runtime.block_on(sleep(&timer, TICK)) >= TICK);
        }
    }
}
