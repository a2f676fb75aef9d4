use std::{
    future::{pending, poll_fn},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};

use carrick_core::outcome::Outcome;
use proptest::prelude::{Just, any, prop, proptest};
use proptest::{prop_assert, prop_assert_eq, prop_oneof, strategy::Strategy as _};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tower_service::Service;

use super::*;
use crate::{
    CallError, Mode,
    outlier::{OutlierConfig, OutlierOptions, Verdict},
};

const MS: Duration = Duration::from_millis(1);

fn config(options: BalanceOptions) -> BalanceConfig {
    BalanceConfig::try_from(options).unwrap()
}

fn endpoints(weights: &[u16]) -> Vec<Endpoint> {
    let endpoint = |(n, weight): (usize, &u16)| Endpoint::new(n.to_string()).with_weight(*weight);
    weights.iter().enumerate().map(endpoint).collect()
}

fn place<T>(pick: &Pick<T>) -> usize {
    pick.host().endpoint().address.parse().unwrap()
}

/// A thousand calls a second, one after the other in simulated time: a model of hosts that answer
/// after `answer(place, rng)`.
struct Load {
    balancer: Balancer,
    rng: SmallRng,
    now: Instant,
    /// Calls under way, with when they end and how.
    open: Vec<(Instant, Pick, Outcome)>,
    taken: Vec<usize>,
}

impl Load {
    fn new(balancer: Balancer, hosts: usize) -> Self {
        let (rng, now) = (SmallRng::seed_from_u64(11), Instant::now());
        Self { balancer, rng, now, open: Vec::new(), taken: vec![0; hosts] }
    }

    fn run(&mut self, calls: usize, answer: impl Fn(usize, &mut SmallRng) -> (Duration, Outcome)) {
        self.taken.iter_mut().for_each(|taken| *taken = 0);
        for _ in 0..calls {
            self.now += MS;
            let ended = self.open.extract_if(.., |(end, _, _)| *end <= self.now);
            for (end, pick, outcome) in ended.collect::<Vec<_>>() {
                let elapsed = end - pick.started();
                pick.settle(outcome, elapsed, self.now);
            }
            let pick = self.balancer.pick(self.now, &mut self.rng, None).unwrap();
            self.taken[place(&pick)] += 1;
            let (time, outcome) = answer(place(&pick), &mut self.rng);
            self.open.push((self.now + time, pick, outcome));
        }
    }
}

fn loaded(weights: &[u16], options: BalanceOptions) -> Load {
    let load = Load::new(Balancer::new("test", config(options)), weights.len());
    load.balancer.update(endpoints(weights), load.now);
    load
}

/// A latency that scatters by half.
fn about(millis: f64, rng: &mut SmallRng) -> (Duration, Outcome) {
    (MS.mul_f64(millis * rng.random_range(0.5..1.5)), Outcome::Success)
}

#[test]
fn a_slow_host_gets_next_to_nothing() {
    let mut load = loaded(&[1; 10], BalanceOptions::default());
    load.run(10_000, |n, rng| about(if n == 3 { 500.0 } else { 5.0 }, rng));
    assert!(load.taken[3] < 30, "{:?}", load.taken);
    assert!(load.taken.iter().enumerate().all(|(n, taken)| n == 3 || *taken > 700));
}

#[test]
fn a_host_that_fails_fast_gets_less_than_its_share() {
    let mut load = loaded(&[1; 10], BalanceOptions::default());
    load.run(5000, |_, rng| about(5.0, rng));
    let mut taken = Vec::new();
    for _ in 0..5 {
        load.run(1000, |n, rng| match n {
            3 => (MS / 10, Outcome::Transient),
            _ => about(5.0, rng),
        });
        taken.push(load.taken[3]);
    }
    println!("of each thousand: {taken:?}");
    assert!(taken[0] < 50 && taken[1..].iter().all(|taken| *taken < 10), "{taken:?}");
}

#[test]
fn a_single_failure_does_not_keep_a_host_out_of_favour_for_long() {
    let mut load = loaded(&[1; 10], BalanceOptions::default());
    load.run(5000, |_, rng| about(5.0, rng));
    let pick = std::iter::repeat_with(|| load.balancer.pick(load.now, &mut load.rng, None))
        .map(|pick| pick.unwrap())
        .find(|pick| place(pick) == 3)
        .unwrap();
    pick.settle(Outcome::Transient, MS, load.now);
    load.run(30_000, |_, rng| about(5.0, rng));
    load.run(5000, |_, rng| about(5.0, rng));
    assert!(load.taken[3] > 250, "{:?}", load.taken);
}

#[test]
fn a_host_that_says_when_to_come_back_is_left_alone_longer() {
    let mut load = loaded(&[1; 2], BalanceOptions::default());
    let pause = Some(Duration::from_secs(60));
    load.run(2000, |n, rng| match n {
        0 => (MS, Outcome::Overload { retry_after: pause }),
        _ => about(1.0, rng),
    });
    assert!(load.taken[0] < 40, "{:?}", load.taken);
}

#[test]
fn a_host_that_never_answers_keeps_only_its_first_calls() {
    let mut load = loaded(&[1; 4], BalanceOptions::default());
    load.run(5000, |n, rng| match n {
        2 => (Duration::from_secs(3600), Outcome::Success),
        _ => about(5.0, rng),
    });
    assert!(load.taken[2] <= 2, "{:?}", load.taken);
}

#[test]
fn tower_134_a_new_host_gets_its_share_at_once_and_not_all() {
    let mut load = loaded(&[1; 4], BalanceOptions::default());
    load.taken.push(0);
    load.run(5000, |_, rng| about(20.0, rng));
    load.balancer.update(endpoints(&[1; 5]), load.now);
    load.run(1000, |_, rng| about(20.0, rng));
    assert!((120..350).contains(&load.taken[4]), "{:?}", load.taken);
}

#[test]
fn shares_follow_weights_when_hosts_are_alike() {
    for strategy in [Strategy::PeakEwma, Strategy::LeastRequest] {
        for millis in [0.5, 20.0] {
            let options = BalanceOptions { strategy, ..BalanceOptions::default() };
            let mut load = loaded(&[10, 20, 30, 40, 0], options);
            load.run(20_000, |_, _| (MS.mul_f64(millis), Outcome::Success));
            let shares: Vec<_> = load.taken.iter().map(|taken| taken / 200).collect();
            for (share, expected) in shares.iter().zip([10usize, 20, 30, 40]) {
                assert!(share.abs_diff(expected) <= 4, "{strategy:?} {millis}: {shares:?}");
            }
            assert_eq!(load.taken[4], 0, "a weight of nothing is no share");
        }
    }
}

#[test]
fn envoy_3284_equal_hosts_of_high_weight_are_not_served_in_runs() {
    let mut load = loaded(&[50, 50], BalanceOptions::default());
    let (mut last, mut run, mut longest) = (9, 0, 0);
    for _ in 0..1000 {
        let pick = load.balancer.pick(load.now, &mut load.rng, None).unwrap();
        run = if place(&pick) == last { run + 1 } else { 1 };
        (last, longest) = (place(&pick), longest.max(run));
        pick.settle(Outcome::Success, MS, load.now);
    }
    assert!(longest < 20, "{longest}");
}

#[test]
fn envoy_19437_a_lone_host_that_starts_is_not_starved() {
    let options = BalanceOptions { slow_start: Duration::from_secs(60), ..Default::default() };
    let mut load = loaded(&[1, 1], options);
    load.balancer.update(vec![Endpoint::new("7")], load.now);
    for _ in 0..100 {
        let pick = load.balancer.pick(load.now, &mut load.rng, None).unwrap();
        assert_eq!(place(&pick), 7);
    }
}

#[test]
fn a_new_host_comes_up_slowly() {
    let slow_start = Duration::from_secs(10);
    let mut load = loaded(&[1, 1, 1], BalanceOptions { slow_start, ..Default::default() });
    load.taken.push(0);
    load.run(100, |_, _| (MS / 2, Outcome::Success));
    load.balancer.update(endpoints(&[1; 4]), load.now);
    let mut shares = Vec::new();
    for _ in 0..11 {
        load.run(1000, |_, _| (MS / 2, Outcome::Success));
        shares.push(load.taken[3]);
    }
    assert!((10..70).contains(&shares[0]), "{shares:?}");
    assert!((90..180).contains(&shares[5]), "{shares:?}");
    assert!((200..300).contains(&shares[10]), "{shares:?}");
}

#[test]
fn tower_856_a_call_counts_for_its_host_however_the_set_changes() {
    let mut load = loaded(&[1, 1, 1], BalanceOptions::default());
    let pick = load.balancer.pick(load.now, &mut load.rng, None).unwrap();
    let (host, taken) = (Arc::clone(pick.host()), place(&pick));
    let mut others = endpoints(&[1, 1, 1]);
    others.remove(taken);
    load.balancer.update(others, load.now);
    pick.settle(Outcome::Success, 7 * MS, load.now);
    assert_eq!((host.pending(), host.latency(load.now).map(|seen| seen.as_millis())), (0, Some(7)));
    for other in load.balancer.hosts() {
        assert_eq!((other.pending(), other.latency(load.now)), (0, None));
    }
}

#[test]
fn what_is_known_of_a_host_stays_when_the_set_changes() {
    let mut load = loaded(&[1, 1], BalanceOptions::default());
    load.run(100, |_, rng| about(1.0, rng));
    let before = load.balancer.hosts();
    let mut more = endpoints(&[3, 1, 1]);
    more.push(Endpoint::new("1").with_weight(9));
    load.balancer.update(more, load.now);
    let after = load.balancer.hosts();
    assert_eq!(after.len(), 3, "an address that is told twice is one host");
    assert!(before.iter().zip(&after).all(|(before, after)| Arc::ptr_eq(before, after)));
}

#[test]
fn istio_39870_a_host_that_drains_gets_no_more_calls() {
    let mut load = loaded(&[1, 1], BalanceOptions::default());
    let mut draining = endpoints(&[1, 1]);
    draining[0].draining = true;
    load.balancer.update(draining, load.now);
    load.run(100, |_, rng| about(1.0, rng));
    assert_eq!(load.taken, [0, 100]);
}

#[test]
fn without_a_host_a_pick_is_refused() {
    let mut load = loaded(&[], BalanceOptions::default());
    let refusal = load.balancer.pick(load.now, &mut load.rng, None).unwrap_err();
    assert_eq!(refusal.to_string(), "refused by the balance: no host is known");
}

#[test]
fn a_host_to_avoid_is_avoided_unless_there_is_no_other() {
    let mut load = loaded(&[1, 1, 1], BalanceOptions::default());
    let host = load.balancer.hosts()[1].clone();
    for _ in 0..100 {
        let pick = load.balancer.pick(load.now, &mut load.rng, Some(host.id())).unwrap();
        assert_ne!(place(&pick), 1);
    }
    load.balancer.update(vec![Endpoint::new("1")], load.now);
    assert_eq!(place(&load.balancer.pick(load.now, &mut load.rng, Some(host.id())).unwrap()), 1);
}

fn watched(hosts: usize, outlier: OutlierOptions) -> (Load, Detector) {
    let detector = Detector::new("test", OutlierConfig::try_from(outlier).unwrap());
    let watching = Some(detector.clone());
    let balancer = Balancer::with("test", BalanceConfig::default(), watching, |_| ());
    let load = Load::new(balancer, hosts);
    load.balancer.update(endpoints(&vec![1; hosts]), load.now);
    (load, detector)
}

#[test]
fn an_ejected_host_gets_nothing_until_its_time_is_over() {
    let (mut load, detector) = watched(4, OutlierOptions::default());
    let sick = |n, rng: &mut SmallRng| match n {
        2 => (MS, Outcome::Transient),
        _ => about(5.0, rng),
    };
    load.run(1000, |_, rng| about(5.0, rng));
    load.run(1000, sick);
    assert_eq!(detector.ejected(), 1);
    load.run(5000, sick);
    assert_eq!(load.taken[2], 0);
    load.run(40_000, |_, rng| about(5.0, rng));
    assert_eq!(detector.ejected(), 0, "the sweep needs no task");
    assert!(load.taken[2] > 500, "{:?}", load.taken);
}

#[test]
fn all_hosts_ejected_is_a_panic_or_if_that_is_off_a_refusal() {
    for (panic_below, expected) in [(0.5, None), (0.0, Some("every host is ejected"))] {
        let options = OutlierOptions {
            max_ejected: 1.0,
            min_serving: 0,
            panic_below,
            ..OutlierOptions::default()
        };
        let (mut load, detector) = watched(3, options);
        for host in load.balancer.hosts() {
            for _ in 0..5 {
                let member = host.member.as_ref().unwrap();
                member.record(Verdict::local(Outcome::Transient), MS, load.now);
            }
        }
        assert_eq!(detector.ejected(), 3);
        let refusal = load.balancer.pick(load.now, &mut load.rng, None).err();
        assert_eq!(refusal.map(|refusal| refusal.reason.into_owned()).as_deref(), expected);
    }
}

#[test]
fn hosts_that_go_leave_the_detector_too() {
    let (load, detector) = watched(4, OutlierOptions::default());
    assert_eq!(detector.hosts(), 4);
    load.balancer.update(endpoints(&[1, 0, 1]), load.now);
    assert_eq!(detector.hosts(), 2);
}

#[test]
fn updates_that_meet_leave_one_of_their_sets_and_no_host_beside_it() {
    let (load, detector) = watched(1, OutlierOptions::default());
    std::thread::scope(|scope| {
        for n in 1..=4 {
            let (balancer, now) = (&load.balancer, load.now);
            scope.spawn(move || {
                for round in 0..50 {
                    balancer.update(endpoints(&vec![1; n + round % 3]), now);
                }
            });
        }
    });
    assert_eq!(detector.hosts(), load.balancer.hosts().len());
}

#[test]
fn in_observe_mode_the_draw_decides() {
    let mut load = loaded(&[1; 4], BalanceOptions { mode: Mode::Observe, ..Default::default() });
    load.run(4000, |n, rng| about(if n == 3 { 500.0 } else { 5.0 }, rng));
    assert!(load.taken[3] > 850, "{:?}", load.taken);
}

#[derive(Clone, Debug)]
enum Step {
    Pick,
    Settle(usize, u8),
    Drop(usize),
    Update(Vec<u16>),
}

fn step() -> impl proptest::strategy::Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Pick),
        4 => (any::<usize>(), 0..6u8).prop_map(|(n, how)| Step::Settle(n, how)),
        1 => any::<usize>().prop_map(Step::Drop),
        1 => prop::collection::vec(0..4u16, 0..6).prop_map(Step::Update),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_calls_under_way_are_those_that_are_held(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let (balancer, mut rng) = (Balancer::new("test", Default::default()), SmallRng::seed_from_u64(3));
        let mut now = Instant::now();
        let (mut weights, mut held) = (Vec::new(), Vec::new());
        for step in steps {
            now += MS;
            match step {
                Step::Pick => match balancer.pick(now, &mut rng, None) {
                    Ok(pick) => {
                        prop_assert!(weights[place(&pick)] > 0);
                        held.push(pick);
                    }
                    Err(_) => prop_assert!(weights.iter().all(|weight| *weight == 0)),
                },
                Step::Settle(n, how) if !held.is_empty() => {
                    let outcome = [
                        Outcome::Success,
                        Outcome::Transient,
                        Outcome::Overload { retry_after: Some(Duration::MAX) },
                        Outcome::Rejected,
                        Outcome::Cancelled,
                        Outcome::Expired,
                    ][usize::from(how)];
                    let pick = held.swap_remove(n % held.len());
                    pick.settle(outcome, Duration::MAX, now);
                }
                Step::Drop(n) if !held.is_empty() => drop(held.swap_remove(n % held.len())),
                Step::Update(new) => {
                    balancer.update(endpoints(&new), now);
                    weights = new;
                }
                _ => {}
            }
            for host in balancer.hosts() {
                let ours = held.iter().filter(|pick| Arc::ptr_eq(pick.host(), &host)).count();
                prop_assert_eq!(host.pending() as usize, ours);
            }
        }
    }
}

/// Panics if it is called without having said that it is ready, which takes it two polls.
#[derive(Debug, Default)]
struct Strict {
    polls: usize,
    calls: Arc<AtomicUsize>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { polls: 0, calls: Arc::clone(&self.calls) }
    }
}

impl Service<usize> for Strict {
    type Response = ();
    type Error = &'static str;
    type Future = futures_util::future::BoxFuture<'static, Result<(), &'static str>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.polls += 1;
        cx.waker().wake_by_ref();
        if self.polls > 2 { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, mut polls: usize) -> Self::Future {
        assert!(self.polls > 2, "called without being ready");
        self.polls = 0;
        self.calls.fetch_add(1, Relaxed);
        Box::pin(poll_fn(move |cx| {
            cx.waker().wake_by_ref();
            match polls.checked_sub(1) {
                Some(left) => polls = left,
                None => return Poll::Ready(Err("refused")),
            }
            Poll::Pending
        }))
    }
}

#[tokio::test(start_paused = true)]
async fn the_service_waits_for_a_host_and_is_dropped_at_every_poll_without_a_trace() {
    let balancer = Balancer::with("test", BalanceConfig::default(), None, |_| Strict::default());
    balancer.update(endpoints(&[1, 1]), Instant::now());
    let mut service = Balance::new(balancer.clone());
    let mut context = Context::from_waker(std::task::Waker::noop());
    for polls in 0..8 {
        let mut future = Box::pin(service.call(3));
        for _ in 0..polls {
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                assert!(matches!(result, Err(CallError::Inner("refused"))));
                break;
            }
        }
        drop(future);
        assert!(balancer.hosts().iter().all(|host| host.pending() == 0), "after {polls} polls");
    }
    let calls = balancer.hosts().iter().map(|host| host.value().calls.load(Relaxed)).sum::<usize>();
    assert_eq!(calls, 5, "those that were polled three times or more");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_waits_for_is_charged_what_it_took_at_least() {
    let make = |_: &Endpoint| tower::service_fn(|(): ()| pending::<Result<(), ()>>());
    let balancer = Balancer::with("test", BalanceConfig::default(), None, make);
    balancer.update(endpoints(&[1]), Instant::now());
    let call = Balance::new(balancer.clone()).call(());
    assert!(tokio::time::timeout(Duration::from_secs(3), call).await.is_err());
    let latency = balancer.hosts()[0].latency(Instant::now()).unwrap();
    assert!(latency >= Duration::from_millis(2999), "{latency:?}");
}

#[tokio::test]
async fn without_a_host_the_service_is_ready_and_refuses() {
    let make = |_: &Endpoint| Strict::default();
    let mut service = Balance::new(Balancer::with("test", Default::default(), None, make));
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
    let error = service.call(0).await.unwrap_err();
    assert!(error.was_never_sent());
}
