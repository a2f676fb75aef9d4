//! Deadlines of a server: what callers ask for, kept.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    config::{Faults, InvalidConfig, duration},
    context::Context,
    deadline::{Deadline, Limits, Said},
    problem::{PROBLEM, Problem},
    trace::TraceContext,
};
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body::{Body, Frame, SizeHint};
use metrics::{Counter, counter};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use serde::Deserialize;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{Armed, Timer};
use crate::{Mode, retry::IDEMPOTENCY_KEY, stack::is_grpc};

/// How long refusals are counted against their cap.
const WINDOW: Duration = Duration::from_secs(10);

/// Settings as an operator writes them; become a [`DeadlineConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeadlineOptions {
    /// The longest that any request may take, 1 ms to 1 d. Default 2 s.
    #[serde(with = "duration")]
    pub max: Duration,
    /// With less left, work is not started, at most `max`. Default 50 ms.
    #[serde(with = "duration")]
    pub min_useful: Duration,
    /// An absolute deadline further in the past than this is a wrong clock. Default 5 s.
    #[serde(with = "duration")]
    pub skew: Duration,
    /// Share of requests that may be refused in 10 s, in [0, 1], so that one caller with a wrong
    /// setting cannot shut a service. Default 0.2.
    pub max_refused: f64,
    /// Whether requests with too little time are refused, or only counted. Default `observe`: look at
    /// the counter before you enforce it.
    pub mode: Mode,
}

impl Default for DeadlineOptions {
    fn default() -> Self {
        let Limits { max, min_useful, skew } = Limits::default();
        Self { max, min_useful, skew, max_refused: 0.2, mode: Mode::Observe }
    }
}

/// Settings that a server can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "DeadlineOptions")]
pub struct DeadlineConfig {
    options: DeadlineOptions,
}

impl TryFrom<DeadlineOptions> for DeadlineConfig {
    type Error = InvalidConfig;

    fn try_from(options: DeadlineOptions) -> Result<Self, InvalidConfig> {
        let DeadlineOptions { max, min_useful, skew: _, max_refused, mode: _ } = options;
        let mut faults = Faults::default();
        let text = duration::format;
        let span = Duration::from_millis(1)..=Duration::from_secs(86_400);
        faults.unless_value(span.contains(&max), "max", "1ms to 1d", text(max));
        let range = format!("at most max ({})", text(max));
        faults.unless_value(min_useful <= max, "min-useful", &range, text(min_useful));
        let share = (0.0..=1.0).contains(&max_refused);
        faults.unless_value(share, "max-refused", "in [0, 1]", max_refused);
        faults.into_result(Self { options })
    }
}

/// Keeps the deadlines that callers send: it puts a [`Context`] in scope for the handler, and ends
/// handler and body when time is over.
///
/// For axum, tonic, or any service of HTTP requests. A request says its deadline in one of the
/// headers that [`Deadline::from_headers`] reads; it is cut to our own maximum. With too little left
/// the handler is not started. Expiry is 504 with a problem, or gRPC's `DEADLINE_EXCEEDED`. When the
/// client hangs up the server drops the call, and with it everything that the handler awaits; work
/// that must go on belongs in a task with a [`Context::detach`]ed context.
///
/// A layer value is one server: its services share the timer and the count of refusals.
///
/// ```
/// # use carrick_call::deadline::{DeadlineConfig, ServerDeadlineLayer};
/// # use tower_layer::Layer;
/// # let handler = ();
/// let service = ServerDeadlineLayer::new(DeadlineConfig::default()).layer(handler);
/// ```
#[derive(Clone, Debug)]
pub struct ServerDeadlineLayer(Arc<Server>);

#[derive(Debug)]
struct Server {
    limits: Limits,
    max_refused: f64,
    mode: Mode,
    timer: Timer,
    refusals: Mutex<Refusals>,
    metrics: Metrics,
}

struct Metrics {
    late: Counter,
    spared: Counter,
    expired: Counter,
    junk: Counter,
    skewed: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Requests and refusals of the present stretch of time.
#[derive(Debug, Default)]
struct Refusals {
    since: Option<Instant>,
    requests: u32,
    refused: u32,
}

impl Refusals {
    fn count(&mut self, now: Instant) {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            *self = Self { since: Some(now), requests: 0, refused: 0 };
        }
        self.requests += 1;
    }

    /// Whether one more may be refused.
    fn refuse(&mut self, max: f64) -> bool {
        let may = f64::from(self.refused + 1) <= max * f64::from(self.requests);
        self.refused += u32::from(may);
        may
    }
}

impl ServerDeadlineLayer {
    /// A layer for one server.
    pub fn new(config: DeadlineConfig) -> Self {
        let DeadlineOptions { max, min_useful, skew, max_refused, mode } = config.options;
        Self(Arc::new(Server {
            limits: Limits { max, min_useful, skew },
            max_refused,
            mode,
            timer: Timer::new(),
            refusals: Mutex::default(),
            metrics: Metrics {
                late: counter!("carrick_deadline_late_total"),
                spared: counter!("carrick_deadline_spared_total"),
                expired: counter!("carrick_deadline_server_expired_total"),
                junk: counter!("carrick_deadline_junk_total"),
                skewed: counter!("carrick_deadline_skewed_total"),
            },
        }))
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

impl Server {
    /// The context of a request; `None` if it is refused.
    fn context(&self, headers: &HeaderMap, now: Instant) -> Option<Context> {
        let inbound = Deadline::from_headers(headers, now, SystemClock.wall(), &self.limits);
        match inbound.said {
            Said::Junk => self.metrics.junk.increment(1),
            Said::Skewed => self.metrics.skewed.increment(1),
            Said::Nothing | Said::Deadline => {}
        }
        let mut refusals = self.refusals.lock();
        refusals.count(now);
        if !inbound.deadline.is_useful(now, &self.limits) {
            self.metrics.late.increment(1);
            if self.mode.enforces() && refusals.refuse(self.max_refused) {
                return None;
            }
            self.metrics.spared.increment(1);
        }
        drop(refusals);
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let trace = text("traceparent").and_then(|text| text.parse::<TraceContext>().ok());
        let trace = match trace {
            Some(trace) => match text("tracestate") {
                Some(state) => trace.with_state(state).child(),
                None => trace.child(),
            },
            None => TraceContext::new(),
        };
        let mut context = Context::new(inbound.deadline, trace);
        let key = headers.get(&IDEMPOTENCY_KEY).and_then(|key| key.to_str().ok());
        if let Some(key) = key.filter(|key| !key.is_empty()) {
            context = context.with_idempotency_key(key);
        }
        if let Some(Ok(attempt)) = text("x-carrick-attempt").map(str::parse) {
            context = context.with_attempt(attempt);
        }
        Some(context)
    }
}

impl<S, B, R> Service<Request<B>> for ServerDeadline<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: Body<Data = Bytes>,
{
    type Response = Response<DeadlineBody<R>>;
    type Error = S::Error;
    type Future = ServerDeadlineFuture<Response<R>, S::Error>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let now = Instant::now();
        let is_grpc = is_grpc(request.headers());
        let server = Arc::clone(&self.server);
        match server.context(request.headers(), now) {
            None => {
                ServerDeadlineFuture { handler: None, deadline: now, armed: None, server, is_grpc }
            }
            Some(context) => {
                let deadline = context.deadline().instant();
                let handler = self.inner.call(request);
                let handler = Box::pin(context.scope(handler));
                ServerDeadlineFuture {
                    handler: Some(handler),
                    deadline,
                    armed: None,
                    server,
                    is_grpc,
                }
            }
        }
    }
}

/// A request under its caller's deadline.
#[must_use = "a handler runs when it is polled"]
pub struct ServerDeadlineFuture<T, E> {
    handler: Option<BoxFuture<'static, Result<T, E>>>,
    deadline: Instant,
    armed: Option<Armed>,
    server: Arc<Server>,
    is_grpc: bool,
}

impl<R, E> Future for ServerDeadlineFuture<Response<R>, E> {
    type Output = Result<Response<DeadlineBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Some(handler) = &mut this.handler else {
            return Poll::Ready(Ok(refused(this.is_grpc, "too little time is left to begin")));
        };
        if let Poll::Ready(result) = handler.as_mut().poll(cx) {
            this.armed = None;
            let (deadline, timer) = (this.deadline, this.server.timer.clone());
            return Poll::Ready(result.map(|answer| {
                answer.map(|body| DeadlineBody {
                    kind: Kind::Inner { body },
                    deadline: Some((deadline, timer)),
                    armed: None,
                    expired: this.server.metrics.expired.clone(),
                    is_grpc: this.is_grpc,
                })
            }));
        }
        ready!(this.server.timer.poll_at(this.deadline, &mut this.armed, cx.waker()));
        // The handler ends here, before anybody is answered.
        (this.handler, this.armed) = (None, None);
        this.server.metrics.expired.increment(1);
        Poll::Ready(Ok(refused(this.is_grpc, "the deadline passed")))
    }
}

impl<T, E> fmt::Debug for ServerDeadlineFuture<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerDeadlineFuture")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// The answer of a request whose time is over.
fn refused<R>(is_grpc: bool, why: &str) -> Response<DeadlineBody<R>> {
    let (content, body) = if is_grpc {
        ("application/grpc", Bytes::new())
    } else {
        let problem = Problem::new(StatusCode::GATEWAY_TIMEOUT, why);
        (PROBLEM, serde_json::to_vec(&problem).unwrap_or_default().into())
    };
    let body = DeadlineBody {
        kind: Kind::Whole { bytes: Some(body).filter(|body| !body.is_empty()) },
        deadline: None,
        armed: None,
        expired: Counter::noop(),
        is_grpc,
    };
    let mut answer = Response::new(body);
    if is_grpc {
        answer.headers_mut().insert("grpc-status", HeaderValue::from_static("4"));
    } else {
        *answer.status_mut() = StatusCode::GATEWAY_TIMEOUT;
    }
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
    answer
}

pin_project! {
    /// A body that ends with its deadline: with gRPC's trailers for it, or broken off.
    #[derive(Debug)]
    pub struct DeadlineBody<R> {
        #[pin]
        kind: Kind<R>,
        deadline: Option<(Instant, Timer)>,
        armed: Option<Armed>,
        expired: Counter,
        is_grpc: bool,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum Kind<R> {
        Inner { #[pin] body: R },
        Whole { bytes: Option<Bytes> },
        Over,
    }
}

/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeadlineBodyError<E> {
    /// The deadline passed while it was sent.
    #[error("the deadline passed before the end of the body")]
    Expired,
    /// The body itself failed.
    #[error("the body failed")]
    Inner(#[source] E),
}

impl<R: Body<Data = Bytes>> Body for DeadlineBody<R> {
    type Data = Bytes;
    type Error = DeadlineBodyError<R::Error>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let mut this = self.project();
        match this.kind.as_mut().project() {
            Projected::Whole { bytes } => Poll::Ready(bytes.take().map(|one| Ok(Frame::data(one)))),
            Projected::Over => Poll::Ready(None),
            Projected::Inner { body } => {
                if let Poll::Ready(frame) = body.poll_frame(cx) {
                    let frame = frame.map(|frame| frame.map_err(DeadlineBodyError::Inner));
                    return Poll::Ready(frame);
                }
                let Some((deadline, timer)) = this.deadline else { return Poll::Pending };
                ready!(timer.poll_at(*deadline, this.armed, cx.waker()));
                this.kind.set(Kind::Over);
                *this.armed = None;
                this.expired.increment(1);
                if !*this.is_grpc {
                    return Poll::Ready(Some(Err(DeadlineBodyError::Expired)));
                }
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("4"));
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Whole { bytes } => bytes.is_none(),
            Kind::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Whole { bytes } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Kind::Over => SizeHint::with_exact(0),
        }
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use http_body_util::{BodyExt, Full, StreamBody};
    use tower::{ServiceExt, service_fn};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn enforced() -> ServerDeadlineLayer {
        let options = DeadlineOptions { mode: Mode::Enforce, ..DeadlineOptions::default() };
        ServerDeadlineLayer::new(DeadlineConfig::try_from(options).unwrap())
    }

    fn request(header: &str, value: &str) -> Request<()> {
        Request::builder().header(header, value).body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_has_its_callers_context_in_scope() {
        let service = enforced().layer(service_fn(|_: Request<()>| async {
            let context = Context::current().expect("in scope");
            let left = context.deadline().remaining(Instant::now());
            let key = context.idempotency_key().unwrap_or_default().to_owned();
            let text = format!("{} {key} {}", left.as_millis(), context.trace().trace_id());
            Ok::<_, ()>(Response::new(Full::<Bytes>::from(text)))
        }));
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request = Request::builder()
            .header("x-request-timeout-ms", "700")
            .header("idempotency-key", "k")
            .header("traceparent", trace)
            .body(())
            .unwrap();
        let answer = service.oneshot(request).await.unwrap();
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, "700 k 0af7651916cd43dd8448eb211c80319c");
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_takes_too_long_is_ended_and_the_answer_is_504() {
        let service = enforced().layer(service_fn(|_: Request<()>| async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            Ok::<_, ()>(Response::new(Full::<Bytes>::default()))
        }));
        let start = Instant::now();
        let answer = service.clone().oneshot(request("x-request-timeout-ms", "300")).await.unwrap();
        assert!(start.elapsed() >= 300 * MS && start.elapsed() < 310 * MS);
        assert_eq!(answer.status(), 504);
        assert_eq!(answer.headers()[CONTENT_TYPE], PROBLEM);
        let grpc = Request::builder().header(CONTENT_TYPE, "application/grpc+proto");
        let grpc = grpc.header("grpc-timeout", "100m").body(()).unwrap();
        let answer = service.oneshot(grpc).await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["grpc-status"]),
            (200, &HeaderValue::from_static("4"))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn with_too_little_left_it_is_not_started_but_for_a_share_of_requests_only() {
        let service = enforced().layer(service_fn(|_: Request<()>| async {
            Ok::<_, ()>(Response::new(Full::<Bytes>::default()))
        }));
        let (mut refused, mut served) = (0, 0);
        for n in 0..200 {
            // One caller of two sends no time at all.
            let left = if n % 2 == 0 { "10" } else { "1000" };
            let answer =
                service.clone().oneshot(request("x-request-timeout-ms", left)).await.unwrap();
            if answer.status() == 504 { refused += 1 } else { served += 1 }
        }
        assert!((39..=40).contains(&refused) && refused + served == 200, "a fifth: {refused}");
        let observed = ServerDeadlineLayer::new(DeadlineConfig::default()).layer(service_fn(
            |_: Request<()>| async { Ok::<_, ()>(Response::new(Full::<Bytes>::default())) },
        ));
        let answer = observed.oneshot(request("x-request-timeout-ms", "10")).await.unwrap();
        assert_eq!(answer.status(), 200, "by default it is only counted");
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_covers_the_body() {
        let service = enforced().layer(service_fn(|_: Request<()>| async {
            let never = futures_util::stream::pending::<Result<Frame<Bytes>, std::io::Error>>();
            Ok::<_, ()>(Response::new(StreamBody::new(never)))
        }));
        let answer = service.clone().oneshot(request("x-request-timeout-ms", "100")).await.unwrap();
        let error = answer.into_body().collect().await.unwrap_err();
        assert!(matches!(error, DeadlineBodyError::Expired));
        let grpc = Request::builder().header(CONTENT_TYPE, "application/grpc");
        let answer = service.oneshot(grpc.body(()).unwrap()).await.unwrap();
        let trailers = answer.into_body().collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(trailers["grpc-status"], "4");
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_java_1205_11690_detached_work_outlives_its_caller() {
        let (done, told) = tokio::sync::oneshot::channel();
        let done = Arc::new(Mutex::new(Some(done)));
        let service = enforced().layer(service_fn(move |_: Request<()>| {
            let done = done.lock().take();
            async move {
                let context = Context::current().expect("in scope");
                let detached = context.detach(Instant::now(), Duration::from_secs(60));
                tokio::spawn(detached.scope(async move {
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    let left =
                        Context::current().expect("given").deadline().remaining(Instant::now());
                    done.expect("once").send(left).ok();
                }));
                std::future::pending::<Result<Response<Full<Bytes>>, ()>>().await
            }
        }));
        let answer = service.oneshot(request("x-request-timeout-ms", "100")).await.unwrap();
        assert_eq!(answer.status(), 504);
        assert_eq!(told.await.unwrap().as_secs(), 50);
    }

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = DeadlineOptions {
            max: Duration::ZERO,
            min_useful: Duration::from_secs(1),
            max_refused: f64::NAN,
            ..DeadlineOptions::default()
        };
        assert_eq!(DeadlineConfig::try_from(options).unwrap_err().faults().len(), 3);
    }
}
