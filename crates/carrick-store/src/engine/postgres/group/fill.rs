//! Filling claims: what is read from the log, and how far ahead.

use std::{collections::VecDeque, num::NonZeroU64, sync::Arc};

use hashbrown::HashMap;

use super::{
    super::{
        count,
        log::{record, text},
        session::{Failure, Refusal},
    },
    Work,
};
use crate::{
    lease::{Claim, Claimed, Claims, LeaseToken, core::New},
    log::{MAX_BATCH, Record, Seq},
    micros,
};

/// Bytes of bodies read ahead for the claims of one transaction.
const AHEAD_BYTES: usize = 8 * 1024 * 1024;

/// Records read ahead in one statement at least: keys that are blocked take some of them.
const AHEAD_RECORDS: usize = 32;

/// Once a claim has something, it passes at most so many records of blocked keys, or as many as it
/// asked for, in search of more: each is one more to keep in memory and in the journal. A claim that
/// has nothing goes on to the end of the log, or to the bound on what may wait.
const PASSED: usize = 100;

/// Records of the log after the cursor, read for all claims of a transaction together.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    rows: VecDeque<(New, Option<Record>)>,
    /// The claims still to be filled want so many.
    records: usize,
    /// Whether something was read already: what comes after that is mostly for keys that are
    /// blocked, so it comes without bodies.
    again: bool,
    /// There is no more in the log.
    at_end: bool,
}

impl Ahead {
    pub(super) fn for_claims(claims: impl Iterator<Item = Claim>) -> Self {
        Self { records: claims.map(|claim| claim.records).sum(), ..Self::default() }
    }
}

/// Number, stored at, key, body, due, expires, size, and the last number in the log.
type Row = (i64, i64, Option<Vec<u8>>, Option<Vec<u8>>, Option<i64>, Option<i64>, i32, i64);

impl Work<'_> {
    pub(super) async fn claim(&mut self, claim: Claim) -> Result<Claims, Failure> {
        let mut filling = self.state.claim(claim.records, claim.bytes, micros::of(claim.lease));
        let mut records: HashMap<Seq, Record> = HashMap::new();
        let passes = claim.records.max(PASSED);
        let mut passed = 0;
        while filling.room().0 > 0
            && self.state.looks_further()
            && (passed < passes || filling.taken.is_empty())
        {
            if self.ahead.rows.is_empty() && !self.read_ahead(filling.room().1).await? {
                break;
            }
            let Some((new, _)) = self.ahead.rows.front() else { break };
            let seq = new.seq;
            if !self.state.offer(new.clone(), &mut filling) {
                break;
            }
            let record = self.ahead.rows.pop_front().and_then(|(_, record)| record);
            if filling.taken.last() != Some(&seq) {
                passed += 1;
            } else if let Some(record) = record {
                records.insert(seq, record);
            }
        }
        self.ahead.records = self.ahead.records.saturating_sub(claim.records);
        self.fetch(&filling.taken, &mut records).await?;
        filling.taken.retain(|seq| {
            let there = records.contains_key(seq);
            if !there {
                // Somebody removed it by hand. Without it the group would stand still for ever.
                metrics::counter!("carrick_store_lost_records_total").increment(1);
                tracing::error!(
                    stream = %self.group.stream, group = %self.group.group, seq,
                    "a waiting record is not in the log any more: skipped"
                );
                self.state.lost(*seq);
            }
            there
        });

        let group = NonZeroU64::new(self.group.id.cast_unsigned())
            .ok_or(Refusal::Corrupt("a group without a number"))?;
        // Ascending by number, and so within each key.
        filling.taken.sort_unstable();
        let claimed = filling
            .taken
            .iter()
            .filter_map(|seq| Some((records.remove(seq)?, self.state.items().get(seq)?)))
            .map(|(record, item)| Claimed {
                token: LeaseToken { group, seq: record.seq, fence: filling.fence },
                attempt: item.attempt,
                first_claimed_at: micros::time(item.first_claimed),
                record,
            })
            .collect();
        // A claim that stopped half-way, with something in hand, left more to look at.
        let more = filling.room().0 > 0
            && self.state.looks_further()
            && !(self.ahead.at_end && self.ahead.rows.is_empty());
        let now = || self.state.now();
        let next_ready = more.then(now).or_else(|| self.state.next_ready(&filling));
        let next_ready = next_ready.map(micros::time);
        Ok(Claims { claimed, expired: filling.expired, next_ready })
    }

    /// Reads those of these records that are not there yet.
    async fn fetch(
        &mut self,
        seqs: &[Seq],
        records: &mut HashMap<Seq, Record>,
    ) -> Result<(), Failure> {
        let missing: Vec<i64> = seqs
            .iter()
            .filter(|seq| !records.contains_key(*seq))
            .map(|seq| seq.cast_signed())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let rows = self
            .db
            .query_as(
                "SELECT seq, stored_at, key, body FROM carrick_log
                 WHERE stream_id = $1 AND seq = ANY ($2)",
            )
            .bind(self.group.stream_id)
            .bind(missing)
            .fetch_all(self.tx.conn())
            .await?;
        records.extend(rows.into_iter().map(|row| {
            let record = record(row);
            (record.seq, record)
        }));
        Ok(())
    }

    /// Reads the next records of the log, for a claim that still takes so many bytes; `false` if
    /// there are none.
    async fn read_ahead(&mut self, bytes: usize) -> Result<bool, Failure> {
        if self.ahead.at_end {
            return Ok(false);
        }
        let bodies = !self.ahead.again;
        let records =
            if bodies { self.ahead.records.clamp(AHEAD_RECORDS, MAX_BATCH) } else { MAX_BATCH };
        // The other claims of the transaction want bodies too, so what is read is more than this
        // one takes, and never nothing.
        let bytes = if bodies { bytes.clamp(AHEAD_BYTES / 8, AHEAD_BYTES) } else { usize::MAX };
        let rows: Vec<Row> = self
            .db
            .query_as(
                "SELECT seq, stored_at, key, CASE WHEN $5 THEN body END, due, expires, size, last
                 FROM (
                     SELECT next.*, sum(size) OVER (ORDER BY seq) - size AS before FROM (
                         SELECT seq, stored_at, key, body, due, expires,
                             octet_length(body) AS size
                         FROM carrick_log
                         WHERE stream_id = $1 AND seq > $2 ORDER BY seq LIMIT $3
                     ) AS next
                 ) AS sized CROSS JOIN (
                     SELECT seq AS last FROM carrick_log
                     WHERE stream_id = $1 ORDER BY seq DESC LIMIT 1
                 ) AS newest
                 WHERE before = 0 OR before + size <= $4
                 ORDER BY seq",
            )
            .bind(self.group.stream_id)
            .bind(self.state.cursor().cast_signed())
            .bind(count(records))
            .bind(count(bytes))
            .bind(bodies)
            .fetch_all(self.tx.conn())
            .await?;
        self.ahead.again = true;
        for (seq, stored_at, key, body, due, expires, size, last) in rows {
            self.ahead.at_end = seq == last;
            let new = New {
                seq: seq.cast_unsigned(),
                key: key.as_ref().map(|key| Arc::from(text(key.clone()))),
                due,
                expires,
                stored: stored_at,
                size: u32::try_from(size).unwrap_or(0),
            };
            let record = body.map(|body| record((seq, stored_at, key, body)));
            self.ahead.rows.push_back((new, record));
        }
        let any = !self.ahead.rows.is_empty();
        self.ahead.at_end |= !any;
        Ok(any)
    }
}
