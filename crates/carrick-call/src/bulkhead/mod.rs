//! Bulkhead: so many calls at a time, and no more.
//!
//! One dependency that hangs must not hold everything that a process has. A bulkhead counts calls
//! under way and refuses beyond its limit. The limit is **fixed**, or it **adapts** to what the
//! dependency can do: *AIMD* grows it by one and cuts it when calls time out or are refused for
//! overload; the *gradient* follows latency, and shrinks when calls take longer than they need to.
//!
//! A place is taken by one compare-and-swap, so that a hundred-and-first caller never gets in between
//! a look and a count, and it is given back when its [`Permit`] goes, however that happens.
//!
//! Source: pattern document, bulkhead; Netflix's concurrency-limits for AIMD, Envoy's adaptive
//! concurrency for the gradient. Differs: calls under way are those when a call began; a limit that
//! is not used does not grow; what was refused, given up or too short to be measured teaches nothing;
//! the least limit and the limit while the best latency is measured are two numbers.

mod config;
mod core;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use carrick_core::outcome::Outcome;
use metrics::{Counter, Gauge, counter, gauge};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::Instant;

pub use self::config::{
    AimdOptions, BulkheadConfig, BulkheadOptions, GradientOptions, LimitOptions,
};
use self::core::{Adaptive, Ended};
use crate::{
    Mode, Policy, Refusal,
    gate::{Gate, GateFuture, GateLayer, GateService},
};

/// Refuses calls beyond what a bulkhead has places for; calls have [`Priority::Default`].
pub type BulkheadLayer<C = crate::classify::AnyError> = GateLayer<Bulkhead, C>;

/// A service with so many places.
pub type BulkheadService<S, C = crate::classify::AnyError> = GateService<S, Bulkhead, C>;

/// A call that has a place; dropping it gives the place back.
pub type BulkheadFuture<F, C = crate::classify::AnyError> = GateFuture<F, Bulkhead, C>;

/// How much a call matters: where not all can go, the lesser ones stay behind first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// May be left out: gets four fifths of the places.
    Sheddable,
    /// As usual: gets nine tenths, if anything is critical at all.
    #[default]
    Default,
    /// Goes first: may have every place.
    Critical,
}

/// Places for calls to one dependency. Clones share them.
///
/// ```
/// use carrick_call::bulkhead::{Bulkhead, BulkheadConfig, Priority};
/// use tokio::time::Instant;
///
/// let bulkhead = Bulkhead::new("pricing", BulkheadConfig::default());
/// let permit = bulkhead.try_acquire(Priority::Default)?;
/// assert_eq!(bulkhead.in_flight(), 1);
/// drop(permit);
/// assert_eq!(bulkhead.in_flight(), 0);
/// # Ok::<(), carrick_call::Refusal>(())
/// ```
#[derive(Clone)]
pub struct Bulkhead(Arc<Inner>);

struct Inner {
    in_flight: Apart,
    limit: AtomicU32,
    adaptive: Option<Mutex<Adaptive>>,
    reserve: bool,
    mode: Mode,
    refused: Counter,
    shown: Gauge,
}

/// What every call writes, in a cache line of its own.
#[repr(align(128))]
struct Apart(AtomicU32);

/// A place for one call.
#[must_use = "the place is given back when the permit goes"]
pub struct Permit {
    inner: Option<Arc<Inner>>,
    ticket: Ticket,
}

/// A place without a guard: see [`Bulkhead::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Calls under way when this one began, itself among them.
    with: u32,
}

const FULL: Refusal = Refusal::new(Policy::Bulkhead, "as many calls as may be are under way");

impl Bulkhead {
    /// Places for calls to a dependency, whose name labels their metrics.
    pub fn new(name: &str, config: BulkheadConfig) -> Self {
        let options = config.options;
        let adaptive = Adaptive::new(&options.limit);
        let limit = adaptive.as_ref().map_or(options.max, |adaptive| adaptive.limit());
        let shown = gauge!("carrick_bulkhead_limit", "dependency" => name.to_owned());
        shown.set(f64::from(limit));
        Self(Arc::new(Inner {
            in_flight: Apart(AtomicU32::new(0)),
            limit: AtomicU32::new(limit),
            adaptive: adaptive.map(Mutex::new),
            reserve: options.reserve,
            mode: options.mode,
            refused: counter!("carrick_bulkhead_refused_total", "dependency" => name.to_owned()),
            shown,
        }))
    }

    /// Takes a place.
    ///
    /// # Errors
    /// The refusal, if there is none.
    pub fn try_acquire(&self, priority: Priority) -> Result<Permit, Refusal> {
        let ticket = self.enter(priority)?;
        Ok(Permit { inner: Some(Arc::clone(&self.0)), ticket })
    }

    /// The bare form of [`Bulkhead::try_acquire`], for a caller with a guard of its own: it must give
    /// the ticket back with [`Bulkhead::leave`], whatever happens.
    ///
    /// # Errors
    /// As [`Bulkhead::try_acquire`].
    pub fn enter(&self, priority: Priority) -> Result<Ticket, Refusal> {
        self.0.enter(priority)
    }

    /// Takes a ticket back, with how the call ended; `None` teaches nothing.
    pub fn leave(&self, ticket: Ticket, ended: Option<(Outcome, Duration)>, now: Instant) {
        self.0.leave(ticket, ended, now);
    }

    /// Calls under way.
    pub fn in_flight(&self) -> u32 {
        self.0.in_flight.0.load(Relaxed)
    }

    /// Calls that may be under way now.
    pub fn limit(&self) -> u32 {
        self.0.limit.load(Relaxed)
    }
}

impl Inner {
    fn enter(&self, priority: Priority) -> Result<Ticket, Refusal> {
        let limit = self.limit.load(Relaxed);
        let most = match priority {
            _ if !self.reserve => limit,
            Priority::Critical => limit,
            Priority::Default => (limit - limit / 10).max(1),
            Priority::Sheddable => (limit - limit / 5).max(1),
        };
        let take = |taken: u32| (taken < most).then_some(taken + 1);
        match self.in_flight.0.fetch_update(Relaxed, Relaxed, take) {
            Ok(before) => Ok(Ticket { with: before + 1 }),
            Err(_) => {
                self.refused.increment(1);
                if self.mode.enforces() {
                    return Err(FULL);
                }
                let before = self.in_flight.0.fetch_add(1, Relaxed);
                Ok(Ticket { with: before.saturating_add(1) })
            }
        }
    }

    fn leave(&self, ticket: Ticket, ended: Option<(Outcome, Duration)>, now: Instant) {
        self.in_flight.0.fetch_sub(1, Relaxed);
        let Some((adaptive, (outcome, elapsed))) = self.adaptive.as_ref().zip(ended) else {
            return;
        };
        let Some(ended) = Ended::of(outcome, elapsed) else { return };
        let limit = {
            let mut adaptive = adaptive.lock();
            adaptive.learn(ended, ticket.with, now);
            adaptive.limit()
        };
        if self.limit.swap(limit, Relaxed) != limit {
            self.shown.set(f64::from(limit));
        }
    }
}

impl Permit {
    /// Tells how the call ended, and how long it took: what an adaptive limit learns from.
    pub fn settle(mut self, outcome: Outcome, elapsed: Duration, now: Instant) {
        if let Some(inner) = self.inner.take() {
            inner.leave(self.ticket, Some((outcome, elapsed)), now);
        }
    }
}

impl Gate for Bulkhead {
    type Permit = Permit;

    fn admit(&self, _now: Instant) -> Result<Permit, Refusal> {
        self.try_acquire(Priority::Default)
    }

    fn settle(permit: Permit, outcome: Outcome, elapsed: Duration, now: Instant) {
        permit.settle(outcome, elapsed, now);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take() {
            inner.in_flight.0.fetch_sub(1, Relaxed);
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ticket.fmt(f)
    }
}

impl fmt::Debug for Bulkhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bulkhead")
            .field("in_flight", &self.in_flight())
            .field("limit", &self.limit())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    fn bulkhead(max: u32, change: impl FnOnce(&mut BulkheadOptions)) -> Bulkhead {
        let mut options = BulkheadOptions { max, ..BulkheadOptions::default() };
        change(&mut options);
        Bulkhead::new("test", BulkheadConfig::try_from(options).unwrap())
    }

    #[test]
    fn camunda_26408_tower_resilience_365_a_hundred_get_in_at_a_hundred_however_many_try() {
        let bulkhead = bulkhead(100, |_| {});
        let held: usize = std::thread::scope(|scope| {
            let take = || {
                let permits: Vec<_> = (0..100)
                    .filter_map(|_| bulkhead.try_acquire(Priority::Critical).ok())
                    .collect();
                let count = permits.len();
                std::mem::forget(permits); // still held
                count
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((held, bulkhead.in_flight()), (100, 100));
    }

    #[test]
    fn kestra_17759_every_way_out_gives_the_place_back() {
        let bulkhead = bulkhead(2, |_| {});
        let now = Instant::now();
        let take = || bulkhead.try_acquire(Priority::Default).unwrap();
        drop(take());
        take().settle(Outcome::Cancelled, Duration::ZERO, now);
        take().settle(Outcome::Success, Duration::from_secs(1), now);
        let ticket = bulkhead.enter(Priority::Default).unwrap();
        bulkhead.leave(ticket, None, now);
        assert_eq!(bulkhead.in_flight(), 0);
    }

    #[test]
    fn the_lesser_stay_behind_where_places_are_reserved() {
        let bulkhead = bulkhead(10, |options| options.reserve = true);
        let fill = |priority| {
            let permits: Vec<_> =
                std::iter::from_fn(|| bulkhead.try_acquire(priority).ok()).collect();
            (permits.len(), permits)
        };
        let (sheddable, first) = fill(Priority::Sheddable);
        let (default, second) = fill(Priority::Default);
        let (critical, third) = fill(Priority::Critical);
        assert_eq!((sheddable, default, critical), (8, 1, 1));
        drop((first, second, third));
    }

    #[test]
    fn in_observe_mode_all_pass_and_all_are_counted() {
        let bulkhead = bulkhead(1, |options| options.mode = Mode::Observe);
        let permits: Vec<_> =
            (0..5).map(|_| bulkhead.try_acquire(Priority::Default).unwrap()).collect();
        assert_eq!(bulkhead.in_flight(), 5);
        drop(permits);
        assert_eq!(bulkhead.in_flight(), 0);
    }
}
