//! Which lane goes next, by topic: in turn, in batches that shrink while a topic refuses.
//!
//! A broker refuses a batch as a whole, and may not say which event it could not take. So a batch
//! that failed is followed by one of half its size: a bad event ends up alone, is put aside with
//! its key, and the batches grow again. While the broker cannot be reached at all the same rule
//! sends one event at a time, with a pause between that grows.

use std::{collections::VecDeque, time::Duration};

use carrick_core::{backoff::Backoff, name::Topic};
use hashbrown::HashMap;
use rand::Rng;
use tokio::time::Instant;

use super::Key;

#[derive(Debug)]
struct Flow {
    ready: VecDeque<Key>,
    in_flight: usize,
    size: usize,
    failures: u32,
    paused: Option<Instant>,
    in_rota: bool,
}

/// The topics that have rows to publish, or failed lately.
#[derive(Debug)]
pub(crate) struct Topics {
    flows: HashMap<Topic, Flow>,
    rota: VecDeque<Topic>,
    full: usize,
    outage: Backoff,
}

/// A topic whose turn it is.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) topic: Topic,
    pub(crate) size: usize,
}

impl Topics {
    pub(crate) fn new(full: usize, outage: Backoff) -> Self {
        Self { flows: HashMap::new(), rota: VecDeque::new(), full, outage }
    }

    /// Puts a lane at the end of its topic's queue.
    pub(crate) fn push(&mut self, topic: &Topic, lane: Key) {
        let full = self.full;
        let flow = self.flows.entry(topic.clone()).or_insert_with(|| Flow {
            ready: VecDeque::new(),
            in_flight: 0,
            size: full,
            failures: 0,
            paused: None,
            in_rota: false,
        });
        flow.ready.push_back(lane);
        if !flow.in_rota {
            flow.in_rota = true;
            self.rota.push_back(topic.clone());
        }
    }

    /// The next topic in turn that may publish now.
    pub(crate) fn turn(&mut self, now: Instant) -> Option<Turn> {
        for _ in 0..self.rota.len() {
            let topic = self.rota.pop_front()?;
            let Some(flow) = self.flows.get_mut(&topic) else { continue };
            if flow.ready.is_empty() {
                flow.in_rota = false;
                self.forget_if_idle(&topic, now);
                continue;
            }
            let paused = flow.paused.is_some_and(|until| until > now);
            // After a failure one batch at a time tries, not a whole window of them.
            let probing = flow.failures > 0 && flow.in_flight > 0;
            let size = flow.size;
            self.rota.push_back(topic.clone());
            if !paused && !probing {
                return Some(Turn { topic, size });
            }
        }
        None
    }

    pub(crate) fn pop(&mut self, topic: &Topic) -> Option<Key> {
        self.flows.get_mut(topic)?.ready.pop_front()
    }

    pub(crate) fn push_front(&mut self, topic: &Topic, lane: Key) {
        if let Some(flow) = self.flows.get_mut(topic) {
            flow.ready.push_front(lane);
        }
    }

    pub(crate) fn sent(&mut self, topic: &Topic) {
        if let Some(flow) = self.flows.get_mut(topic) {
            flow.in_flight += 1;
        }
    }

    pub(crate) fn accepted(&mut self, topic: &Topic, now: Instant) {
        let full = self.full;
        if let Some(flow) = self.flows.get_mut(topic) {
            flow.in_flight -= 1;
            flow.size = (flow.size * 2).min(full);
            flow.failures = 0;
            flow.paused = None;
        }
        self.forget_if_idle(topic, now);
    }

    /// A batch of `rows` was refused; `shrink` unless its size has nothing to do with it, and
    /// `pause` at least so long if the broker may take it later.
    pub(crate) fn refused(
        &mut self,
        topic: &Topic,
        rows: usize,
        shrink: bool,
        pause: Option<Duration>,
        now: Instant,
        rng: &mut impl Rng,
    ) {
        let Some(flow) = self.flows.get_mut(topic) else { return };
        flow.in_flight -= 1;
        if shrink {
            flow.size = flow.size.min((rows / 2).max(1));
        }
        let Some(pause) = pause else { return };
        if flow.paused.is_some_and(|until| until > now) {
            return; // others of the same window failed already
        }
        let delay = self.outage.delay(flow.failures, rng);
        flow.failures = flow.failures.saturating_add(1);
        flow.paused = Some(now + delay.max(pause));
    }

    /// The earliest end of a pause of a topic that has something to publish.
    pub(crate) fn next_end_of_pause(&self, now: Instant) -> Option<Instant> {
        let waiting = self.flows.values().filter(|flow| !flow.ready.is_empty());
        waiting.filter_map(|flow| flow.paused).filter(|until| *until > now).min()
    }

    fn forget_if_idle(&mut self, topic: &Topic, now: Instant) {
        let idle = self.flows.get(topic).is_some_and(|flow| {
            let paused = flow.paused.is_some_and(|until| until > now);
            flow.ready.is_empty() && flow.in_flight == 0 && !flow.in_rota && !paused
        });
        // A topic with a history is remembered as long as there are few of them.
        let plain = self.flows.get(topic).is_some_and(|flow| flow.size == self.full);
        if idle && (plain || self.flows.len() > MAX_REMEMBERED) {
            self.flows.remove(topic);
        }
    }
}

/// Topics that failed lately and have nothing to publish: each costs a few hundred bytes.
const MAX_REMEMBERED: usize = 1024;
