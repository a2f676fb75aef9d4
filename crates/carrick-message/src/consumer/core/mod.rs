//! What a consumer decides: what to fetch, start, extend, give up and say to the broker.
//!
//! Nothing here waits, spawns or looks at a clock: the service tells what happened and when, and
//! asks what to do. A held event is a *slot*: queued, parked behind its key, running, or doomed (its
//! lease is lost, its handler is being stopped). Every verdict passes through one buffer, which
//! keeps it until the broker has answered or the lease has run out.

mod bound;
mod circuit;
mod judge;
mod lanes;
mod leases;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
mod verdicts;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use hashbrown::HashMap;
use jiff::Timestamp;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::Instant;

use self::{
    bound::Bound,
    circuit::{Circuit, State},
    judge::{Blame, Failure, aside, judge},
    lanes::{Entered, Lanes},
    leases::Holds,
    verdicts::{Said, Verdicts},
};
use super::HandlerErrorKind;
use crate::broker::{Capabilities, Delivery, LeaseId, Verdict};

pub(crate) use self::{
    circuit::CircuitRules,
    judge::Limits,
    leases::{Extension, LeaseRules},
};

/// Names an event that is held here.
pub(crate) type SlotId = u64;

/// Everything the decisions rest on.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) concurrency: usize,
    pub(crate) prefetch: usize,
    pub(crate) in_flight_bytes: usize,
    pub(crate) lane: usize,
    pub(crate) latency_target: Duration,
    pub(crate) handler_timeout: Duration,
    pub(crate) settle_after: Duration,
    pub(crate) settle_batch: usize,
    pub(crate) leases: LeaseRules,
    pub(crate) limits: Limits,
    pub(crate) circuit: CircuitRules,
}

/// How long an overloaded dependency pauses the whole consumer at most: longer pauses are for the
/// events that asked for them.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Verdicts that may wait for the broker before nothing new is started: bounds what is handled
/// again when they cannot be delivered.
const MAX_UNSETTLED: usize = 1000;

/// How long events go back for to a broker that does not hold the later ones of a key back: it
/// would hand them out again at once.
const UNORDERED_PAUSE: Duration = Duration::from_secs(1);

/// A fetch to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    pub(crate) max: usize,
    pub(crate) max_bytes: usize,
}

/// A handler to start.
#[derive(Debug)]
pub(crate) struct Begin {
    pub(crate) slot: SlotId,
    pub(crate) delivery: Delivery,
    pub(crate) deadline: Instant,
}

/// How a handler ended.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// It did its work.
    Done,
    /// It failed, in words.
    Failed(HandlerErrorKind, String),
    /// It was stopped because its lease was lost.
    Lost,
}

/// What has happened so far; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) delivered: u64,
    pub(crate) handled: u64,
    pub(crate) failed: u64,
    pub(crate) retried: u64,
    pub(crate) dead: u64,
    pub(crate) expired: u64,
    pub(crate) stale: u64,
    pub(crate) returned: u64,
    pub(crate) circuit_opened: u64,
}

#[derive(Debug)]
enum Stage {
    /// In the queue, with what the handler will get.
    Queued(Box<Delivery>),
    /// Behind others of its key.
    Parked(Box<Delivery>),
    /// Its handler runs, since then and in that state of the circuit.
    Running { since: Instant, epoch: u32 },
    /// Its lease is lost, its handler has not ended yet.
    Doomed,
}

#[derive(Debug)]
struct Slot {
    lease: LeaseId,
    key: Option<Arc<str>>,
    bytes: usize,
    attempt: u32,
    first_delivered_at: Timestamp,
    event: u128,
    stage: Stage,
}

/// The state of one consumer.
#[derive(Debug)]
pub(crate) struct Core {
    rules: Rules,
    capabilities: Capabilities,
    slots: HashMap<SlotId, Slot>,
    next_slot: SlotId,
    ready: VecDeque<SlotId>,
    lanes: Lanes,
    running: usize,
    bytes: usize,
    bound: Bound,
    circuit: Circuit,
    probe: Option<SlotId>,
    paused_until: Option<Instant>,
    holds: Holds,
    verdicts: Verdicts,
    draining: bool,
    tally: Tally,
    rng: SmallRng,
}

impl Core {
    pub(crate) fn new(rules: Rules, capabilities: Capabilities, seed: u64) -> Self {
        Self {
            bound: Bound::new(rules.concurrency, rules.prefetch, rules.latency_target),
            circuit: Circuit::new(rules.circuit),
            holds: Holds::new(rules.leases, capabilities.extend),
            verdicts: Verdicts::new(rules.settle_after, rules.settle_batch),
            capabilities,
            rules,
            slots: HashMap::new(),
            next_slot: 1,
            ready: VecDeque::new(),
            lanes: Lanes::default(),
            running: 0,
            bytes: 0,
            probe: None,
            paused_until: None,
            draining: false,
            tally: Tally::default(),
            rng: SmallRng::seed_from_u64(seed),
        }
    }

    // ---- What to do ----

    /// How much to fetch now, if anything.
    pub(crate) fn fetch(&mut self, now: Instant) -> Option<Fetch> {
        if self.draining || self.is_paused(now) || self.verdicts.len() >= MAX_UNSETTLED {
            return None;
        }
        let bytes = self.rules.in_flight_bytes.saturating_sub(self.bytes);
        if bytes == 0 {
            return None;
        }
        match self.circuit.state(now) {
            State::Open(_) => return None,
            State::HalfOpen => {
                let free = self.probe.is_none() && self.ready.is_empty();
                return free.then_some(Fetch { max: 1, max_bytes: bytes });
            }
            State::Closed => {}
        }
        let ahead = self.bound.ahead();
        // A queue that is still half full keeps the handlers busy; waiting for it to drain makes
        // fetches few and large. Without a queue, every free slot is refilled at once.
        if ahead > 0 && self.ready.len() > ahead / 2 {
            return None;
        }
        let held = self.running + self.ready.len();
        let max = (self.rules.concurrency + ahead).saturating_sub(held);
        (max > 0).then_some(Fetch { max: max.min(carrick_store::log::MAX_BATCH), max_bytes: bytes })
    }

    /// Whether a handler may start now.
    pub(crate) fn may_begin(&mut self, now: Instant) -> bool {
        !self.ready.is_empty() && self.may_start(now)
    }

    /// The next handler to start, if one may start now.
    pub(crate) fn start(&mut self, now: Instant, wall: Timestamp) -> Option<Begin> {
        while self.may_start(now) {
            let slot = self.ready.pop_front()?;
            let held = self.slots.get_mut(&slot).expect("what is ready is held");
            let running = Stage::Running { since: now, epoch: self.circuit.epoch() };
            let Stage::Queued(delivery) = std::mem::replace(&mut held.stage, running) else {
                unreachable!("what is ready is queued")
            };
            self.running += 1;
            let expires_at = delivery.event.expires_at();
            if expires_at.is_some_and(|expires_at| expires_at <= wall) {
                self.end_unrun(slot, Verdict::Ack, Said::Expired);
                continue;
            }
            if delivery.attempt > self.rules.limits.max_attempts {
                let before = delivery.attempt - 1;
                let cause = format!("delivered {before} times, and never with a verdict");
                self.end_unrun(slot, aside(&cause), Said::Dead);
                continue;
            }
            if self.circuit.last_state() == State::HalfOpen {
                self.probe = Some(slot);
            }
            let mut deadline =
                (now + self.rules.handler_timeout).min(self.holds.longest(slot).unwrap_or(now));
            if let Some(expires_at) = expires_at {
                let left = Duration::try_from(expires_at.duration_since(wall)).unwrap_or_default();
                // An event that lives for ever would overflow the sum.
                deadline = deadline.min(now.checked_add(left).unwrap_or(deadline));
            }
            return Some(Begin { slot, delivery: *delivery, deadline });
        }
        None
    }

    /// The verdicts to send now; one batch is under way at a time.
    pub(crate) fn settle(&mut self, now: Instant) -> Option<Vec<(LeaseId, Verdict)>> {
        let idle = self.running == 0 && self.ready.is_empty();
        self.verdicts.take(now, idle || self.draining)
    }

    /// The leases to extend now; one batch is under way at a time.
    pub(crate) fn extend(&mut self, now: Instant) -> Option<Vec<Extension>> {
        let slots = &self.slots;
        self.holds.take(now, |slot| slots[&slot].lease.clone())
    }

    /// Lets time pass; returns the handlers to stop because their leases have run out.
    pub(crate) fn lapse(&mut self, now: Instant) -> Vec<SlotId> {
        self.circuit.state(now); // a cool-down may be over
        let lapsed = self.holds.lapsed(now);
        lapsed.into_iter().filter(|slot| self.lose(*slot)).collect()
    }

    /// When something is to be done even if nothing happens.
    pub(crate) fn next_wake(&self, now: Instant) -> Option<Instant> {
        let circuit = match self.circuit.last_state() {
            State::Open(until) => Some(until).filter(|until| *until > now),
            State::Closed | State::HalfOpen => None,
        };
        let paused = self.paused_until.filter(|until| *until > now);
        [circuit, paused, self.holds.next(), self.verdicts.next()].into_iter().flatten().min()
    }

    // ---- What happened ----

    /// Takes in what a fetch brought.
    pub(crate) fn delivered(&mut self, deliveries: Vec<Delivery>, now: Instant) {
        self.tally.delivered += deliveries.len() as u64;
        let mut surplus = Vec::new();
        for delivery in deliveries {
            let slot = self.hold(delivery, now);
            if self.draining || !self.circuit_takes(now) {
                surplus.push(slot);
                continue;
            }
            self.enter(slot, &mut surplus);
        }
        for slot in surplus.into_iter().rev() {
            let delay = self.return_delay(now);
            self.give_back(slot, delay);
        }
    }

    /// Takes in how a handler ended.
    pub(crate) fn ended(&mut self, slot: SlotId, ending: Ending, now: Instant, wall: Timestamp) {
        let was_probe = self.probe == Some(slot);
        if was_probe {
            self.probe = None;
        }
        let Some(held) = self.slots.get(&slot) else { return };
        let Stage::Running { since, epoch } = held.stage else {
            // Its lease was lost before it ended: whatever it did, the event is somebody else's.
            self.release(slot);
            return;
        };
        let event = held.event;
        match ending {
            Ending::Done => {
                self.bound.handled(now - since);
                self.circuit.record(now, epoch, event, None, &mut self.rng);
                self.say(slot, Verdict::Ack, Said::Handled);
                self.release(slot);
            }
            Ending::Lost => {
                self.lose(slot);
                self.release(slot);
            }
            Ending::Failed(kind, text) => {
                self.bound.handled(now - since);
                self.tally.failed += 1;
                let signature = circuit::signature(kind.code(), &text);
                let opened = self.circuit.record(now, epoch, event, Some(signature), &mut self.rng);
                let blame = match self.circuit.is_alike(signature) {
                    true if was_probe => Blame::EveryEventByProbe,
                    true => Blame::EveryEvent,
                    false => Blame::Event,
                };
                self.fail(slot, kind, &text, blame, wall);
                if let HandlerErrorKind::Overload { retry_after: Some(pause) } = kind {
                    let until = now + pause.min(MAX_PAUSE);
                    self.paused_until = self.paused_until.max(Some(until));
                }
                if opened {
                    self.tally.circuit_opened += 1;
                    self.return_queued(now);
                }
            }
        }
    }

    /// Takes in the broker's answer to a batch of verdicts; `None` if the call failed and is worth
    /// another try `after`.
    pub(crate) fn settled(
        &mut self,
        answer: Result<Vec<crate::broker::Verdicted>, Duration>,
        now: Instant,
    ) {
        self.verdicts.answered(answer, now, &mut self.tally);
    }

    /// Takes in the broker's answer to a batch of extensions sent at `sent`; returns the handlers
    /// to stop because their leases are lost.
    pub(crate) fn extended(
        &mut self,
        answer: Option<Vec<crate::broker::Verdicted>>,
        sent: Instant,
        now: Instant,
    ) -> Vec<SlotId> {
        let lost = self.holds.answered(answer, sent, now);
        lost.into_iter().filter(|slot| self.lose(*slot)).collect()
    }

    /// Stops consuming: what has not been started goes back at once.
    pub(crate) fn drain(&mut self, now: Instant) {
        self.draining = true;
        self.return_queued(now);
    }

    /// Gives back what still runs; its handlers have been stopped.
    pub(crate) fn give_up(&mut self, now: Instant) {
        self.drain(now);
        let mut running: Vec<SlotId> = self.slots.keys().copied().collect();
        running.sort_unstable_by(|a, b| b.cmp(a));
        for slot in running {
            if matches!(self.slots[&slot].stage, Stage::Running { .. }) {
                self.say_returned(slot, Duration::ZERO);
            }
            self.release(slot);
        }
    }

    // ---- How it stands ----

    /// Whether a drain has nothing left to do.
    pub(crate) fn is_drained(&self) -> bool {
        self.draining && self.slots.is_empty() && self.verdicts.is_empty()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining
    }

    pub(crate) fn is_circuit_closed(&self) -> bool {
        self.circuit.last_state() == State::Closed
    }

    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    pub(crate) fn running(&self) -> usize {
        self.running
    }

    pub(crate) fn queued(&self) -> usize {
        self.ready.len() + self.lanes.parked()
    }

    pub(crate) fn mean_handling(&self) -> Option<Duration> {
        self.bound.mean()
    }

    // ---- Steps ----

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    fn may_start(&mut self, now: Instant) -> bool {
        let room = self.running < self.rules.concurrency
            && self.verdicts.len() < MAX_UNSETTLED
            && !self.draining
            && !self.is_paused(now);
        room && match self.circuit.state(now) {
            State::Closed => true,
            State::HalfOpen => self.probe.is_none(),
            State::Open(_) => false,
        }
    }

    /// Whether the circuit takes one more event into the queue.
    fn circuit_takes(&mut self, now: Instant) -> bool {
        match self.circuit.state(now) {
            State::Closed => true,
            State::HalfOpen => self.probe.is_none() && self.ready.is_empty(),
            State::Open(_) => false,
        }
    }

    fn hold(&mut self, delivery: Delivery, now: Instant) -> SlotId {
        let slot = self.next_slot;
        self.next_slot += 1;
        let bytes = delivery.event.as_json().len();
        self.bytes += bytes;
        self.holds.add(slot, now, delivery.expires_at);
        let held = Slot {
            lease: delivery.lease.clone(),
            key: delivery.event.partition_key().map(|key| Arc::from(&*key)),
            bytes,
            attempt: delivery.attempt,
            first_delivered_at: delivery.first_delivered_at,
            event: delivery.event.dedupe_key(),
            stage: Stage::Queued(Box::new(delivery)),
        };
        self.slots.insert(slot, held);
        slot
    }

    /// Enters a held event into its lane or the queue; what has no place there is `surplus`.
    fn enter(&mut self, slot: SlotId, surplus: &mut Vec<SlotId>) {
        let Some(key) = self.slots[&slot].key.clone() else {
            self.ready.push_back(slot);
            return;
        };
        match self.lanes.enter(&key, slot) {
            Entered::Ready => self.ready.push_back(slot),
            Entered::Parked(behind) => {
                self.restage(slot, Stage::Parked);
                // A key that is stuck holds only so much here, and all of them together only as
                // much as a queue would; the broker keeps the rest until their heads are done.
                let too_many = self.lanes.parked() > self.rules.prefetch.max(self.rules.lane);
                if behind > self.rules.lane || too_many {
                    let last = self.lanes.pop_last(&key);
                    surplus.push(last.expect("this event was parked just now"));
                }
            }
        }
    }

    fn restage(&mut self, slot: SlotId, stage: impl FnOnce(Box<Delivery>) -> Stage) {
        let held = self.slots.get_mut(&slot).expect("only held events change their stage");
        let (Stage::Queued(delivery) | Stage::Parked(delivery)) =
            std::mem::replace(&mut held.stage, Stage::Doomed)
        else {
            unreachable!("only what waits changes where it waits")
        };
        held.stage = stage(delivery);
    }

    /// Ends an event that was about to run.
    fn end_unrun(&mut self, slot: SlotId, verdict: Verdict, said: Said) {
        if said == Said::Dead {
            self.return_followers(slot);
        }
        self.say(slot, verdict, said);
        self.release(slot);
    }

    fn fail(
        &mut self,
        slot: SlotId,
        kind: HandlerErrorKind,
        text: &str,
        blame: Blame,
        wall: Timestamp,
    ) {
        let Slot { attempt, first_delivered_at, .. } = self.slots[&slot];
        let failure = Failure { kind, text, attempt, first_delivered_at };
        let verdict = judge(failure, blame, &self.rules.limits, wall, &mut self.rng);
        let said = match verdict {
            Verdict::DeadLetter { .. } => Said::Dead,
            _ => Said::Retried,
        };
        self.return_followers(slot);
        self.say(slot, verdict, said);
        self.release(slot);
    }

    /// Gives back what is parked behind an event that ends unfinished, so that the key starts over
    /// with it. A broker that keeps order ends their leases with it anyway; saying so costs little
    /// and holds for those that a later call brought, too.
    fn return_followers(&mut self, slot: SlotId) {
        let Some(key) = self.slots[&slot].key.clone() else { return };
        let delay = if self.capabilities.order_per_key { Duration::ZERO } else { UNORDERED_PAUSE };
        for follower in self.lanes.clear(&key) {
            self.give_back(follower, delay);
        }
    }

    /// Takes an event's lease as lost; returns whether its handler must be stopped.
    fn lose(&mut self, slot: SlotId) -> bool {
        let Some(held) = self.slots.get_mut(&slot) else { return false };
        self.holds.remove(slot);
        let key = held.key.clone();
        match held.stage {
            Stage::Doomed => false,
            Stage::Running { .. } => {
                held.stage = Stage::Doomed;
                self.tally.stale += 1;
                // Its successor may run elsewhere only after it: the broker hands both out again.
                self.return_followers(slot);
                true
            }
            Stage::Queued(_) => {
                self.tally.stale += 1;
                self.return_followers(slot);
                self.ready.retain(|ready| *ready != slot);
                self.leave_lane(key);
                self.forget(slot);
                false
            }
            Stage::Parked(_) => {
                self.tally.stale += 1;
                let key = key.expect("only keyed events are parked");
                for behind in self.lanes.cut(&key, slot) {
                    if behind != slot {
                        self.give_back(behind, Duration::ZERO);
                    }
                }
                self.forget(slot);
                false
            }
        }
    }

    /// Gives back everything that has not been started, last first: to give back the head of a key
    /// first would end the later leases before their own turn.
    fn return_queued(&mut self, now: Instant) {
        let mut waiting: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, held)| matches!(held.stage, Stage::Queued(_) | Stage::Parked(_)))
            .map(|(slot, _)| *slot)
            .collect();
        waiting.sort_unstable_by(|a, b| b.cmp(a));
        let delay = self.return_delay(now);
        for slot in waiting {
            let key = self.slots[&slot].key.clone();
            match self.slots[&slot].stage {
                Stage::Parked(_) => {
                    let last = self.lanes.pop_last(&key.expect("only keyed events are parked"));
                    debug_assert_eq!(last, Some(slot), "lanes are in order of arrival");
                }
                _ => self.leave_lane(key),
            }
            self.give_back(slot, delay);
        }
        self.ready.clear();
    }

    /// How long what goes back should wait: until this consumer would take it again.
    fn return_delay(&mut self, now: Instant) -> Duration {
        match self.circuit.last_state() {
            State::Open(until) if !self.draining => until.saturating_duration_since(now),
            _ if !self.capabilities.order_per_key && !self.draining => UNORDERED_PAUSE,
            _ => Duration::ZERO,
        }
    }

    /// Gives back an event that is in no lane and no queue, uncounted.
    fn give_back(&mut self, slot: SlotId, delay: Duration) {
        self.say_returned(slot, delay);
        self.forget(slot);
    }

    fn say_returned(&mut self, slot: SlotId, delay: Duration) {
        self.say(slot, Verdict::Nack { delay, counted: false }, Said::Returned);
    }

    fn say(&mut self, slot: SlotId, verdict: Verdict, said: Said) {
        let lease = self.slots[&slot].lease.clone();
        // Without a hold its lease is lost already, and the broker need not hear of it.
        if let Some(expires_at) = self.holds.expires_at(slot) {
            self.verdicts.push(lease, verdict, said, expires_at);
        }
    }

    /// Ends a slot whose handler has ended: its key moves on.
    fn release(&mut self, slot: SlotId) {
        let key = self.slots[&slot].key.clone();
        self.running -= 1;
        self.leave_lane(key);
        self.forget(slot);
    }

    fn leave_lane(&mut self, key: Option<Arc<str>>) {
        if let Some(next) = key.and_then(|key| self.lanes.advance(&key)) {
            self.restage(next, Stage::Queued);
            self.ready.push_back(next);
        }
    }

    fn forget(&mut self, slot: SlotId) {
        self.holds.remove(slot);
        if let Some(held) = self.slots.remove(&slot) {
            self.bytes -= held.bytes;
        }
    }
}
