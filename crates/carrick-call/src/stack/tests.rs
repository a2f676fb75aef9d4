use std::{
    future::Future,
    pin::Pin,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use carrick_core::deadline::Deadline;
use futures_util::poll;
use tokio::time::sleep;
use tower::ServiceExt;

use super::*;
use crate::{
    Classify, Policy,
    balance::{BalanceConfig, Endpoint},
    breaker::{BreakerConfig, BreakerOptions, State},
    budget::{BudgetConfig, BudgetOptions},
    bulkhead::{BulkheadConfig, BulkheadOptions, Priority},
    classify::Hints,
    explain::Explain,
    retry::RetryOptions,
    throttle::ThrottleConfig,
};

const MS: Duration = Duration::from_millis(1);

/// What a host does with a call.
#[derive(Clone, Copy, Debug)]
enum Does {
    Answers,
    Fails,
    Hangs,
    Takes(Duration),
}

#[derive(Clone, Debug)]
struct Host {
    address: String,
    script: Arc<dyn Script>,
    calls: Arc<Mutex<Vec<String>>>,
    attempts: Arc<Mutex<Vec<u32>>>,
    under_way: Arc<AtomicUsize>,
    is_ready: bool,
}

trait Script: Send + Sync + fmt::Debug {
    fn of(&self, host: &str, call: usize) -> Does;
}

#[derive(Debug)]
struct Each(Vec<Does>);

impl Script for Each {
    fn of(&self, _host: &str, call: usize) -> Does {
        self.0[call.min(self.0.len() - 1)]
    }
}

struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Request> for Host {
    type Response = &'static str;
    type Error = &'static str;
    type Future = Pin<Box<dyn Future<Output = Result<&'static str, &'static str>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called before it was ready");
        self.attempts.lock().unwrap().push(request.prepared.expect("prepared before it is sent"));
        let mut calls = self.calls.lock().unwrap();
        let does = self.script.of(&self.address, calls.len());
        calls.push(self.address.clone());
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let under_way = UnderWay(Arc::clone(&self.under_way));
        Box::pin(async move {
            let _under_way = under_way;
            match does {
                Does::Answers => Ok("answer"),
                Does::Fails => Err("failed"),
                Does::Hangs => std::future::pending().await,
                Does::Takes(span) => {
                    sleep(span).await;
                    Ok("answer")
                }
            }
        })
    }
}

#[derive(Clone, Debug, Default)]
struct Request {
    deadline: Option<Deadline>,
    is_unsafe: bool,
    prepared: Option<u32>,
    explain: Option<Explain>,
    priority: Priority,
}

impl Call for Request {
    fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    fn is_idempotent(&self) -> bool {
        !self.is_unsafe
    }

    fn copy(&self) -> Self {
        self.clone()
    }

    fn is_replayable(&self) -> bool {
        true
    }

    fn prepare(&mut self, attempt: u32, _deadline: Deadline, _now: Instant) {
        self.prepared = Some(attempt);
    }

    fn explain(&self) -> Option<&Explain> {
        self.explain.as_ref()
    }

    fn priority(&self) -> Priority {
        self.priority
    }
}

#[derive(Clone, Copy, Debug)]
struct Judge {
    never_sent: bool,
}

impl Classify<&'static str, &'static str> for Judge {
    fn classify(&self, result: Result<&&'static str, &&'static str>) -> Outcome {
        if result.is_ok() { Outcome::Success } else { Outcome::Transient }
    }

    fn hints(&self, _result: Result<&&'static str, &&'static str>) -> Hints {
        Hints { never_sent: self.never_sent, ..Hints::default() }
    }
}

struct Scene {
    stack: Stack<Host, Judge>,
    calls: Arc<Mutex<Vec<String>>>,
    attempts: Arc<Mutex<Vec<u32>>>,
    under_way: Arc<AtomicUsize>,
}

fn scene(hosts: usize, does: &[Does], change: impl FnOnce(&mut Policies<Host>)) -> Scene {
    let calls = Arc::<Mutex<Vec<String>>>::default();
    let attempts = Arc::<Mutex<Vec<u32>>>::default();
    let under_way = Arc::<AtomicUsize>::default();
    let script: Arc<dyn Script> = Arc::new(Each(does.to_vec()));
    let make = {
        let (calls, attempts) = (Arc::clone(&calls), Arc::clone(&attempts));
        let under_way = Arc::clone(&under_way);
        move |endpoint: &Endpoint| Host {
            address: endpoint.address.to_string(),
            script: Arc::clone(&script),
            calls: Arc::clone(&calls),
            attempts: Arc::clone(&attempts),
            under_way: Arc::clone(&under_way),
            is_ready: false,
        }
    };
    let balancer = Balancer::with("test", BalanceConfig::default(), None, make);
    let endpoints = (0..hosts).map(|n| Endpoint::new(format!("host-{n}"))).collect();
    balancer.update(endpoints, Instant::now());
    let mut policies = Policies {
        name: "test".to_owned(),
        timeout: 2000 * MS,
        per_try_timeout: None,
        retry: RetryConfig::default(),
        budget: Budget::new("test", BudgetConfig::default()),
        balancer,
        throttle: None,
        bulkhead: Bulkhead::new("test", BulkheadConfig::default()),
        queue: None,
        breaker: Breaker::new("test", BreakerConfig::default()),
        stream: StreamConfig::default(),
        timer: Timer::new(),
    };
    change(&mut policies);
    let stack = Stack::new(policies, Judge { never_sent: false });
    Scene { stack, calls, attempts, under_way }
}

impl Scene {
    async fn call(&self, request: Request) -> Result<&'static str, CallError<&'static str>> {
        self.stack.clone().oneshot(request).await
    }

    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    #[track_caller]
    fn assert_idle(&self) {
        let policies = self.stack.policies();
        assert_eq!(self.under_way.load(Ordering::SeqCst), 0, "calls under way");
        assert_eq!(policies.bulkhead.in_flight(), 0, "places taken");
        assert_eq!(self.stack.queue().map_or(0, Queue::waiting), 0, "calls in line");
        assert_eq!(policies.timer.armed(), 0, "deadlines armed");
        let pending: u32 = policies.balancer.hosts().iter().map(|host| host.pending()).sum();
        assert_eq!(pending, 0, "calls pending at hosts");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_tried_again_on_another_host() {
    let scene = scene(2, &[Does::Fails, Does::Answers], |_| {});
    assert_eq!(scene.call(Request::default()).await.unwrap(), "answer");
    let calls = scene.calls();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0], calls[1]);
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_request_is_tried_again_only_if_it_was_never_sent() {
    let scene = scene(2, &[Does::Fails, Does::Answers], |_| {});
    let request = Request { is_unsafe: true, ..Request::default() };
    assert!(matches!(scene.call(request.clone()).await, Err(CallError::Inner("failed"))));
    assert_eq!(scene.calls().len(), 1);
    scene.calls.lock().unwrap().clear();
    let mut stack = scene.stack.clone();
    stack.classify.never_sent = true;
    assert_eq!(stack.oneshot(request).await.unwrap(), "answer");
    assert_eq!(scene.calls().len(), 2);
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_host_that_hangs_costs_one_try_and_the_last_try_may_take_what_is_left() {
    let script = [Does::Hangs, Does::Hangs, Does::Takes(900 * MS)];
    let scene = scene(3, &script, |policies| {
        policies.per_try_timeout = Some(300 * MS);
        let options = RetryOptions { backoff: MS, backoff_cap: MS, ..RetryOptions::default() };
        policies.retry = RetryConfig::try_from(options).unwrap();
    });
    let start = Instant::now();
    assert_eq!(scene.call(Request::default()).await.unwrap(), "answer");
    assert!(start.elapsed() >= 1500 * MS && start.elapsed() < 1520 * MS, "{:?}", start.elapsed());
    assert_eq!(*scene.attempts.lock().unwrap(), [1, 2, 3], "as the wire says them");
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn the_deadline_ends_a_call_and_what_it_holds() {
    let scene = scene(1, &[Does::Hangs], |_| {});
    let start = Instant::now();
    assert!(matches!(scene.call(Request::default()).await, Err(CallError::Expired)));
    assert!(start.elapsed() >= 2000 * MS && start.elapsed() < 2010 * MS, "{:?}", start.elapsed());
    assert_eq!(scene.calls().len(), 1, "no time is left for another try");
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn with_too_little_time_left_nothing_is_sent() {
    let scene = scene(1, &[Does::Answers], |_| {});
    let explain = Explain::new(Instant::now());
    let request = Request {
        deadline: Some(Deadline::at(Instant::now() + 38 * MS)),
        explain: Some(explain.clone()),
        ..Request::default()
    };
    let error = scene.call(request).await.unwrap_err();
    assert!(matches!(error, CallError::Refused(refusal) if refusal.policy == Policy::Deadline));
    assert!(scene.calls().is_empty());
    let told = explain.decisions()[0].to_string();
    assert_eq!(told, "deadline: attempt 1 not made: 38 ms left < 50 ms");
}

#[tokio::test(start_paused = true)]
async fn the_budget_bounds_retries_over_all_calls() {
    let scene = scene(1, &[Does::Fails], |policies| {
        let options = BudgetOptions { floor: 5, ratio: 0.0, cap: 5, ..BudgetOptions::default() };
        policies.budget = Budget::new("test", BudgetConfig::try_from(options).unwrap());
        policies.breaker.force(Some(crate::breaker::Forced::Closed), Instant::now());
        let options = RetryOptions { backoff: MS, backoff_cap: MS, ..RetryOptions::default() };
        policies.retry = RetryConfig::try_from(options).unwrap();
    });
    let start = Instant::now();
    let mut made = 0;
    for _ in 0..100 {
        assert!(scene.call(Request::default()).await.is_err());
        made += std::mem::take(&mut *scene.calls.lock().unwrap()).len();
    }
    let refilled = (5.0 * start.elapsed().as_secs_f64()).ceil() as usize;
    assert!((105..=105 + refilled).contains(&made), "{made}");
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn an_open_circuit_and_a_full_bulkhead_refuse_and_are_not_tried_again() {
    let scene = scene(2, &[Does::Fails], |_| {});
    while scene.stack.policies().breaker.state() != State::Open {
        scene.calls.lock().unwrap().clear();
        assert!(scene.call(Request::default()).await.is_err());
    }
    scene.calls.lock().unwrap().clear();
    let error = scene.call(Request::default()).await.unwrap_err();
    assert!(matches!(&error, CallError::Refused(refusal) if refusal.policy == Policy::Breaker));
    assert!(error.was_never_sent() && scene.calls().is_empty());
    scene.assert_idle();

    let scene = self::scene(1, &[Does::Hangs], |policies| {
        let options = BulkheadOptions { max: 1, ..BulkheadOptions::default() };
        policies.bulkhead = Bulkhead::new("test", BulkheadConfig::try_from(options).unwrap());
    });
    let mut first = Box::pin(scene.call(Request::default()));
    assert!(poll!(&mut first).is_pending());
    let error = scene.call(Request::default()).await.unwrap_err();
    assert!(matches!(error, CallError::Refused(refusal) if refusal.policy == Policy::Bulkhead));
    drop(first);
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_at_any_poll_leaves_nothing_behind() {
    let script = [Does::Takes(10 * MS), Does::Fails, Does::Takes(10 * MS)];
    for polls in 0..12 {
        let scene = scene(3, &script, |policies| policies.per_try_timeout = Some(5 * MS));
        let mut call = Box::pin(scene.call(Request::default()));
        for _ in 0..polls {
            if poll!(&mut call).is_ready() {
                break;
            }
            tokio::time::advance(3 * MS).await;
        }
        drop(call);
        scene.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_explains_itself() {
    let scene = scene(2, &[Does::Fails, Does::Fails, Does::Fails], |_| {});
    let explain = Explain::new(Instant::now());
    let request = Request { explain: Some(explain.clone()), ..Request::default() };
    assert!(scene.call(request).await.is_err());
    assert_eq!(explain.attempts().len(), 3);
    assert!(explain.attempts().iter().all(|attempt| attempt.outcome == "transient"));
    let told: Vec<_> = explain.decisions().iter().map(ToString::to_string).collect();
    assert!(told[0].starts_with("retry: attempt 2 in "), "{told:?}");
    assert_eq!(told[2], "retry: no attempt 4: attempt 3 was the last that is allowed");
}

#[tokio::test(start_paused = true)]
async fn without_hosts_a_call_is_refused() {
    let scene = scene(0, &[Does::Answers], |_| {});
    let error = scene.call(Request::default()).await.unwrap_err();
    assert!(matches!(error, CallError::Refused(refusal) if refusal.policy == Policy::Balance));
}

fn one_place(policies: &mut Policies<Host>) {
    let options = BulkheadOptions { max: 1, ..BulkheadOptions::default() };
    policies.bulkhead = Bulkhead::new("test", BulkheadConfig::try_from(options).unwrap());
    policies.queue = Some(QueueConfig::default());
}

#[tokio::test(start_paused = true)]
async fn with_a_queue_calls_wait_for_a_place_the_important_first() {
    let script = [Does::Takes(100 * MS), Does::Answers];
    let scene = scene(1, &script, one_place);
    let start = Instant::now();
    let said = Mutex::new(Vec::new());
    let call = |priority: Priority| {
        let (scene, said) = (&scene, &said);
        async move {
            let request = Request { priority, ..Request::default() };
            assert_eq!(scene.call(request).await.unwrap(), "answer");
            said.lock().unwrap().push(priority);
        }
    };
    let critical = Priority::Critical;
    tokio::join!(call(Priority::Default), call(Priority::Sheddable), call(critical));
    assert_eq!(*said.lock().unwrap(), [Priority::Default, Priority::Critical, Priority::Sheddable]);
    assert!((100 * MS..110 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn who_waits_too_long_in_line_is_refused_without_having_been_sent() {
    let scene = scene(1, &[Does::Hangs], one_place);
    let first = scene.call(Request::default());
    let second = async {
        let start = Instant::now();
        let error = scene.call(Request::default()).await.unwrap_err();
        assert!(error.was_never_sent());
        let CallError::Refused(refusal) = error else { panic!("{error:?}") };
        assert_eq!(refusal.policy, Policy::Queue);
        assert!((500 * MS..510 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        // Whoever has less time than that is let go while an answer could still come in time.
        let deadline = Some(Deadline::at(Instant::now() + 200 * MS));
        let start = Instant::now();
        assert!(scene.call(Request { deadline, ..Request::default() }).await.is_err());
        assert!((150 * MS..160 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
    };
    let (first, ()) = tokio::join!(first, second);
    assert!(first.is_err());
    assert_eq!(scene.calls().len(), 1);
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_in_line_leaves_it() {
    let scene = scene(1, &[Does::Hangs, Does::Answers], one_place);
    let mut first = Box::pin(scene.call(Request::default()));
    let mut second = Box::pin(scene.call(Request::default()));
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    assert_eq!(scene.stack.queue().unwrap().waiting(), 1);
    drop(second);
    assert_eq!(scene.stack.queue().unwrap().waiting(), 0);
    let mut third = Box::pin(scene.call(Request::default()));
    assert!(poll!(&mut third).is_pending());
    drop(first);
    assert_eq!(third.await.unwrap(), "answer");
    scene.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_throttle_learns_from_attempts_and_refuses_before_a_host_is_asked() {
    let scene = scene(1, &[Does::Hangs], |policies| {
        policies.timeout = 60 * MS;
        policies.throttle = Some(Throttle::new("test", ThrottleConfig::default()));
        policies.breaker.force(Some(crate::breaker::Forced::Closed), Instant::now());
    });
    let calls = futures_util::future::join_all((0..100).map(|_| scene.call(Request::default())));
    assert!(calls.await.iter().all(Result::is_err));
    let asked = scene.calls().len();
    assert!(asked < 60, "{asked} of 100: nothing was accepted");
    let throttle = scene.stack.policies().throttle.as_ref().unwrap();
    assert!(throttle.chance(Instant::now()) > 0.7);
    scene.assert_idle();

    // What an open circuit refuses was never asked of the dependency.
    let scene = self::scene(1, &[Does::Answers], |policies| {
        policies.throttle = Some(Throttle::new("test", ThrottleConfig::default()));
        policies.breaker.force(Some(crate::breaker::Forced::Open), Instant::now());
    });
    for _ in 0..100 {
        let error = scene.call(Request::default()).await.unwrap_err();
        assert!(matches!(error, CallError::Refused(refusal) if refusal.policy == Policy::Breaker));
    }
    let throttle = scene.stack.policies().throttle.as_ref().unwrap();
    assert!(throttle.chance(Instant::now()) < 0.01);
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_is_refused_does_not_deny_that_an_attempt_was_sent() {
    let scene = scene(1, &[Does::Fails], |policies| {
        let options = BreakerOptions { min_calls: 1, ..BreakerOptions::default() };
        policies.breaker = Breaker::new("test", BreakerConfig::try_from(options).unwrap());
    });
    let error = scene.call(Request::default()).await.unwrap_err();
    assert!(matches!(&error, CallError::Refused(refusal) if refusal.policy == Policy::Breaker));
    assert!(!error.was_never_sent() && scene.calls().len() == 1);
    assert!(scene.call(Request::default()).await.unwrap_err().was_never_sent());
}
