//! Deadlines of a server: what callers ask for, kept.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
};

use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    context::{Context, Scoped},
    deadline::{Deadline, Limits, Said},
    trace::{TraceContext, recorded},
};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body::Body;
use metrics::{Counter, counter};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    DeadlineBody, DeadlineConfig, DeadlineOptions, Timer,
    body::Limit,
    core::{Refusals, Span},
    watch::{Bound, Watch},
    wire::is_grpc,
};
use crate::{
    early,
    retry::{ATTEMPT, IDEMPOTENCY_KEY},
};

/// Keeps the deadlines that callers send: it puts a [`Context`] in scope for the handler, and ends
/// handler and body when time is over.
///
/// For axum, tonic, or any service of HTTP requests. A request says its deadline in one of the
/// headers that [`Deadline::from_headers`] reads; it is cut to our own maximum. With too little left
/// the handler is not started. Expiry is 504 with a problem, or gRPC's `DEADLINE_EXCEEDED`. When the
/// client hangs up the server drops the call, and with it everything that the handler awaits; work
/// that must go on belongs in a task with a [`Context::detach`]ed context.
///
/// An answer that is a stream ([`Streaming`], or `text/event-stream`) has no deadline of its own from
/// its head on: it may go on while something comes, for its lifetime at most, and no longer than its
/// caller said.
///
/// By default it only counts whom it would not start: see [`DeadlineOptions::refuse`].
///
/// A layer value is one server: its services share the timer and the count of refusals.
///
/// ```
/// # use bytes::Bytes;
/// # use carrick_call::deadline::{DeadlineConfig, ServerDeadlineLayer};
/// # use http::{Request, Response};
/// # use http_body_util::Empty;
/// # use tower::{ServiceBuilder, ServiceExt, service_fn};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let service = ServiceBuilder::new()
///     .layer(ServerDeadlineLayer::new(DeadlineConfig::default()))
///     .service(service_fn(|_: Request<()>| {
///         std::future::pending::<Result<Response<Empty<Bytes>>, ()>>()
///     }));
/// let request = Request::builder().header("x-request-timeout-ms", "100").body(()).unwrap();
/// assert_eq!(service.oneshot(request).await.unwrap().status(), 504);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ServerDeadlineLayer(Arc<Server>);

/// Marks a stream, in the extensions of a request or of an answer: its answer may go on while
/// something comes. A request says it before it is sent, so that no shorter deadline is sent with it; of
/// an answer of type `text/event-stream` it is known.
///
/// ```
/// # use carrick_call::deadline::Streaming;
/// let mut answer = http::Response::new("a long download");
/// answer.extensions_mut().insert(Streaming);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming;

struct Server {
    options: DeadlineOptions,
    timer: Timer,
    refusals: Mutex<Refusals>,
    late: Counter,
    spared: Counter,
    expired: Counter,
    junk: Counter,
    skewed: Counter,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ServerDeadlineLayer {
    /// A layer for one server.
    pub fn new(config: DeadlineConfig) -> Self {
        Self(Arc::new(Server {
            options: config.options,
            timer: Timer::new(),
            refusals: Mutex::default(),
            late: counter!("carrick_deadline_late_total"),
            spared: counter!("carrick_deadline_spared_total"),
            expired: counter!("carrick_deadline_server_expired_total"),
            junk: counter!("carrick_deadline_junk_total"),
            skewed: counter!("carrick_deadline_skewed_total"),
        }))
    }

    /// Deadlines that are armed: those of requests that wait.
    pub fn armed(&self) -> usize {
        self.0.timer.armed()
    }
}

impl<S> Layer<S> for ServerDeadlineLayer {
    type Service = ServerDeadline<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ServerDeadline { inner, server: Arc::clone(&self.0) }
    }
}

/// A handler whose callers' deadlines are kept; see [`ServerDeadlineLayer`].
#[derive(Clone, Debug)]
pub struct ServerDeadline<S> {
    inner: S,
    server: Arc<Server>,
}

/// Until when a request may go on.
#[derive(Clone, Copy, Debug)]
struct Ends {
    /// Its answer, unless that is a stream.
    whole: Instant,
    /// Its answer if it is one.
    stream: Instant,
}

impl Server {
    /// Reads the deadlines of a request; `None` if it is refused.
    fn admit(&self, headers: &HeaderMap, now: Instant) -> Option<Ends> {
        let DeadlineOptions { max, min_useful, skew, max_refused, stream, refuse, .. } =
            self.options;
        let limits = Limits { max, min_useful, skew };
        let inbound = Deadline::from_headers(headers, now, SystemClock.wall(), &limits);
        match inbound.said {
            Said::Junk => self.junk.increment(1),
            Said::Skewed => self.skewed.increment(1),
            Said::Nothing | Said::Deadline => {}
        }
        let is_late = !inbound.deadline.is_useful(now, &limits);
        let mut refusals = self.refusals.lock();
        refusals.count(now);
        let is_refused = is_late && refuse.enforces() && refusals.refuse(max_refused);
        drop(refusals);
        if is_late {
            self.late.increment(1);
            if is_refused {
                return None;
            }
            self.spared.increment(1);
        }
        let whole = inbound.deadline.instant();
        let lifetime = stream.lifetime;
        let stream = match inbound.said {
            Said::Deadline if whole < now + max => whole,
            // It was cut to the maximum of answers that are no streams.
            Said::Deadline => {
                let limits = Limits { max: lifetime, ..limits };
                let wall = SystemClock.wall();
                Deadline::from_headers(headers, now, wall, &limits).deadline.instant()
            }
            _ => now + lifetime,
        };
        Some(Ends { whole, stream: stream.min(now + lifetime) })
    }

    /// What the body of an answer is held to.
    fn limit<R>(&self, answer: &Response<R>, ends: Ends, is_grpc: bool, counts: bool) -> Limit {
        let DeadlineOptions { stream, mode, .. } = &self.options;
        let span = if is_stream(answer) {
            Span::stream(Instant::now(), stream, ends.stream)
        } else {
            Span::Whole(ends.whole)
        };
        Limit {
            bound: Bound::new(span, self.timer.clone()),
            expired: if counts { self.expired.clone() } else { Counter::noop() },
            enforces: mode.enforces(),
            in_trailers: is_grpc,
        }
    }
}

/// The context of a request.
fn context(headers: &HeaderMap, deadline: Deadline) -> Context {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let trace = text("traceparent").and_then(|text| text.parse::<TraceContext>().ok());
    let state = text("tracestate").filter(|_| trace.is_some());
    // The span that is recorded of this request, if one is: what is sent on continues it.
    let trace = match (recorded(), trace) {
        (Some(recorded), _) => recorded,
        (None, Some(trace)) => trace.child(),
        (None, None) => TraceContext::new(),
    };
    let trace = state.into_iter().fold(trace, |trace, state| trace.with_state(state));
    let mut context = Context::new(deadline, trace);
    if let Some(key) = text(IDEMPOTENCY_KEY.as_str()).filter(|key| !key.is_empty()) {
        context = context.with_idempotency_key(key);
    }
    if let Some(attempt) = text(ATTEMPT.as_str()).and_then(|text| text.parse::<u32>().ok()) {
        context = context.with_attempt(attempt.max(1));
    }
    context
}

/// Whether an answer is a stream.
pub(crate) fn is_stream<R>(answer: &Response<R>) -> bool {
    let by_content = || {
        let content = answer.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        content.is_some_and(|content| content.starts_with(b"text/event-stream"))
    };
    answer.extensions().get::<Streaming>().is_some() || by_content()
}

impl<S, B, R> Service<Request<B>> for ServerDeadline<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Body<Data = Bytes>,
{
    type Response = Response<DeadlineBody<R>>;
    type Error = S::Error;
    type Future = ServerDeadlineFuture<S, Request<B>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let now = Instant::now();
        let is_grpc = is_grpc(request.headers());
        let Some(ends) = self.server.admit(request.headers(), now) else {
            return ServerDeadlineFuture { state: State::Refused { is_grpc } };
        };
        let context = context(request.headers(), Deadline::at(ends.whole));
        // It is called within the scope, and not here: what it does at once belongs to the request too.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        let handler = context.scope(Handler::Ready { service: ready, request: Some(request) });
        let server = Arc::clone(&self.server);
        let watch = Some(Watch::new(server.timer.clone(), ends.whole));
        ServerDeadlineFuture { state: State::Runs { handler, ends, watch, server, is_grpc } }
    }
}

pin_project! {
    /// A handler, and the request for it until it is called.
    #[project = Handled]
    enum Handler<S, R, F> {
        Ready { service: S, request: Option<R> },
        Runs { #[pin] future: F },
    }
}

impl<S: Service<R>, R> Future for Handler<S, R, S::Future> {
    type Output = Result<S::Response, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        if let Handled::Ready { service, request } = self.as_mut().project() {
            let future = service.call(request.take().expect("there until it is called"));
            self.set(Self::Runs { future });
        }
        match self.project() {
            Handled::Runs { future } => future.poll(cx),
            Handled::Ready { .. } => unreachable!("it has been called"),
        }
    }
}

pin_project! {
    /// A request under its caller's deadline. Dropping it, as the server does when the client hangs up,
    /// ends the handler.
    #[must_use = "a handler runs when it is polled"]
    pub struct ServerDeadlineFuture<S: Service<R>, R> {
        #[pin]
        state: State<S, R, S::Future>,
    }
}

pin_project! {
    #[project = Projected]
    enum State<S, R, F> {
        Runs {
            #[pin]
            handler: Scoped<Handler<S, R, F>>,
            ends: Ends,
            // None: it has expired, and that is only counted.
            watch: Option<Watch>,
            server: Arc<Server>,
            is_grpc: bool,
        },
        Refused { is_grpc: bool },
        Over,
    }
}

impl<S, B, R> Future for ServerDeadlineFuture<S, Request<B>>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    type Output = Result<Response<DeadlineBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        let result = match state.as_mut().project() {
            Projected::Over => panic!("polled after it was over"),
            Projected::Refused { is_grpc } => {
                Ok(expired(*is_grpc, "too little time is left to begin"))
            }
            Projected::Runs { handler, ends, watch, server, is_grpc } => match handler.poll(cx) {
                Poll::Ready(result) => result.map(|answer| {
                    let limit = server.limit(&answer, *ends, *is_grpc, watch.is_some());
                    answer.map(|body| DeadlineBody::new(body, limit))
                }),
                Poll::Pending => {
                    let Some(waits) = watch else { return Poll::Pending };
                    ready!(waits.poll(ends.whole, cx));
                    server.expired.increment(1);
                    if !server.options.mode.enforces() {
                        *watch = None;
                        return Poll::Pending;
                    }
                    Ok(expired(*is_grpc, "the deadline passed"))
                }
            },
        };
        // The handler ends here, before anybody is answered.
        state.set(State::Over);
        Poll::Ready(result)
    }
}

impl<S: Service<R>, R> fmt::Debug for ServerDeadlineFuture<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_over = matches!(self.state, State::Over);
        f.debug_struct("ServerDeadlineFuture").field("is_over", &is_over).finish_non_exhaustive()
    }
}

/// The answer of a request whose time is over.
fn expired<R>(is_grpc: bool, why: &str) -> Response<DeadlineBody<R>> {
    early::answer(is_grpc, StatusCode::GATEWAY_TIMEOUT, early::LATE, why, None)
        .map(DeadlineBody::own)
}
