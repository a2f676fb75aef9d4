//! The outbox in an SQLite file.
//!
//! One bucket: SQLite has one writer at a time, and numbers are given out under its lock, so the
//! order of numbers is the order of commits, and a second relay could only wait for the first.
//! Others stand by and take over when its lease ends.
//!
//! Marks are written with `synchronous=NORMAL`: a power cut may forget the last of them, and those
//! rows are then published again, with the same ids. What writers of the file chose for their own
//! connections is left alone.
//!
//! Reads have a connection and a thread of their own: in WAL mode they wait for nobody, while a mark
//! may have to wait for its turn among the writers.

use std::{path::Path, time::Duration};

use async_trait::async_trait;
use carrick_store::{
    StoreError,
    fence::{self, Acquired, FenceToken},
    schema,
};
use jiff::Timestamp;
use rusqlite::{
    Connection, Row as SqlRow, Transaction, TransactionBehavior, params, types::ValueRef,
};

use super::{
    Failure, Health, OutboxStore, Pruned, Range, Sent, content, lane_key, lease_name, spellings,
    worker::Worker,
};
use crate::outbox::{
    COMPONENT, OutboxError,
    compose::Columns,
    relay::core::{
        Bucket, Fetch, Fetched, Found, Heading, LaneKey, Marks, Page, Row, Scan, Seq, Sweep, Wanted,
    },
};

/// How long a statement waits for another writer of the file, in milliseconds.
const BUSY: i32 = 5000;

/// Rows that one transaction removes: it keeps other writers out for some 10 ms.
const PRUNE_AT_ONCE: usize = 1000;

const BUCKET: Bucket = 0;

/// Milliseconds until the next attempt.
const WAIT: &str = "CAST((julianday(next_attempt_at) - julianday('now')) * 86400000 AS INTEGER)";

const COLUMNS: &str = "topic, key, event, id, type, source, subject, time, datacontenttype,
    dataschema, traceparent, tracestate, extensions, data, data_binary";

/// An SQLite file with an outbox.
#[derive(Clone, Debug)]
pub(crate) struct SqliteOutbox {
    reads: Worker,
    writes: Worker,
}

impl SqliteOutbox {
    pub(crate) async fn open(path: &Path) -> Result<Self, OutboxError> {
        let path = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let writes = open_to_write(&path)?;
            Ok((connect(&path)?, writes))
        });
        let (reads, writes) =
            opened.await.map_err(|panic| OutboxError::Database(panic.into()))??;
        Ok(Self { reads: Worker::start(reads), writes: Worker::start(writes) })
    }
}

fn open_to_write(path: &Path) -> Result<Connection, OutboxError> {
    let mut conn = connect(path)?;
    let mode: String =
        conn.query_row("PRAGMA journal_mode", (), |row| row.get(0)).map_err(unreachable)?;
    if mode == "wal" {
        conn.pragma_update(None, "synchronous", "NORMAL").map_err(unreachable)?;
    } else {
        tracing::warn!(
            %mode,
            "the outbox's file is not in WAL mode, so that its relay and its writers keep each \
             other waiting; PRAGMA journal_mode=WAL changes it for good"
        );
    }
    for component in [&COMPONENT, &fence::COMPONENT] {
        schema::sqlite::migrate(&mut conn, component).map_err(OutboxError::Schema)?;
    }
    Ok(conn)
}

fn connect(path: &Path) -> Result<Connection, OutboxError> {
    let conn = Connection::open(path).map_err(unreachable)?;
    conn.busy_handler(Some(wait_a_moment)).map_err(unreachable)?;
    conn.set_prepared_statement_cache_capacity(32);
    Ok(conn)
}

/// Waits for another writer: SQLite's own handler would sleep up to 100 ms at a time, which keeps
/// a relay out for long beside a writer that commits every few milliseconds.
fn wait_a_moment(times: i32) -> bool {
    #[expect(clippy::disallowed_methods, reason = "the thread is this connection's own")]
    std::thread::sleep(Duration::from_millis(1));
    times < BUSY
}

fn unreachable(error: rusqlite::Error) -> OutboxError {
    OutboxError::Disconnected(Box::new(error))
}

fn failed(error: rusqlite::Error) -> OutboxError {
    OutboxError::Database(Box::new(error))
}

fn store(error: StoreError) -> OutboxError {
    OutboxError::Database(Box::new(error))
}

fn immediate(conn: &mut Connection) -> Result<Transaction<'_>, OutboxError> {
    conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)
}

/// The time as the table writes it; texts of this form sort like their times.
fn text(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// Any column as text: SQLite keeps what it was given, and a number in a text column is no reason
/// to stop a relay.
fn lossy(row: &SqlRow<'_>, at: usize) -> rusqlite::Result<Option<String>> {
    Ok(match row.get_ref(at)? {
        ValueRef::Null => None,
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
        ValueRef::Text(text) | ValueRef::Blob(text) => {
            Some(String::from_utf8_lossy(text).into_owned())
        }
    })
}

/// Reads [`COLUMNS`], of which the first is the one `at`.
fn columns(row: &SqlRow<'_>, at: usize) -> rusqlite::Result<Columns> {
    let (topic, key, event) = (lossy(row, at)?, lossy(row, at + 1)?, lossy(row, at + 2)?);
    let topic = topic.unwrap_or_default();
    if event.is_some() {
        return Ok(Columns { topic, key, event, ..Columns::default() });
    }
    let data_binary = match row.get_ref(at + 14)? {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Some(bytes.to_vec()),
        _ => None,
    };
    Ok(Columns {
        topic,
        key,
        event,
        id: lossy(row, at + 3)?.unwrap_or_default(),
        ty: lossy(row, at + 4)?,
        source: lossy(row, at + 5)?,
        subject: lossy(row, at + 6)?,
        time: lossy(row, at + 7)?,
        content_type: lossy(row, at + 8)?,
        schema: lossy(row, at + 9)?,
        traceparent: lossy(row, at + 10)?,
        tracestate: lossy(row, at + 11)?,
        extensions: lossy(row, at + 12)?,
        data: lossy(row, at + 13)?,
        data_binary,
    })
}

/// A row of `seq, attempts, wait` and [`COLUMNS`].
fn found(row: &SqlRow<'_>) -> rusqlite::Result<Found> {
    let seq = row.get::<_, i64>(0)?.cast_unsigned();
    let columns = columns(row, 3)?;
    let lane = lane_key(seq, &columns.topic, columns.key.as_deref());
    let attempts = u32::try_from(row.get::<_, i64>(1)?).unwrap_or(0);
    let row = Row { seq, bucket: BUCKET, attempts, content: content(columns) };
    Ok(Found { row, lane, wait: None })
}

fn found_with_wait(row: &SqlRow<'_>) -> rusqlite::Result<Found> {
    Ok(Found { wait: wait(row, 2)?, ..found(row)? })
}

fn wait(row: &SqlRow<'_>, at: usize) -> rusqlite::Result<Option<Duration>> {
    let millis = row.get::<_, Option<i64>>(at)?.and_then(|millis| u64::try_from(millis).ok());
    Ok(millis.filter(|millis| *millis > 0).map(Duration::from_millis))
}

fn holds(conn: &Connection, token: FenceToken) -> Result<bool, OutboxError> {
    let mut current = conn
        .prepare_cached("SELECT token = ?2 FROM carrick_fence WHERE name = ?1")
        .map_err(failed)?;
    let mut rows =
        current.query(params![lease_name(BUCKET), token.cast_signed()]).map_err(failed)?;
    match rows.next().map_err(failed)? {
        Some(row) => row.get(0).map_err(failed),
        None => Ok(false),
    }
}

#[async_trait]
impl OutboxStore for SqliteOutbox {
    fn buckets(&self) -> u16 {
        1
    }

    async fn heartbeat(&self, _relay: &str, _ttl: Duration) -> Result<usize, OutboxError> {
        Ok(1) // one bucket: nothing is shared
    }

    async fn leave(&self, _relay: &str) -> Result<(), OutboxError> {
        Ok(())
    }

    async fn acquire(
        &self,
        buckets: &[Bucket],
        max: usize,
        ttl: Duration,
    ) -> Result<Vec<(Bucket, FenceToken)>, OutboxError> {
        if buckets.is_empty() || max == 0 {
            return Ok(Vec::new());
        }
        self.writes
            .call(move |conn| {
                let acquired = fence::sqlite::acquire(conn, &lease_name(BUCKET), ttl);
                Ok(match acquired.map_err(store)? {
                    Acquired::Held(token) => vec![(BUCKET, token)],
                    Acquired::Busy(_) => Vec::new(),
                })
            })
            .await
    }

    async fn renew(
        &self,
        held: &[(Bucket, FenceToken)],
        ttl: Duration,
    ) -> Result<Vec<Bucket>, OutboxError> {
        let Some(&(bucket, token)) = held.first() else { return Ok(Vec::new()) };
        self.writes
            .call(move |conn| {
                let renewed = fence::sqlite::renew(conn, &lease_name(bucket), token, ttl);
                Ok(if renewed.map_err(store)? { vec![bucket] } else { Vec::new() })
            })
            .await
    }

    async fn release(&self, held: &[(Bucket, FenceToken)]) -> Result<(), OutboxError> {
        let Some(&(bucket, token)) = held.first() else { return Ok(()) };
        self.writes
            .call(move |conn| {
                fence::sqlite::release(conn, &lease_name(bucket), token).map_err(store)?;
                Ok(())
            })
            .await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, OutboxError> {
        let Scan { after, rows: limit, bytes, .. } = *scan;
        let known: hashbrown::HashSet<Seq> = scan.known.iter().copied().collect();
        self.reads
            .call(move |conn| {
                let sql = format!(
                    "SELECT seq, attempts, {WAIT}, {COLUMNS} FROM carrick_outbox
                     WHERE published_at IS NULL AND seq > ?1 ORDER BY seq"
                );
                let mut select = conn.prepare_cached(&sql).map_err(failed)?;
                let mut found = select.query([after.cast_signed()]).map_err(failed)?;
                let mut page = Page::default();
                let mut size = 0;
                while let Some(row) = found.next().map_err(failed)? {
                    let seq = row.get::<_, i64>(0).map_err(failed)?.cast_unsigned();
                    page.last = Some(seq);
                    if known.contains(&seq) {
                        continue;
                    }
                    let one = found_with_wait(row).map_err(failed)?;
                    size += one.row.bytes();
                    page.rows.push(one);
                    if page.rows.len() >= limit || size >= bytes {
                        page.full = true;
                        break;
                    }
                }
                Ok(page)
            })
            .await
    }

    async fn fetch(&self, fetch: &Fetch) -> Result<Fetched, OutboxError> {
        let fetch = fetch.clone();
        self.reads
            .call(move |conn| {
                let select = |and: &str| {
                    format!(
                        "SELECT seq, attempts, {WAIT}, {COLUMNS} FROM carrick_outbox
                         WHERE published_at IS NULL AND {and} ORDER BY seq"
                    )
                };
                let mut keyed = conn
                    .prepare_cached(&select("seq >= ?1 AND topic = ?2 AND key = ?3"))
                    .map_err(failed)?;
                let mut single = conn.prepare_cached(&select("seq = ?1")).map_err(failed)?;
                let mut fetched = Fetched::default();
                let mut size = 0;
                for Wanted { lane, from } in fetch.wanted {
                    let from = from.cast_signed();
                    let found = match &*lane {
                        LaneKey::Keyed { topic, key } => {
                            keyed.query_map(params![from, topic, key], found_with_wait)
                        }
                        LaneKey::Single(_) => single.query_map([from], found_with_wait),
                    };
                    for one in found.map_err(failed)?.take(fetch.rows) {
                        let one = one.map_err(failed)?;
                        size += one.row.bytes();
                        fetched.rows.push(one);
                        if size >= fetch.bytes {
                            fetched.full = true;
                            return Ok(fetched);
                        }
                    }
                }
                Ok(fetched)
            })
            .await
    }

    async fn sweep(&self, sweep: &Sweep) -> Result<Vec<Heading>, OutboxError> {
        let Sweep { after, upto, rows } = *sweep;
        self.reads
            .call(move |conn| {
                let sql = format!(
                    "SELECT seq, topic, {WAIT}, key FROM carrick_outbox
                     WHERE published_at IS NULL AND seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3"
                );
                let mut select = conn.prepare_cached(&sql).map_err(failed)?;
                let limit = i64::try_from(rows).unwrap_or(i64::MAX);
                let range = params![after.cast_signed(), upto.cast_signed(), limit];
                let headings = select.query_map(range, |row| {
                    let seq = row.get::<_, i64>(0)?.cast_unsigned();
                    let (topic, key) = (lossy(row, 1)?.unwrap_or_default(), lossy(row, 3)?);
                    let lane = lane_key(seq, &topic, key.as_deref());
                    Ok(Heading { seq, bucket: BUCKET, lane, wait: wait(row, 2)? })
                });
                headings.map_err(failed)?.collect::<Result<_, _>>().map_err(failed)
            })
            .await
    }

    async fn mark(&self, marks: &Marks) -> Result<usize, OutboxError> {
        let marks = marks.clone();
        self.writes
            .call(move |conn| {
                let tx = immediate(conn)?;
                let marked = mark(&tx, &marks)?;
                tx.commit().map_err(failed)?;
                Ok(marked)
            })
            .await
    }

    async fn prune(&self, after: Seq, keep: Duration, limit: usize) -> Result<Pruned, OutboxError> {
        self.writes
            .call(move |conn| {
                let tx = immediate(conn)?;
                let pruned = prune(&tx, after, keep, limit.min(PRUNE_AT_ONCE)).map_err(failed)?;
                tx.commit().map_err(failed)?;
                Ok(pruned)
            })
            .await
    }

    async fn health(&self, floor: Seq, _buckets: &[Bucket]) -> Result<Health, OutboxError> {
        self.reads
            .call(move |conn| {
                let mut select = conn
                    .prepare_cached(
                        "SELECT (julianday('now') - julianday(created_at)) * 86400
                         FROM carrick_outbox WHERE published_at IS NULL AND seq >= ?1
                         ORDER BY seq LIMIT 1",
                    )
                    .map_err(failed)?;
                let ages =
                    select.query_map([floor.cast_signed()], |row| row.get::<_, Option<f64>>(0));
                let age = ages.map_err(failed)?.next().transpose().map_err(failed)?.flatten();
                let oldest = age.map(|age| Duration::try_from_secs_f64(age).unwrap_or_default());
                Ok(Health { oldest, oldest_snapshot: None })
            })
            .await
    }

    async fn failures(&self, after: Seq, limit: usize) -> Result<Vec<Failure>, OutboxError> {
        self.reads
            .call(move |conn| {
                let mut select = conn
                    .prepare_cached(
                        "SELECT seq, topic, key, id, attempts, last_error, next_attempt_at, created_at
                         FROM carrick_outbox WHERE published_at IS NULL AND seq > ?1 AND attempts > 0
                         ORDER BY seq LIMIT ?2",
                    )
                    .map_err(failed)?;
                let limit = i64::try_from(limit).unwrap_or(i64::MAX);
                let rows = select.query_map(params![after.cast_signed(), limit], |row| {
                    let time = |at| Ok::<_, rusqlite::Error>(lossy(row, at)?.and_then(|t| t.parse().ok()));
                    Ok(Failure {
                        seq: row.get::<_, i64>(0)?.cast_unsigned(),
                        topic: lossy(row, 1)?.unwrap_or_default(),
                        key: lossy(row, 2)?,
                        id: lossy(row, 3)?.unwrap_or_default(),
                        attempts: u32::try_from(row.get::<_, i64>(4)?).unwrap_or(u32::MAX),
                        error: lossy(row, 5)?.unwrap_or_default(),
                        next_attempt_at: time(6)?,
                        created_at: time(7)?.unwrap_or(Timestamp::UNIX_EPOCH),
                    })
                });
                rows.map_err(failed)?.collect::<Result<_, _>>().map_err(failed)
            })
            .await
    }

    async fn retry(&self, seqs: &[Seq]) -> Result<u64, OutboxError> {
        self.each(
            "UPDATE carrick_outbox SET next_attempt_at = NULL
             WHERE seq = ?1 AND published_at IS NULL AND attempts > 0 AND ?2 IS NULL",
            seqs,
            None,
        )
        .await
    }

    async fn skip(&self, seqs: &[Seq], reason: &str) -> Result<u64, OutboxError> {
        self.each(
            "UPDATE carrick_outbox SET next_attempt_at = NULL, last_error = ?2,
                 published_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
             WHERE seq = ?1 AND published_at IS NULL AND attempts > 0",
            seqs,
            Some(reason.to_owned()),
        )
        .await
    }

    async fn last(&self) -> Result<Seq, OutboxError> {
        self.reads
            .call(|conn| {
                let last = conn.query_row("SELECT max(seq) FROM carrick_outbox", (), |row| {
                    row.get::<_, Option<i64>>(0)
                });
                Ok(last.map_err(failed)?.unwrap_or(0).cast_unsigned())
            })
            .await
    }

    async fn published(&self, range: &Range) -> Result<Vec<Sent>, OutboxError> {
        let range = range.clone();
        self.reads
            .call(move |conn| {
                let sql = format!(
                    "SELECT seq, attempts, NULL, {COLUMNS} FROM carrick_outbox
                     WHERE seq > ?1 AND seq <= ?2 AND published_at >= ?3 AND published_at < ?4
                         AND (?5 IS NULL OR topic IN (?5, ?6))
                     ORDER BY seq LIMIT ?7"
                );
                let mut select = conn.prepare_cached(&sql).map_err(failed)?;
                let topic = range.topic.as_ref().map(spellings);
                let (full, short) =
                    topic.as_ref().map_or((None, None), |(a, b)| (Some(a), Some(b)));
                let rows = select.query_map(
                    params![
                        range.after.cast_signed(),
                        range.upto.cast_signed(),
                        text(range.from),
                        text(range.to),
                        full,
                        short,
                        i64::try_from(range.rows).unwrap_or(i64::MAX),
                    ],
                    |row| {
                        let Found { row, .. } = found(row)?;
                        Ok(Sent { seq: row.seq, content: row.content })
                    },
                );
                rows.map_err(failed)?.collect::<Result<_, _>>().map_err(failed)
            })
            .await
    }

    async fn hint(&self) {
        // A look costs as little as asking whether the file has changed; looks are the watch.
        std::future::pending().await
    }

    async fn close(&self) {}
}

impl SqliteOutbox {
    async fn each(
        &self,
        sql: &'static str,
        seqs: &[Seq],
        text: Option<String>,
    ) -> Result<u64, OutboxError> {
        let seqs = seqs.to_vec();
        self.writes
            .call(move |conn| {
                let tx = immediate(conn)?;
                let mut changed = 0;
                for seq in seqs {
                    changed += tx.execute(sql, params![seq.cast_signed(), text]).map_err(failed)?;
                }
                tx.commit().map_err(failed)?;
                Ok(changed as u64)
            })
            .await
    }
}

fn mark(tx: &Transaction<'_>, marks: &Marks) -> Result<usize, OutboxError> {
    let mut marked = 0;
    let mut fence: Option<(FenceToken, bool)> = None;
    let mut is_current = |token| match fence {
        Some((known, holds)) if known == token => Ok(holds),
        _ => {
            let holds = holds(tx, token)?;
            fence = Some((token, holds));
            Ok(holds)
        }
    };
    let mut publish = tx
        .prepare_cached(
            "UPDATE carrick_outbox SET published_at = ?2, next_attempt_at = NULL, last_error = NULL
             WHERE seq = ?1 AND published_at IS NULL",
        )
        .map_err(failed)?;
    let now: String = tx
        .query_row("SELECT strftime('%Y-%m-%dT%H:%M:%fZ', 'now')", (), |row| row.get(0))
        .map_err(failed)?;
    for row in &marks.accepted {
        if is_current(row.token)? {
            marked += publish.execute(params![row.seq.cast_signed(), now]).map_err(failed)?;
        }
    }
    let mut fail = tx
        .prepare_cached(
            "UPDATE carrick_outbox SET attempts = attempts + 1, last_error = ?2,
                 next_attempt_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?3)
             WHERE seq = ?1 AND published_at IS NULL",
        )
        .map_err(failed)?;
    for row in &marks.failed {
        if is_current(row.token)? {
            let delay = format!("+{:.3} seconds", row.delay.as_secs_f64());
            let row = params![row.seq.cast_signed(), row.error, delay];
            marked += fail.execute(row).map_err(failed)?;
        }
    }
    Ok(marked)
}

fn prune(
    tx: &Transaction<'_>,
    after: Seq,
    keep: Duration,
    limit: usize,
) -> rusqlite::Result<Pruned> {
    let age = format!("-{:.3} seconds", keep.as_secs_f64());
    let cutoff: String =
        tx.query_row("SELECT strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?1)", [age], |row| row.get(0))?;
    let mut page = tx.prepare_cached(
        "SELECT seq, published_at < ?3, created_at < ?3 FROM carrick_outbox
         WHERE seq > ?1 ORDER BY seq LIMIT ?2",
    )?;
    let limit_sql = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = page
        .query_map(params![after.cast_signed(), limit_sql, cutoff], |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, Option<bool>>(1)?, row.get::<_, bool>(2)?))
        })?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    let mut delete = tx.prepare_cached("DELETE FROM carrick_outbox WHERE seq = ?1")?;
    let mut pruned = Pruned::default();
    for (seq, is_over, _) in &rows {
        if is_over == &Some(true) {
            pruned.rows += delete.execute([seq])? as u64;
        }
    }
    // Below a row written before the cut-off there may be more; above one written after it, nothing.
    pruned.next = match rows.last() {
        Some((seq, _, true)) if rows.len() == limit => Some(seq.cast_unsigned()),
        _ => None,
    };
    Ok(pruned)
}
