//! The stack: every policy of a dependency, in its one right order.
//!
//! Total deadline → retry (one budget) → timeout of one try → queue → throttle → balancer (outliers
//! left out) → bulkhead → breaker → the host's own service. The order is fixed here and not by whoever wraps services in
//! services: a breaker outside of the retries would count one failure for three attempts, a timeout
//! inside of a limit would leave its place taken.
//!
//! One future does it all, and reads the clock once for a call that is ready at once: a stack of
//! services would read it in each, and hand results through as many. The decisions are those of the
//! patterns' own folders, to the letter.
//!
//! [`Stack`] is generic over the hosts' services; [`client`](crate::client) puts connections there.

mod call;
mod future;
mod http;
#[cfg(all(test, not(carrick_loom)))]
mod tests;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use carrick_core::outcome::Outcome;
use metrics::{Counter, Histogram, counter, histogram};
use tokio::time::Instant;
use tower_service::Service;

#[cfg(feature = "client")]
pub(crate) use self::http::grpc_outcome;
pub use self::{
    call::{AtHead, Call, Finish, Held, Tried},
    future::StackFuture,
};
use crate::{
    CallError,
    balance::{Balancer, Pick},
    breaker::{self, Breaker},
    budget::Budget,
    bulkhead::{self, Bulkhead},
    deadline::{StreamConfig, Timer},
    outlier::Verdict,
    queue::{self, Queue, QueueConfig},
    retry::RetryConfig,
    throttle::{self, Throttle},
};

/// The policies of one dependency.
#[derive(Debug)]
pub struct Policies<S> {
    /// The dependency's name, as metrics and explanations say it.
    pub name: String,
    /// How long a call may take in all, if its caller has no shorter deadline.
    pub timeout: Duration,
    /// How long one attempt may take; the last that is allowed may take what is left.
    pub per_try_timeout: Option<Duration>,
    /// Whether and when to try again.
    pub retry: RetryConfig,
    /// What retries are paid from.
    pub budget: Budget,
    /// The hosts.
    pub balancer: Balancer<S>,
    /// Asks less of a dependency that refuses often, if that is wanted.
    pub throttle: Option<Throttle>,
    /// Calls at a time.
    pub bulkhead: Bulkhead,
    /// Who finds no place there waits for one, if that is wanted.
    pub queue: Option<QueueConfig>,
    /// The circuit.
    pub breaker: Breaker,
    /// Until when answers that are streams may go on.
    pub stream: StreamConfig,
    /// What deadlines are armed on.
    pub timer: Timer,
}

/// A dependency, guarded. Clones share everything.
pub struct Stack<S, C, F = AtHead> {
    shared: Arc<Shared<S>>,
    classify: C,
    finish: F,
}

pub(crate) struct Shared<S> {
    pub(crate) policies: Policies<S>,
    queue: Option<Queue>,
    attempts: Counter,
    retries: Counter,
    expired: Counter,
    seconds: Histogram,
}

/// What an attempt holds of its policies; given back when it ends.
pub(crate) struct Open<S> {
    pick: Pick<S>,
    place: Place,
    breaker: breaker::Ticket,
    throttle: Option<throttle::Permit>,
}

/// A place of the bulkhead.
enum Place {
    Taken(bulkhead::Ticket),
    /// It was waited for; when it goes, the next in line gets it.
    Queued(queue::Permit),
}

impl<S> Shared<S> {
    /// Gives back what an attempt holds, with how it ended and when it was answered; `None` decides
    /// nothing.
    fn close(&self, open: Open<S>, ended: Option<Ended>, answered: Instant, now: Instant) {
        let Open { pick, place, breaker, throttle } = open;
        let policies = &self.policies;
        let Some(Ended { outcome, verdict }) = ended else {
            policies.breaker.leave(breaker, None, now);
            self.vacate(place, None, now);
            return; // the others go by themselves
        };
        let elapsed = answered.saturating_duration_since(pick.started());
        policies.breaker.leave(breaker, Some((outcome, elapsed)), now);
        self.vacate(place, Some((outcome, elapsed)), now);
        if let Some(permit) = throttle {
            permit.settle(outcome, now);
        }
        policies.budget.settle(outcome);
        pick.settle(verdict, elapsed, now);
    }

    fn vacate(&self, place: Place, ended: Option<(Outcome, Duration)>, now: Instant) {
        match (place, ended) {
            (Place::Taken(ticket), ended) => self.policies.bulkhead.leave(ticket, ended, now),
            (Place::Queued(permit), Some((outcome, elapsed))) => {
                permit.settle(outcome, elapsed, now);
            }
            (Place::Queued(permit), None) => drop(permit),
        }
    }
}

/// How an attempt ended.
#[derive(Clone, Copy)]
pub(crate) struct Ended {
    outcome: Outcome,
    verdict: Verdict,
}

impl Ended {
    fn with(self, outcome: Outcome) -> Self {
        Self { outcome, verdict: Verdict { outcome, ..self.verdict } }
    }
}

impl<S, C> Stack<S, C> {
    /// A dependency with these policies, whose answers `classify` judges at their heads.
    pub fn new(policies: Policies<S>, classify: C) -> Self {
        Self::finishing(policies, classify, AtHead)
    }
}

impl<S, C, F> Stack<S, C, F> {
    /// The same, with something else that ends attempts.
    pub fn finishing(policies: Policies<S>, classify: C, finish: F) -> Self {
        let label = || policies.name.clone();
        let shared = Shared {
            attempts: counter!("carrick_call_attempts_total", "dependency" => label()),
            retries: counter!("carrick_retry_attempts_total", "dependency" => label()),
            expired: counter!("carrick_deadline_expired_total", "dependency" => label()),
            seconds: histogram!("carrick_call_seconds", "dependency" => label()),
            queue: policies
                .queue
                .clone()
                .map(|config| Queue::new(&policies.name, config, policies.bulkhead.clone())),
            policies,
        };
        Self { shared: Arc::new(shared), classify, finish }
    }

    /// The policies.
    pub fn policies(&self) -> &Policies<S> {
        &self.shared.policies
    }

    /// The line for places, if there is one.
    pub fn queue(&self) -> Option<&Queue> {
        self.shared.queue.as_ref()
    }
}

impl<S, C: Clone, F: Clone> Clone for Stack<S, C, F> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            classify: self.classify.clone(),
            finish: self.finish.clone(),
        }
    }
}

impl<S, C, F> fmt::Debug for Stack<S, C, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("name", &self.shared.policies.name).finish_non_exhaustive()
    }
}

impl<S, C, F, R> Service<R> for Stack<S, C, F>
where
    S: Service<R> + Clone,
    R: Call,
    C: crate::Classify<S::Response, S::Error> + Clone,
    F: Finish<S, S::Response> + Clone,
{
    type Response = F::Output;
    type Error = CallError<S::Error>;
    type Future = StackFuture<S, R, C, F>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // A host's readiness is awaited within the call, for which host it is shows only there.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        StackFuture::new(
            Arc::clone(&self.shared),
            self.classify.clone(),
            self.finish.clone(),
            request,
            Instant::now(),
        )
    }
}
