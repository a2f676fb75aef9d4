//! Checks of arguments, the same in every engine.

use std::time::Duration;

use crate::{
    StoreError,
    lease::{Claim, LeaseToken, Settle},
    log::{MAX_BATCH, MAX_BODY, NewRecord, ReadLimit},
    once::OnceKey,
};

fn check(
    holds: bool,
    what: &'static str,
    range: &'static str,
    value: impl ToString,
) -> Result<(), StoreError> {
    if holds {
        return Ok(());
    }
    Err(StoreError::Invalid { what, range, value: value.to_string() })
}

pub(crate) fn append(records: &[NewRecord]) -> Result<(), StoreError> {
    check(records.len() <= MAX_BATCH, "records", "at most 1000", records.len())?;
    let largest = records.iter().map(|record| record.body.len()).max().unwrap_or(0);
    check(largest <= MAX_BODY, "body", "at most 1114112 bytes", largest)
}

pub(crate) fn read(limit: ReadLimit) -> Result<(), StoreError> {
    check((1..=MAX_BATCH).contains(&limit.records), "records", "1 to 1000", limit.records)
}

pub(crate) fn claim(claim: Claim) -> Result<(), StoreError> {
    check((1..=MAX_BATCH).contains(&claim.records), "records", "1 to 1000", claim.records)?;
    lease(claim.lease)
}

fn lease(lease: Duration) -> Result<(), StoreError> {
    let allowed = Duration::from_secs(1)..=Duration::from_secs(12 * 3600);
    check(allowed.contains(&lease), "lease", "1 s to 12 h", format!("{lease:?}"))
}

pub(crate) fn settle(settlements: &[(LeaseToken, Settle)]) -> Result<(), StoreError> {
    check(settlements.len() <= MAX_BATCH, "settlements", "at most 1000", settlements.len())?;
    for (_, settle) in settlements {
        match settle {
            Settle::Ack | Settle::Bury { .. } => {}
            Settle::Extend { lease: extended } => lease(*extended)?,
            Settle::Release { delay, .. } => {
                let month = Duration::from_secs(30 * 86_400);
                check(*delay <= month, "delay", "at most 30 days", format!("{delay:?}"))?;
            }
        }
    }
    Ok(())
}

pub(crate) fn once(key: &OnceKey) -> Result<(), StoreError> {
    check((1..=200).contains(&key.scope.len()), "scope", "1 to 200 bytes", key.scope.len())?;
    check((1..=200).contains(&key.key.len()), "key", "1 to 200 bytes", key.key.len())
}

pub(crate) fn lease_name(name: &str) -> Result<(), StoreError> {
    let fits = (1..=200).contains(&name.len()) && !name.contains('\0');
    check(fits, "lease name", "1 to 200 bytes without NUL", name.len())
}
