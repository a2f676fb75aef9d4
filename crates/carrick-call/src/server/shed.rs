//! Load shedding: a request that finds no place, and no place in the line, is told so at once.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{ShedBody, ToEnd};
use crate::{
    CallError,
    bulkhead::Priority,
    classify::Http,
    deadline::is_grpc,
    early,
    queue::{Queue, QueueFuture, QueueLayer, QueueService},
};

type PriorityOf = dyn Fn(&Parts) -> Priority + Send + Sync;

/// Lets requests wait for one of a server's places, and answers those that get none: 503 with a problem
/// and `Retry-After`, or gRPC's `RESOURCE_EXHAUSTED` with its pushback.
///
/// The handler is not asked before there is a place, so what is refused cost nearly nothing, and the
/// caller may try elsewhere: nothing was done. The wait ends with the deadline of the context in scope.
///
/// A layer value is one server: its services share the line and the places.
///
/// ```
/// # use bytes::Bytes;
/// use carrick_call::{bulkhead::{Bulkhead, BulkheadConfig, Priority}, queue::{Queue, QueueConfig}};
/// use carrick_call::server::ShedLayer;
///
/// let places = Bulkhead::new("shop", BulkheadConfig::default());
/// let shed = ShedLayer::new(Queue::new("shop", QueueConfig::default(), places))
///     .with_priority(|request| match request.uri.path() {
///         "/checkout" => Priority::Critical,
///         "/recommendations" => Priority::Sheddable,
///         _ => Priority::Default,
///     });
/// ```
#[derive(Clone)]
pub struct ShedLayer {
    queue: Queue,
    priority: Option<Arc<PriorityOf>>,
}

impl ShedLayer {
    /// Sheds what this line does not take.
    pub fn new(queue: Queue) -> Self {
        Self { queue, priority: None }
    }

    /// Says which requests go first, and which are let go of first. By default all are alike.
    #[must_use]
    pub fn with_priority(
        self,
        priority: impl Fn(&Parts) -> Priority + Send + Sync + 'static,
    ) -> Self {
        Self { priority: Some(Arc::new(priority)), ..self }
    }

    /// The line.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

impl fmt::Debug for ShedLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShedLayer").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = Shed<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let line = QueueLayer::new(self.queue.clone()).with_classify(Http).finishing(ToEnd);
        Shed { inner: line.layer(inner), priority: self.priority.clone() }
    }
}

/// A handler with a line before it; see [`ShedLayer`]. Clones share the line.
#[derive(Clone)]
pub struct Shed<S> {
    inner: QueueService<S, Http, ToEnd>,
    priority: Option<Arc<PriorityOf>>,
}

impl<S: fmt::Debug> fmt::Debug for Shed<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shed").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, B, R> Service<Request<B>> for Shed<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Body<Data = Bytes>,
{
    type Response = Response<ShedBody<R>>;
    type Error = S::Error;
    type Future = ShedFuture<S, Request<B>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        // The handler's readiness is awaited when there is a place, and not before.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let is_grpc = is_grpc(request.headers());
        let (parts, body) = request.into_parts();
        let priority = self.priority.as_ref().map_or(Priority::Default, |of| of(&parts));
        let request = Request::from_parts(parts, body);
        ShedFuture { inner: self.inner.enter(request, priority), is_grpc }
    }
}

pin_project! {
    /// A request that waits for its place, or is being handled. Dropping it gives back what it has.
    #[must_use = "a handler runs when it is polled"]
    pub struct ShedFuture<S: Service<R>, R> {
        #[pin]
        inner: QueueFuture<S, R, Http, ToEnd>,
        is_grpc: bool,
    }
}

impl<S, B, R> Future for ShedFuture<S, Request<B>>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    type Output = Result<Response<ShedBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (status, grpc, why, after) = match ready!(this.inner.poll(cx)) {
            Ok(answer) => return Poll::Ready(Ok(answer)),
            Err(CallError::Inner(error)) => return Poll::Ready(Err(error)),
            Err(CallError::Refused(refusal)) => (
                StatusCode::SERVICE_UNAVAILABLE,
                early::EXHAUSTED,
                refusal.reason,
                refusal.retry_after,
            ),
            Err(CallError::Expired) => {
                (StatusCode::GATEWAY_TIMEOUT, early::LATE, "the deadline passed".into(), None)
            }
        };
        let answer = early::answer(*this.is_grpc, status, grpc, &why, after);
        Poll::Ready(Ok(answer.map(ShedBody::own)))
    }
}

impl<S: Service<R>, R> fmt::Debug for ShedFuture<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShedFuture").field("inner", &self.inner).finish_non_exhaustive()
    }
}
