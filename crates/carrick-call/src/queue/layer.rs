//! A service with a line before it.

use std::{
    fmt,
    pin::Pin,
    task::{Context as TaskContext, Poll, ready},
};

use carrick_core::context::Context;
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
pub struct QueueLayer<C = AnyError> {
    queue: Queue,
    priority: Priority,
    classify: C,
}

impl QueueLayer {
    /// Takes every error of the service for a transient failure.
    pub fn new(queue: Queue) -> Self {
        Self { queue, priority: Priority::Default, classify: AnyError }
    }
}

impl<C> QueueLayer<C> {
    /// Lets `classify` judge how a call ended.
    pub fn with_classify<D>(self, classify: D) -> QueueLayer<D> {
        QueueLayer { queue: self.queue, priority: self.priority, classify }
    }

    /// The priority of this service's calls.
    #[must_use]
    pub fn with_priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }
}

impl<S, C: Clone> Layer<S> for QueueLayer<C> {
    type Service = QueueService<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        QueueService { inner, layer: self.clone() }
    }
}

/// A service with a line before it; clones share the line.
#[derive(Clone, Debug)]
pub struct QueueService<S, C = AnyError> {
    inner: S,
    layer: QueueLayer<C>,
}

impl<S, C, R> Service<R> for QueueService<S, C>
where
    S: Service<R> + Clone,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = CallError<S::Error>;
    type Future = QueueFuture<S, R, C>;

    fn poll_ready(&mut self, _cx: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        // Readiness that is held while a call waits in line would be somebody else's.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        let deadline = Context::current().map(|context| context.deadline());
        let enter = self.layer.queue.enter(self.layer.priority, deadline);
        QueueFuture {
            state: State::Waiting { enter },
            next: Some((self.inner.clone(), request)),
            permit: None,
            since: Instant::now(),
            classify: self.layer.classify.clone(),
        }
    }
}

pin_project! {
    /// A call that waits in line, or is being made. Dropping it leaves the line, or gives the place
    /// back.
    #[must_use = "a call is made when it is polled"]
    pub struct QueueFuture<S: Service<R>, R, C> {
        #[pin]
        state: State<S::Future>,
        next: Option<(S, R)>,
        permit: Option<Permit>,
        since: Instant,
        classify: C,
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

impl<S, R, C> Future for QueueFuture<S, R, C>
where
    S: Service<R>,
    C: Classify<S::Response, S::Error>,
{
    type Output = Result<S::Response, CallError<S::Error>>;

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
                    if let Some(permit) = this.permit.take() {
                        let now = Instant::now();
                        let elapsed = now.saturating_duration_since(*this.since);
                        permit.settle(this.classify.classify(result.as_ref()), elapsed, now);
                    }
                    return Poll::Ready(result.map_err(CallError::Inner));
                }
            }
        }
    }
}

impl<S: Service<R>, R, C> fmt::Debug for QueueFuture<S, R, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueFuture").field("permit", &self.permit).finish_non_exhaustive()
    }
}
