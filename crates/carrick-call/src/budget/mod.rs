//! Retry budget: retries are paid for by recent traffic.
//!
//! A call earns a part of a retry, and a retry costs a whole one; so when everything fails at once the
//! purse empties and the extra load ends. A limit per call cannot do that: it multiplies load exactly
//! when there is too much. Share one budget per dependency; retries, hedges and fan-out draw on the
//! same one.
//!
//! Three kinds: by **ratio** of recent calls with a floor per second (the default), by calls **in
//! flight**, and gRPC's **tokens**. Each is a few integers that change by one compare-and-swap, so two
//! callers cannot spend one coin.
//!
//! Source: pattern document, retry budget; Finagle's `RetryBudget` for the floor, Envoy's
//! `retry_budget` for calls in flight, gRFC A6 for tokens. Differs: integers of a thousandth, so that
//! ten earnings of a tenth are one; the floor is refilled by time and there from the start.

mod config;
mod core;

use std::{fmt, sync::Arc};

use carrick_core::outcome::Outcome;
use metrics::{Counter, counter};
use tokio::time::Instant;

pub use self::config::{BudgetConfig, BudgetKind, BudgetOptions};
use self::core::{Flying, Purse, Tokens, WHOLE, milli};
use crate::Mode;

/// What retries are paid from. Clones share it.
///
/// ```
/// use carrick_call::budget::{Budget, BudgetConfig};
/// use tokio::time::Instant;
///
/// let (budget, now) = (Budget::new("pricing", BudgetConfig::default()), Instant::now());
/// let call = budget.deposit(now); // once per call, not per attempt
/// let paid = budget.withdraw(now); // a retry may go
/// assert!(paid.is_some());
/// drop((call, paid));
/// ```
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    mode: Mode,
    kind: Kind,
    start: Instant,
    paid: Counter,
    refused: Counter,
}

enum Kind {
    Ratio(Purse),
    InFlight { share: u64, floor: u64, flying: Flying },
    Tokens(Tokens),
}

/// A call that is counted in flight for as long as this lives.
#[derive(Debug)]
#[must_use = "a call counts only while this lives"]
pub struct Deposit(Option<Budget>);

/// A retry that was paid for; it counts as in flight for as long as this lives.
#[derive(Debug)]
#[must_use = "a retry counts only while this lives"]
pub struct Paid(Option<Budget>);

impl Budget {
    /// A budget for one dependency, whose name labels its metrics.
    pub fn new(name: &str, config: BudgetConfig) -> Self {
        let options = config.options;
        let kind = match options.kind {
            BudgetKind::Ratio => {
                Kind::Ratio(Purse::new(milli(options.ratio), options.floor, options.cap))
            }
            BudgetKind::InFlight => Kind::InFlight {
                share: milli(options.ratio),
                floor: u64::from(options.floor),
                flying: Flying::default(),
            },
            BudgetKind::Tokens => Kind::Tokens(Tokens::new(options.cap, milli(options.ratio))),
        };
        let label = || name.to_owned();
        Self(Arc::new(Inner {
            mode: options.mode,
            kind,
            start: Instant::now(),
            paid: counter!("carrick_budget_paid_total", "dependency" => label()),
            refused: counter!("carrick_budget_refused_total", "dependency" => label()),
        }))
    }

    /// Counts a call. Once for each, whatever its attempts; not for one that was refused here.
    pub fn deposit(&self, now: Instant) -> Deposit {
        match &self.0.kind {
            Kind::Ratio(purse) if purse.is_full() => {}
            Kind::Ratio(purse) => purse.deposit(self.millis(now)),
            Kind::InFlight { flying, .. } => {
                flying.enter();
                return Deposit(Some(self.clone()));
            }
            Kind::Tokens(_) => {}
        }
        Deposit(None)
    }

    /// Takes what one retry costs; `None` if there is not as much, and nothing was taken.
    ///
    /// In observe mode it always pays, and what would have been refused is counted.
    pub fn withdraw(&self, now: Instant) -> Option<Paid> {
        let (pays, held) = match &self.0.kind {
            Kind::Ratio(purse) => (purse.withdraw(self.millis(now)), false),
            Kind::InFlight { share, floor, flying } => {
                let pays = flying.withdraw(*share, *floor);
                (pays, pays)
            }
            Kind::Tokens(tokens) => (tokens.may_retry(), false),
        };
        if pays {
            self.0.paid.increment(1)
        } else {
            self.0.refused.increment(1)
        }
        let paid = || Paid(held.then(|| self.clone()));
        (pays || !self.0.mode.enforces()).then(paid)
    }

    /// Tells how an attempt ended: what gRPC's tokens are made of.
    pub fn settle(&self, outcome: Outcome) {
        if let Kind::Tokens(tokens) = &self.0.kind {
            match outcome {
                Outcome::Success => tokens.succeeded(),
                Outcome::Transient | Outcome::Overload { .. } => tokens.failed(),
                _ => {}
            }
        }
    }

    /// Retries that could be paid for now.
    pub fn balance(&self, now: Instant) -> u64 {
        match &self.0.kind {
            Kind::Ratio(purse) => purse.balance(self.millis(now)) / WHOLE,
            Kind::InFlight { share, floor, flying } => flying.left(*share, *floor),
            Kind::Tokens(tokens) => tokens.retries_left(),
        }
    }

    /// Milliseconds since this budget was made.
    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.0.start).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

impl Drop for Deposit {
    fn drop(&mut self) {
        if let Some(Budget(inner)) = &self.0
            && let Kind::InFlight { flying, .. } = &inner.kind
        {
            flying.leave();
        }
    }
}

impl Drop for Paid {
    fn drop(&mut self) {
        if let Some(Budget(inner)) = &self.0
            && let Kind::InFlight { flying, .. } = &inner.kind
        {
            flying.end_retry();
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("mode", &self.0.mode).finish_non_exhaustive()
    }
}
