//! The balancer as a service over one service per host.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use carrick_core::outcome::Outcome;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::{Balancer, Pick};
use crate::{
    CallError, Refusal,
    classify::{AnyError, Classify},
    outlier::Verdict,
};

/// Sends each call to a host's service, and charges the host with how it ended. A clone shares the
/// hosts.
///
/// It is always ready: a host is picked when the call is made, and its readiness is waited for within
/// the call, where it counts as the host's latency. Services of hosts are cloned for each call, so
/// they should be handles.
///
/// ```
/// # use carrick_call::balance::{Balance, BalanceConfig, Balancer, Endpoint};
/// # use tokio::time::Instant;
/// # use tower::{ServiceExt, service_fn};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let balancer = Balancer::with("pricing", BalanceConfig::default(), None, |endpoint| {
///     let address = endpoint.address.clone();
///     service_fn(move |call: &'static str| {
///         let answer = format!("{call} at {address}");
///         async move { Ok::<_, std::io::Error>(answer) }
///     })
/// });
/// balancer.update(vec![Endpoint::new("a:80")], Instant::now());
/// assert_eq!(Balance::new(balancer).oneshot("price").await.unwrap(), "price at a:80");
/// # }
/// ```
pub struct Balance<S, C = AnyError> {
    balancer: Balancer<S>,
    classify: C,
}

impl<S> Balance<S> {
    /// A service for which every response is a success and every error a failure.
    pub fn new(balancer: Balancer<S>) -> Self {
        Self { balancer, classify: AnyError }
    }
}

impl<S, C> Balance<S, C> {
    /// The same with another opinion on how calls end. An error is a call without an answer, and an
    /// answer that is overload or expiry is a gateway's.
    pub fn with_classify<D>(self, classify: D) -> Balance<S, D> {
        Balance { balancer: self.balancer, classify }
    }

    /// The hosts.
    pub fn balancer(&self) -> &Balancer<S> {
        &self.balancer
    }
}

impl<S, C, Request> Service<Request> for Balance<S, C>
where
    S: Service<Request> + Clone,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = CallError<S::Error>;
    type Future = BalanceFuture<S, C, Request>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let classify = self.classify.clone();
        match self.balancer.pick(Instant::now(), &mut rand::rng(), None) {
            Ok(pick) => {
                let service = pick.host().value().clone();
                let state = State::Waiting { service, request: Some(request) };
                BalanceFuture { state, pick: Some(pick), classify }
            }
            Err(refusal) => {
                let state = State::Refused { refusal: Some(refusal) };
                BalanceFuture { state, pick: None, classify }
            }
        }
    }
}

impl<S, C: Clone> Clone for Balance<S, C> {
    fn clone(&self) -> Self {
        Self { balancer: self.balancer.clone(), classify: self.classify.clone() }
    }
}

impl<S, C> fmt::Debug for Balance<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balance").field("balancer", &self.balancer).finish_non_exhaustive()
    }
}

pin_project! {
    /// A call through [`Balance`]. Dropped before it ends, it gives its place at the host back.
    pub struct BalanceFuture<S: Service<Request>, C, Request> {
        #[pin]
        state: State<S, S::Future, Request>,
        pick: Option<Pick<S>>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, F, Request> {
        Refused { refusal: Option<Refusal> },
        Waiting { service: S, request: Option<Request> },
        Calling { #[pin] future: F },
    }
}

impl<S, C, Request> Future for BalanceFuture<S, C, Request>
where
    S: Service<Request>,
    C: Classify<S::Response, S::Error>,
{
    type Output = Result<S::Response, CallError<S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        const ONCE: &str = "a future is not polled after it has ended";
        let mut this = self.project();
        let result = loop {
            match this.state.as_mut().project() {
                StateProjection::Refused { refusal } => {
                    return Poll::Ready(Err(refusal.take().expect(ONCE).into()));
                }
                StateProjection::Waiting { service, request } => {
                    if let Err(error) = ready!(service.poll_ready(cx)) {
                        break Err(error);
                    }
                    let future = service.call(request.take().expect(ONCE));
                    this.state.set(State::Calling { future });
                }
                StateProjection::Calling { future } => break ready!(future.poll(cx)),
            }
        };
        if let Some(pick) = this.pick.take() {
            let now = Instant::now();
            let elapsed = now.saturating_duration_since(pick.started());
            let outcome = this.classify.classify(result.as_ref());
            pick.settle(verdict(outcome, result.is_ok()), elapsed, now);
        }
        Poll::Ready(result.map_err(CallError::Inner))
    }
}

fn verdict(outcome: Outcome, answered: bool) -> Verdict {
    if !answered {
        return Verdict::local(outcome);
    }
    let gateway = matches!(outcome, Outcome::Overload { .. } | Outcome::Expired);
    Verdict { gateway, ..Verdict::peer(outcome) }
}

impl<S: Service<Request>, C, Request> fmt::Debug for BalanceFuture<S, C, Request> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalanceFuture").field("pick", &self.pick).finish_non_exhaustive()
    }
}
