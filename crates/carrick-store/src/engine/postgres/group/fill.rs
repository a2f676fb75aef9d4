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

/// Bytes read ahead for the claims of one transaction.
const AHEAD_BYTES: usize = 8 * 1024 * 1024;

/// Records read ahead in one statement at least: keys that are blocked take some of them.
const AHEAD_RECORDS: usize = 32;

/// Records of the log after the cursor, read for all claims of a transaction together.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    rows: VecDeque<(New, Record)>,
    /// The claims still to be filled want so many.
    records: usize,
    bytes: usize,
    /// There is no more in the log.
    at_end: bool,
}

impl Ahead {
    pub(super) fn for_claims(claims: impl Iterator<Item = Claim>) -> Self {
        let mut ahead = Self::default();
        for claim in claims {
            ahead.records = ahead.records.saturating_add(claim.records);
            ahead.bytes = ahead.bytes.saturating_add(claim.bytes);
        }
        ahead
    }
}

type Row = (i64, i64, Option<Vec<u8>>, Vec<u8>, Option<i64>, Option<i64>, i64);

impl Work<'_> {
    pub(super) async fn claim(&mut self, claim: Claim) -> Result<Claims, Failure> {
        let lease = micros::of(claim.lease);
        let mut filling = self.state.claim(claim.records, claim.bytes, lease);
        let mut bodies = self.fetch(&filling.taken).await?;
        filling.taken.retain(|&seq| {
            let there = bodies.contains_key(&seq);
            if !there {
                // Somebody removed it by hand. Without it the group would stand still for ever.
                metrics::counter!("carrick_store_lost_records_total").increment(1);
                tracing::error!(
                    stream = %self.group.stream, group = %self.group.group, seq,
                    "a waiting record is not in the log any more: skipped"
                );
                self.state.lost(seq);
            }
            there
        });

        while filling.room().0 > 0 && self.state.looks_further() {
            if self.ahead.rows.is_empty() && !self.read_ahead().await? {
                break;
            }
            let Some((new, record)) = self.ahead.rows.front() else { break };
            if !self.state.offer(new.clone(), &mut filling) {
                break;
            }
            if filling.taken.last() == Some(&record.seq) {
                bodies.insert(record.seq, record.clone());
            }
            self.ahead.rows.pop_front();
        }
        self.ahead.records = self.ahead.records.saturating_sub(claim.records);
        self.ahead.bytes = self.ahead.bytes.saturating_sub(claim.bytes);

        let group = NonZeroU64::new(self.group.id.cast_unsigned())
            .ok_or(Refusal::Corrupt("a group without a number"))?;
        // Ascending by number, and so within each key.
        filling.taken.sort_unstable();
        let claimed = filling
            .taken
            .iter()
            .filter_map(|seq| Some((bodies.remove(seq)?, self.state.items().get(seq)?)))
            .map(|(record, item)| Claimed {
                token: LeaseToken { group, seq: record.seq, fence: filling.fence },
                attempt: item.attempt,
                first_claimed_at: micros::time(item.first_claimed),
                record,
            })
            .collect();
        let next_ready = self.state.next_ready(&filling).map(micros::time);
        Ok(Claims { claimed, expired: filling.expired, next_ready })
    }

    /// Reads records by their numbers.
    async fn fetch(&mut self, seqs: &[Seq]) -> Result<HashMap<Seq, Record>, Failure> {
        if seqs.is_empty() {
            return Ok(HashMap::new());
        }
        let seqs: Vec<i64> = seqs.iter().map(|seq| seq.cast_signed()).collect();
        let rows = self
            .db
            .query_as(
                "SELECT seq, stored_at, key, body FROM carrick_log
                 WHERE stream_id = $1 AND seq = ANY ($2)",
            )
            .bind(self.group.stream_id)
            .bind(seqs)
            .fetch_all(self.tx.conn())
            .await?;
        let by_seq = |row| {
            let record = record(row);
            (record.seq, record)
        };
        Ok(rows.into_iter().map(by_seq).collect())
    }

    /// Reads the next records of the log; `false` if there are none.
    async fn read_ahead(&mut self) -> Result<bool, Failure> {
        if self.ahead.at_end {
            return Ok(false);
        }
        let records = self.ahead.records.clamp(AHEAD_RECORDS, MAX_BATCH);
        let rows: Vec<Row> = self
            .db
            .query_as(
                "SELECT seq, stored_at, key, body, due, expires, last FROM (
                     SELECT next.*,
                         sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS before
                     FROM (
                         SELECT seq, stored_at, key, body, due, expires FROM carrick_log
                         WHERE stream_id = $1 AND seq > $2 ORDER BY seq LIMIT $3
                     ) AS next
                 ) AS sized CROSS JOIN (
                     SELECT seq AS last FROM carrick_log
                     WHERE stream_id = $1 ORDER BY seq DESC LIMIT 1
                 ) AS newest
                 WHERE before = 0 OR before + octet_length(body) <= $4
                 ORDER BY seq",
            )
            .bind(self.group.stream_id)
            .bind(self.state.cursor().cast_signed())
            .bind(count(records))
            .bind(count(self.ahead.bytes.min(AHEAD_BYTES)))
            .fetch_all(self.tx.conn())
            .await?;
        for (seq, stored_at, key, body, due, expires, last) in rows {
            self.ahead.at_end = seq == last;
            let new = New {
                seq: seq.cast_unsigned(),
                key: key.as_ref().map(|key| Arc::from(text(key.clone()))),
                due,
                expires,
                stored: stored_at,
                size: u32::try_from(body.len()).unwrap_or(u32::MAX),
            };
            self.ahead.rows.push_back((new, record((seq, stored_at, key, body))));
        }
        let any = !self.ahead.rows.is_empty();
        self.ahead.at_end |= !any;
        Ok(any)
    }
}
