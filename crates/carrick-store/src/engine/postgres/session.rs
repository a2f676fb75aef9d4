//! Connections and transactions: pools, timeouts, what is retried, and what an error means.

use std::{fmt, sync::Arc, time::Duration};

use carrick_core::backoff::Backoff;
use hashbrown::HashMap;
use parking_lot::Mutex;
use sqlx::{
    AssertSqlSafe, Connection, PgConnection, PgPool, Postgres, Transaction,
    pool::PoolConnection,
    postgres::{PgArguments, PgConnectOptions, PgPoolOptions},
    query::{Query, QueryAs},
};
use tokio::time::{Instant, timeout};
use xxhash_rust::xxh3::xxh3_64;

use super::config::PostgresOptions;
use crate::{StoreError, Stream};

/// The database's clock, in microseconds since 1970; made with the table of named leases.
macro_rules! now {
    () => {
        "carrick_now()"
    };
}
pub(super) use now;

/// Connections of the lease pool: one to renew while another is stuck, and no more, for they serve
/// one statement at a time.
const LEASE_CONNECTIONS: u32 = 2;

/// A connection unused for longer is tried before it is used: the server may have gone meanwhile.
/// One in use is not; what it fails with is retried or told.
const TRUSTED_FOR: Duration = Duration::from_secs(1);

/// Numbers of streams kept in memory: a megabyte or two.
const STREAMS_KNOWN: usize = 10_000;

/// The database as the engine uses it.
#[derive(Debug)]
pub(super) struct Db {
    /// For everything but leases.
    pool: PgPool,
    /// For leases, so that callers who hold every other connection cannot keep one from renewal.
    leases: PgPool,
    /// For telling other processes: one connection, made when there is something to tell.
    notices: PgPool,
    /// Numbers of streams by name, so that most calls need not look them up. Streams are never
    /// removed, so what it holds stays true.
    streams: Mutex<HashMap<Stream, i64>>,
    schema: String,
    /// After so long a server that has not answered is taken for gone.
    limit: Duration,
    /// What a transaction begins with.
    begin: String,
    /// Whether a session is left as it was found, and statements have no names.
    pooler: bool,
}

impl Db {
    pub(super) fn open(url: PgConnectOptions, options: &PostgresOptions) -> Self {
        let settings = settings(options);
        // A database or a role may have another default level; what is read after a lock was taken
        // must be newer than the lock.
        let mut begin = "BEGIN ISOLATION LEVEL READ COMMITTED".to_owned();
        let connect = if options.pooler {
            for (name, value) in &settings {
                begin.push_str(&format!("; SET LOCAL {name} = '{value}'"));
            }
            // PgBouncer refuses a connection that asks for a setting it does not know.
            url.statement_cache_capacity(0).extra_float_digits(None)
        } else {
            url.options(settings)
        };
        let connect = match connect.get_application_name() {
            Some(_) => connect,
            None => connect.application_name("carrick"),
        };
        let pool = |connections| {
            PgPoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(options.acquire_timeout)
                .test_before_acquire(false)
                .before_acquire(|connection, meta| {
                    Box::pin(async move {
                        if meta.idle_for > TRUSTED_FOR {
                            connection.ping().await?;
                        }
                        Ok(true)
                    })
                })
                .connect_lazy_with(connect.clone())
        };
        Self {
            pool: pool(options.max_connections),
            leases: pool(LEASE_CONNECTIONS),
            notices: pool(1),
            streams: Mutex::default(),
            schema: options.schema.clone(),
            // A connection, a lock and the statements have their own limits, which the server keeps.
            // This one is for a server, or a network, that says nothing more.
            limit: options.acquire_timeout + 2 * options.statement_timeout,
            begin,
            pooler: options.pooler,
        }
    }

    /// Waits for work with the database, but not for ever.
    pub(super) async fn within<T, E: From<Failure>>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        timeout(self.limit, work).await.unwrap_or_else(|_silent| Err(Failure::Silent.into()))
    }

    /// Begins a transaction, with an advisory lock of its own as its first act.
    pub(super) async fn begin(&self, lock: Option<Lock>) -> Result<Tx, Failure> {
        Self::begin_on(&self.pool, &self.begin, lock).await
    }

    async fn begin_on(pool: &PgPool, begin: &str, lock: Option<Lock>) -> Result<Tx, Failure> {
        // One round trip for all of it. Each statement of it sees what was committed before it
        // started, and what follows sees all that earlier holders of the lock did.
        let sql = match lock {
            Some(Lock(key)) => format!("{begin}; SELECT pg_advisory_xact_lock({key})"),
            None => begin.to_owned(),
        };
        Ok(Tx(pool.begin_with(AssertSqlSafe(sql)).await?))
    }

    /// A connection for one statement, or a few that need not be one transaction.
    pub(super) async fn single(&self) -> Result<Single, Failure> {
        self.single_on(&self.pool).await
    }

    /// The same, for a statement about leases.
    pub(super) async fn lease(&self) -> Result<Single, Failure> {
        self.single_on(&self.leases).await
    }

    /// The same, to tell other processes something.
    pub(super) async fn notices(&self) -> Result<Single, Failure> {
        self.single_on(&self.notices).await
    }

    async fn single_on(&self, pool: &PgPool) -> Result<Single, Failure> {
        Ok(if self.pooler {
            Single::Transaction(Self::begin_on(pool, &self.begin, None).await?)
        } else {
            Single::Connection(pool.acquire().await?)
        })
    }

    pub(super) fn query(&self, sql: &'static str) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(sql).persistent(!self.pooler)
    }

    pub(super) fn query_as<T>(
        &self,
        sql: &'static str,
    ) -> QueryAs<'static, Postgres, T, PgArguments>
    where
        T: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow>,
    {
        sqlx::query_as(sql).persistent(!self.pooler)
    }

    /// The lock on which transactions about one thing take turns. Locks of other programs in the
    /// same database live in the same 64 bits: should two meet, they wait for each other, no more.
    pub(super) fn lock(&self, what: &str, id: i64) -> Lock {
        let name = format!("carrick/{}/{what}/{id}", self.schema);
        Lock(xxh3_64(name.as_bytes()).cast_signed())
    }

    /// The number of a stream; `None` if nobody has written to it.
    pub(super) async fn find_stream(&self, stream: &Stream) -> Result<Option<i64>, Failure> {
        if let Some(&id) = self.streams.lock().get(stream) {
            return Ok(Some(id));
        }
        let mut session = self.single().await?;
        let row: Option<(i64,)> = self
            .query_as("SELECT id FROM carrick_stream WHERE name = $1")
            .bind(stream.as_str())
            .fetch_optional(session.conn())
            .await?;
        session.finish().await?;
        let Some((id,)) = row else { return Ok(None) };
        let mut streams = self.streams.lock();
        if streams.len() >= STREAMS_KNOWN {
            streams.clear();
        }
        streams.insert(stream.clone(), id);
        Ok(Some(id))
    }

    /// The number of a stream, which is made if it is not there.
    pub(super) async fn stream(&self, stream: &Stream) -> Result<i64, Failure> {
        loop {
            if let Some(id) = self.find_stream(stream).await? {
                return Ok(id);
            }
            let mut session = self.single().await?;
            self.query("INSERT INTO carrick_stream (name) VALUES ($1) ON CONFLICT DO NOTHING")
                .bind(stream.as_str())
                .execute(session.conn())
                .await?;
            session.finish().await?;
        }
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
        self.leases.close().await;
        self.notices.close().await;
    }
}

/// What every session or transaction of the engine is set to.
fn settings(options: &PostgresOptions) -> Vec<(&'static str, String)> {
    let millis = |duration: Duration| duration.as_millis().to_string();
    vec![
        ("search_path", options.schema.clone()),
        ("statement_timeout", millis(options.statement_timeout)),
        ("lock_timeout", millis(options.lock_timeout)),
        // A process that stands still in the middle of a transaction holds its locks: not for long.
        ("idle_in_transaction_session_timeout", millis(options.statement_timeout)),
        // Every statement of the engine is made for an index. A plan made while a table was small,
        // or emptied a moment ago, must not read all of it once it has grown.
        ("enable_seqscan", "off".to_owned()),
        ("enable_hashjoin", "off".to_owned()),
        ("enable_mergejoin", "off".to_owned()),
        ("jit", "off".to_owned()),
    ]
}

/// Key of an advisory lock, which ends with its transaction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lock(pub(super) i64);

/// A transaction.
#[derive(Debug)]
pub(super) struct Tx(Transaction<'static, Postgres>);

impl Tx {
    pub(super) fn conn(&mut self) -> &mut PgConnection {
        &mut self.0
    }

    pub(super) async fn commit(self) -> Result<(), Failure> {
        self.0.commit().await.map_err(|error| Failure::Commit(Arc::new(error)))
    }
}

/// A connection by itself, or in a transaction where sessions are shared.
#[derive(Debug)]
pub(super) enum Single {
    Connection(PoolConnection<Postgres>),
    Transaction(Tx),
}

impl Single {
    pub(super) fn conn(&mut self) -> &mut PgConnection {
        match self {
            Self::Connection(connection) => connection,
            Self::Transaction(tx) => tx.conn(),
        }
    }

    pub(super) async fn finish(self) -> Result<(), Failure> {
        match self {
            Self::Connection(_) => Ok(()),
            Self::Transaction(tx) => tx.commit().await,
        }
    }
}

/// Why a transaction did not happen. Cheap to clone: everybody in a batch is told.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// Before the commit was asked for: nothing was changed.
    Before(Arc<sqlx::Error>),
    /// While it was asked for: if the connection broke, nobody knows.
    Commit(Arc<sqlx::Error>),
    /// It said nothing more; what it did is unknown.
    Silent,
    /// It was not the database.
    Refused(Refusal),
}

/// What the engine itself refuses, once it has looked.
#[derive(Clone, Debug)]
pub(super) enum Refusal {
    /// What the database holds is not what the engine wrote.
    Corrupt(&'static str),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Corrupt(what) = self;
        write!(f, "the tables hold what the engine did not write: {what}")
    }
}

impl std::error::Error for Refusal {}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Before(Arc::new(error))
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Failure {
    /// What the caller is told.
    pub(super) fn told(&self) -> StoreError {
        let error = match self {
            Self::Before(error) | Self::Commit(error) => Arc::clone(error),
            Self::Silent => return StoreError::Engine("the database does not answer".into()),
            Self::Refused(refusal) => return StoreError::Engine(Box::new(refusal.clone())),
        };
        match (&*error, code(&error).as_deref()) {
            (sqlx::Error::PoolClosed, _) => StoreError::Closed,
            // read_only_sql_transaction, disk_full
            (_, Some("25006" | "53100")) => StoreError::ReadOnly(Box::new(error)),
            // lock_not_available, too_many_connections
            (_, Some("55P03" | "53300")) => StoreError::Overloaded,
            _ => StoreError::Engine(Box::new(error)),
        }
    }

    /// Whether the same transaction, tried again at once, may well succeed and cannot act twice.
    fn is_worth_another_try(&self) -> bool {
        let (error, before) = match self {
            Self::Before(error) => (error, true),
            Self::Commit(error) => (error, false),
            Self::Silent | Self::Refused(_) => return false,
        };
        match code(error).as_deref() {
            // serialization_failure, deadlock_detected: the database undid it.
            Some("40001" | "40P01") => true,
            // admin_shutdown, crash_shutdown, idle_in_transaction_session_timeout: the connection
            // ended, and the next one may be good.
            Some("57P01" | "57P02" | "25P03") => before,
            Some(_) => false,
            None => before && is_lost(error),
        }
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        failure.told()
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(Into::into)
}

/// Whether the connection is what failed.
fn is_lost(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed)
}

/// How often a transaction is tried quietly, the first time included, and what is waited between.
/// A third of a second in all: it outlasts a deadlock and a killed connection, not an outage.
const TRIES: u32 = 6;
const BETWEEN: Backoff =
    Backoff { base: Duration::from_millis(10), cap: Duration::from_millis(160) };

/// Counts the tries of one transaction.
#[derive(Debug, Default)]
pub(super) struct Tries {
    failed: u32,
}

impl Tries {
    /// Whether to try once more, after having waited for it.
    pub(super) async fn again(&mut self, failure: &Failure) -> bool {
        self.failed += 1;
        if self.failed >= TRIES || !failure.is_worth_another_try() {
            return false;
        }
        metrics::counter!("carrick_store_retried_total", "engine" => "postgres").increment(1);
        let wait = BETWEEN.delay(self.failed - 1, &mut rand::rng());
        tracing::debug!(attempt = self.failed, error = %failure.told(), "trying again");
        tokio::time::sleep(wait).await;
        true
    }
}

/// Lets one log line through in a while, and counts those it held back.
#[derive(Debug, Default)]
pub(super) struct Sparse {
    last: Option<Instant>,
    held: u64,
}

impl Sparse {
    /// How many lines were held back since the last one, if it is time for another.
    pub(super) fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now - last < Duration::from_secs(10)) {
            self.held += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_ten_seconds_and_the_rest_counted() {
        let start = Instant::now();
        let mut sparse = Sparse::default();
        assert_eq!(sparse.due(start), Some(0));
        for second in 1..10 {
            assert_eq!(sparse.due(start + Duration::from_secs(second)), None);
        }
        assert_eq!(sparse.due(start + Duration::from_secs(10)), Some(9));
    }

    #[test]
    fn a_commit_that_was_cut_off_is_never_repeated() {
        let lost = || Arc::new(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()));
        assert!(Failure::Before(lost()).is_worth_another_try());
        assert!(!Failure::Commit(lost()).is_worth_another_try());
        assert!(!Failure::Before(Arc::new(sqlx::Error::PoolTimedOut)).is_worth_another_try());
    }
}
