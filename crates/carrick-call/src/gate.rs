//! Policies that let a call through or refuse it, as services: one layer for all of them.
//!
//! A breaker, a bulkhead and a throttle differ in how they decide and not in how they stand before a
//! service. So each is a [`Gate`], and `BreakerLayer`, `BulkheadLayer` and `ThrottleLayer` are one
//! [`GateLayer`].

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use carrick_core::outcome::Outcome;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use crate::{CallError, Classify, Refusal, classify::AnyError};

/// Lets calls through, and hears how they ended.
pub trait Gate: Clone {
    /// Leave to make one call. Dropping it gives back what it holds, and decides nothing.
    type Permit;

    /// Lets a call through, or refuses it.
    ///
    /// # Errors
    /// The refusal.
    fn admit(&self, now: Instant) -> Result<Self::Permit, Refusal>;

    /// Takes a permit back, with how the call ended and how long it took.
    fn settle(permit: Self::Permit, outcome: Outcome, elapsed: Duration, now: Instant);
}

/// Puts a gate before a service.
///
/// A layer value is one gate: every service it makes, and every clone, shares it.
///
/// ```
/// # use carrick_call::{breaker::{Breaker, BreakerConfig}, gate::GateLayer};
/// # use tower_layer::Layer;
/// # let service = ();
/// let breaker = Breaker::new("pricing", BreakerConfig::default());
/// let guarded = GateLayer::new(breaker).layer(service);
/// ```
#[derive(Clone, Debug)]
pub struct GateLayer<G, C = AnyError> {
    gate: G,
    classify: C,
}

impl<G> GateLayer<G> {
    /// Takes every error of the service for a transient failure.
    pub fn new(gate: G) -> Self {
        Self { gate, classify: AnyError }
    }
}

impl<G, C> GateLayer<G, C> {
    /// Lets `classify` judge how a call ended.
    pub fn with_classify<D>(self, classify: D) -> GateLayer<G, D> {
        GateLayer { gate: self.gate, classify }
    }
}

impl<S, G: Clone, C: Clone> Layer<S> for GateLayer<G, C> {
    type Service = GateService<S, G, C>;

    fn layer(&self, inner: S) -> Self::Service {
        GateService { inner, layer: self.clone() }
    }
}

/// A service behind a gate; clones share the gate.
#[derive(Clone, Debug)]
pub struct GateService<S, G, C = AnyError> {
    inner: S,
    layer: GateLayer<G, C>,
}

impl<S, G, C, Request> Service<Request> for GateService<S, G, C>
where
    S: Service<Request>,
    G: Gate,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = CallError<S::Error>;
    type Future = GateFuture<S::Future, G, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Never refuse here: an `Err` tells the caller to throw the service away; gates open again.
        self.inner.poll_ready(cx).map_err(CallError::Inner)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let now = Instant::now();
        let state = match self.layer.gate.admit(now) {
            // The inner readiness stays unspent when it refuses; this clone's next call uses it.
            Err(refusal) => State::Refused { refusal: Some(refusal) },
            Ok(permit) => State::Sent {
                inner: self.inner.call(request),
                permit: Some(permit),
                since: now,
                classify: self.layer.classify.clone(),
            },
        };
        GateFuture { state }
    }
}

pin_project! {
    /// A call that was let through, or a refusal. Dropping it gives back what the call holds.
    #[derive(Debug)]
    pub struct GateFuture<F, G: Gate, C> {
        #[pin]
        state: State<F, G::Permit, C>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum State<F, P, C> {
        Refused { refusal: Option<Refusal> },
        Sent {
            #[pin]
            inner: F,
            permit: Option<P>,
            since: Instant,
            classify: C,
        },
    }
}

impl<F, G, C, T, E> Future for GateFuture<F, G, C>
where
    F: Future<Output = Result<T, E>>,
    G: Gate,
    C: Classify<T, E>,
{
    type Output = Result<T, CallError<E>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            Projected::Refused { refusal } => {
                let refusal = refusal.take().expect("polled once after it refused");
                Poll::Ready(Err(refusal.into()))
            }
            Projected::Sent { inner, permit, since, classify } => {
                let result = ready!(inner.poll(cx));
                if let Some(permit) = permit.take() {
                    let now = Instant::now();
                    let elapsed = now.saturating_duration_since(*since);
                    G::settle(permit, classify.classify(result.as_ref()), elapsed, now);
                }
                Poll::Ready(result.map_err(CallError::Inner))
            }
        }
    }
}
