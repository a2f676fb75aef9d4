use std::{sync::Arc, time::Duration};

use carrick_call::{
    Refusal, breaker::BreakerOptions, bulkhead::BulkheadOptions, outlier::OutlierConfig,
    queue::QueueOptions, throttle::ThrottleConfig,
};
use carrick_core::outcome::Outcome;
use carrick_testkit::fleet::{
    Client, Dice, Ended, Fleet, Guarded, Guards, Line, Naive, Next, Policy, Report, Second, Sent,
    ServerOptions, Slowdown,
    metastable::{BEGINS, ENDS, LASTS, Stage},
};
use tokio::time::Instant;

const SECOND: Duration = Duration::from_secs(1);

fn small() -> Fleet {
    let faults = vec![Slowdown { servers: 0..2, factor: 8.0, during: 4 * SECOND..8 * SECOND }];
    Fleet { clients: 20, servers: 5, lasts: 12 * SECOND, faults, ..Fleet::default() }
}

fn guards() -> Arc<Guards> {
    let cool_down = Duration::from_millis(300);
    let breaker = BreakerOptions { cool_down, min_calls: 5, ..BreakerOptions::default() };
    Arc::new(Guards {
        breaker: Some(breaker.try_into().unwrap()),
        outlier: Some(OutlierConfig::default()),
        throttle: Some(ThrottleConfig::default()),
        ..Guards::default()
    })
}

#[test]
fn the_same_seed_gives_the_same_trace_to_the_byte() {
    let bulkhead = BulkheadOptions { max: 12, ..BulkheadOptions::default() };
    let queue = QueueOptions { length: 7, ..QueueOptions::default() };
    let server = ServerOptions {
        line: Line::Queue(queue.try_into().unwrap()),
        bulkhead: Some(bulkhead.try_into().unwrap()),
        ..ServerOptions::default()
    };
    let faults = vec![Slowdown { servers: 0..5, factor: 8.0, during: 4 * SECOND..8 * SECOND }];
    let fleet = Fleet { rate: 15.0, server, faults, ..small() };
    let guards = guards();
    let run = |seed| fleet.traced(seed, |client| Guarded::new(client, &guards));
    let (report, trace) = run(3);
    assert!(trace.lines().count() as u64 == report.events && report.events > 10_000);
    let Second { shed, dropped, refused, .. } = report.sum(0..13);
    assert!(shed > 0 && dropped > 0 && refused > 0, "the fault must reach every policy");
    assert_eq!(run(3), (report, trace.clone()));
    assert_ne!(run(4).1, trace);
}

#[tokio::test]
async fn a_run_within_a_runtime_is_the_same_run() {
    let guards = guards();
    let run = || small().traced(3, |client| Guarded::new(client, &guards));
    let outside = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    tokio::time::sleep(Duration::from_millis(3)).await;
    assert_eq!(run(), outside);
}

#[test]
fn no_policy_moves_the_calls() {
    let guards = guards();
    let calls = |trace: String| -> Vec<String> {
        trace.lines().filter(|line| line.contains("Call {")).map(str::to_owned).collect()
    };
    let naive = small().traced(9, |client| Naive::new(client, SECOND)).1;
    let guarded = small().traced(9, |client| Guarded::new(client, &guards)).1;
    assert_ne!(naive, guarded);
    assert_eq!(calls(naive), calls(guarded));
}

#[test]
fn servers_that_are_asked_for_twice_what_they_can_do_what_they_can() {
    // Four workers and 50 ms: 80 a second each.
    let fleet = Fleet { clients: 16, rate: 20.0, servers: 2, lasts: 60 * SECOND, ..small() };
    let fleet = Fleet { faults: Vec::new(), ..fleet };
    let patient = |client| Naive::new(client, 3600 * SECOND).with_attempts(1, SECOND);
    let report = fleet.run(1, patient);
    let worked = f64::from(report.sum(10..60).worked) / 50.0;
    assert!((worked - 160.0).abs() < 5.0, "{worked} a second");
    let line = Line::Short(4);
    let fleet = Fleet { server: ServerOptions { line, ..ServerOptions::default() }, ..fleet };
    let goodput = fleet.run(1, patient).goodput(10..60);
    assert!((0.45..0.55).contains(&goodput), "{goodput}");
}

#[test]
fn a_balancer_goes_around_a_slow_server_and_round_robin_does_not() {
    let faults = vec![Slowdown { servers: 0..1, factor: 40.0, during: SECOND..60 * SECOND }];
    let fleet = Fleet { servers: 5, clients: 5, rate: 40.0, lasts: 60 * SECOND, faults, ..small() };
    let once = |client| Naive::new(client, SECOND).with_attempts(1, SECOND);
    let naive = fleet.run(1, once).goodput(5..60);
    let retry = carrick_call::retry::RetryOptions { max_attempts: 1, ..Default::default() };
    let guards = Arc::new(Guards { retry: retry.try_into().unwrap(), ..Guards::default() });
    let guarded = fleet.run(1, |client| Guarded::new(client, &guards)).goodput(5..60);
    assert!(naive < 0.85 && guarded > 0.97, "{naive} against {guarded}");
}

/// Counts what its calls hold.
struct Counting(Arc<()>, Naive);

impl Policy for Counting {
    type Call = (Arc<()>, u32);

    fn begin(&mut self, now: Instant) -> Self::Call {
        (Arc::clone(&self.0), self.1.begin(now))
    }

    fn send(
        &mut self,
        call: &mut Self::Call,
        now: Instant,
        dice: &mut Dice,
    ) -> Result<Sent, Refusal> {
        self.1.send(&mut call.1, now, dice)
    }

    fn ended(
        &mut self,
        call: &mut Self::Call,
        ended: Ended,
        now: Instant,
        dice: &mut Dice,
    ) -> Next {
        assert!(ended.elapsed <= SECOND, "patience is a second");
        assert_eq!(ended.timed_out, ended.outcome == Outcome::Expired, "this server drops nothing");
        // Even a policy that would go on after a success is not asked to.
        match self.1.ended(&mut call.1, ended, now, dice) {
            Next::Stop if ended.outcome == Outcome::Success => Next::Retry(SECOND),
            next => next,
        }
    }
}

#[test]
fn every_call_lets_go_of_what_it_holds() {
    let held = Arc::new(());
    let policy = |client: Client| {
        Counting(Arc::clone(&held), Naive::new(client, SECOND).with_attempts(2, SECOND / 10))
    };
    let report = small().run(5, policy);
    assert_eq!(Arc::strong_count(&held), 1);
    let sum = report.sum(0..13);
    assert!(sum.answered <= sum.calls && sum.attempts >= sum.calls);
}

#[test]
fn nothing_to_do_and_nobody_to_do_it_is_no_error() {
    let naive = |client| Naive::new(client, SECOND);
    let check = |fleet: Fleet| fleet.run(1, naive).sum(0..100);
    assert_eq!(check(Fleet { clients: 0, ..small() }).calls, 0);
    assert_eq!(check(Fleet { rate: 0.0, ..small() }).calls, 0);
    assert_eq!(check(Fleet { rate: f64::NAN, ..small() }).calls, 0);
    assert_eq!(check(Fleet { lasts: Duration::ZERO, ..small() }).calls, 0);
    let none = check(Fleet { servers: 0, ..small() });
    assert!(none.calls > 0 && none.answered > 0, "there is always one server");
    let server = ServerOptions { workers: 0, service: Duration::MAX, ..ServerOptions::default() };
    assert_eq!(check(Fleet { server, ..small() }).answered, 0);
}

#[test]
fn hundreds_of_clients_and_servers() {
    let guards = guards();
    let fleet = Fleet { clients: 500, servers: 300, rate: 2.0, lasts: 5 * SECOND, ..small() };
    let report = fleet.run(1, |client| Guarded::new(client, &guards));
    assert!(report.goodput(0..5) > 0.99 && report.sum(0..5).calls > 4500);
}

fn last_minute(report: &Report) -> f64 {
    report.goodput(LASTS - 60..LASTS)
}

#[test]
fn naive_retries_keep_a_fleet_down_that_carrick_brings_back() {
    for seed in 1..=3 {
        let (naive, carrick) = (Stage::Naive.run(seed), Stage::Carrick.run(seed));
        let calls = |report: &Report| -> Vec<u32> {
            report.seconds.iter().map(|second| second.calls).collect()
        };
        assert_eq!(calls(&naive), calls(&carrick), "seed {seed}: the same calls");
        for report in [&naive, &carrick] {
            assert!(report.goodput(5..BEGINS) > 0.99, "seed {seed}: well before");
        }
        assert!(last_minute(&naive) < 0.5, "seed {seed}: {}", last_minute(&naive));
        let back = carrick.recovers(ENDS, 0.95);
        assert!(back.is_some_and(|second| second <= ENDS + 10), "seed {seed}: {back:?}");
    }
}

#[test]
fn what_brings_a_fleet_back_is_that_work_in_vain_ends() {
    let deadline = Stage::Deadline.run(1);
    assert!(last_minute(&deadline) < 0.5 && deadline.waste(LASTS - 60..LASTS) > 0.9);
    let breaker = Stage::Breaker.run(1).recovers(ENDS, 0.95);
    assert!(breaker.is_some_and(|second| second <= ENDS + 15), "clients alone: {breaker:?}");
    let line = Stage::NaiveWithLine.run(1).recovers(ENDS, 0.95);
    assert!(line.is_some_and(|second| second <= ENDS + 10), "servers alone: {line:?}");
}
