//! The retry layer over services that do what a test says, on a paused clock.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use carrick_call::{
    CallError, Policy,
    breaker::{Breaker, BreakerConfig, Forced},
    budget::{Budget, BudgetConfig, BudgetKind, BudgetOptions},
    classify::{Guarded, Http},
    explain::Explain,
    gate::GateLayer,
    retry::{ATTEMPT, IDEMPOTENCY_KEY, RETRIED, ReplayBody, RetryConfig, RetryLayer, RetryOptions},
};
use carrick_core::{context::Context as Scope, deadline::Deadline, trace::TraceContext};
use futures_util::{poll, stream};
use http::{HeaderMap, Method, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt};

const MS: Duration = Duration::from_millis(1);

/// What the dependency does with an attempt.
#[derive(Clone, Copy, Debug)]
enum Does {
    Answers(u16),
    Says(u16, &'static str, &'static str),
    Fails,
    Hangs,
    Takes(Duration),
}

/// An attempt as the dependency saw it.
#[derive(Clone, Debug)]
struct Seen {
    at: Instant,
    attempt: String,
    digest: Vec<u8>,
    trailers: Option<HeaderMap>,
}

/// A dependency that goes through its script, and then repeats its last line.
#[derive(Debug)]
struct Dependency {
    script: Arc<[Does]>,
    seen: Arc<Mutex<Vec<Seen>>>,
    calls: Arc<AtomicUsize>,
    under_way: Arc<AtomicUsize>,
    reads_body: bool,
    is_ready: bool,
}

/// Not ready because its original was.
impl Clone for Dependency {
    fn clone(&self) -> Self {
        Self {
            script: Arc::clone(&self.script),
            seen: Arc::clone(&self.seen),
            calls: Arc::clone(&self.calls),
            under_way: Arc::clone(&self.under_way),
            reads_body: self.reads_body,
            is_ready: false,
        }
    }
}

struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Dependency {
    fn new(script: &[Does]) -> Self {
        Self {
            script: script.into(),
            seen: Arc::default(),
            calls: Arc::default(),
            under_way: Arc::default(),
            reads_body: true,
            is_ready: false,
        }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn under_way(&self) -> usize {
        self.under_way.load(Ordering::SeqCst)
    }
}

impl<B> Service<Request<ReplayBody<B>>> for Dependency
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<()>;
    type Error = &'static str;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, &'static str>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody<B>>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called before it was ready");
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let does = self.script[call.min(self.script.len() - 1)];
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let under_way = UnderWay(Arc::clone(&self.under_way));
        let (seen, reads_body) = (Arc::clone(&self.seen), self.reads_body);
        Box::pin(async move {
            let _under_way = under_way;
            let at = Instant::now();
            let attempt = request.headers()[ATTEMPT].to_str().unwrap().to_owned();
            let body = request.into_body();
            let (bytes, trailers) = if reads_body {
                let body = body.collect().await.map_err(|_| "body")?;
                let trailers = body.trailers().cloned();
                (body.to_bytes(), trailers)
            } else {
                (Bytes::new(), None)
            };
            let digest = Sha256::digest(&bytes).to_vec();
            seen.lock().unwrap().push(Seen { at, attempt, digest, trailers });
            let answer = |status| Response::builder().status(status);
            match does {
                Does::Answers(status) => Ok(answer(status).body(()).unwrap()),
                Does::Says(status, name, value) => {
                    Ok(answer(status).header(name, value).body(()).unwrap())
                }
                Does::Fails => Err("failed"),
                Does::Hangs => std::future::pending().await,
                Does::Takes(span) => {
                    sleep(span).await;
                    Ok(answer(200).body(()).unwrap())
                }
            }
        })
    }
}

fn config(change: impl FnOnce(&mut RetryOptions)) -> RetryConfig {
    let mut options = RetryOptions { backoff: MS, backoff_cap: MS, ..RetryOptions::default() };
    change(&mut options);
    RetryConfig::try_from(options).unwrap()
}

fn budget(options: BudgetOptions) -> Budget {
    Budget::new("test", BudgetConfig::try_from(options).unwrap())
}

fn retry() -> RetryLayer {
    RetryLayer::new("test", config(|_| {}), budget(BudgetOptions::default()))
}

fn get() -> Request<Full<Bytes>> {
    Request::get("/").body(Full::default()).unwrap()
}

type Answer<E> = Result<Response<()>, CallError<E>>;

async fn call(layer: &RetryLayer, dependency: &Dependency) -> Answer<&'static str> {
    layer.layer(dependency.clone()).oneshot(get()).await
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_tried_again_and_everybody_is_told_so() {
    for first in [Does::Fails, Does::Answers(503), Does::Answers(502)] {
        let dependency = Dependency::new(&[first, Does::Answers(200)]);
        let answer = call(&retry(), &dependency).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()[RETRIED], "1", "so that nobody above tries again as well");
        let attempts: Vec<_> = dependency.seen().into_iter().map(|seen| seen.attempt).collect();
        assert_eq!(attempts, ["1", "2"]);
    }
    let dependency = Dependency::new(&[Does::Answers(200)]);
    assert!(!call(&retry(), &dependency).await.unwrap().headers().contains_key(RETRIED));
}

#[tokio::test(start_paused = true)]
async fn what_would_end_alike_is_not_tried_again() {
    for status in [200, 304, 400, 404, 409, 501, 504] {
        let dependency = Dependency::new(&[Does::Answers(status)]);
        assert_eq!(call(&retry(), &dependency).await.unwrap().status(), status);
        assert_eq!(dependency.calls(), 1, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_failure_is_handed_on_as_it_came() {
    let dependency = Dependency::new(&[Does::Says(503, "x-reason", "full")]);
    let answer = call(&retry(), &dependency).await.unwrap();
    assert_eq!((answer.status().as_u16(), dependency.calls()), (503, 3));
    assert_eq!(
        (&answer.headers()["x-reason"], &answer.headers()[RETRIED]),
        (&"full".parse().unwrap(), &"2".parse().unwrap())
    );
    let dependency = Dependency::new(&[Does::Fails]);
    assert!(matches!(call(&retry(), &dependency).await, Err(CallError::Inner("failed"))));
}

#[tokio::test(start_paused = true)]
async fn istio_13851_50506_17145_a_payment_is_sent_twice_only_with_a_key() {
    let send = async |method: Method, key: Option<&str>| {
        let dependency = Dependency::new(&[Does::Answers(503)]);
        let mut request = Request::builder().method(method);
        if let Some(key) = key {
            request = request.header(IDEMPOTENCY_KEY, key);
        }
        let request = request.body(Full::<Bytes>::from("pay")).unwrap();
        retry().layer(dependency.clone()).oneshot(request).await.unwrap();
        dependency.calls()
    };
    assert_eq!(send(Method::POST, None).await, 1);
    assert_eq!(send(Method::PATCH, None).await, 1);
    assert_eq!(send(Method::POST, Some("order-7")).await, 3);
    assert_eq!(send(Method::PUT, None).await, 3);
}

#[tokio::test(start_paused = true)]
async fn a_mark_or_a_pushback_from_below_stops() {
    for (name, value) in [
        ("x-carrick-retried", "2"),
        ("grpc-retry-pushback-ms", "-1"),
        ("grpc-retry-pushback-ms", "soon"),
    ] {
        let dependency = Dependency::new(&[Does::Says(503, name, value)]);
        let answer = call(&retry(), &dependency).await.unwrap();
        assert_eq!((dependency.calls(), answer.headers()[name].to_str().unwrap()), (1, value));
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_asked_for_is_kept_and_one_beyond_the_deadline_is_not_begun() {
    for header in ["retry-after", "grpc-retry-pushback-ms"] {
        let value = if header == "retry-after" { "1" } else { "1000" };
        let script = [Does::Says(503, header, value), Does::Answers(200)];
        let dependency = Dependency::new(&script);
        assert_eq!(call(&retry(), &dependency).await.unwrap().status(), 200);
        let seen = dependency.seen();
        let waited = seen[1].at - seen[0].at;
        assert!((1000 * MS..=1101 * MS).contains(&waited), "{header}: {waited:?}");
    }
    let dependency = Dependency::new(&[Does::Says(503, "retry-after", "86400")]);
    let start = Instant::now();
    assert_eq!(call(&retry(), &dependency).await.unwrap().status(), 503);
    assert_eq!((dependency.calls(), start.elapsed()), (1, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_hangs_is_dropped_and_the_last_may_take_what_is_left() {
    let dependency = Dependency::new(&[Does::Hangs, Does::Hangs, Does::Takes(900 * MS)]);
    let layer = retry().with_per_try_timeout(300 * MS);
    let start = Instant::now();
    let answer = call(&layer, &dependency).await.unwrap();
    assert_eq!(answer.headers()[RETRIED], "2");
    assert!((1500 * MS..1510 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(dependency.under_way(), 0);

    let dependency = Dependency::new(&[Does::Hangs]);
    let start = Instant::now();
    assert!(matches!(call(&layer, &dependency).await, Err(CallError::Expired)));
    assert!((2000 * MS..2003 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!((dependency.calls(), dependency.under_way()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_in_the_request_wins_over_the_scope_and_the_scope_over_the_default() {
    let layer = retry();
    let took = async |explicit: Option<Duration>, scope: Option<Duration>| {
        let dependency = Dependency::new(&[Does::Hangs]);
        let start = Instant::now();
        let mut request = get();
        if let Some(span) = explicit {
            request.extensions_mut().insert(Deadline::at(start + span));
        }
        let call = layer.layer(dependency).oneshot(request);
        let result = match scope {
            Some(span) => {
                let deadline = Deadline::at(start + span);
                Scope::new(deadline, TraceContext::new()).scope(call).await
            }
            None => call.await,
        };
        assert!(matches!(result, Err(CallError::Expired)));
        start.elapsed().as_millis() / 10 * 10
    };
    assert_eq!(took(Some(500 * MS), Some(200 * MS)).await, 500);
    assert_eq!(took(None, Some(200 * MS)).await, 200);
    assert_eq!(took(None, None).await, 2000);
    assert_eq!(took(Some(5000 * MS), None).await, 2000, "our own bound holds all the same");
}

#[tokio::test(start_paused = true)]
async fn with_too_little_time_left_nothing_is_sent() {
    let dependency = Dependency::new(&[Does::Answers(200)]);
    for (left, useful) in [(0, false), (49, false), (50, true)] {
        let mut request = get();
        request.extensions_mut().insert(Deadline::at(Instant::now() + left * MS));
        let explain = Explain::new(Instant::now());
        request.extensions_mut().insert(explain.clone());
        let result = retry().layer(dependency.clone()).oneshot(request).await;
        if useful {
            assert!(result.is_ok());
        } else {
            let error = result.unwrap_err();
            assert!(matches!(&error, CallError::Refused(by) if by.policy == Policy::Deadline));
            assert!(error.was_never_sent());
            let told = format!("deadline: attempt 1 not made: {left} ms left < 50 ms");
            assert_eq!(explain.decisions()[0].to_string(), told);
        }
    }
    assert_eq!(dependency.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_budget_bounds_retries_over_all_services_of_a_layer() {
    let options = BudgetOptions { floor: 5, ratio: 0.0, cap: 5, ..BudgetOptions::default() };
    let layer = RetryLayer::new("test", config(|_| {}), budget(options));
    let dependency = Dependency::new(&[Does::Answers(503)]);
    let start = Instant::now();
    for _ in 0..100 {
        call(&layer, &dependency).await.unwrap();
    }
    let refilled = (5.0 * start.elapsed().as_secs_f64()).ceil() as usize;
    assert!((105..=105 + refilled).contains(&dependency.calls()), "{}", dependency.calls());
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_observes_lets_all_retries_through() {
    let options = BudgetOptions {
        floor: 0,
        ratio: 0.0,
        mode: carrick_call::Mode::Observe,
        ..BudgetOptions::default()
    };
    let layer = RetryLayer::new("test", config(|_| {}), budget(options));
    let dependency = Dependency::new(&[Does::Answers(503)]);
    call(&layer, &dependency).await.unwrap();
    assert_eq!(dependency.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn grpc_tokens_stop_all_retries_at_half() {
    let options = BudgetOptions { kind: BudgetKind::Tokens, cap: 10, ..BudgetOptions::default() };
    let layer = RetryLayer::new("test", config(|_| {}), budget(options));
    let dependency = Dependency::new(&[Does::Answers(503)]);
    for _ in 0..10 {
        call(&layer, &dependency).await.unwrap();
    }
    // 3 attempts, then 2: five failures leave half. Each later call is sent once.
    assert_eq!(dependency.calls(), 3 + 2 + 8);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_below_is_not_tried_again_and_costs_nothing() {
    let breaker = Breaker::new("test", BreakerConfig::default());
    breaker.force(Some(Forced::Open), Instant::now());
    let budget = budget(BudgetOptions::default());
    let layer =
        RetryLayer::new("test", config(|_| {}), budget.clone()).with_classify(Guarded(Http));
    let dependency = Dependency::new(&[Does::Answers(200)]);
    let before = budget.balance(Instant::now());
    let service =
        layer.layer(GateLayer::new(breaker).with_classify(Http).layer(dependency.clone()));
    let error = service.oneshot(get()).await.unwrap_err();
    let CallError::Inner(CallError::Refused(refusal)) = error else { panic!("{error:?}") };
    assert_eq!((refusal.policy, dependency.calls()), (Policy::Breaker, 0));
    assert_eq!(budget.balance(Instant::now()), before);
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_at_any_poll_leaves_nothing_behind() {
    let script = [Does::Takes(10 * MS), Does::Fails, Does::Takes(10 * MS)];
    for polls in 0..12 {
        let options = BudgetOptions {
            kind: BudgetKind::InFlight,
            ratio: 1.0,
            floor: 3,
            ..BudgetOptions::default()
        };
        let budget = budget(options);
        let layer =
            RetryLayer::new("test", config(|_| {}), budget.clone()).with_per_try_timeout(5 * MS);
        let dependency = Dependency::new(&script);
        let mut call = Box::pin(call(&layer, &dependency));
        for _ in 0..polls {
            if poll!(&mut call).is_ready() {
                break;
            }
            tokio::time::advance(3 * MS).await;
        }
        drop(call);
        assert_eq!(dependency.under_way(), 0);
        // As many as without any call: neither calls nor retries are counted in flight.
        assert_eq!(budget.balance(Instant::now()), 3);
        let retries: Vec<_> = (0..4).map(|_| budget.withdraw(Instant::now())).collect();
        assert_eq!(retries.iter().flatten().count(), 3);
    }
}

fn order(bytes: usize) -> Request<impl Body<Data = Bytes, Error = std::io::Error> + Send + Unpin> {
    let mut trailers = HeaderMap::new();
    trailers.insert("checksum", "abc".parse().unwrap());
    let pieces: Vec<_> = (0..bytes)
        .collect::<Vec<_>>()
        .chunks(1000)
        .map(|piece| piece.iter().map(|n| (n % 251) as u8).collect::<Bytes>())
        .map(|piece| Ok(Frame::data(piece)))
        .chain([Ok(Frame::trailers(trailers))])
        .collect();
    Request::put("/").body(StreamBody::new(stream::iter(pieces))).unwrap()
}

#[tokio::test(start_paused = true)]
async fn linkerd2_15649_14050_each_attempt_gets_the_same_bytes_and_trailers() {
    let dependency = Dependency::new(&[Does::Fails, Does::Answers(503), Does::Answers(200)]);
    let answer = retry().layer(dependency.clone()).oneshot(order(64 * 1024)).await.unwrap();
    assert_eq!(answer.status(), 200);
    let whole: Vec<u8> = (0..64 * 1024).map(|n| (n % 251) as u8).collect();
    let seen = dependency.seen();
    assert_eq!(seen.len(), 3);
    for attempt in seen {
        assert_eq!(attempt.digest, Sha256::digest(&whole).to_vec());
        assert_eq!(attempt.trailers.unwrap()["checksum"], "abc");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_large_to_keep_is_sent_whole_and_once() {
    let dependency = Dependency::new(&[Does::Answers(503)]);
    let mut request = order(64 * 1024 + 1);
    let explain = Explain::new(Instant::now());
    request.extensions_mut().insert(explain.clone());
    let answer = retry().layer(dependency.clone()).oneshot(request).await.unwrap();
    assert_eq!((answer.status().as_u16(), dependency.calls()), (503, 1));
    let whole: Vec<u8> = (0..64 * 1024 + 1).map(|n| (n % 251) as u8).collect();
    assert_eq!(dependency.seen()[0].digest, Sha256::digest(&whole).to_vec());
    let told = explain.decisions().last().unwrap().to_string();
    assert_eq!(told, "retry: no attempt 2: the body was too large to be kept");
}

#[tokio::test(start_paused = true)]
async fn linkerd2_proxy_3216_an_answer_may_come_before_the_body_was_read() {
    let dependency = Dependency {
        reads_body: false,
        ..Dependency::new(&[Does::Answers(503), Does::Answers(200)])
    };
    // Longer than is kept, and nobody has read it: it can still be sent.
    let answer = retry().layer(dependency.clone()).oneshot(order(100_000)).await.unwrap();
    assert_eq!((answer.status().as_u16(), dependency.calls()), (200, 2));
}

/// Ready so many times, and never again.
#[derive(Clone, Debug)]
struct Tires(Dependency, usize);

impl Service<Request<ReplayBody<Full<Bytes>>>> for Tires {
    type Response = Response<()>;
    type Error = &'static str;
    type Future = <Dependency as Service<Request<ReplayBody<Full<Bytes>>>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        if self.0.calls() < self.1 {
            Service::<Request<ReplayBody<Full<Bytes>>>>::poll_ready(&mut self.0, cx)
        } else {
            Poll::Pending
        }
    }

    fn call(&mut self, request: Request<ReplayBody<Full<Bytes>>>) -> Self::Future {
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn time_that_is_awaited_for_readiness_counts_and_what_was_sent_is_not_denied() {
    for times in [0, 1] {
        let dependency = Dependency::new(&[Does::Fails]);
        let start = Instant::now();
        let mut service = retry().layer(Tires(dependency.clone(), times));
        let error = service.call(get()).await.unwrap_err();
        assert!((2000 * MS..2003 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert_eq!((dependency.calls(), error.was_never_sent()), (times, times == 0));
    }
}

#[tokio::test(start_paused = true)]
async fn the_readiness_that_was_awaited_is_the_one_that_is_used() {
    // A limit of one: whoever keeps the place of a service that is ready, and calls another, waits
    // for himself.
    let dependency = Dependency::new(&[Does::Fails, Does::Answers(200)]);
    let limited = tower::limit::ConcurrencyLimit::new(dependency.clone(), 1);
    let mut service = retry().layer(limited);
    for _ in 0..3 {
        let service = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service).await.unwrap();
        let answer = service.call(get()).await;
        assert_eq!(answer.unwrap().status(), 200);
    }
    assert_eq!(dependency.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn what_is_held_is_given_back_with_the_answer_and_not_with_the_future() {
    let options = BudgetOptions {
        kind: BudgetKind::InFlight,
        ratio: 1.0,
        floor: 0,
        ..BudgetOptions::default()
    };
    let budget = budget(options);
    let layer = RetryLayer::new("test", config(|_| {}), budget.clone());
    let mut service = layer.layer(Dependency::new(&[Does::Takes(MS)]));
    let mut call = Box::pin(service.call(get()));
    assert!(poll!(&mut call).is_pending());
    assert_eq!(budget.balance(Instant::now()), 1, "one call in flight, so one retry");
    assert!((&mut call).await.is_ok());
    assert_eq!(budget.balance(Instant::now()), 0);
    drop(call);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn envoy_32580_exactly_so_many_attempts_are_made(most in 1..=20_u32, fails in 0..30_usize) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let mut script = vec![Does::Answers(503); fails];
        script.push(Does::Answers(200));
        let dependency = Dependency::new(&script);
        let rich = BudgetOptions { floor: 100, ..BudgetOptions::default() };
        let layer =
            RetryLayer::new("test", config(|options| options.max_attempts = most), budget(rich));
        let answer = runtime.block_on(call(&layer, &dependency)).unwrap();
        prop_assert_eq!(dependency.calls(), (fails + 1).min(most as usize));
        prop_assert_eq!(answer.status().is_success(), fails < most as usize);
    }
}
