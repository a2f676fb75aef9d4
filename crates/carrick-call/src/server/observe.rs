//! Each request's span, and the counts of all of them.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use carrick_core::trace::TraceContext;
use http::{Request, Response, StatusCode};
use metrics::{Counter, Histogram, counter, histogram};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;
use tracing::{Span, field::Empty};

/// Opens a span for each request, and counts it.
#[derive(Clone, Debug)]
pub(super) struct ObserveLayer(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// By the first digit of the status, less one.
    answered: [Counter; 5],
    failed: Counter,
    dropped: Counter,
    seconds: Histogram,
}

impl ObserveLayer {
    pub(super) fn new(name: &str) -> Self {
        let count = |status: &'static str| counter!("carrick_server_requests_total", "server" => name.to_owned(), "status" => status);
        Self(Arc::new(Counts {
            answered: ["1xx", "2xx", "3xx", "4xx", "5xx"].map(count),
            failed: count("error"),
            dropped: count("dropped"),
            seconds: histogram!("carrick_server_seconds", "server" => name.to_owned()),
        }))
    }
}

impl<S> Layer<S> for ObserveLayer {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed { inner, counts: Arc::clone(&self.0) }
    }
}

/// A service whose requests have spans, and are counted.
#[derive(Clone, Debug)]
pub struct Observed<S> {
    inner: S,
    counts: Arc<Counts>,
}

fn span<B>(request: &Request<B>) -> Span {
    let parent = request.headers().get("traceparent").and_then(|text| text.to_str().ok());
    // What is no traceparent begins a trace of its own, as the recommendation has it.
    let parent = parent.filter(|text| text.parse::<TraceContext>().is_ok());
    tracing::info_span!(
        "request",
        otel.kind = "server",
        otel.name = request.method().as_str(),
        otel.status_code = Empty,
        http.request.method = request.method().as_str(),
        http.response.status_code = Empty,
        url.path = request.uri().path(),
        traceparent = parent,
    )
}

impl<S, B, R> Service<Request<B>> for Observed<S>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ObservedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let span = span(&request);
        let inner = span.in_scope(|| self.inner.call(request));
        let since = Instant::now();
        ObservedFuture { inner, span, since, counts: Some(Arc::clone(&self.counts)) }
    }
}

pin_project! {
    /// A request with its span. One that is dropped before it has been answered is counted as dropped.
    #[derive(Debug)]
    #[must_use = "a handler runs when it is polled"]
    pub struct ObservedFuture<F> {
        #[pin]
        inner: F,
        span: Span,
        since: Instant,
        counts: Option<Arc<Counts>>,
    }

    impl<F> PinnedDrop for ObservedFuture<F> {
        fn drop(this: Pin<&mut Self>) {
            if let Some(counts) = &this.counts {
                counts.dropped.increment(1);
            }
        }
    }
}

impl<F, R, E> Future for ObservedFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = ready!(this.span.in_scope(|| this.inner.poll(cx)));
        if let Some(counts) = this.counts.take() {
            counts.seconds.record(this.since.elapsed().as_secs_f64());
            match &result {
                Ok(answer) => {
                    let status = answer.status();
                    counts.answered[class(status)].increment(1);
                    this.span.record("http.response.status_code", status.as_u16());
                    if status.is_server_error() {
                        this.span.record("otel.status_code", "ERROR");
                    }
                }
                Err(_) => {
                    counts.failed.increment(1);
                    this.span.record("otel.status_code", "ERROR");
                }
            }
        }
        Poll::Ready(result)
    }
}

fn class(status: StatusCode) -> usize {
    usize::from(status.as_u16() / 100).clamp(1, 5) - 1
}
