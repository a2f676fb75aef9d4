//! Single decisions of the core, each as a sentence.

use std::time::Duration;

use carrick_core::{backoff::Backoff, event::Event};
use jiff::Timestamp;
use tokio::time::Instant;

use super::*;
use crate::broker::Verdicted;

const LEASE: Duration = Duration::from_secs(30);
const WALL: Timestamp = Timestamp::UNIX_EPOCH;

fn rules() -> Rules {
    Rules {
        concurrency: 2,
        prefetch: 10,
        in_flight_bytes: 1024 * 1024,
        lane: 3,
        latency_target: Duration::from_millis(100),
        handler_timeout: Duration::from_secs(300),
        settle_after: Duration::from_millis(2),
        settle_batch: 100,
        leases: LeaseRules { lease: LEASE, cap: Duration::from_secs(100) },
        limits: Limits {
            max_attempts: 3,
            max_age: None,
            backoff: Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(300) },
        },
        circuit: CircuitRules {
            window: 10,
            share: 0.9,
            cool_down: Duration::from_secs(30),
            max_cool_down: Duration::from_secs(300),
        },
    }
}

struct Bench {
    core: Core,
    now: Instant,
    made: u64,
}

impl Bench {
    fn new(rules: Rules) -> Self {
        let capabilities = Capabilities {
            order_per_key: true,
            delay: true,
            attempts: true,
            extend: true,
            dead_letters: true,
            dedupe_window: None,
            max_event: 1024 * 1024,
        };
        Self { core: Core::new(rules, capabilities, 1), now: Instant::now(), made: 0 }
    }

    fn delivery(&mut self, key: Option<&str>, attempt: u32) -> Delivery {
        self.made += 1;
        let mut event = Event::builder("core.tested.v1").id(self.made.to_string()).source("/t");
        if let Some(key) = key {
            event = event.extension("partitionkey", key);
        }
        Delivery {
            lease: LeaseId(self.made.to_string()),
            fence: Some(self.made),
            attempt,
            first_delivered_at: WALL,
            expires_at: self.now + LEASE,
            event: event.build().unwrap(),
        }
    }

    fn deliver(&mut self, keys: &[Option<&str>]) {
        let deliveries = keys.iter().map(|key| self.delivery(*key, 1)).collect();
        self.core.delivered(deliveries, self.now);
    }

    /// Starts what may start; the ids of the events, and their slots.
    fn start(&mut self) -> Vec<(String, SlotId)> {
        let mut started = Vec::new();
        while let Some(begin) = self.core.start(self.now, WALL) {
            started.push((begin.delivery.event.id().to_string(), begin.slot));
        }
        started
    }

    fn end(&mut self, slot: SlotId, ending: Ending) {
        self.core.ended(slot, ending, self.now, WALL);
    }

    fn fail(&mut self, slot: SlotId, kind: HandlerErrorKind) {
        self.end(slot, Ending::Failed(kind, "down".to_owned()));
    }

    /// What goes to the broker after the longest gathering.
    fn verdicts(&mut self) -> Vec<(String, Verdict)> {
        let batch = self.core.settle(self.now).or_else(|| {
            self.now += Duration::from_millis(2);
            self.core.settle(self.now)
        });
        let batch = batch.unwrap_or_default();
        let answers = vec![Verdicted::Done; batch.len()];
        self.core.settled(Ok(answers), self.now);
        batch.into_iter().map(|(lease, verdict)| (lease.0, verdict)).collect()
    }
}

fn names(started: &[(String, SlotId)]) -> Vec<&str> {
    started.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn a_slot_is_refilled_when_it_is_free_and_not_when_a_batch_is_done() {
    let mut bench = Bench::new(Rules { prefetch: 0, ..rules() });
    assert_eq!(bench.core.fetch(bench.now).map(|fetch| fetch.max), Some(2));
    bench.deliver(&[None, None]);
    let started = bench.start();
    assert_eq!(bench.core.fetch(bench.now), None, "both slots are taken");
    bench.end(started[0].1, Ending::Done);
    let fetch = bench.core.fetch(bench.now).map(|fetch| fetch.max);
    assert_eq!(fetch, Some(1), "the slow one holds up nobody");
}

#[test]
fn bytes_bound_what_is_held_too() {
    let mut bench = Bench::new(Rules { concurrency: 100, ..rules() });
    let before = bench.core.fetch(bench.now).unwrap().max_bytes;
    bench.deliver(&[None]);
    let held = bench.core.slots.values().next().unwrap().bytes;
    assert_eq!(bench.core.fetch(bench.now).unwrap().max_bytes, before - held);
    bench.core.rules.in_flight_bytes = held;
    assert_eq!(bench.core.fetch(bench.now), None, "no byte is left");
}

#[test]
fn fast_handlers_fetch_ahead_and_wait_until_the_queue_is_half_empty() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[None]);
    let started = bench.start();
    bench.now += Duration::from_millis(1);
    bench.end(started[0].1, Ending::Done);
    let fetch = bench.core.fetch(bench.now).unwrap();
    assert_eq!(fetch.max, 12, "two to run and ten ahead");
    bench.deliver(&[None; 12]);
    let mut started = bench.start();
    for _ in 0..4 {
        assert_eq!(bench.core.fetch(bench.now), None, "more than half of the queue is left");
        bench.end(started.remove(0).1, Ending::Done);
        started.extend(bench.start());
    }
    bench.end(started.remove(0).1, Ending::Done);
    bench.start();
    assert_eq!(bench.core.fetch(bench.now).map(|fetch| fetch.max), Some(5));
}

#[test]
fn a_failed_head_returns_its_lane_and_no_other() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[Some("a"), Some("a"), Some("b"), Some("b")]);
    let started = bench.start();
    assert_eq!(names(&started), ["1", "3"], "one of each key");
    bench.fail(started[0].1, HandlerErrorKind::Transient);
    assert!(bench.start().is_empty(), "its follower must not overtake it");
    bench.end(started[1].1, Ending::Done);
    assert_eq!(names(&bench.start()), ["4"]);
    let verdicts = bench.verdicts();
    assert!(matches!(verdicts[0], (ref id, Verdict::Nack { counted: false, .. }) if id == "2"));
    assert!(matches!(verdicts[1], (ref id, Verdict::Nack { counted: true, .. }) if id == "1"));
    assert!(matches!(verdicts[2], (ref id, Verdict::Ack) if id == "3"));
}

#[test]
fn a_stuck_key_parks_a_few_events_and_the_others_flow() {
    let mut bench = Bench::new(Rules { prefetch: 0, ..rules() });
    bench.deliver(&[Some("stuck"); 20]);
    let stuck = bench.start();
    assert_eq!(names(&stuck), ["1"]);
    assert_eq!(bench.core.queued(), 3, "the rest went back");
    assert_eq!(bench.verdicts().len(), 16);
    for _ in 0..50 {
        assert_eq!(bench.core.fetch(bench.now).map(|fetch| fetch.max), Some(1));
        bench.deliver(&[Some("healthy")]);
        let healthy = bench.start();
        bench.end(healthy[0].1, Ending::Done);
        bench.verdicts();
    }
}

#[test]
fn a_lease_is_extended_at_a_third_all_together_and_up_to_its_cap() {
    let mut bench = Bench::new(rules());
    let start = bench.now;
    bench.deliver(&[None, None]);
    bench.now += Duration::from_secs(1);
    bench.deliver(&[Some("k")]);
    bench.start();
    bench.now = start + Duration::from_millis(9_999);
    assert!(bench.core.extend(bench.now).is_none(), "a third of 30 s is 10 s");
    let mut extended = Vec::new();
    while let Some(next) = bench.core.next_wake(bench.now) {
        bench.now = next;
        assert!(bench.core.lapse(bench.now).is_empty() || next >= start + Duration::from_secs(100));
        if let Some(batch) = bench.core.extend(bench.now) {
            assert_eq!(batch.len(), 3, "in one call, though granted a second apart");
            extended.push((bench.now - start).as_secs());
            let done = vec![Verdicted::Done; 3];
            bench.core.extended(Some(done), bench.now, bench.now);
        }
    }
    assert_eq!(extended, [10, 20, 30, 40, 50, 60, 70]);
    let lost = bench.now - start;
    assert!(lost >= Duration::from_secs(100), "held to the cap, and not longer: {lost:?}");
    assert_eq!(bench.core.tally().stale, 3);
}

#[test]
fn a_lost_lease_stops_its_handler_and_says_nothing_to_the_broker() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[Some("a"), Some("a")]);
    let started = bench.start();
    bench.now += Duration::from_secs(10);
    assert_eq!(bench.core.extend(bench.now).unwrap().len(), 2);
    let answers = vec![Verdicted::Stale; 2];
    assert_eq!(bench.core.extended(Some(answers), bench.now, bench.now), [started[0].1]);
    // Delivered again before the old handler has ended: two of a key never run at once.
    bench.deliver(&[Some("a")]);
    assert!(bench.start().is_empty());
    bench.end(started[0].1, Ending::Done);
    assert_eq!(names(&bench.start()), ["3"]);
    let about_the_lost = bench.verdicts().into_iter().any(|(lease, _)| lease == "1");
    assert!(!about_the_lost, "a handler that ended too late acknowledges nothing");
}

#[test]
fn extensions_that_fail_are_repeated_and_the_handler_stops_when_the_lease_ends() {
    let mut bench = Bench::new(rules());
    let start = bench.now;
    bench.deliver(&[None]);
    let started = bench.start();
    let mut tries = 0;
    let stopped = loop {
        bench.now = bench.core.next_wake(bench.now).unwrap();
        let lapsed = bench.core.lapse(bench.now);
        if !lapsed.is_empty() {
            break lapsed;
        }
        if bench.core.extend(bench.now).is_some() {
            tries += 1;
            bench.core.extended(None, bench.now, bench.now);
        }
    };
    assert_eq!((stopped, bench.now - start), (vec![started[0].1], LEASE));
    assert!(tries >= 5, "{tries} tries");
}

#[test]
fn a_crash_loop_ends_as_a_dead_letter_without_another_run() {
    let mut bench = Bench::new(rules());
    let deliveries = vec![bench.delivery(Some("k"), 4), bench.delivery(Some("k"), 1)];
    bench.core.delivered(deliveries, bench.now);
    assert_eq!(names(&bench.start()), Vec::<&str>::new(), "its successor waits for the broker");
    let verdicts = bench.verdicts();
    let Verdict::DeadLetter { cause } = &verdicts[1].1 else { panic!("{verdicts:?}") };
    assert_eq!(cause, "delivered 3 times, and never with a verdict");
}

#[test]
fn an_overloaded_dependency_pauses_the_consumer_and_burns_no_attempt() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[None, None, None]);
    let started = bench.start();
    let pause = Duration::from_secs(5);
    bench.fail(started[0].1, HandlerErrorKind::Overload { retry_after: Some(pause) });
    assert!(bench.start().is_empty());
    assert_eq!(bench.core.fetch(bench.now), None);
    let verdicts = bench.verdicts();
    let Verdict::Nack { delay, counted: false } = verdicts[0].1 else { panic!("{verdicts:?}") };
    assert!(delay >= pause, "never earlier than asked: {delay:?}");
    bench.now += pause;
    assert_eq!(names(&bench.start()), ["3"]);
}

#[test]
fn when_everything_fails_alike_consuming_stops_and_few_become_dead_letters() {
    let mut bench = Bench::new(Rules { concurrency: 12, ..rules() });
    bench.deliver(&[None; 30]);
    let started = bench.start();
    assert_eq!(started.len(), 12);
    for (_, slot) in &started {
        bench.fail(*slot, HandlerErrorKind::Permanent);
    }
    assert!(bench.start().is_empty(), "the circuit is open");
    assert_eq!(bench.core.fetch(bench.now), None);
    let verdicts = bench.verdicts();
    let dead = verdicts.iter().filter(|(_, one)| matches!(one, Verdict::DeadLetter { .. })).count();
    assert_eq!(dead, 9, "those before the window was full");
    let held_off = |one: &&(String, Verdict)| matches!(one.1, Verdict::Nack { delay, counted: false } if delay >= Duration::from_secs(30));
    assert_eq!(
        verdicts.iter().filter(held_off).count(),
        18,
        "the queue goes back for the cool-down"
    );
    assert_eq!(bench.core.queued(), 0);

    bench.now = bench.core.next_wake(bench.now).unwrap();
    assert_eq!(bench.core.fetch(bench.now).map(|fetch| fetch.max), Some(1), "one probe");
    bench.deliver(&[None, None]); // an earlier fetch may bring more
    let probe = bench.start();
    assert_eq!(probe.len(), 1);
    bench.fail(probe[0].1, HandlerErrorKind::Permanent);
    let verdicts = bench.verdicts();
    let spared = |one: &(String, Verdict)| matches!(one.1, Verdict::Nack { .. });
    assert!(verdicts.iter().all(spared), "not even the probe: {verdicts:?}");

    bench.now = bench.core.next_wake(bench.now).unwrap();
    bench.deliver(&[None]);
    let probe = bench.start();
    bench.end(probe[0].1, Ending::Done);
    assert!(bench.core.is_circuit_closed());
    assert!(bench.core.fetch(bench.now).unwrap().max > 1);
}

#[test]
fn a_verdict_that_cannot_be_delivered_is_repeated_until_its_lease_ends() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[None]);
    let started = bench.start();
    bench.end(started[0].1, Ending::Done);
    let sent = bench.core.settle(bench.now).expect("at once, because nothing else runs");
    bench.core.settled(Err(Duration::from_secs(1)), bench.now);
    assert!(bench.core.settle(bench.now).is_none(), "not at once");
    bench.now = bench.core.next_wake(bench.now).unwrap();
    let again = bench.core.settle(bench.now).unwrap();
    assert_eq!(again[0].0, sent[0].0);
    bench.now += LEASE;
    bench.core.settled(Err(Duration::from_secs(1)), bench.now);
    assert_eq!(bench.core.tally().stale, 1);
    assert!(bench.core.settle(bench.now).is_none(), "pointless by now");
}

#[test]
fn nothing_new_is_started_while_too_many_verdicts_wait() {
    let mut bench = Bench::new(Rules { concurrency: 3000, ..rules() });
    bench.deliver(&[None; 1500]);
    let started = bench.start();
    for (_, slot) in started.iter().take(MAX_UNSETTLED) {
        bench.end(*slot, Ending::Done);
    }
    assert_eq!(bench.core.fetch(bench.now), None);
    bench.verdicts();
    assert!(bench.core.fetch(bench.now).is_some());
}

#[test]
fn a_drain_returns_what_was_not_started_last_first() {
    let mut bench = Bench::new(rules());
    bench.deliver(&[Some("a"), Some("a"), Some("b"), Some("c"), Some("c")]);
    let started = bench.start();
    assert_eq!(names(&started), ["1", "3"]);
    bench.core.drain(bench.now);
    let returned = bench.core.settle(bench.now).unwrap();
    bench.core.settled(Ok(vec![Verdicted::Done; returned.len()]), bench.now);
    let returned: Vec<&str> = returned.iter().map(|(lease, _)| lease.0.as_str()).collect();
    assert_eq!(returned, ["5", "4", "2"]);
    bench.deliver(&[None]); // the fetch that was under way
    bench.end(started[0].1, Ending::Done);
    assert!(!bench.core.is_drained(), "one still runs");
    bench.core.give_up(bench.now);
    let last = bench.core.settle(bench.now).unwrap();
    let told: Vec<bool> = last.iter().map(|(_, one)| matches!(one, Verdict::Ack)).collect();
    assert_eq!(told, [false, true, false], "fetched too late, done, given up");
    bench.core.settled(Ok(vec![Verdicted::Done; 3]), bench.now);
    assert!(bench.core.is_drained());
}
