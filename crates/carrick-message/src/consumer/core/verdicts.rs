//! Verdicts on their way to the broker: gathered for a moment, sent in batches, kept until they
//! are answered or pointless.

use std::time::Duration;

use tokio::time::Instant;

use super::Tally;
use crate::broker::{LeaseId, Verdict, Verdicted};

/// What a verdict says of its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// It was handled.
    Handled,
    /// It failed, and is tried again.
    Retried,
    /// It was put aside.
    Dead,
    /// It had expired.
    Expired,
    /// It goes back untried.
    Returned,
}

#[derive(Clone, Debug)]
struct Pending {
    lease: LeaseId,
    verdict: Verdict,
    said: Said,
    /// From then on the broker would answer "stale".
    expires_at: Instant,
}

/// Verdicts that the broker has not answered. Bounded by the core, which starts nothing new while
/// too many wait.
#[derive(Debug)]
pub(super) struct Verdicts {
    after: Duration,
    batch: usize,
    pending: Vec<Pending>,
    oldest: Option<Instant>,
    out: Vec<Pending>,
    not_before: Option<Instant>,
}

impl Verdicts {
    pub(super) fn new(after: Duration, batch: usize) -> Self {
        Self { after, batch, pending: Vec::new(), oldest: None, out: Vec::new(), not_before: None }
    }

    pub(super) fn push(
        &mut self,
        lease: LeaseId,
        verdict: Verdict,
        said: Said,
        expires_at: Instant,
    ) {
        self.pending.push(Pending { lease, verdict, said, expires_at });
    }

    pub(super) fn len(&self) -> usize {
        self.pending.len() + self.out.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// When a batch is due; `None` while one is under way or nothing waits.
    pub(super) fn next(&self) -> Option<Instant> {
        if !self.out.is_empty() {
            return None;
        }
        let due = self.oldest? + self.after;
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }

    /// Takes a batch if it is full or its first verdict has waited; at once if `hurry`.
    pub(super) fn take(&mut self, now: Instant, hurry: bool) -> Option<Vec<(LeaseId, Verdict)>> {
        if !self.out.is_empty() || self.pending.is_empty() {
            return None;
        }
        let oldest = *self.oldest.get_or_insert(now);
        let held_off = self.not_before.is_some_and(|not_before| now < not_before);
        let due = hurry || self.pending.len() >= self.batch || now >= oldest + self.after;
        if held_off || !due {
            return None;
        }
        let count = self.pending.len().min(carrick_store::log::MAX_BATCH);
        self.out = self.pending.drain(..count).collect();
        self.oldest = (!self.pending.is_empty()).then_some(now);
        self.not_before = None;
        Some(self.out.iter().map(|one| (one.lease.clone(), one.verdict.clone())).collect())
    }

    /// Takes in the answer to the batch under way. After a failed call what is still worth it is
    /// sent again, not before the time given.
    pub(super) fn answered(
        &mut self,
        answer: Result<Vec<Verdicted>, Duration>,
        now: Instant,
        tally: &mut Tally,
    ) {
        let out = std::mem::take(&mut self.out);
        match answer {
            Ok(answers) => {
                for (place, pending) in out.iter().enumerate() {
                    match answers.get(place) {
                        Some(Verdicted::Done) => count(pending.said, tally),
                        // Given back what was taken already: as if it had never been here.
                        _ if pending.said == Said::Returned => tally.returned += 1,
                        _ => tally.stale += 1,
                    }
                }
            }
            Err(after) => {
                self.not_before = Some(now + after);
                self.oldest = Some(now);
                let (keep, drop): (Vec<_>, Vec<_>) =
                    out.into_iter().partition(|one| one.expires_at > now);
                tally.stale += drop.len() as u64;
                self.pending.splice(0..0, keep);
                if self.pending.is_empty() {
                    self.oldest = None;
                }
            }
        }
    }
}

fn count(said: Said, tally: &mut Tally) {
    let counter = match said {
        Said::Handled => &mut tally.handled,
        Said::Retried => &mut tally.retried,
        Said::Dead => &mut tally.dead,
        Said::Expired => &mut tally.expired,
        Said::Returned => &mut tally.returned,
    };
    *counter += 1;
}
