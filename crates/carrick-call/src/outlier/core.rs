//! Who is ejected, for how long, and how many may be.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

#[cfg(carrick_loom)]
use loom::sync::atomic::Ordering::Relaxed;
#[cfg(not(carrick_loom))]
use std::sync::atomic::Ordering::Relaxed;

use super::{
    Change, HostId, Kind, OutlierOptions, What,
    judge::{self, Judged},
    stats::Stats,
};

/// Whether one more of `hosts` may be ejected when `ejected` are already.
///
/// The share is that after the ejection. A rule that looks at the share before it takes two hosts of
/// three at 50 %.
pub fn may_eject(options: &OutlierOptions, hosts: usize, ejected: usize) -> bool {
    let after = ejected.saturating_add(1);
    let left = hosts.checked_sub(after);
    // The small addend makes 7 of 10 fit 0.7, which as a binary fraction is less.
    let within = after as f64 <= options.max_ejected * hosts as f64 + 1e-9;
    let lone = options.always_allow_one && ejected == 0;
    left.is_some_and(|left| left >= options.min_serving) && (within || lone)
}

/// Whether so few serve that ejections are to be ignored.
pub fn panics(options: &OutlierOptions, hosts: usize, ejected: usize) -> bool {
    let serving = hosts.saturating_sub(ejected);
    (serving as f64) + 1e-9 < options.panic_below * hosts as f64
}

/// The hosts, and who of them is out.
#[derive(Debug)]
pub(super) struct Fleet {
    /// As many as the caller adds; a balancer adds no more than its subset holds.
    members: Vec<Entry>,
    next_id: u64,
    ejected: usize,
    seed: u64,
}

#[derive(Debug)]
struct Entry {
    id: HostId,
    label: Arc<str>,
    stats: Arc<Stats>,
    /// Ejections in a row; falls by one at each sweep that finds the host serving.
    ejections: u32,
    until: Option<Instant>,
}

impl Fleet {
    pub(super) fn new(seed: u64) -> Self {
        Self { members: Vec::new(), next_id: 0, ejected: 0, seed }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn ejected(&self) -> usize {
        self.ejected
    }

    pub(super) fn add(&mut self, label: Arc<str>, stats: Arc<Stats>) -> HostId {
        let id = HostId(self.next_id);
        self.next_id += 1;
        self.members.push(Entry { id, label, stats, ejections: 0, until: None });
        id
    }

    /// Takes a host out of the membership, and brings back the least bad until the cap holds for
    /// those that are left.
    pub(super) fn remove(&mut self, options: &OutlierOptions, host: HostId) -> Vec<Change> {
        let Some(index) = self.members.iter().position(|entry| entry.id == host) else {
            return Vec::new();
        };
        let gone = self.members.swap_remove(index);
        self.ejected -= usize::from(gone.until.is_some());
        let mut changes = Vec::new();
        while self.ejected > 0 && !may_eject(options, self.members.len(), self.ejected - 1) {
            let out = self.members.iter_mut().filter(|entry| entry.until.is_some());
            let Some(least_bad) = out.min_by_key(|entry| (entry.ejections, entry.until)) else {
                break;
            };
            changes.push(least_bad.come_back(What::Spared));
            self.ejected -= 1;
        }
        changes
    }

    /// Ejects a host if it serves and the cap allows; `None` if it is out already or unknown.
    pub(super) fn eject(
        &mut self,
        options: &OutlierOptions,
        host: HostId,
        kind: Kind,
        now: Instant,
    ) -> Option<Change> {
        let allowed = may_eject(options, self.members.len(), self.ejected);
        let seed = self.seed;
        let entry = self.members.iter_mut().find(|entry| entry.id == host)?;
        if entry.until.is_some() {
            return None;
        }
        if !allowed {
            return Some(entry.change(What::Capped { kind }));
        }
        self.ejected += 1;
        Some(entry.go(options, kind, now, seed))
    }

    /// Brings back whose time is over, then judges the interval.
    pub(super) fn sweep(&mut self, options: &OutlierOptions, now: Instant) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut judged = Vec::with_capacity(self.members.len());
        for entry in &mut self.members {
            match entry.until {
                None => entry.ejections = entry.ejections.saturating_sub(1),
                Some(until) if until <= now => {
                    changes.push(entry.come_back(What::Returned));
                    self.ejected -= 1;
                }
                Some(_) => {}
            }
            let window = entry.stats.take();
            if entry.until.is_none() {
                let in_a_row = entry.stats.in_a_row(options);
                judged.push(Judged { host: entry.id, window, in_a_row });
            }
        }
        for (host, kind) in judge::worst_first(options, &judged) {
            changes.extend(self.eject(options, host, kind, now));
        }
        changes
    }
}

impl Entry {
    fn go(&mut self, options: &OutlierOptions, kind: Kind, now: Instant, seed: u64) -> Change {
        let lasts = |times| options.ejection_time.saturating_mul(times);
        // The count stops where the cap does, so that a host that got well is not held for hours.
        if self.ejections == 0 || lasts(self.ejections) < options.max_ejection_time {
            self.ejections = self.ejections.saturating_add(1);
        }
        let time = lasts(self.ejections).min(options.max_ejection_time);
        let time = time.saturating_add(time.mul_f64(options.jitter * self.spread(seed)));
        self.until = Some(now.checked_add(time).unwrap_or(now));
        self.stats.ejected.store(true, Relaxed);
        self.change(What::Ejected { kind, time })
    }

    fn come_back(&mut self, what: What) -> Change {
        self.until = None;
        self.stats.forget();
        self.stats.ejected.store(false, Relaxed);
        self.change(what)
    }

    fn change(&self, what: What) -> Change {
        Change { host: self.id, label: Arc::clone(&self.label), what }
    }

    /// A number in [0, 1) that differs by host, ejection and process, without a generator that
    /// every call would have to carry for it.
    fn spread(&self, seed: u64) -> f64 {
        let salt = (self.id.0 << 32) ^ u64::from(self.ejections);
        let mut mixed = seed ^ salt.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// How long until the next sweep, as nanoseconds since the detector's first moment.
pub(super) fn next_sweep(options: &OutlierOptions, elapsed: Duration) -> u64 {
    u64::try_from(elapsed.saturating_add(options.interval).as_nanos()).unwrap_or(u64::MAX)
}
