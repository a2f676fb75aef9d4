//! A service behind a circuit.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{Breaker, OwnedPermit};
use crate::{CallError, Classify, Refusal, classify::AnyError};

/// Refuses calls to one dependency while its circuit is open.
///
/// A layer value is one circuit: every service it makes, and every clone, shares it.
///
/// ```
/// # use carrick_call::breaker::{Breaker, BreakerConfig, BreakerLayer};
/// # use tower_layer::Layer;
/// # let service = ();
/// let breaker = Breaker::new("pricing", BreakerConfig::default());
/// let guarded = BreakerLayer::new(breaker).layer(service);
/// ```
#[derive(Clone, Debug)]
pub struct BreakerLayer<C = AnyError> {
    breaker: Breaker,
    classify: C,
}

impl BreakerLayer {
    /// Counts every error of the service as a failure.
    pub fn new(breaker: Breaker) -> Self {
        Self { breaker, classify: AnyError }
    }

    /// Lets `classify` judge how a call ended.
    pub fn with_classify<C>(self, classify: C) -> BreakerLayer<C> {
        BreakerLayer { breaker: self.breaker, classify }
    }
}

impl<S, C: Clone> Layer<S> for BreakerLayer<C> {
    type Service = BreakerService<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        let Self { breaker, classify } = self.clone();
        BreakerService { inner, breaker, classify }
    }
}

/// A service behind a circuit; clones share the circuit.
#[derive(Clone, Debug)]
pub struct BreakerService<S, C = AnyError> {
    inner: S,
    breaker: Breaker,
    classify: C,
}

impl<S, C, Request> Service<Request> for BreakerService<S, C>
where
    S: Service<Request>,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = CallError<S::Error>;
    type Future = BreakerFuture<S::Future, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Never refuse here: an `Err` tells the caller to throw the service away; circuits heal.
        self.inner.poll_ready(cx).map_err(CallError::Inner)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let now = Instant::now();
        let state = match self.breaker.admit_owned(now) {
            // The inner readiness stays unspent when it refuses; this clone's next call uses it.
            Err(refusal) => FutureState::Refused { refusal: Some(refusal) },
            Ok(permit) => FutureState::Sent {
                inner: self.inner.call(request),
                permit: Some(permit),
                since: now,
                classify: self.classify.clone(),
            },
        };
        BreakerFuture { state }
    }
}

pin_project! {
    /// A call behind a circuit. Dropping it gives a probe's place back.
    #[derive(Debug)]
    pub struct BreakerFuture<F, C> {
        #[pin]
        state: FutureState<F, C>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum FutureState<F, C> {
        Refused { refusal: Option<Refusal> },
        Sent {
            #[pin]
            inner: F,
            permit: Option<OwnedPermit>,
            since: Instant,
            classify: C,
        },
    }
}

impl<F, C, T, E> Future for BreakerFuture<F, C>
where
    F: Future<Output = Result<T, E>>,
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
                    permit.settle(classify.classify(result.as_ref()), elapsed, now);
                }
                Poll::Ready(result.map_err(CallError::Inner))
            }
        }
    }
}
