//! Hedging: a call that takes longer than nearly all do is made a second time, and the first answer
//! wins.
//!
//! Where one of a hundred calls is slow for no reason of its own, asking again after the time that
//! ninety-five of a hundred need costs five more calls in a hundred and takes the slow ones away. The
//! delay is measured and not set: [`Hedge`] keeps the latencies of the last half minute. A hedge is
//! made only for a request that may be made twice, while the dependency is well, with time left, and
//! if both its own cap and the retries' [`budget`](crate::budget) pay for it.
//!
//! The loser is dropped before the winner is handed on, and its fate touches nobody: the winner's
//! body belongs to the winner's own call. A first attempt that fails in a way that may pass lets the
//! second go at once; one that fails for good ends both.
//!
//! Source: Dean and Barroso, "The Tail at Scale"; gRFC A6 for what ends a hedge. Differs: one hedge at
//! most, and from the same budget as retries.

mod config;
mod latencies;
mod layer;

use std::{fmt, sync::Arc, time::Duration};

use metrics::{Counter, counter};
use tokio::time::Instant;

use self::latencies::Latencies;
pub use self::{
    config::{HedgeConfig, HedgeOptions},
    layer::{HedgeFuture, HedgeLayer, HedgeService},
};
use crate::{
    Mode,
    budget::{Budget, BudgetConfig, BudgetOptions, Paid},
    deadline::Timer,
};

/// When to hedge calls to one dependency. Clones share what is known.
///
/// ```
/// use std::time::Duration;
/// use carrick_call::hedge::{Hedge, HedgeConfig};
/// use tokio::time::Instant;
///
/// let (hedge, now) = (Hedge::new("pricing", HedgeConfig::default()), Instant::now());
/// assert_eq!(hedge.delay(now), None, "too little is known");
/// (1..=100).for_each(|millis| hedge.record(Duration::from_millis(millis), now));
/// let delay = hedge.delay(now).expect("enough is known");
/// assert!(delay >= Duration::from_millis(90) && delay <= Duration::from_millis(110));
/// ```
#[derive(Clone)]
pub struct Hedge(Arc<Inner>);

struct Inner {
    options: HedgeOptions,
    latencies: Latencies,
    own: Budget,
    shared: Option<Budget>,
    gate: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    timer: Timer,
    start: Instant,
    made: Counter,
    won: Counter,
    lost: Counter,
}

/// Both budgets paid; a hedge holds it while it runs.
#[derive(Debug)]
pub(crate) struct Fare {
    _own: Paid,
    _shared: Option<Paid>,
}

impl Hedge {
    /// Hedges calls to a dependency, whose name labels their metrics.
    pub fn new(name: &str, config: HedgeConfig) -> Self {
        Self::with(name, config, Timer::new(), None, None)
    }

    /// The same, with the dependency's timer and retry budget, and a gate that says whether the
    /// dependency is well enough to be asked twice.
    pub fn with(
        name: &str,
        config: HedgeConfig,
        timer: Timer,
        shared: Option<Budget>,
        gate: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    ) -> Self {
        let options = config.options;
        // A call in a second is enough to hedge at all where there is next to no traffic.
        let own = BudgetOptions { ratio: options.share, floor: 1, cap: 10, ..Default::default() };
        let own = BudgetConfig::try_from(own).expect("a share that was checked");
        let count = |kind: &'static str| counter!("carrick_hedge_total", "dependency" => name.to_owned(), "kind" => kind);
        Self(Arc::new(Inner {
            latencies: Latencies::default(),
            own: Budget::new(&format!("{name} (hedges)"), own),
            shared,
            gate,
            timer,
            start: Instant::now(),
            made: count("made"),
            won: count("won"),
            lost: count("lost"),
            options,
        }))
    }

    /// Notes how long a call took that succeeded.
    pub fn record(&self, elapsed: Duration, now: Instant) {
        self.0.latencies.record(elapsed, self.millis(now));
    }

    /// After how long a call is to be hedged; `None` while too little is known.
    pub fn delay(&self, now: Instant) -> Option<Duration> {
        let options = &self.0.options;
        let delay = self.0.latencies.percentile(options.percentile, self.millis(now))?;
        Some(delay.max(options.min_delay))
    }

    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.0.start).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX)
    }

    pub(crate) fn begin(&self, now: Instant) {
        // The kind of this budget keeps nothing while a call is under way.
        drop(self.0.own.deposit(now));
    }

    /// Pays for a hedge, if one is to be made.
    pub(crate) fn pay(&self, now: Instant) -> Option<Fare> {
        if self.0.gate.as_ref().is_some_and(|is_well| !is_well()) {
            return None;
        }
        let own = self.0.own.withdraw(now)?;
        let shared = match &self.0.shared {
            Some(budget) => Some(budget.withdraw(now)?),
            None => None,
        };
        self.0.made.increment(1);
        // Observed, it is counted and not made.
        (self.0.options.mode == Mode::Enforce).then_some(Fare { _own: own, _shared: shared })
    }

    pub(crate) fn ended(&self, won: bool) {
        if won { self.0.won.increment(1) } else { self.0.lost.increment(1) }
    }

    pub(crate) fn timer(&self) -> &Timer {
        &self.0.timer
    }
}

impl fmt::Debug for Hedge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hedge").field("options", &self.0.options).finish_non_exhaustive()
    }
}
