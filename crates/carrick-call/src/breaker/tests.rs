use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use carrick_core::outcome::Outcome;
use futures_util::FutureExt;
use proptest::prelude::*;
use tokio::time::Instant;
use tower::{Service, ServiceExt};
use tower_layer::Layer;

use super::*;
use crate::{CallError, Mode};

const SEC: Duration = Duration::from_secs(1);
const OVERLOAD: Outcome = Outcome::Overload { retry_after: None };

fn breaker(change: impl FnOnce(&mut BreakerOptions)) -> Breaker {
    let mut options = BreakerOptions::default();
    change(&mut options);
    Breaker::seeded("test", BreakerConfig::try_from(options).unwrap(), 1)
}

fn call(breaker: &Breaker, outcome: Outcome, now: Instant) -> bool {
    match breaker.admit(now) {
        Ok(permit) => {
            permit.settle(outcome, Duration::ZERO, now);
            true
        }
        Err(_) => false,
    }
}

fn opened(breaker: &Breaker, now: Instant) {
    while breaker.state() != State::Open {
        assert!(call(breaker, Outcome::Transient, now));
    }
}

/// When an open circuit lets the next probe go.
fn probe_time(breaker: &Breaker, now: Instant) -> Instant {
    now + breaker.admit(now).unwrap_err().retry_after.unwrap()
}

#[test]
fn of_25_failures_20_reach_the_dependency_and_5_are_refused() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    let sent = (0..25).filter(|_| call(&breaker, Outcome::Transient, now)).count();
    assert_eq!(sent, 20);
}

#[test]
fn half_of_the_window_opens_and_less_does_not() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    (0..51).for_each(|_| assert!(call(&breaker, Outcome::Success, now)));
    (0..49).for_each(|_| assert!(call(&breaker, Outcome::Transient, now)));
    assert_eq!(breaker.state(), State::Closed);
    call(&breaker, Outcome::Transient, now); // pushes a success out: 50 of 100
    assert_eq!(breaker.state(), State::Open);
}

#[test]
fn what_says_nothing_about_the_dependency_is_not_counted() {
    let (closed, now) = (breaker(|_| {}), Instant::now());
    for outcome in [Outcome::Permanent, Outcome::Cancelled, Outcome::Rejected] {
        (0..100).for_each(|_| assert!(call(&closed, outcome, now)));
    }
    assert_eq!(closed.state(), State::Closed);
    let lenient = breaker(|options| options.ignore_overload = true);
    (0..100).for_each(|_| assert!(call(&lenient, OVERLOAD, now)));
    opened(&breaker(|_| {}), now);
    let strict = breaker(|_| {});
    (0..20).for_each(|_| assert!(call(&strict, OVERLOAD, now)));
    assert_eq!(strict.state(), State::Open, "a dependency that answers 503 only is not well");
}

#[test]
fn slow_calls_open_it_where_that_is_wished() {
    let now = Instant::now();
    let breaker = breaker(|options| options.slow_rate = Some(0.5));
    for _ in 0..20 {
        breaker.admit(now).unwrap().settle(Outcome::Success, SEC, now);
    }
    assert_eq!(breaker.state(), State::Open);
}

#[test]
fn one_probe_goes_and_its_success_closes() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    opened(&breaker, now);
    let later = probe_time(&breaker, now);
    assert!(later >= now + 30 * SEC && later <= now + 36 * SEC, "jitter only lengthens it");
    assert!(breaker.admit(later - Duration::from_millis(1)).is_err());
    let probe = breaker.admit(later).unwrap();
    assert!((0..100).all(|_| breaker.admit(later).is_err()), "one probe, however many wait");
    probe.settle(Outcome::Success, SEC, later);
    assert_eq!(breaker.state(), State::Closed);
    (0..19).for_each(|_| assert!(call(&breaker, Outcome::Transient, later), "an empty window"));
}

#[test]
fn the_cool_down_doubles_up_to_its_cap_and_falls_back_after_a_healthy_time() {
    let (breaker, mut now) = (breaker(|_| {}), Instant::now());
    opened(&breaker, now);
    let mut waits = Vec::new();
    for _ in 0..6 {
        let later = probe_time(&breaker, now);
        waits.push((later - now).as_secs_f64());
        now = later;
        assert!(call(&breaker, Outcome::Transient, now));
    }
    for (wait, cool_down) in waits.iter().zip([30.0, 60.0, 120.0, 240.0, 300.0, 300.0]) {
        assert!((cool_down..=cool_down * 1.2).contains(wait), "{waits:?}");
    }
    now = probe_time(&breaker, now);
    assert!(call(&breaker, Outcome::Success, now));
    now += 61 * SEC;
    opened(&breaker, now);
    assert!(probe_time(&breaker, now) <= now + 36 * SEC);
}

#[test]
fn resilience4j_935_a_probe_that_never_returns_does_not_hold_half_open_for_ever() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    opened(&breaker, now);
    let later = probe_time(&breaker, now);
    let lost = breaker.admit(later).unwrap();
    assert!(breaker.admit(later + 29 * SEC).is_err());
    let next = breaker.admit(later + 30 * SEC).expect("another probe");
    lost.settle(Outcome::Transient, SEC, later + 31 * SEC);
    assert_eq!(breaker.state(), State::HalfOpen, "nobody listens to the lost one any more");
    next.settle(Outcome::Success, SEC, later + 31 * SEC);
    assert_eq!(breaker.state(), State::Closed);
}

#[test]
fn omniroute_13836_a_sick_dependency_is_probed_in_each_cool_down_for_six_days() {
    let (breaker, start) = (breaker(|_| {}), Instant::now());
    opened(&breaker, start);
    let (mut now, mut probes) = (start, 0);
    while now < start + 6 * 86_400 * SEC {
        now = probe_time(&breaker, now);
        assert!(call(&breaker, Outcome::Transient, now));
        probes += 1;
    }
    assert!(probes >= 6 * 86_400 / 360, "{probes}");
    assert!(breaker.time_in_state(now + SEC) == SEC);
}

#[test]
fn resilience4j_544_polly_311_a_probe_without_a_verdict_neither_opens_nor_closes() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    opened(&breaker, now);
    let later = probe_time(&breaker, now);
    for outcome in [Outcome::Cancelled, Outcome::Rejected] {
        assert!(call(&breaker, outcome, later));
        assert_eq!(breaker.state(), State::HalfOpen);
    }
    drop(breaker.admit(later).unwrap()); // resilience4j#682: the caller left
    assert_eq!(breaker.state(), State::HalfOpen);
    assert!(call(&breaker, Outcome::Success, later));
    assert_eq!(breaker.state(), State::Closed);
}

#[test]
fn a_late_result_of_an_earlier_state_decides_nothing() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    let late: Vec<_> = (0..50).map(|_| breaker.admit(now).unwrap()).collect();
    opened(&breaker, now);
    let later = probe_time(&breaker, now);
    let probe = breaker.admit(later).unwrap();
    late.into_iter().for_each(|permit| permit.settle(Outcome::Success, SEC, later));
    assert_eq!(breaker.state(), State::HalfOpen);
    probe.settle(Outcome::Transient, SEC, later);
    assert_eq!(breaker.state(), State::Open);
}

#[test]
fn resilience4j_1432_opossum_119_of_many_threads_one_gets_the_probe() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    for _ in 0..50 {
        opened(&breaker, now);
        let later = now + 400 * SEC;
        let admitted: usize = std::thread::scope(|scope| {
            let probe = || {
                let ticket = breaker.enter(later);
                usize::from(ticket.is_ok())
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(probe)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 1);
        breaker.force(None, now);
    }
}

#[test]
fn after_closing_a_growing_share_passes() {
    let breaker = breaker(|options| options.ramp = Some(10 * SEC));
    let now = Instant::now();
    opened(&breaker, now);
    let closed = probe_time(&breaker, now);
    assert!(call(&breaker, Outcome::Success, closed));
    let share = |at: Instant| (0..1000).filter(|_| call(&breaker, Outcome::Success, at)).count();
    assert!((90..=110).contains(&share(closed)), "a tenth at first");
    assert!((540..=560).contains(&share(closed + 5 * SEC)));
    assert_eq!(share(closed + 10 * SEC), 1000);
}

#[test]
fn resilience4j_991_a_forced_state_stays_whatever_calls_do() {
    let (breaker, now) = (breaker(|_| {}), Instant::now());
    breaker.force(Some(Forced::Closed), now);
    (0..100).for_each(|_| assert!(call(&breaker, Outcome::Transient, now)));
    assert_eq!(breaker.state(), State::Disabled);
    breaker.force(Some(Forced::Open), now);
    assert!(breaker.admit(now + 86_400 * SEC).is_err());
    breaker.force(None, now);
    assert!(call(&breaker, Outcome::Transient, now));
}

#[test]
fn in_observe_mode_it_opens_and_lets_through() {
    let now = Instant::now();
    let breaker = breaker(|options| options.mode = Mode::Observe);
    opened(&breaker, now);
    assert!((0..100).all(|_| call(&breaker, Outcome::Success, now)));
    assert_eq!(breaker.state(), State::Open, "what it let through is not its business");
}

#[test]
fn resilience4j_2243_1221_a_map_is_bounded_and_keeps_open_circuits() {
    let now = Instant::now();
    let map = BreakerMap::new("test", BreakerConfig::default(), 160, 600 * SEC);
    let open = map.of(&0_u32, now);
    opened(&open, now);
    for key in 1..10_000_u32 {
        map.of(&key, now + SEC);
    }
    assert!(map.len() <= 160);
    assert_eq!(map.of(&0, now + SEC).state(), State::Open);
    let later = now + 700 * SEC;
    for key in 20_000..20_100_u32 {
        map.of(&key, later);
    }
    assert_eq!(map.of(&0, later).state(), State::Closed, "idle for too long");
}

proptest! {
    /// Against a model in whole seconds, with one probe.
    #[test]
    fn a_breaker_does_what_the_model_does(
        steps in prop::collection::vec((0..40_u32, 0..4_u8), 0..300),
    ) {
        let breaker = breaker(|options| {
            options.window.calls = 10;
            options.min_calls = 4;
        });
        let start = Instant::now();
        let mut now = start;
        let mut window: Vec<bool> = Vec::new();
        let mut open_until: Option<Instant> = None;
        for (wait, what) in steps {
            now += wait * SEC;
            let outcome =
                [Outcome::Success, Outcome::Transient, Outcome::Expired, Outcome::Cancelled][what as usize];
            let admitted = breaker.admit(now);
            let is_probe = match open_until {
                None => false,
                Some(until) if now < until => {
                    let refusal = admitted.unwrap_err();
                    prop_assert_eq!(refusal.retry_after, Some(until - now));
                    continue;
                }
                Some(_) => true,
            };
            admitted.unwrap().settle(outcome, SEC, now);
            let failed = matches!(outcome, Outcome::Transient | Outcome::Expired);
            if outcome == Outcome::Cancelled {
                continue;
            }
            let opens = if is_probe {
                open_until = None;
                window.clear();
                failed
            } else {
                window.push(failed);
                if window.len() > 10 {
                    window.remove(0);
                }
                window.len() >= 4 && 2 * window.iter().filter(|one| **one).count() >= window.len()
            };
            if opens {
                window.clear();
                let wait = breaker.admit(now).unwrap_err().retry_after.unwrap();
                prop_assert!(wait >= 30 * SEC && wait <= 360 * SEC);
                open_until = Some(now + wait);
            }
            prop_assert_eq!(breaker.state() == State::Open, open_until.is_some());
        }
    }
}

/// Panics if it is called without having been ready.
#[derive(Debug)]
struct Strict {
    ready: bool,
    calls: Arc<AtomicUsize>,
    answer: Result<(), ()>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { ready: false, calls: Arc::clone(&self.calls), answer: self.answer }
    }
}

impl Service<()> for Strict {
    type Response = ();
    type Error = ();
    type Future = futures_util::future::BoxFuture<'static, Result<(), ()>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ()>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called before it was ready");
        self.calls.fetch_add(1, Ordering::SeqCst);
        let answer = self.answer;
        async move {
            tokio::task::yield_now().await;
            tokio::time::sleep(SEC).await;
            answer
        }
        .boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_circuit_stops_calling_until_its_cool_down_ends() {
    let inner = Strict { ready: false, calls: Arc::default(), answer: Err(()) };
    let calls = Arc::clone(&inner.calls);
    let service = BreakerLayer::new(breaker(|_| {})).layer(inner);
    let mut refused = 0;
    for _ in 0..25 {
        let result = service.clone().oneshot(()).await;
        refused += usize::from(matches!(result, Err(CallError::Refused(_))));
    }
    assert_eq!((calls.load(Ordering::SeqCst), refused), (20, 5));
    tokio::time::advance(36 * SEC).await;
    let _ = tokio::join!(service.clone().oneshot(()), service.clone().oneshot(()));
    assert_eq!(calls.load(Ordering::SeqCst), 21, "one probe, however many callers wait");
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_at_any_poll_gives_its_probe_back() {
    for polls in 0..3 {
        let breaker = breaker(|_| {});
        opened(&breaker, Instant::now());
        tokio::time::advance(36 * SEC).await;
        let inner = Strict { ready: false, calls: Arc::default(), answer: Ok(()) };
        let mut service = BreakerLayer::new(breaker.clone()).layer(inner);
        let mut call = Box::pin(service.ready().await.unwrap().call(()));
        for _ in 0..polls {
            assert!(futures_util::poll!(&mut call).is_pending());
        }
        drop(call);
        assert!(breaker.admit(Instant::now()).is_ok(), "after {polls} polls");
    }
}
