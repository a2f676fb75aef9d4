//! Who waits, and whether anybody ticks for them.

#[cfg(carrick_loom)]
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Deadlines that are armed, and the one ticker that there is while there are any.
///
/// The two are read and written crosswise, by who arms and by who stops, and each of them must see what
/// the other did: hence one order for all of it.
#[derive(Debug)]
pub(super) struct Duty {
    armed: AtomicUsize,
    is_ticking: AtomicBool,
}

impl Duty {
    pub(super) fn new() -> Self {
        Self { armed: AtomicUsize::new(0), is_ticking: AtomicBool::new(false) }
    }

    /// Counts a deadline; true if its owner has to start the ticking.
    pub(super) fn enter(&self) -> bool {
        self.armed.fetch_add(1, SeqCst);
        // Nearly always somebody ticks, and a read leaves the line with every core that has it.
        !self.is_ticking.load(SeqCst) && !self.is_ticking.swap(true, SeqCst)
    }

    /// A deadline is of no interest any more.
    pub(super) fn leave(&self) {
        self.armed.fetch_sub(1, SeqCst);
    }

    /// Whether who ticks may stop; if so, it has.
    pub(super) fn rest(&self) -> bool {
        if self.armed.load(SeqCst) > 0 {
            return false;
        }
        self.is_ticking.store(false, SeqCst);
        // Who armed meanwhile either saw that nobody ticks, and does, or is seen here.
        self.armed.load(SeqCst) == 0 || self.is_ticking.swap(true, SeqCst)
    }

    /// Who ticked is gone without having been asked.
    pub(super) fn abandon(&self) {
        self.is_ticking.store(false, SeqCst);
    }

    /// Deadlines that are armed.
    pub(super) fn armed(&self) -> usize {
        self.armed.load(SeqCst)
    }

    #[cfg(test)]
    pub(super) fn is_ticking(&self) -> bool {
        self.is_ticking.load(SeqCst)
    }
}

#[cfg(all(test, carrick_loom))]
mod loom_tests {
    use loom::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::SeqCst},
        },
        thread,
    };

    use super::Duty;

    #[test]
    fn loom_while_somebody_waits_exactly_one_ticks() {
        loom::model(|| {
            let duty = Arc::new(Duty::new());
            let tickers = Arc::new(AtomicUsize::new(0));
            let arm = |duty: &Duty, tickers: &AtomicUsize| {
                if duty.enter() {
                    assert_eq!(tickers.fetch_add(1, SeqCst), 0, "one at a time");
                }
            };
            arm(&duty, &tickers);
            duty.leave();
            let stops = thread::spawn({
                let (duty, tickers) = (Arc::clone(&duty), Arc::clone(&tickers));
                move || {
                    // As who ticks does: it counts as gone from when it may be replaced.
                    tickers.fetch_sub(1, SeqCst);
                    if !duty.rest() {
                        tickers.fetch_add(1, SeqCst);
                    }
                }
            });
            let others = [(); 2].map(|()| {
                let (duty, tickers) = (Arc::clone(&duty), Arc::clone(&tickers));
                thread::spawn(move || {
                    if duty.enter() {
                        tickers.fetch_add(1, SeqCst);
                    }
                })
            });
            stops.join().unwrap();
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!((duty.armed(), tickers.load(SeqCst)), (2, 1));
        });
    }
}
