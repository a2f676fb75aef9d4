//! The outbox in a Postgres database.
//!
//! Every call is one statement, set-based, under a statement timeout; no transaction is open while
//! anything is published. Leases have a connection of their own, so that a slow read cannot keep
//! them from being renewed, and nothing is asked of a session except to listen on one of its own,
//! which is optional: all of it works through a transaction pooler.
//!
//! Marks are committed without waiting for the disk: a crash of the database may forget the last of
//! them, and those rows are then published again, with the same ids. Leases do wait, for a token
//! must not be given out twice.

use std::{str::FromStr, time::Duration};

use async_trait::async_trait;
use carrick_store::{
    StoreError,
    fence::{self, FenceToken},
    schema,
};
use jiff::Timestamp;
use sqlx::{
    PgPool, Postgres, Row as _,
    postgres::{PgArguments, PgConnectOptions, PgListener, PgPoolOptions, PgRow},
    query::Query,
};
use tokio::{sync::Mutex, time::sleep};
use tracing::debug;

use super::{
    Failure, Health, OutboxStore, Pruned, Range, Sent, content, lane_key, lease_name, spellings,
};
use crate::outbox::{
    COMPONENT, OutboxError,
    compose::Columns,
    notify::CHANNEL,
    relay::core::{
        Bucket, Fetch, Fetched, Found, Heading, LaneKey, Marks, Page, Row, Scan, Seq, Snapshot,
        Sweep, Wanted,
    },
    schema::POSTGRES_BUCKETS,
};

/// Reads, marks and upkeep run beside each other, one of each at a time.
const WORK_CONNECTIONS: u32 = 4;
/// Until a connection of the pool is given up on.
const ACQUIRE: Duration = Duration::from_secs(5);
/// The longest that a statement may take. They take milliseconds.
const STATEMENT: Duration = Duration::from_secs(15);
/// Between two attempts to listen.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// Numbers given out to others, beyond which a read without rows takes an id to pass them.
const PASS: i64 = 1000;

/// A Postgres database with an outbox.
#[derive(Debug)]
pub(crate) struct PostgresOutbox {
    work: PgPool,
    leases: PgPool,
    listen: PgPool,
    pooler: bool,
    listener: Mutex<Option<PgListener>>,
}

impl PostgresOutbox {
    pub(crate) async fn connect(url: &str) -> Result<Self, OutboxError> {
        let (url, pooler) = without_pooler_option(url);
        let options = PgConnectOptions::from_str(&url).map_err(failed)?;
        Self::with(options, pooler).await
    }

    /// `pooler`: sessions are shared with others, as behind a transaction pooler.
    pub(crate) async fn with(options: PgConnectOptions, pooler: bool) -> Result<Self, OutboxError> {
        let options = options.application_name("carrick relay");
        let (work, leases) = if pooler {
            let plain = options.statement_cache_capacity(0);
            (plain.clone(), plain)
        } else {
            let timeout = STATEMENT.as_millis().to_string();
            let leases = options.options([
                ("statement_timeout", timeout.as_str()),
                ("lock_timeout", timeout.as_str()),
                ("idle_in_transaction_session_timeout", timeout.as_str()),
                // Every statement is made for an index; a plan from when the table was empty must
                // not read all of it once it has grown.
                ("enable_seqscan", "off"),
                ("jit", "off"),
            ]);
            (leases.clone().options([("synchronous_commit", "off")]), leases)
        };
        let pool = |connections| {
            PgPoolOptions::new().max_connections(connections).acquire_timeout(ACQUIRE)
        };
        let outbox = Self {
            work: pool(WORK_CONNECTIONS).connect_lazy_with(work),
            listen: pool(1).connect_lazy_with(leases.clone()),
            leases: pool(1).connect_lazy_with(leases),
            pooler,
            listener: Mutex::new(None),
        };
        for component in [&COMPONENT, &fence::COMPONENT] {
            schema::postgres::migrate(&outbox.work, component)
                .await
                .map_err(OutboxError::Schema)?;
        }
        Ok(outbox)
    }

    fn query(&self, sql: &'static str) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(sql).persistent(!self.pooler)
    }

    async fn listen(&self) -> Result<PgListener, sqlx::Error> {
        let mut listener = PgListener::connect_with(&self.listen).await?;
        listener.listen(CHANNEL).await?;
        Ok(listener)
    }
}

/// Takes `pgbouncer=true` out of a URL, as other clients spell it.
fn without_pooler_option(url: &str) -> (String, bool) {
    let Some((base, query)) = url.split_once('?') else { return (url.to_owned(), false) };
    let (pooler, kept): (Vec<&str>, Vec<&str>) =
        query.split('&').partition(|option| option.starts_with("pgbouncer="));
    let is_pooled = pooler.contains(&"pgbouncer=true");
    let mark = if kept.is_empty() { "" } else { "?" };
    (format!("{base}{mark}{}", kept.join("&")), is_pooled)
}

fn failed(error: sqlx::Error) -> OutboxError {
    match error {
        sqlx::Error::PoolClosed => OutboxError::Closed,
        error @ (sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::WorkerCrashed) => OutboxError::Disconnected(Box::new(error)),
        error => OutboxError::Database(Box::new(error)),
    }
}

fn store(error: StoreError) -> OutboxError {
    OutboxError::Database(Box::new(error))
}

fn names(held: &[(Bucket, FenceToken)]) -> Vec<(String, FenceToken)> {
    held.iter().map(|(bucket, token)| (lease_name(*bucket), *token)).collect()
}

fn bucket(name: &str) -> Option<Bucket> {
    name.strip_prefix("relay/")?.parse().ok()
}

fn signed(seqs: impl IntoIterator<Item = Seq>) -> Vec<i64> {
    seqs.into_iter().map(u64::cast_signed).collect()
}

fn numbers(buckets: impl IntoIterator<Item = Bucket>) -> Vec<i16> {
    buckets.into_iter().map(u16::cast_signed).collect()
}

fn limit(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX).min(100 * 366 * 86_400 * 1_000_000)
}

/// What [`found`] reads, of table or subquery `o`. Texts of columns that `event` replaces are not
/// sent along with it.
macro_rules! columns {
    () => {
        "o.seq, o.bucket, o.attempts,
         (extract(epoch FROM o.next_attempt_at - clock_timestamp()) * 1000000)::bigint AS wait,
         o.topic, o.key, o.event,
         CASE WHEN o.event IS NULL THEN o.id END AS id,
         CASE WHEN o.event IS NULL THEN o.type END AS type,
         CASE WHEN o.event IS NULL THEN o.source END AS source,
         o.subject,
         CASE WHEN o.event IS NULL THEN
             to_char(o.time AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') END AS time,
         o.datacontenttype, o.dataschema, o.traceparent, o.tracestate,
         o.extensions::text AS extensions, o.data::text AS data, o.data_binary"
    };
}

/// The same, without reading anything that is large.
macro_rules! size {
    () => {
        "coalesce(pg_column_size(o.event), pg_column_size(o.data), pg_column_size(o.data_binary), 0)
         + 200"
    };
}

/// A row of `columns!`, of which the first is the one `at`.
fn found(row: &PgRow, at: usize) -> Result<Found, sqlx::Error> {
    let seq = row.try_get::<i64, _>(at)?.cast_unsigned();
    let bucket = row.try_get::<i16, _>(at + 1)?.cast_unsigned();
    let attempts = u32::try_from(row.try_get::<i32, _>(at + 2)?).unwrap_or(0);
    let wait = positive(row.try_get(at + 3)?);
    let (topic, key): (String, Option<String>) = (row.try_get(at + 4)?, row.try_get(at + 5)?);
    let lane = lane_key(seq, &topic, key.as_deref());
    let event: Option<String> = row.try_get(at + 6)?;
    let columns = if event.is_some() {
        Columns { topic, key, event, ..Columns::default() }
    } else {
        Columns {
            topic,
            key,
            event,
            id: row.try_get::<Option<String>, _>(at + 7)?.unwrap_or_default(),
            ty: row.try_get(at + 8)?,
            source: row.try_get(at + 9)?,
            subject: row.try_get(at + 10)?,
            time: row.try_get(at + 11)?,
            content_type: row.try_get(at + 12)?,
            schema: row.try_get(at + 13)?,
            traceparent: row.try_get(at + 14)?,
            tracestate: row.try_get(at + 15)?,
            extensions: row.try_get(at + 16)?,
            data: row.try_get(at + 17)?,
            data_binary: row.try_get(at + 18)?,
        }
    };
    Ok(Found { row: Row { seq, bucket, attempts, content: content(columns) }, lane, wait })
}

fn positive(micros: Option<i64>) -> Option<Duration> {
    let micros = micros.and_then(|micros| u64::try_from(micros).ok());
    micros.filter(|micros| *micros > 0).map(Duration::from_micros)
}

/// Reads `xmin:xmax:xip,xip` and the id of the read.
fn snapshot(text: &str, own: Option<&str>) -> Option<Snapshot> {
    let mut parts = text.split(':');
    let (_, next, running) = (parts.next()?, parts.next()?, parts.next()?);
    let running = running.split(',').filter(|xid| !xid.is_empty());
    Some(Snapshot {
        next: next.parse().ok()?,
        running: running.map(|xid| xid.parse().ok()).collect::<Option<_>>()?,
        own: own.and_then(|own| own.parse().ok()),
    })
}

// Starts above what was read, or lower if a transaction has ended that may have brought lower
// numbers; see `relay::core::horizon`, whose model this is. The snapshot is the statement's own, and
// an id is taken after it, only if there are rows or numbers to pass.
const SCAN: &str = concat!(
    "WITH snap AS MATERIALIZED (SELECT pg_current_snapshot() AS s),
     low AS MATERIALIZED (
         SELECT least($1::bigint, (
             SELECT min(p.low)
             FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS p (a, b, low), snap
             WHERE pg_snapshot_xmax(s)::text::bigint > p.a
               AND (p.b > p.a + 1 OR pg_visible_in_snapshot(p.a::text::xid8, s))
         )) AS seq
     ),
     top AS MATERIALIZED (SELECT last_value AS seq FROM carrick_outbox_seq),
     page AS MATERIALIZED (
         SELECT * FROM (
             SELECT o.*, sum(size) OVER (ORDER BY o.seq)::bigint - size AS before
             FROM (
                 SELECT ",
    columns!(),
    ", (",
    size!(),
    ")::bigint AS size
                 FROM carrick_outbox AS o
                 WHERE o.published_at IS NULL AND o.seq > (SELECT seq FROM low)
                   AND o.bucket = ANY($5) AND o.seq <> ALL($6::bigint[])
                 ORDER BY o.seq LIMIT $7
             ) AS o
         ) AS o WHERE before < $8::bigint
     )
     SELECT snap.s::text,
         CASE WHEN page.seq IS NOT NULL OR (SELECT seq FROM top) > $1 + $9::bigint
              THEN pg_current_xact_id()::text END,
         (SELECT seq FROM top),
         page.*
     FROM snap LEFT JOIN page ON true ORDER BY page.seq"
);

const FETCH: &str = concat!(
    "SELECT * FROM (
         SELECT o.*, sum(size) OVER (ORDER BY wanted.place, o.seq)::bigint - size AS before,
             wanted.place
         FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[]) WITH ORDINALITY
             AS wanted (low, topic, key, high, place)
         CROSS JOIN LATERAL (
             SELECT ",
    columns!(),
    ", (",
    size!(),
    ")::bigint AS size
             FROM carrick_outbox AS o
             WHERE o.published_at IS NULL AND o.seq >= wanted.low AND o.seq <= wanted.high
               AND (wanted.key IS NULL OR o.topic = wanted.topic AND o.key = wanted.key)
             ORDER BY o.seq LIMIT $5
         ) AS o
     ) AS o WHERE before < $6::bigint ORDER BY place, seq"
);

const SWEEP: &str = "SELECT seq, bucket, topic, key,
         (extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000000)::bigint
     FROM carrick_outbox
     WHERE published_at IS NULL AND seq > $1 AND seq <= $2 ORDER BY seq LIMIT $3";

// The fence is looked at, not locked: a lease that changes hands in this very moment costs one
// repeated publish. Rows whose lease has a new holder stay as they are.
const MARK_PUBLISHED: &str = "UPDATE carrick_outbox AS o
     SET published_at = clock_timestamp(), next_attempt_at = NULL, last_error = NULL
     WHERE o.seq = ANY($1) AND o.published_at IS NULL AND o.bucket = ANY (ARRAY(
         SELECT held.bucket FROM unnest($2::smallint[], $3::bigint[]) AS held (bucket, token)
         JOIN carrick_fence AS fence
             ON fence.name = 'relay/' || held.bucket AND fence.token = held.token))";

const MARK_FAILED: &str = "UPDATE carrick_outbox AS o
     SET attempts = o.attempts + 1, last_error = failed.error,
         next_attempt_at = clock_timestamp() + failed.delay * interval '1 microsecond'
     FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS failed (seq, error, delay)
     WHERE o.seq = failed.seq AND o.published_at IS NULL AND o.bucket = ANY (ARRAY(
         SELECT held.bucket FROM unnest($4::smallint[], $5::bigint[]) AS held (bucket, token)
         JOIN carrick_fence AS fence
             ON fence.name = 'relay/' || held.bucket AND fence.token = held.token))";

const PRUNE: &str = "WITH page AS MATERIALIZED (
         SELECT seq, published_at, created_at FROM carrick_outbox
         WHERE seq > $1 ORDER BY seq LIMIT $3
     ),
     over AS MATERIALIZED (
         SELECT o.seq FROM carrick_outbox AS o
         WHERE o.seq = ANY (ARRAY(
             SELECT seq FROM page
             WHERE published_at < clock_timestamp() - $2::bigint * interval '1 microsecond'))
         FOR UPDATE SKIP LOCKED
     ),
     gone AS (
         DELETE FROM carrick_outbox AS o WHERE o.seq = ANY (ARRAY(SELECT seq FROM over))
         RETURNING o.seq
     )
     SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM page),
         last.seq, last.created_at < clock_timestamp() - $2::bigint * interval '1 microsecond'
     FROM (SELECT 1) AS one
     LEFT JOIN (SELECT seq, created_at FROM page ORDER BY seq DESC LIMIT 1) AS last ON true";

const HEALTH: &str = "SELECT
         (SELECT (extract(epoch FROM clock_timestamp() - created_at) * 1000000)::bigint
          FROM carrick_outbox WHERE published_at IS NULL AND seq >= $1 AND bucket = ANY($2)
          ORDER BY seq LIMIT 1),
         (SELECT (extract(epoch FROM clock_timestamp() - min(xact_start)) * 1000000)::bigint
          FROM pg_stat_activity
          WHERE backend_xmin IS NOT NULL AND datname = current_database())";

const PUBLISHED: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM carrick_outbox AS o
     WHERE o.seq > $1 AND o.seq <= $2
       AND o.published_at >= to_timestamp($3::bigint / 1000000.0)
       AND o.published_at < to_timestamp($4::bigint / 1000000.0)
       AND ($5::text IS NULL OR o.topic IN ($5, $6))
     ORDER BY o.seq LIMIT $7"
);

#[async_trait]
impl OutboxStore for PostgresOutbox {
    fn buckets(&self) -> u16 {
        POSTGRES_BUCKETS
    }

    async fn heartbeat(&self, relay: &str, ttl: Duration) -> Result<usize, OutboxError> {
        let live: i64 = self
            .query(
                "WITH me AS (
                     INSERT INTO carrick_relay (id, seen_at) VALUES ($1, clock_timestamp())
                     ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
                 ),
                 gone AS (
                     DELETE FROM carrick_relay WHERE id IN (
                         SELECT id FROM carrick_relay
                         WHERE seen_at < clock_timestamp() - 10 * $2::bigint * interval '1 microsecond'
                         FOR UPDATE SKIP LOCKED)
                 )
                 SELECT 1 + count(*) FROM carrick_relay
                 WHERE id <> $1 AND seen_at > clock_timestamp() - $2::bigint * interval '1 microsecond'",
            )
            .bind(relay)
            .bind(micros(ttl))
            .fetch_one(&self.leases)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(failed)?;
        Ok(usize::try_from(live).unwrap_or(1))
    }

    async fn leave(&self, relay: &str) -> Result<(), OutboxError> {
        let left = self.query("DELETE FROM carrick_relay WHERE id = $1").bind(relay);
        left.execute(&self.leases).await.map_err(failed)?;
        Ok(())
    }

    async fn acquire(
        &self,
        buckets: &[Bucket],
        max: usize,
        ttl: Duration,
    ) -> Result<Vec<(Bucket, FenceToken)>, OutboxError> {
        let names: Vec<String> = buckets.iter().map(|bucket| lease_name(*bucket)).collect();
        let mut conn = self.leases.acquire().await.map_err(failed)?;
        let granted = fence::postgres::acquire_some(&mut conn, &names, max, ttl).await;
        let granted = granted.map_err(store)?;
        Ok(granted.iter().filter_map(|(name, token)| Some((bucket(name)?, *token))).collect())
    }

    async fn renew(
        &self,
        held: &[(Bucket, FenceToken)],
        ttl: Duration,
    ) -> Result<Vec<Bucket>, OutboxError> {
        let mut conn = self.leases.acquire().await.map_err(failed)?;
        let renewed = fence::postgres::renew_some(&mut conn, &names(held), ttl).await;
        Ok(renewed.map_err(store)?.iter().filter_map(|name| bucket(name)).collect())
    }

    async fn release(&self, held: &[(Bucket, FenceToken)]) -> Result<(), OutboxError> {
        let mut conn = self.leases.acquire().await.map_err(failed)?;
        fence::postgres::release_some(&mut conn, &names(held)).await.map_err(store)?;
        Ok(())
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, OutboxError> {
        let pending = &scan.pending;
        let rows = self
            .query(SCAN)
            .bind(scan.after.cast_signed())
            .bind(signed(pending.iter().map(|pending| pending.from)))
            .bind(signed(pending.iter().map(|pending| pending.to)))
            .bind(signed(pending.iter().map(|pending| pending.low)))
            .bind(numbers(scan.buckets.iter().copied()))
            .bind(signed(scan.known.iter().copied()))
            .bind(limit(scan.rows))
            .bind(limit(scan.bytes))
            .bind(PASS)
            .fetch_all(&self.work)
            .await
            .map_err(failed)?;
        page(&rows, scan).map_err(failed)
    }

    async fn fetch(&self, fetch: &Fetch) -> Result<Fetched, OutboxError> {
        let (mut lows, mut topics, mut keys, mut highs) = (vec![], vec![], vec![], vec![]);
        for Wanted { lane, from } in &fetch.wanted {
            let (topic, key, high) = match &**lane {
                LaneKey::Keyed { topic, key } => (Some(&**topic), Some(&**key), i64::MAX),
                LaneKey::Single(seq) => (None, None, seq.cast_signed()),
            };
            lows.push(from.cast_signed());
            topics.push(topic);
            keys.push(key);
            highs.push(high);
        }
        let rows = self
            .query(FETCH)
            .bind(lows)
            .bind(topics)
            .bind(keys)
            .bind(highs)
            .bind(limit(fetch.rows))
            .bind(limit(fetch.bytes))
            .fetch_all(&self.work)
            .await
            .map_err(failed)?;
        let mut fetched = Fetched::default();
        let mut size = 0;
        for row in &rows {
            fetched.rows.push(found(row, 0).map_err(failed)?);
            size += row.try_get::<i64, _>(19).map_err(failed)?;
        }
        fetched.full = size >= limit(fetch.bytes);
        Ok(fetched)
    }

    async fn sweep(&self, sweep: &Sweep) -> Result<Vec<Heading>, OutboxError> {
        let rows = self
            .query(SWEEP)
            .bind(sweep.after.cast_signed())
            .bind(sweep.upto.cast_signed())
            .bind(limit(sweep.rows))
            .fetch_all(&self.work)
            .await
            .map_err(failed)?;
        let heading = |row: &PgRow| {
            let seq = row.try_get::<i64, _>(0)?.cast_unsigned();
            let (topic, key): (String, Option<String>) = (row.try_get(2)?, row.try_get(3)?);
            Ok::<_, sqlx::Error>(Heading {
                seq,
                bucket: row.try_get::<i16, _>(1)?.cast_unsigned(),
                lane: lane_key(seq, &topic, key.as_deref()),
                wait: positive(row.try_get(4)?),
            })
        };
        rows.iter().map(heading).collect::<Result<_, _>>().map_err(failed)
    }

    async fn mark(&self, marks: &Marks) -> Result<usize, OutboxError> {
        let mut marked = 0;
        if !marks.accepted.is_empty() {
            let rows = &marks.accepted;
            let (buckets, tokens) = tokens(rows.iter().map(|row| (row.bucket, row.token)));
            let seqs = signed(rows.iter().map(|row| row.seq));
            let update = self.query(MARK_PUBLISHED).bind(seqs).bind(buckets).bind(tokens);
            marked += update.execute(&self.work).await.map_err(failed)?.rows_affected();
        }
        if !marks.failed.is_empty() {
            let rows = &marks.failed;
            let (buckets, tokens) = tokens(rows.iter().map(|row| (row.bucket, row.token)));
            let update = self
                .query(MARK_FAILED)
                .bind(signed(rows.iter().map(|row| row.seq)))
                .bind(rows.iter().map(|row| row.error.replace('\0', "")).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| micros(row.delay)).collect::<Vec<_>>())
                .bind(buckets)
                .bind(tokens);
            marked += update.execute(&self.work).await.map_err(failed)?.rows_affected();
        }
        Ok(usize::try_from(marked).unwrap_or(usize::MAX))
    }

    async fn prune(&self, after: Seq, keep: Duration, rows: usize) -> Result<Pruned, OutboxError> {
        let done = self
            .query(PRUNE)
            .bind(after.cast_signed())
            .bind(micros(keep))
            .bind(limit(rows))
            .fetch_one(&self.work)
            .await
            .map_err(failed)?;
        let read = |row: &PgRow| {
            let (gone, seen): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let last: Option<i64> = row.try_get(2)?;
            let is_old: Option<bool> = row.try_get(3)?;
            let goes_on = seen == limit(rows) && is_old == Some(true);
            Ok::<_, sqlx::Error>(Pruned {
                rows: gone.cast_unsigned(),
                next: last.filter(|_| goes_on).map(i64::cast_unsigned),
            })
        };
        read(&done).map_err(failed)
    }

    async fn health(&self, floor: Seq, buckets: &[Bucket]) -> Result<Health, OutboxError> {
        let ages = self
            .query(HEALTH)
            .bind(floor.cast_signed())
            .bind(numbers(buckets.iter().copied()))
            .fetch_one(&self.work)
            .await
            .map_err(failed)?;
        let age = |at| {
            let micros: Option<i64> = ages.try_get(at).map_err(failed)?;
            Ok(micros.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0))))
        };
        Ok(Health { oldest: age(0)?, oldest_snapshot: age(1)? })
    }

    async fn failures(&self, after: Seq, rows: usize) -> Result<Vec<Failure>, OutboxError> {
        let rows = self
            .query(
                "SELECT seq, topic, key, id, attempts, last_error,
                     (extract(epoch FROM next_attempt_at) * 1000000)::bigint,
                     (extract(epoch FROM created_at) * 1000000)::bigint
                 FROM carrick_outbox
                 WHERE published_at IS NULL AND seq > $1 AND attempts > 0 ORDER BY seq LIMIT $2",
            )
            .bind(after.cast_signed())
            .bind(limit(rows))
            .fetch_all(&self.work)
            .await
            .map_err(failed)?;
        let failure = |row: &PgRow| {
            let time = |micros| Timestamp::from_microsecond(micros).ok();
            Ok::<_, sqlx::Error>(Failure {
                seq: row.try_get::<i64, _>(0)?.cast_unsigned(),
                topic: row.try_get(1)?,
                key: row.try_get(2)?,
                id: row.try_get(3)?,
                attempts: u32::try_from(row.try_get::<i32, _>(4)?).unwrap_or(0),
                error: row.try_get::<Option<String>, _>(5)?.unwrap_or_default(),
                next_attempt_at: row.try_get::<Option<i64>, _>(6)?.and_then(time),
                created_at: time(row.try_get(7)?).unwrap_or(Timestamp::UNIX_EPOCH),
            })
        };
        rows.iter().map(failure).collect::<Result<_, _>>().map_err(failed)
    }

    async fn retry(&self, seqs: &[Seq]) -> Result<u64, OutboxError> {
        let update = self
            .query(
                "UPDATE carrick_outbox SET next_attempt_at = NULL
                 WHERE seq = ANY($1) AND published_at IS NULL AND attempts > 0",
            )
            .bind(signed(seqs.iter().copied()));
        Ok(update.execute(&self.leases).await.map_err(failed)?.rows_affected())
    }

    async fn skip(&self, seqs: &[Seq], reason: &str) -> Result<u64, OutboxError> {
        let update = self
            .query(
                "UPDATE carrick_outbox SET next_attempt_at = NULL, last_error = $2,
                     published_at = clock_timestamp()
                 WHERE seq = ANY($1) AND published_at IS NULL AND attempts > 0",
            )
            .bind(signed(seqs.iter().copied()))
            .bind(reason);
        Ok(update.execute(&self.leases).await.map_err(failed)?.rows_affected())
    }

    async fn last(&self) -> Result<Seq, OutboxError> {
        let last = self.query("SELECT max(seq) FROM carrick_outbox").fetch_one(&self.work).await;
        let last: Option<i64> = last.and_then(|row| row.try_get(0)).map_err(failed)?;
        Ok(last.unwrap_or(0).cast_unsigned())
    }

    async fn published(&self, range: &Range) -> Result<Vec<Sent>, OutboxError> {
        let topic = range.topic.as_ref().map(spellings);
        let (full, short) = topic.as_ref().map_or((None, None), |(a, b)| (Some(a), Some(b)));
        let rows = self
            .query(PUBLISHED)
            .bind(range.after.cast_signed())
            .bind(range.upto.cast_signed())
            .bind(range.from.as_microsecond())
            .bind(range.to.as_microsecond())
            .bind(full)
            .bind(short)
            .bind(limit(range.rows))
            .fetch_all(&self.work)
            .await
            .map_err(failed)?;
        let sent = |row: &PgRow| {
            let Found { row, .. } = found(row, 0)?;
            Ok::<_, sqlx::Error>(Sent { seq: row.seq, content: row.content })
        };
        rows.iter().map(sent).collect::<Result<_, _>>().map_err(failed)
    }

    async fn hint(&self) {
        if self.pooler {
            return std::future::pending().await;
        }
        let mut listener = self.listener.lock().await;
        loop {
            if let Some(listening) = listener.as_mut() {
                match listening.try_recv().await {
                    Ok(Some(_)) => return,
                    // The connection was lost, and with it perhaps a notification.
                    Ok(None) => return,
                    Err(error) => {
                        debug!(%error, "not listening; the outbox is polled");
                        *listener = None;
                        sleep(LISTEN_AGAIN).await;
                    }
                }
            } else {
                match self.listen().await {
                    // What came before is found by a look now.
                    Ok(listening) => {
                        *listener = Some(listening);
                        return;
                    }
                    Err(error) => {
                        debug!(%error, "cannot listen; the outbox is polled");
                        sleep(LISTEN_AGAIN).await;
                    }
                }
            }
        }
    }

    async fn close(&self) {
        *self.listener.lock().await = None;
        self.work.close().await;
        self.leases.close().await;
        self.listen.close().await;
    }
}

fn page(rows: &[PgRow], scan: &Scan) -> Result<Page, sqlx::Error> {
    let mut page = Page::default();
    let Some(first) = rows.first() else { return Ok(page) };
    let own: Option<String> = first.try_get(1)?;
    page.snapshot = snapshot(first.try_get(0)?, own.as_deref());
    let is_empty = first.try_get::<Option<i64>, _>(3)?.is_none();
    if is_empty {
        if own.is_some() {
            page.last = Some(first.try_get::<i64, _>(2)?.cast_unsigned());
        }
        return Ok(page);
    }
    let mut size = 0;
    for row in rows {
        let one = found(row, 3)?;
        size += row.try_get::<i64, _>(22)?;
        page.last = Some(one.row.seq);
        page.rows.push(one);
    }
    page.full = page.rows.len() >= scan.rows || size >= limit(scan.bytes);
    Ok(page)
}

fn tokens(rows: impl Iterator<Item = (Bucket, FenceToken)>) -> (Vec<i16>, Vec<i64>) {
    let held: hashbrown::HashSet<(Bucket, FenceToken)> = rows.collect();
    held.iter().map(|(bucket, token)| (bucket.cast_signed(), token.cast_signed())).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_read_as_postgres_writes_it() {
        let read = snapshot("10:14:10,12", Some("15")).unwrap();
        assert_eq!(read, Snapshot { next: 14, running: vec![10, 12], own: Some(15) });
        assert_eq!(snapshot("10:10:", None).unwrap().running, Vec::<u64>::new());
        assert_eq!(snapshot("nonsense", None), None);
    }

    #[test]
    fn the_pooler_option_is_taken_out_of_the_url() {
        let (url, pooler) = without_pooler_option("postgres://h/d?pgbouncer=true&sslmode=disable");
        assert_eq!((url.as_str(), pooler), ("postgres://h/d?sslmode=disable", true));
        assert_eq!(without_pooler_option("postgres://h/d").0, "postgres://h/d");
    }
}
