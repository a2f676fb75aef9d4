//! The leases that are held, and when each of them wants something.
//!
//! A lease is extended when a third of it is over, to "now + lease", so that two extensions may
//! fail before it is lost. All that are due soon go in one call. An overall cap ends a hold that
//! would otherwise be extended for ever; a lease that was not extended in time is lost here before
//! it is lost at the broker, because it is counted from before the call that granted it.

use std::time::Duration;

use hashbrown::HashMap;
use tokio::time::Instant;

use super::SlotId;
use crate::broker::{LeaseId, MIN_LEASE, Verdicted};

/// How leases are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseRules {
    /// How long a lease holds.
    pub(crate) lease: Duration,
    /// How long an event is held in all.
    pub(crate) cap: Duration,
}

/// An extension to ask for.
#[derive(Clone, Debug)]
pub(crate) struct Extension {
    pub(crate) lease_id: LeaseId,
    pub(crate) lease: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    expires_at: Instant,
    /// `None` when it is extended no more.
    extend_at: Option<Instant>,
    cap_at: Instant,
}

/// All holds of one consumer.
///
/// The two instants beside the map are lower bounds of what is in it: they let a busy consumer pass
/// by without a walk, since most events end long before a third of their lease is over.
#[derive(Debug)]
pub(super) struct Holds {
    rules: LeaseRules,
    extends: bool,
    holds: HashMap<SlotId, Hold>,
    extend_from: Option<Instant>,
    lapse_from: Option<Instant>,
    out: Option<Vec<(SlotId, Duration)>>,
}

fn earlier(known: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (known, other) {
        (Some(known), Some(other)) => Some(known.min(other)),
        (known, other) => known.or(other),
    }
}

impl Holds {
    pub(super) fn new(rules: LeaseRules, extends: bool) -> Self {
        Self {
            rules,
            extends,
            holds: HashMap::new(),
            extend_from: None,
            lapse_from: None,
            out: None,
        }
    }

    pub(super) fn add(&mut self, slot: SlotId, now: Instant, expires_at: Instant) {
        let extend_at = self.extends.then(|| expires_at - self.rules.lease * 2 / 3);
        let hold = Hold { expires_at, extend_at, cap_at: now + self.rules.cap };
        self.extend_from = earlier(self.extend_from, extend_at);
        self.lapse_from = earlier(self.lapse_from, Some(expires_at));
        self.holds.insert(slot, hold);
    }

    pub(super) fn remove(&mut self, slot: SlotId) {
        self.holds.remove(&slot);
        if self.holds.is_empty() {
            (self.extend_from, self.lapse_from) = (None, None);
        }
    }

    /// When a lease ends, if it is held.
    pub(super) fn expires_at(&self, slot: SlotId) -> Option<Instant> {
        self.holds.get(&slot).map(|hold| hold.expires_at)
    }

    /// Until when a hold can last at most.
    pub(super) fn longest(&self, slot: SlotId) -> Option<Instant> {
        let hold = self.holds.get(&slot)?;
        Some(if self.extends { hold.cap_at } else { hold.expires_at })
    }

    /// When something is due, if nothing else happens.
    pub(super) fn next(&self) -> Option<Instant> {
        let extend = self.extend_from.filter(|_| self.out.is_none());
        earlier(extend, self.lapse_from)
    }

    /// Takes the leases whose extension is due or soon will be.
    pub(super) fn take(
        &mut self,
        now: Instant,
        lease_of: impl Fn(SlotId) -> LeaseId,
    ) -> Option<Vec<Extension>> {
        if self.out.is_some() || self.extend_from.is_none_or(|from| now < from) {
            return None;
        }
        let soon = now + self.rules.lease / 12;
        let mut out = Vec::new();
        let mut extensions = Vec::new();
        self.extend_from = None;
        for (slot, hold) in &mut self.holds {
            let Some(extend_at) = hold.extend_at else { continue };
            if extend_at > soon {
                self.extend_from = earlier(self.extend_from, Some(extend_at));
                continue;
            }
            let lease = self.rules.lease.min(hold.cap_at.saturating_duration_since(now));
            // At the cap the lease is left to run out, and what it covers is stopped then; an
            // extension that gains next to nothing is not worth its call.
            if lease < MIN_LEASE || now + lease <= hold.expires_at + self.rules.lease / 12 {
                hold.extend_at = None;
                continue;
            }
            if extensions.len() == carrick_store::log::MAX_BATCH {
                self.extend_from = Some(now);
                continue;
            }
            out.push((*slot, lease));
            extensions.push(Extension { lease_id: lease_of(*slot), lease });
        }
        if out.is_empty() {
            return None;
        }
        self.out = Some(out);
        Some(extensions)
    }

    /// Takes in the answer to what was taken and sent at `sent`; returns whose leases are lost.
    pub(super) fn answered(
        &mut self,
        answer: Option<Vec<Verdicted>>,
        sent: Instant,
        now: Instant,
    ) -> Vec<SlotId> {
        let out = self.out.take().unwrap_or_default();
        let mut lost = Vec::new();
        for (place, (slot, lease)) in out.into_iter().enumerate() {
            let Some(hold) = self.holds.get_mut(&slot) else { continue };
            match answer.as_ref().and_then(|answers| answers.get(place)) {
                Some(Verdicted::Done) => {
                    hold.expires_at = sent + lease;
                    hold.extend_at = Some(sent + self.rules.lease / 3);
                }
                Some(Verdicted::Stale) => lost.push(slot),
                // The call failed: again soon, as often as fits into what is left.
                None => hold.extend_at = Some(now + self.rules.lease / 15),
            }
            self.extend_from = earlier(self.extend_from, hold.extend_at);
        }
        lost
    }

    /// The holds that have ended.
    pub(super) fn lapsed(&mut self, now: Instant) -> Vec<SlotId> {
        if self.lapse_from.is_none_or(|from| now < from) {
            return Vec::new();
        }
        let mut lapsed = Vec::new();
        self.lapse_from = None;
        for (slot, hold) in &self.holds {
            if hold.expires_at <= now {
                lapsed.push(*slot);
            } else {
                self.lapse_from = earlier(self.lapse_from, Some(hold.expires_at));
            }
        }
        lapsed.sort_unstable();
        lapsed
    }
}
