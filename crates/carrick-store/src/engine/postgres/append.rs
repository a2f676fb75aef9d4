//! Appends: one lane a stream, one transaction for what gathered in it.
//!
//! Numbers without gaps need appends of one stream to take turns, over all processes. The turn is an
//! advisory lock of the transaction, and the last number is read from the end of the log's own
//! index. The obvious way, a counter in the stream's row, would be updated by each append; while
//! anybody keeps a snapshot open, none of those versions can go, and each append walks past all of
//! them. The end of the index is as near after a million appends as after one.
//!
//! Three round trips a transaction: begin and lock, one statement, commit. A number becomes visible
//! with its commit, and the lock goes after that, so the next number cannot come first.

use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{
    lanes::Lane,
    notices::Notices,
    session::{Db, Failure, Tries, Tx, now},
};
use crate::{
    StoreError, Stream,
    log::{Appended, NewRecord},
};

/// Records that gather into a transaction, before one more command would make it larger: the lock
/// is held for some milliseconds.
const GATHERED_RECORDS: usize = 1000;

/// Bytes that gather, likewise.
const GATHERED_BYTES: usize = 4 * 1024 * 1024;

/// Bytes in one statement: it is held in memory on both sides, and spills to disk there when large.
const STATEMENT_BYTES: usize = 2 * 1024 * 1024;

/// An append on its way.
#[derive(Debug)]
pub(super) struct Append {
    pub(super) records: Vec<NewRecord>,
    pub(super) answer: oneshot::Sender<Result<Vec<Appended>, StoreError>>,
    /// Its share of the memory that waiting appends may take; given back when it is dropped.
    pub(super) _memory: OwnedSemaphorePermit,
}

/// Works off the appends of a stream.
pub(super) async fn work(mut lane: Lane<Stream, Append>, db: Arc<Db>, notices: Arc<Notices>) {
    while let Some(first) = lane.next().await {
        let batch = gather(first, &mut lane);
        let records: Vec<&NewRecord> = batch.iter().flat_map(|append| &append.records).collect();
        let outcome = append(&db, lane.key(), &records).await;
        if outcome.is_ok() {
            notices.moved(lane.key());
        }
        answer(batch, outcome);
    }
}

fn gather(first: Append, lane: &mut Lane<Stream, Append>) -> Vec<Append> {
    let bytes_of = |append: &Append| append.records.iter().map(|one| one.body.len()).sum::<usize>();
    let (mut records, mut bytes) = (first.records.len(), bytes_of(&first));
    let mut batch = vec![first];
    while records < GATHERED_RECORDS && bytes < GATHERED_BYTES {
        let Some(append) = lane.more() else { break };
        records += append.records.len();
        bytes += bytes_of(&append);
        batch.push(append);
    }
    batch
}

fn answer(batch: Vec<Append>, outcome: Result<Vec<Appended>, Failure>) {
    match outcome {
        Ok(appended) => {
            let mut appended = appended.into_iter();
            for append in batch {
                let its = appended.by_ref().take(append.records.len()).collect();
                // A caller that left does not want to know; its records are there all the same.
                append.answer.send(Ok(its)).ok();
            }
        }
        Err(failure) => {
            for append in batch {
                append.answer.send(Err(failure.told())).ok();
            }
        }
    }
}

async fn append(
    db: &Db,
    stream: &Stream,
    records: &[&NewRecord],
) -> Result<Vec<Appended>, Failure> {
    let mut tries = Tries::default();
    loop {
        match db.within(try_append(db, stream, records)).await {
            Err(failure) if tries.again(&failure).await => {}
            outcome => return outcome,
        }
    }
}

async fn try_append(
    db: &Db,
    stream: &Stream,
    records: &[&NewRecord],
) -> Result<Vec<Appended>, Failure> {
    let id = db.stream(stream).await?;
    let mut tx = db.begin(Some(db.lock("append", id))).await?;
    let mut appended = Vec::with_capacity(records.len());
    let mut rest = records;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take(GATHERED_RECORDS).take_while(|record| {
            bytes += record.body.len();
            bytes <= STATEMENT_BYTES
        });
        let (part, later) = rest.split_at(fits.count().max(1));
        insert(db, &mut tx, id, part, &mut appended).await?;
        rest = later;
    }
    tx.commit().await?;
    Ok(appended)
}

/// `$1` stream, `$2` identities, `$3` keys, `$4` due, `$5` expires, `$6` bodies. Answers with the
/// last number before, and for each record the number under which it was known already.
///
/// Identities are looked up one by one, so that no plan can prefer to read their whole table.
const INSERT: &str = concat!(
    "WITH head AS MATERIALIZED (
         SELECT ",
    now!(),
    " AS at, coalesce(
             (SELECT log.seq FROM carrick_log AS log
              WHERE log.stream_id = $1 AND log.seq >= stream.first ORDER BY log.seq DESC LIMIT 1),
             stream.first - 1) AS last
         FROM carrick_stream AS stream WHERE stream.id = $1
     ), given AS MATERIALIZED (
         SELECT given.*, coalesce(
             (SELECT old.seq FROM carrick_dedupe_0 AS old
              WHERE old.stream_id = $1 AND old.id = given.dedupe),
             (SELECT old.seq FROM carrick_dedupe_1 AS old
              WHERE old.stream_id = $1 AND old.id = given.dedupe)) AS known
         FROM unnest($2::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::bytea[])
             WITH ORDINALITY AS given (dedupe, key, due, expires, body, place)
     ), fresh AS MATERIALIZED (
         SELECT given.*, head.at, head.last + row_number() OVER (ORDER BY place) AS seq
         FROM given CROSS JOIN head WHERE given.known IS NULL
     ), turn AS MATERIALIZED (
         SELECT turn % 2 AS half FROM carrick_dedupe_turn ORDER BY turn DESC LIMIT 1
     ), logged AS (
         INSERT INTO carrick_log (stream_id, seq, stored_at, due, expires, key, body)
         SELECT $1, seq, at, due, expires, key, body FROM fresh
     ), seen_0 AS (
         INSERT INTO carrick_dedupe_0 (stream_id, id, seq)
         SELECT $1, dedupe, seq FROM fresh, turn WHERE dedupe IS NOT NULL AND half = 0
     ), seen_1 AS (
         INSERT INTO carrick_dedupe_1 (stream_id, id, seq)
         SELECT $1, dedupe, seq FROM fresh, turn WHERE dedupe IS NOT NULL AND half = 1
     )
     SELECT last, (SELECT array_agg(known ORDER BY place) FROM given) FROM head",
);

async fn insert(
    db: &Db,
    tx: &mut Tx,
    stream: i64,
    records: &[&NewRecord],
    appended: &mut Vec<Appended>,
) -> Result<(), Failure> {
    // A repetition within the statement is not seen by it: the first of its kind goes in.
    let mut first_of: HashMap<u128, usize> = HashMap::new();
    let mut sent: Vec<&NewRecord> = Vec::with_capacity(records.len());
    let mut places: Vec<(usize, bool)> = Vec::with_capacity(records.len());
    for record in records {
        let place = sent.len();
        let first = record.dedupe.map_or(place, |id| *first_of.entry(id).or_insert(place));
        if first == place {
            sent.push(record);
        }
        places.push((first, first != place));
    }

    let ids: Vec<Option<[u8; 16]>> =
        sent.iter().map(|record| record.dedupe.map(u128::to_be_bytes)).collect();
    let ids: Vec<Option<&[u8]>> = ids.iter().map(|id| id.as_ref().map(|id| &id[..])).collect();
    let keys: Vec<Option<&[u8]>> =
        sent.iter().map(|record| record.key.as_deref().map(str::as_bytes)).collect();
    let due: Vec<Option<i64>> =
        sent.iter().map(|record| record.due.map(|at| at.as_microsecond())).collect();
    let expires: Vec<Option<i64>> =
        sent.iter().map(|record| record.expires.map(|at| at.as_microsecond())).collect();
    let bodies: Vec<&[u8]> = sent.iter().map(|record| Bytes::as_ref(&record.body)).collect();
    let (last, known): (i64, Vec<Option<i64>>) = db
        .query_as(INSERT)
        .bind(stream)
        .bind(ids)
        .bind(keys)
        .bind(due)
        .bind(expires)
        .bind(bodies)
        .fetch_one(tx.conn())
        .await?;

    let mut next = last.cast_unsigned() + 1;
    let outcomes: Vec<Appended> = known
        .into_iter()
        .map(|known| match known {
            Some(seq) => Appended::Duplicate(seq.cast_unsigned()),
            None => {
                next += 1;
                Appended::Stored(next - 1)
            }
        })
        .collect();
    appended.extend(places.into_iter().map(|(place, repeated)| match outcomes[place] {
        Appended::Stored(seq) if repeated => Appended::Duplicate(seq),
        outcome => outcome,
    }));
    Ok(())
}
