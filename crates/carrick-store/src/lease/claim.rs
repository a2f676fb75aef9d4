//! Filling a claim from wherever an engine keeps its records.

use std::{num::NonZeroU64, sync::Arc};

use super::{
    Claim, Claimed, Claims, LeaseToken, Select,
    core::{Micros, New, State},
};
use crate::{
    log::{MAX_BATCH, Record, Seq},
    micros,
};

/// A record with what decides about its delivery.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) record: Record,
    pub(crate) due: Option<Micros>,
    pub(crate) expires: Option<Micros>,
}

impl Stored {
    pub(crate) fn to_new(&self) -> New {
        let Self { record, due, expires } = self;
        New {
            seq: record.seq,
            key: record.key.as_deref().map(Arc::from),
            due: *due,
            expires: *expires,
            stored: record.stored_at.as_microsecond(),
            size: u32::try_from(record.body.len()).unwrap_or(u32::MAX),
        }
    }
}

/// One stream's records.
pub(crate) trait Shelf {
    /// What reading can fail with.
    type Error;

    /// A record by its number.
    fn record(&mut self, seq: Seq) -> Result<Option<Record>, Self::Error>;

    /// Calls back for the records after `seq`, ascending, until it says stop or `limit` were shown.
    fn after(
        &mut self,
        seq: Seq,
        limit: usize,
        each: &mut dyn FnMut(Stored) -> bool,
    ) -> Result<(), Self::Error>;
}

/// Claims what is ready: first what was looked at before, then what follows in the log.
pub(crate) fn claim<S: Shelf>(
    state: &mut State,
    shelf: &mut S,
    group: NonZeroU64,
    claim: Claim,
) -> Result<Claims, S::Error> {
    let mut filling = state.claim(claim.records, claim.bytes, micros::of(claim.lease));
    let mut records = Vec::with_capacity(claim.records.min(MAX_BATCH));
    for seq in filling.taken.clone() {
        match shelf.record(seq)? {
            Some(record) => records.push(record),
            None => {
                // Somebody removed it by hand. Without it the group would stand still for ever.
                metrics::counter!("carrick_store_lost_records_total").increment(1);
                tracing::error!(group, seq, "a waiting record is not in the log any more: skipped");
                filling.taken.retain(|taken| *taken != seq);
                state.lost(seq);
            }
        }
    }
    // Records that wait behind their key pass by without filling the claim: each round looks at a
    // bounded number, and the state's own bound ends the rounds.
    let mut at_end = false;
    while !at_end && filling.room().0 > 0 && state.looks_further() {
        let (from, want) = (state.cursor(), filling.room().0.min(MAX_BATCH));
        let mut seen = 0;
        shelf.after(from, want, &mut |stored| {
            seen += 1;
            let before = filling.taken.len();
            let looked_at = state.offer(stored.to_new(), &mut filling);
            if filling.taken.len() > before {
                records.push(stored.record);
            }
            looked_at && state.looks_further()
        })?;
        at_end = seen < want || state.cursor() == from;
    }
    records.sort_unstable_by_key(|record| record.seq);
    let claimed = records.into_iter().map(|record| {
        let item = &state.items()[&record.seq];
        Claimed {
            token: LeaseToken { group, seq: record.seq, fence: filling.fence },
            attempt: item.attempt,
            first_claimed_at: micros::time(item.first_claimed),
            record,
        }
    });
    Ok(Claims {
        claimed: claimed.collect(),
        expired: filling.expired,
        next_ready: state.next_ready(&filling).map(micros::time),
    })
}

impl Select {
    /// Whether an action is for a dead letter, or for a waiting head, whose cause is the empty text.
    pub fn takes(&self, seq: Seq, key: Option<&str>, cause: &str) -> bool {
        match self {
            Self::Seqs(seqs) => seqs.contains(&seq),
            Self::Key(wanted) => key == Some(wanted),
            Self::Cause(part) => cause.contains(part.as_str()),
            Self::All => true,
        }
    }
}
