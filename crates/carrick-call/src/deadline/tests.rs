//! Both sides, in paused time.

use std::{
    convert::Infallible,
    future::{pending, ready},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context as TaskContext, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{context::Context, deadline::Deadline, problem::PROBLEM, trace::TraceContext};
use futures_util::{Stream, StreamExt, future::BoxFuture, stream};
use http::{HeaderValue, Request, Response, header::CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceExt, service_fn};
use tower_layer::Layer;

use super::*;
use crate::{CallError, Mode, Policy};

type Piece = Result<Frame<Bytes>, std::io::Error>;

const MS: Duration = Duration::from_millis(1);

fn enforced() -> ServerDeadlineLayer {
    let options = DeadlineOptions { refuse: Mode::Enforce, ..DeadlineOptions::default() };
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
        sleep(Duration::from_secs(3600)).await;
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
        let answer = service.clone().oneshot(request("x-request-timeout-ms", left)).await.unwrap();
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
        let never = stream::pending::<Piece>();
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
                sleep(Duration::from_secs(10)).await;
                let left = Context::current().expect("given").deadline().remaining(Instant::now());
                done.expect("once").send(left).ok();
            }));
            pending::<Result<Response<Full<Bytes>>, ()>>().await
        }
    }));
    let answer = service.oneshot(request("x-request-timeout-ms", "100")).await.unwrap();
    assert_eq!(answer.status(), 504);
    assert_eq!(told.await.unwrap().as_secs(), 50);
}

/// Gives a piece after each of these spans, and ends.
fn pieces(spans: Vec<Duration>) -> impl Stream<Item = Piece> {
    stream::iter(spans).then(|span| async move {
        sleep(span).await;
        Ok(Frame::data(Bytes::from_static(b"piece")))
    })
}

/// How a stream of these pieces ends, and when.
async fn streamed(
    options: DeadlineOptions,
    request: Request<()>,
    spans: Vec<Duration>,
) -> (Result<usize, ()>, Duration) {
    let layer = ServerDeadlineLayer::new(DeadlineConfig::try_from(options).unwrap());
    let service = layer.layer(service_fn(move |_: Request<()>| {
        let mut answer = Response::new(StreamBody::new(pieces(spans.clone()).boxed()));
        answer.extensions_mut().insert(Streaming);
        ready(Ok::<_, ()>(answer))
    }));
    let start = Instant::now();
    let body = service.oneshot(request).await.unwrap().into_body();
    let result = body.collect().await.map(|all| all.to_bytes().len()).map_err(drop);
    assert_eq!(layer.armed(), 0);
    (result, start.elapsed())
}

#[track_caller]
fn about(found: Duration, expected: Duration) {
    let late = 2 * TICK + MS;
    assert!(expected <= found && found <= expected + late, "{found:?} and not {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn opencrabs_1678_a_stream_that_is_well_outlives_every_total_timeout() {
    let options = DeadlineOptions::default();
    let spans = [vec![Duration::from_secs(5)], vec![Duration::from_secs(50); 60]].concat();
    let (result, took) = streamed(options, Request::new(()), spans).await;
    assert_eq!(result, Ok(305));
    assert!(took >= Duration::from_secs(3000), "2 s is the maximum of other answers");
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_it_is_silent_too_old_or_late_with_its_first_byte() {
    let second = Duration::from_secs(1);
    let options = DeadlineOptions {
        stream: StreamOptions { first_byte: 3 * second, idle: 5 * second, lifetime: 20 * second },
        ..DeadlineOptions::default()
    };
    let (result, took) = streamed(options.clone(), Request::new(()), vec![4 * second]).await;
    assert_eq!(result, Err(()));
    about(took, 3 * second);
    let silent = vec![second, 4 * second, 6 * second];
    let (result, took) = streamed(options.clone(), Request::new(()), silent).await;
    assert_eq!(result, Err(()));
    about(took, 10 * second);
    let endless = vec![2 * second; 100];
    let (result, took) = streamed(options.clone(), Request::new(()), endless).await;
    assert_eq!(result, Err(()));
    about(took, 20 * second);
    // What never lets go of its reader meets its end, too.
    let (result, _) =
        streamed(options, request("x-request-timeout-ms", "0"), vec![Duration::ZERO; 9]).await;
    assert_eq!(result, Err(()));
}

#[tokio::test(start_paused = true)]
async fn a_stream_keeps_what_its_caller_said_beyond_our_maximum_too() {
    let second = Duration::from_secs(1);
    let spans = vec![second; 100];
    let said = request("x-request-timeout-ms", "30000");
    let (result, took) = streamed(DeadlineOptions::default(), said, spans.clone()).await;
    assert_eq!(result, Err(()));
    about(took, 30 * second);
    let junk = request("x-request-timeout-ms", "soon");
    assert_eq!(streamed(DeadlineOptions::default(), junk, spans).await.0, Ok(500));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_always_has_more_is_ended_too() {
    let service = enforced().layer(service_fn(|_: Request<()>| async {
        // Never pending, so that no timer has a say; it ends some time lest a failure take for ever.
        let more = || Piece::Ok(Frame::data(Bytes::from_static(b"more")));
        let endless = stream::iter(std::iter::repeat_with(more).take(10_000));
        // As of a caller whose time is over, but who is spared.
        Ok::<_, ()>(Response::new(StreamBody::new(endless.boxed())))
    }));
    let answer = service.oneshot(request("x-request-timeout-ms", "0")).await.unwrap();
    let error = answer.into_body().collect().await.unwrap_err();
    assert!(matches!(error, DeadlineBodyError::Expired));
}

#[tokio::test(start_paused = true)]
async fn in_observe_mode_nothing_is_ended() {
    let options = DeadlineOptions { mode: Mode::Observe, ..DeadlineOptions::default() };
    let layer = ServerDeadlineLayer::new(DeadlineConfig::try_from(options).unwrap());
    let service = layer.layer(service_fn(|_: Request<()>| async {
        sleep(Duration::from_secs(10)).await;
        let body = StreamBody::new(pieces(vec![Duration::from_secs(10); 3]).boxed());
        Ok::<_, ()>(Response::new(body))
    }));
    let answer = service.oneshot(request("x-request-timeout-ms", "10")).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 15);
    assert_eq!(layer.armed(), 0);

    let options = ClientDeadlineOptions { mode: Mode::Observe, ..Default::default() };
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::try_from(options).unwrap());
    let service = layer.layer(service_fn(|request: Request<()>| async move {
        assert!(request.headers().contains_key("x-request-timeout-ms"));
        sleep(Duration::from_secs(10)).await;
        let body = StreamBody::new(pieces(vec![Duration::from_secs(10); 3]).boxed());
        Ok::<_, ()>(Response::new(body))
    }));
    let answer = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 15);
    assert_eq!(layer.armed(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_service_does_when_it_is_called_is_in_scope_as_well() {
    let service = enforced().layer(service_fn(|_: Request<()>| {
        let left = Context::current().expect("in scope").deadline().remaining(Instant::now());
        ready(Ok::<_, ()>(Response::new(Full::<Bytes>::from(left.as_millis().to_string()))))
    }));
    let answer = service.oneshot(request("x-request-timeout-ms", "700")).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "700");
}

#[tokio::test(start_paused = true)]
async fn boulder_7686_a_skewed_clock_is_not_an_expiry() {
    let service = enforced().layer(service_fn(|_: Request<()>| async {
        let context = Context::current().expect("in scope");
        let left = context.deadline().remaining(Instant::now()).as_millis();
        Ok::<_, ()>(Response::new(Full::<Bytes>::from(left.to_string())))
    }));
    let long_ago = request("x-request-deadline-unix-ms", "1000");
    let answer = service.oneshot(long_ago).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "2000");
}

/// What a dependency behind a client's layer is sent.
async fn sent(
    request: Request<()>,
    context: Option<Context>,
) -> Result<http::HeaderMap, CallError<()>> {
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let echo = service_fn(|request: Request<()>| {
        let mut answer = Response::new(Full::<Bytes>::default());
        *answer.headers_mut() = request.headers().clone();
        ready(Ok::<_, ()>(answer))
    });
    let call = layer.layer(echo).oneshot(request);
    let answer = match context {
        Some(context) => context.scope(call).await,
        None => call.await,
    };
    answer.map(|answer| answer.headers().clone())
}

fn in_ms(millis: u32) -> Deadline {
    Deadline::at(Instant::now() + millis * MS)
}

#[tokio::test(start_paused = true)]
async fn the_deadline_that_is_sent_is_the_explicit_one_then_the_contexts_and_ours_if_sooner() {
    let left =
        |headers: http::HeaderMap| headers["x-request-timeout-ms"].to_str().unwrap().to_owned();
    let context = |millis| Some(Context::new(in_ms(millis), TraceContext::new()));
    let explicit = |millis| {
        let mut request = Request::new(());
        request.extensions_mut().insert(in_ms(millis));
        request
    };
    assert_eq!(left(sent(Request::new(()), None).await.unwrap()), "2000");
    assert_eq!(left(sent(Request::new(()), context(700)).await.unwrap()), "700");
    assert_eq!(left(sent(explicit(900), context(700)).await.unwrap()), "900");
    assert_eq!(left(sent(explicit(60_000), context(700)).await.unwrap()), "2000");
    let error = sent(explicit(49), context(700)).await.unwrap_err();
    assert!(matches!(&error, CallError::Refused(refusal) if refusal.policy == Policy::Deadline));
    assert!(error.was_never_sent());
    assert!(sent(explicit(50), None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn elixir_grpc_574_what_remains_is_never_sent_shorter_than_it_is() {
    let grpc = Request::builder().header(CONTENT_TYPE, "application/grpc+proto");
    let mut grpc = grpc.body(()).unwrap();
    grpc.extensions_mut().insert(in_ms(1500));
    let headers = sent(grpc, None).await.unwrap();
    assert_eq!(headers["grpc-timeout"], "1500000u");
    assert!(!headers.contains_key("x-request-timeout-ms"), "one form for one protocol");
    // A timeout of somebody else's, which would be read before ours, does not get through.
    let headers = sent(request("grpc-timeout", "9H"), None).await.unwrap();
    assert!(!headers.contains_key("grpc-timeout"));
}

#[tokio::test(start_paused = true)]
async fn grpc_gateway_7382_a_timeout_beyond_all_bounds_is_our_maximum() {
    let service = enforced().layer(service_fn(|_: Request<()>| async {
        pending::<Result<Response<Full<Bytes>>, ()>>().await
    }));
    let grpc = Request::builder().header(CONTENT_TYPE, "application/grpc");
    let start = Instant::now();
    let answer = service.oneshot(grpc.header("grpc-timeout", "99999999H").body(()).unwrap()).await;
    assert_eq!(answer.unwrap().headers()["grpc-status"], "4");
    about(start.elapsed(), Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn the_contexts_trace_is_sent_unless_the_request_has_its_own_and_its_key_is_not() {
    let trace = TraceContext::new().with_state("vendor=1");
    let context = Context::new(in_ms(700), trace.clone()).with_idempotency_key("k");
    let headers = sent(Request::new(()), Some(context.clone())).await.unwrap();
    let said: TraceContext = headers["traceparent"].to_str().unwrap().parse().unwrap();
    assert_eq!(said.trace_id(), trace.trace_id());
    assert_ne!(said.span_id(), trace.span_id(), "a span of its own");
    assert_eq!(headers["tracestate"], "vendor=1");
    assert!(!headers.contains_key("idempotency-key"), "two calls of a handler are two effects");
    let own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let request = Request::builder().header("traceparent", own).header("idempotency-key", "mine");
    let headers = sent(request.body(()).unwrap(), Some(context)).await.unwrap();
    assert_eq!(
        (headers["traceparent"].as_bytes(), headers["idempotency-key"].as_bytes()),
        (own.as_bytes(), &b"mine"[..],)
    );
    assert!(!headers.contains_key("tracestate"), "no state of another trace");
}

/// Says when it is dropped.
struct Tells(Arc<AtomicBool>);

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_takes_too_long_is_dropped_before_its_caller_hears_of_it() {
    let dropped = Arc::<AtomicBool>::default();
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let service = layer.layer(service_fn(|_: Request<()>| {
        let tells = Tells(Arc::clone(&dropped));
        async move {
            let _tells = tells;
            pending::<Result<Response<Full<Bytes>>, ()>>().await
        }
    }));
    let start = Instant::now();
    let mut call = pin!(service.oneshot(Request::new(())));
    let error = call.as_mut().await.unwrap_err();
    assert!(matches!(error, CallError::Expired) && !error.was_never_sent());
    assert!(dropped.load(Ordering::SeqCst), "though the future is still there");
    about(start.elapsed(), Duration::from_secs(2));
    assert_eq!(layer.armed(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_clients_deadline_covers_body_and_trailers() {
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let service = layer.layer(service_fn(|_: Request<()>| async {
        sleep(Duration::from_secs(1)).await;
        let late = pieces(vec![500 * MS, Duration::from_secs(60)]);
        Ok::<_, ()>(Response::new(StreamBody::new(late.boxed())))
    }));
    let start = Instant::now();
    let mut body = service.oneshot(Request::new(())).await.unwrap().into_body();
    assert!(body.frame().await.unwrap().is_ok());
    assert!(matches!(body.frame().await, Some(Err(DeadlineBodyError::Expired))));
    about(start.elapsed(), Duration::from_secs(2));
    assert!(body.frame().await.is_none(), "it is over");
    assert_eq!(layer.armed(), 0);
}

/// Must be asked for readiness before each call, by the clone that is called.
struct Strict {
    is_ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { is_ready: false, calls: Arc::clone(&self.calls) }
    }
}

type Answer = Response<Full<Bytes>>;

impl Service<Request<()>> for Strict {
    type Response = Answer;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Answer, Infallible>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without having been ready");
        self.calls.fetch_add(1, Ordering::SeqCst);
        Box::pin(async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            Ok(Response::new(Full::default()))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn only_who_was_ready_is_called_and_a_refusal_spends_no_readiness() {
    let strict = Strict { is_ready: false, calls: Arc::default() };
    let mut server = enforced().layer(strict.clone());
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let mut client = layer.layer(strict.clone());
    for _ in 0..5 {
        server.ready().await.unwrap().call(Request::new(())).await.unwrap();
        client.ready().await.unwrap().call(Request::new(())).await.unwrap();
    }
    assert_eq!(strict.calls.load(Ordering::SeqCst), 10);
    let ready = client.ready().await.unwrap();
    let mut late = Request::new(());
    late.extensions_mut().insert(in_ms(0));
    assert!(ready.call(late).await.is_err());
    assert!(ready.call(Request::new(())).await.is_ok(), "it is ready still");
}

#[tokio::test(start_paused = true)]
async fn dropped_at_every_poll_it_leaves_nothing_armed() {
    let strict = Strict { is_ready: false, calls: Arc::default() };
    let client = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let server = enforced();
    for polls in 0..6 {
        let call =
            server.layer(client.layer(strict.clone()).map_err(drop).map_response(|answer| {
                answer.map(|body| body.map_err(|_| std::io::Error::other("broken")))
            }));
        let mut call = Box::pin(call.oneshot(Request::new(())));
        let mut cx = TaskContext::from_waker(Waker::noop());
        let mut armed = 0;
        for _ in 0..polls {
            if Pin::as_mut(&mut call).poll(&mut cx).is_ready() {
                break;
            }
            armed = armed.max(client.armed() + server.armed());
        }
        assert_eq!(armed, if polls == 0 { 0 } else { 2 }, "both wait");
        drop(call);
        assert_eq!((client.armed(), server.armed()), (0, 0), "after {polls} polls");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_ready_at_once_arms_nothing() {
    let layer = DeadlineLayer::new("shop", ClientDeadlineConfig::default());
    let service = layer.layer(service_fn(|_: Request<()>| {
        ready(Ok::<_, ()>(Response::new(Full::<Bytes>::from("body"))))
    }));
    let mut call = Box::pin(service.oneshot(Request::new(())));
    let mut cx = TaskContext::from_waker(Waker::noop());
    let Poll::Ready(Ok(answer)) = call.as_mut().poll(&mut cx) else { panic!("not at once") };
    let mut body = answer.into_body();
    assert!(body.frame().await.unwrap().is_ok());
    assert_eq!(layer.armed(), 0);
}
