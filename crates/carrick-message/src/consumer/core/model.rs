//! The core against a model of a broker, for a great many random steps.
//!
//! The model keeps the promises of [`Broker`](crate::broker::Broker) that the core relies on:
//! leases that end, attempts, order per key, followers that end with their head. Whatever the core
//! does with it, the model checks what must always hold.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use carrick_core::{backoff::Backoff, event::Event};
use jiff::Timestamp;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::Instant;

use super::*;
use crate::broker::Verdicted;

const LEASE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Waiting { ready_at: Instant },
    Leased { fence: u64, call: u64, expires_at: Instant },
    Finished,
    Dead,
}

#[derive(Debug)]
struct Entry {
    key: Option<usize>,
    event: Event,
    attempts: u32,
    fate: Fate,
}

/// A broker with one group, whose clock is an argument.
struct Model {
    entries: Vec<Entry>,
    fence: u64,
    call: u64,
}

impl Model {
    fn new(events: usize, keys: usize, rng: &mut SmallRng, now: Instant) -> Self {
        let entries = (0..events)
            .map(|n| {
                let key = Some(rng.random_range(0..=keys)).filter(|key| *key < keys);
                let mut event =
                    Event::builder("model.stepped.v1").id(n.to_string()).source("/model");
                if let Some(key) = key {
                    event = event.extension("partitionkey", format!("key-{key}"));
                }
                let event = event.build().unwrap();
                Entry { key, event, attempts: 0, fate: Fate::Waiting { ready_at: now } }
            })
            .collect();
        Self { entries, fence: 0, call: 0 }
    }

    fn expire(&mut self, now: Instant) {
        for entry in &mut self.entries {
            if matches!(entry.fate, Fate::Leased { expires_at, .. } if expires_at <= now) {
                entry.fate = Fate::Waiting { ready_at: now };
            }
        }
    }

    fn lease(&mut self, fetch: Fetch, now: Instant) -> Vec<Delivery> {
        self.expire(now);
        self.call += 1;
        let mut blocked = HashSet::new();
        let mut deliveries = Vec::new();
        for (seq, entry) in self.entries.iter_mut().enumerate() {
            if matches!(entry.fate, Fate::Finished | Fate::Dead) || deliveries.len() == fetch.max {
                continue;
            }
            let ready = matches!(entry.fate, Fate::Waiting { ready_at } if ready_at <= now);
            if !ready || entry.key.is_some_and(|key| blocked.contains(&key)) {
                blocked.extend(entry.key);
                continue;
            }
            self.fence += 1;
            entry.attempts += 1;
            let expires_at = now + LEASE;
            entry.fate = Fate::Leased { fence: self.fence, call: self.call, expires_at };
            deliveries.push(Delivery {
                lease: LeaseId(format!("{seq}.{}", self.fence)),
                fence: Some(self.fence),
                attempt: entry.attempts,
                first_delivered_at: Timestamp::UNIX_EPOCH,
                expires_at,
                event: entry.event.clone(),
            });
        }
        deliveries
    }

    fn settle(&mut self, lease: &LeaseId, verdict: &Verdict, now: Instant) -> Verdicted {
        self.expire(now);
        let (seq, token) = lease.0.split_once('.').unwrap();
        let (seq, token): (usize, u64) = (seq.parse().unwrap(), token.parse().unwrap());
        let Fate::Leased { fence, call, .. } = self.entries[seq].fate else {
            return Verdicted::Stale;
        };
        if fence != token {
            return Verdicted::Stale;
        }
        let entry = &mut self.entries[seq];
        match verdict {
            Verdict::Ack => entry.fate = Fate::Finished,
            Verdict::Extend { lease } => {
                entry.fate = Fate::Leased { fence, call, expires_at: now + *lease };
            }
            Verdict::Nack { delay, counted } => {
                entry.attempts -= u32::from(!counted);
                entry.fate = Fate::Waiting { ready_at: now + *delay };
            }
            Verdict::DeadLetter { .. } => entry.fate = Fate::Dead,
        }
        if matches!(verdict, Verdict::Nack { .. } | Verdict::DeadLetter { .. }) {
            self.end_followers(seq, call, now);
        }
        Verdicted::Done
    }

    fn end_followers(&mut self, head: usize, of_call: u64, now: Instant) {
        let key = self.entries[head].key;
        for entry in &mut self.entries[head + 1..] {
            let held = matches!(entry.fate, Fate::Leased { call, .. } if call == of_call);
            if key.is_some() && entry.key == key && held {
                entry.attempts -= 1;
                entry.fate = Fate::Waiting { ready_at: now };
            }
        }
    }

    fn is_done(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.fate, Fate::Finished | Fate::Dead))
    }
}

fn rules(concurrency: usize, prefetch: usize, lane: usize) -> Rules {
    Rules {
        concurrency,
        prefetch,
        in_flight_bytes: 4096,
        lane,
        latency_target: Duration::from_millis(100),
        handler_timeout: Duration::from_secs(300),
        settle_after: Duration::from_millis(2),
        settle_batch: 10,
        leases: LeaseRules { lease: LEASE, cap: Duration::from_secs(600) },
        limits: Limits {
            max_attempts: 4,
            max_age: None,
            backoff: Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(10) },
        },
        circuit: CircuitRules {
            window: 20,
            share: 0.9,
            cool_down: Duration::from_secs(30),
            max_cool_down: Duration::from_secs(300),
        },
    }
}

/// A run: the core, the model, and what is under way between them.
struct Run {
    core: Core,
    model: Model,
    now: Instant,
    rng: SmallRng,
    running: BTreeMap<SlotId, Delivery>,
    lost: HashSet<SlotId>,
    settling: Option<Vec<(LeaseId, Verdict)>>,
    extending: Option<(Vec<Extension>, Instant)>,
    /// The highest event of each key whose effect has happened.
    effects: HashMap<usize, usize>,
    handled: HashSet<usize>,
    loses_leases: bool,
}

impl Run {
    fn wall(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    fn seq(delivery: &Delivery) -> usize {
        delivery.event.id().parse().unwrap()
    }

    fn stop(&mut self, slots: Vec<SlotId>) {
        for slot in slots {
            assert!(self.running.contains_key(&slot), "only running handlers are stopped");
            self.lost.insert(slot);
        }
    }

    /// Everything the service would do before it waits.
    fn act(&mut self) {
        let lapsed = self.core.lapse(self.now);
        self.stop(lapsed);
        while let Some(begin) = self.core.start(self.now, self.wall()) {
            let seq = Self::seq(&begin.delivery);
            if let Some(key) = self.model.entries[seq].key {
                let twice = self
                    .running
                    .values()
                    .find(|running| self.model.entries[Self::seq(running)].key == Some(key));
                assert!(twice.is_none(), "two events of key {key} run at once");
            }
            assert!(begin.deadline > self.now);
            self.running.insert(begin.slot, begin.delivery);
        }
        assert!(self.running.len() <= self.core.rules.concurrency);
        if self.settling.is_none() {
            self.settling = self.core.settle(self.now);
        }
        if self.extending.is_none() {
            let sent = self.now;
            self.extending = self.core.extend(self.now).map(|extensions| (extensions, sent));
        }
    }

    fn step(&mut self, trouble: f64) {
        self.act();
        match self.rng.random_range(0..10) {
            0..=1 => {
                if let Some(fetch) = self.core.fetch(self.now) {
                    assert!(fetch.max > 0 && fetch.max_bytes > 0);
                    let deliveries = self.model.lease(fetch, self.now);
                    self.core.delivered(deliveries, self.now);
                }
            }
            2..=5 => self.end_one(trouble),
            6..=7 => self.answer_verdicts(trouble),
            8 => self.answer_extensions(trouble),
            _ => {
                // Now and then long enough to lose leases.
                let long = self.loses_leases && self.rng.random_bool(trouble / 2.0);
                let longest = if long { 40_000 } else { 4000 };
                let pause = self.rng.random_range(0..longest);
                self.now += Duration::from_millis(pause);
            }
        }
        self.act();
        self.check();
    }

    fn end_one(&mut self, trouble: f64) {
        let any = self.pick(self.running.len());
        let Some(slot) = self.running.keys().copied().nth(any) else { return };
        let delivery = self.running.remove(&slot).unwrap();
        let lost = self.lost.remove(&slot);
        let ending = if lost {
            Ending::Lost
        } else if self.rng.random_bool(trouble) {
            let kinds = [
                HandlerErrorKind::Transient,
                HandlerErrorKind::Permanent,
                HandlerErrorKind::Overload { retry_after: Some(Duration::from_secs(1)) },
            ];
            let texts = ["down", "no such order", "bad amount"];
            Ending::Failed(kinds[self.pick(3)], texts[self.pick(3)].to_owned())
        } else {
            self.effect(&delivery);
            Ending::Done
        };
        self.core.ended(slot, ending, self.now, self.wall());
    }

    fn pick(&mut self, count: usize) -> usize {
        self.rng.random_range(0..count.max(1))
    }

    /// A handler's effect: guarded by an inbox, so that a repeat changes nothing.
    fn effect(&mut self, delivery: &Delivery) {
        let seq = Self::seq(delivery);
        if !self.handled.insert(seq) {
            return;
        }
        if let Some(key) = self.model.entries[seq].key {
            let last = self.effects.insert(key, seq);
            assert!(last.is_none_or(|last| last < seq), "key {key}: {seq} after {last:?}");
            let earlier = self.model.entries[..seq].iter().enumerate();
            for (earlier, entry) in earlier.filter(|(_, entry)| entry.key == Some(key)) {
                let over = self.handled.contains(&earlier) || entry.fate == Fate::Dead;
                assert!(over, "key {key}: {seq} while {earlier} is unfinished");
            }
        }
    }

    fn answer_verdicts(&mut self, trouble: f64) {
        let Some(batch) = self.settling.take() else { return };
        let fails = self.rng.random_bool(trouble);
        // A failed call may have taken effect or not.
        let happened = !fails || self.rng.random_bool(0.5);
        let mut answers = Vec::new();
        if happened {
            for (lease, verdict) in &batch {
                answers.push(self.model.settle(lease, verdict, self.now));
            }
        }
        let answer = if fails { Err(Duration::from_millis(50)) } else { Ok(answers) };
        self.core.settled(answer, self.now);
    }

    fn answer_extensions(&mut self, trouble: f64) {
        let Some((batch, sent)) = self.extending.take() else { return };
        let fails = self.rng.random_bool(trouble);
        let answer = (!fails).then(|| {
            let extend = |one: &Extension| Verdict::Extend { lease: one.lease };
            // Sent earlier than it takes effect: the local end is the earlier one.
            batch
                .iter()
                .map(|one| self.model.settle(&one.lease_id, &extend(one), self.now))
                .collect()
        });
        let lost = self.core.extended(answer, sent, self.now);
        self.stop(lost);
    }

    fn check(&self) {
        let core = &self.core;
        let held: usize = core.slots.values().map(|slot| slot.bytes).sum();
        assert_eq!(core.bytes, held, "bytes are counted exactly");
        assert_eq!(core.running, self.running.len(), "slots of handlers are counted exactly");
        let waiting = core.slots.len() - core.running;
        assert_eq!(core.queued(), waiting, "every held event runs, is queued or is parked");
        assert!(core.lanes.parked() <= core.rules.prefetch.max(core.rules.lane));
        assert!(core.verdicts.len() <= MAX_UNSETTLED + core.slots.len() + 1000);
    }

    /// Lets everything succeed from now on, and the consumer must come to an end.
    fn calm(&mut self) {
        for _ in 0..200_000 {
            if self.model.is_done() && self.core.verdicts.is_empty() && self.running.is_empty() {
                return;
            }
            self.step(0.0);
        }
        panic!("not finished: {:?}", self.core);
    }
}

fn start(seed: u64, events: usize, keys: usize, rules: Rules) -> Run {
    let mut rng = SmallRng::seed_from_u64(seed);
    let now = Instant::now();
    let capabilities = Capabilities {
        order_per_key: true,
        delay: true,
        attempts: true,
        extend: true,
        dead_letters: true,
        dedupe_window: None,
        max_event: 1024 * 1024,
    };
    let model = Model::new(events, keys, &mut rng, now);
    let core = Core::new(rules, capabilities, seed);
    Run {
        core,
        model,
        now,
        rng,
        running: BTreeMap::new(),
        lost: HashSet::new(),
        settling: None,
        extending: None,
        effects: HashMap::new(),
        handled: HashSet::new(),
        loses_leases: false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_fails_order_per_key_holds_and_everything_ends(
        seed: u64,
        concurrency in 1..9usize,
        prefetch in 0..20usize,
        lane in 1..6usize,
        keys in 0..6usize,
        trouble in 0.0..0.7f64,
    ) {
        let mut run = start(seed, 60, keys, rules(concurrency, prefetch, lane));
        run.loses_leases = true;
        for _ in 0..1500 {
            run.step(trouble);
        }
        run.calm();
        let dead = run.model.entries.iter().filter(|entry| entry.fate == Fate::Dead).count();
        prop_assert!(run.handled.len() + dead >= 60, "nothing is lost");
    }

    #[test]
    fn a_drain_at_any_moment_leaves_nothing_under_lease(
        seed: u64,
        steps in 0..400usize,
        trouble in 0.0..0.7f64,
        gives_up: bool,
    ) {
        let mut run = start(seed, 60, 4, rules(4, 8, 3));
        for _ in 0..steps {
            run.step(trouble);
        }
        run.core.drain(run.now);
        prop_assert_eq!(run.core.fetch(run.now), None);
        if gives_up {
            run.running.clear();
            run.lost.clear();
            run.core.give_up(run.now);
        }
        for _ in 0..10_000 {
            if run.core.is_drained() {
                break;
            }
            run.step(0.0);
        }
        prop_assert!(run.core.is_drained());
        for entry in &run.model.entries {
            let held = matches!(entry.fate, Fate::Leased { expires_at, .. } if expires_at > run.now);
            prop_assert!(!held, "{:?}", entry);
        }
    }
}
