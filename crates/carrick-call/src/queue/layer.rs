//! A service with a line before it.

use std::{
    fmt,
    pin::Pin,
    task::{Context as TaskContext, Poll, ready},
    time::Duration,
};

use carrick_core::{context::Context, deadline::Deadline, outcome::Outcome};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{Enter, Permit, Queue};
use crate::{CallError, Classify, bulkhead::Priority, classify::AnyError};

/// Lets calls wait for a place, under the deadline of the context in scope.
///
/// A layer value is one line: every service it makes, and every clone, shares it.
#[derive(Clone, Debug)]
pub struct QueueLayer<C = AnyError, F = AtHead> {
    queue: Queue,
    priority: Priority,
    classify: C,
    finish: F,
}

/// What becomes of an answer, and of the place that its call has.
pub trait Finish<T> {
    /// What the caller gets.
    type Output;

    /// Takes an answer. The place is given back when `served` goes.
    fn finish(&self, answer: T, served: Served) -> Self::Output;
}

/// Takes an answer's head for its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtHead;

impl<T> Finish<T> for AtHead {
    type Output = T;

    fn finish(&self, answer: T, _served: Served) -> T {
        answer
    }
}

/// The place of a call that has been answered; given back, with how the call went, when this goes.
#[derive(Debug)]
pub struct Served {
    permit: Option<Permit>,
    outcome: Outcome,
    elapsed: Duration,
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            permit.settle(self.outcome, self.elapsed, Instant::now());
        }
    }
}

impl QueueLayer {
    /// Takes every error of the service for a transient failure.
    pub fn new(queue: Queue) -> Self {
        Self { queue, priority: Priority::Default, classify: AnyError, finish: AtHead }
    }
}

impl<C, F> QueueLayer<C, F> {
    /// Lets `classify` judge how a call ended.
    pub fn with_classify<D>(self, classify: D) -> QueueLayer<D, F> {
        let Self { queue, priority, classify: _, finish } = self;
        QueueLayer { queue, priority, classify, finish }
    }

    /// The priority of this service's calls.
    #[must_use]
    pub fn with_priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }

    /// Lets `finish` decide when an answered call gives its place back. By default it does at once.
    pub fn finishing<G>(self, finish: G) -> QueueLayer<C, G> {
        let Self { queue, priority, classify, finish: _ } = self;
        QueueLayer { queue, priority, classify, finish }
    }
}

impl<S, C: Clone, F: Clone> Layer<S> for QueueLayer<C, F> {
    type Service = QueueService<S, C, F>;

    fn layer(&self, inner: S) -> Self::Service {
        QueueService { inner, layer: self.clone() }
    }
}

/// A service with a line before it; clones share the line.
#[derive(Clone, Debug)]
pub struct QueueService<S, C = AnyError, F = AtHead> {
    inner: S,
    layer: QueueLayer<C, F>,
}

impl<S: Clone, C: Clone, F: Clone> QueueService<S, C, F> {
    /// Lets one request wait, with a priority of its own.
    pub fn enter<R>(&self, request: R, priority: Priority) -> QueueFuture<S, R, C, F>
    where
        S: Service<R>,
    {
        let deadline = Context::current().map(|context| context.deadline());
        QueueFuture {
            state: State::Waiting { enter: self.layer.queue.enter(priority, deadline) },
            next: Some((self.inner.clone(), request)),
            permit: None,
            since: Instant::now(),
            deadline,
            classify: self.layer.classify.clone(),
            finish: self.layer.finish.clone(),
        }
    }
}

impl<S, C, F, R> Service<R> for QueueService<S, C, F>
where
    S: Service<R> + Clone,
    C: Classify<S::Response, S::Error> + Clone,
    F: Finish<S::Response> + Clone,
{
    type Response = F::Output;
    type Error = CallError<S::Error>;
    type Future = QueueFuture<S, R, C, F>;

    fn poll_ready(&mut self, _cx: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        // Readiness that is held while a call waits in line would be somebody else's.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.enter(request, self.layer.priority)
    }
}

pin_project! {
    /// A call that waits in line, or is being made. Dropping it leaves the line, or gives the place
    /// back; if it is dropped because its deadline passed, an adaptive limit learns that.
    #[must_use = "a call is made when it is polled"]
    pub struct QueueFuture<S: Service<R>, R, C, F = AtHead> {
        #[pin]
        state: State<S::Future>,
        next: Option<(S, R)>,
        permit: Option<Permit>,
        since: Instant,
        deadline: Option<Deadline>,
        classify: C,
        finish: F,
    }

    impl<S: Service<R>, R, C, F> PinnedDrop for QueueFuture<S, R, C, F> {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            let Some((permit, deadline)) = this.permit.take().zip(*this.deadline) else { return };
            let now = Instant::now();
            if now >= deadline.instant() {
                let elapsed = now.saturating_duration_since(*this.since);
                permit.settle(Outcome::Expired, elapsed, now);
            }
        }
    }
}

pin_project! {
    #[project = Projected]
    enum State<F> {
        Waiting { #[pin] enter: Enter },
        Readying,
        Sent { #[pin] inner: F },
    }
}

impl<S, R, C, F> Future for QueueFuture<S, R, C, F>
where
    S: Service<R>,
    C: Classify<S::Response, S::Error>,
    F: Finish<S::Response>,
{
    type Output = Result<F::Output, CallError<S::Error>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        loop {
            let mut this = self.as_mut().project();
            match this.state.as_mut().project() {
                Projected::Waiting { enter } => {
                    *this.permit = Some(ready!(enter.poll(cx))?);
                    *this.since = Instant::now();
                    this.state.set(State::Readying);
                }
                Projected::Readying => {
                    let (service, _) = this.next.as_mut().expect("there until it is sent");
                    ready!(service.poll_ready(cx)).map_err(CallError::Inner)?;
                    let (mut service, request) = this.next.take().expect("just seen");
                    let inner = service.call(request);
                    this.state.set(State::Sent { inner });
                }
                Projected::Sent { inner } => {
                    let result = ready!(inner.poll(cx));
                    let served = Served {
                        permit: this.permit.take(),
                        outcome: this.classify.classify(result.as_ref()),
                        elapsed: this.since.elapsed(),
                    };
                    return Poll::Ready(match result {
                        Ok(answer) => Ok(this.finish.finish(answer, served)),
                        Err(error) => Err(CallError::Inner(error)),
                    });
                }
            }
        }
    }
}

impl<S: Service<R>, R, C, F> fmt::Debug for QueueFuture<S, R, C, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueFuture").field("permit", &self.permit).finish_non_exhaustive()
    }
}
