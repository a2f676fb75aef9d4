//! Breaker: a dependency that fails is not asked for a while.
//!
//! Callers that wait for a sick dependency tie up their own resources and keep it sick. A circuit
//! counts how calls end; when too many fail it *opens* and refuses at once. After a cool-down it is
//! *half-open*: a few probes go through, and what becomes of them decides. Each change of state is a
//! new generation, and a [`Permit`] carries the one it was given in, so that a late result of an
//! earlier state cannot move the present one. A permit that is dropped without a verdict frees its
//! place and decides nothing.
//!
//! [`Breaker`] is one circuit, [`BreakerMap`] one for each key, [`BreakerLayer`] a service behind one.
//! A closed circuit costs a load on the way in, and one counter on the way out: no lock.
//!
//! Source: pattern document, circuit breaker; resilience4j for windows and slow calls. Differs: probes
//! are reserved at admission and lost ones replaced, results carry a generation, the cool-down grows
//! and falls back, and is jittered.

mod config;
mod core;
mod map;
mod metrics;
#[cfg(all(test, not(carrick_loom)))]
mod tests;
mod window;

use std::{fmt, sync::Arc, time::Duration};

use carrick_core::outcome::Outcome;
use tokio::time::Instant;

use self::core::Circuit;
pub use self::{
    config::{BreakerConfig, BreakerOptions, WindowOptions},
    core::{Forced, State, Ticket},
    map::BreakerMap,
};
use crate::{
    Refusal,
    gate::{Gate, GateFuture, GateLayer, GateService},
};

/// Refuses calls to one dependency while its circuit is open.
pub type BreakerLayer<C = crate::classify::AnyError> = GateLayer<Breaker, C>;

/// A service behind a circuit.
pub type BreakerService<S, C = crate::classify::AnyError> = GateService<S, Breaker, C>;

/// A call behind a circuit; dropping it gives a probe's place back.
pub type BreakerFuture<F, C = crate::classify::AnyError> = GateFuture<F, Breaker, C>;

/// One circuit. Clones share it.
///
/// ```
/// use std::time::Duration;
/// use carrick_call::breaker::{Breaker, BreakerConfig, State};
/// use carrick_core::outcome::Outcome;
/// use tokio::time::Instant;
///
/// let breaker = Breaker::new("pricing", BreakerConfig::default());
/// let now = Instant::now();
/// for _ in 0..20 {
///     breaker.admit(now)?.settle(Outcome::Transient, Duration::ZERO, now);
/// }
/// assert_eq!(breaker.state(), State::Open);
/// assert!(breaker.admit(now).unwrap_err().retry_after >= Some(Duration::from_secs(30)));
/// # Ok::<(), carrick_call::Refusal>(())
/// ```
#[derive(Clone)]
pub struct Breaker(Arc<Circuit>);

/// Leave to make one call; tell how it ended with [`Permit::settle`].
#[derive(Debug)]
#[must_use = "a permit that is dropped decides nothing"]
pub struct Permit<'a> {
    circuit: &'a Circuit,
    ticket: Option<Ticket>,
}

/// The same, for a future that outlives the borrow of its breaker.
#[derive(Debug)]
#[must_use = "a permit that is dropped decides nothing"]
pub struct OwnedPermit {
    circuit: Arc<Circuit>,
    ticket: Option<Ticket>,
}

impl Breaker {
    /// A closed circuit for one dependency, whose name labels its metrics.
    pub fn new(name: &str, config: BreakerConfig) -> Self {
        Self::seeded(name, config, rand::random())
    }

    /// The same, with the seed of its jitter.
    pub fn seeded(name: &str, config: BreakerConfig, seed: u64) -> Self {
        Self(Arc::new(Circuit::new(name, config.options, seed, Instant::now())))
    }

    /// Lets a call through, or refuses it.
    ///
    /// # Errors
    /// The refusal, with the time until the next probe.
    pub fn admit(&self, now: Instant) -> Result<Permit<'_>, Refusal> {
        let ticket = Some(self.0.enter(now)?);
        Ok(Permit { circuit: &self.0, ticket })
    }

    /// The same, for a future.
    ///
    /// # Errors
    /// As [`Breaker::admit`].
    pub fn admit_owned(&self, now: Instant) -> Result<OwnedPermit, Refusal> {
        let ticket = Some(self.0.enter(now)?);
        Ok(OwnedPermit { circuit: Arc::clone(&self.0), ticket })
    }

    /// The bare form of [`Breaker::admit`], for a caller with a guard of its own: it must give the
    /// ticket back with [`Breaker::leave`], whatever happens.
    ///
    /// # Errors
    /// As [`Breaker::admit`].
    pub fn enter(&self, now: Instant) -> Result<Ticket, Refusal> {
        self.0.enter(now)
    }

    /// Takes a ticket back, with how the call ended; `None` decides nothing.
    pub fn leave(&self, ticket: Ticket, ended: Option<(Outcome, Duration)>, now: Instant) {
        self.0.leave(ticket, ended, now);
    }

    /// The state. A circuit whose cool-down is over is open until somebody asks to enter.
    pub fn state(&self) -> State {
        self.0.state()
    }

    /// How long the circuit has been in its state.
    pub fn time_in_state(&self, now: Instant) -> Duration {
        self.0.time_in_state(now)
    }

    /// Forces the circuit open or closed, whatever calls do; `None` gives it back to them, closed and
    /// with an empty window.
    pub fn force(&self, forced: Option<Forced>, now: Instant) {
        self.0.force(forced, now);
    }
}

impl Permit<'_> {
    /// Tells how the call ended, and how long it took.
    pub fn settle(mut self, outcome: Outcome, elapsed: Duration, now: Instant) {
        if let Some(ticket) = self.ticket.take() {
            self.circuit.leave(ticket, Some((outcome, elapsed)), now);
        }
    }
}

impl OwnedPermit {
    /// Tells how the call ended, and how long it took.
    pub fn settle(mut self, outcome: Outcome, elapsed: Duration, now: Instant) {
        if let Some(ticket) = self.ticket.take() {
            self.circuit.leave(ticket, Some((outcome, elapsed)), now);
        }
    }
}

impl Gate for Breaker {
    type Permit = OwnedPermit;

    fn admit(&self, now: Instant) -> Result<OwnedPermit, Refusal> {
        self.admit_owned(now)
    }

    fn settle(permit: OwnedPermit, outcome: Outcome, elapsed: Duration, now: Instant) {
        permit.settle(outcome, elapsed, now);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.circuit.abandon(ticket);
        }
    }
}

impl Drop for OwnedPermit {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.circuit.abandon(ticket);
        }
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Breaker").field(&self.0).finish()
    }
}
