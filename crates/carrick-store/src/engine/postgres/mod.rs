//! The engine on PostgreSQL 13 or newer.
//!
//! Any number of processes share the tables. What must take turns does so on an advisory lock that
//! ends with its transaction: appends of one stream (`append`), transactions of one group
//! (`group`). Transactions are short, their statements work on sets, and what many callers want at
//! once goes into one of them (`lanes`). The database's clock is the only clock. Nothing is kept
//! in a session but the optional `LISTEN` (`notices`), so a transaction pooler may stand between.
//! Read `schema` for how a snapshot that somebody holds open does no harm.

mod append;
mod config;
mod group;
mod housekeeping;
mod lanes;
mod log;
mod notices;
mod once;
mod queue;
mod schema;
mod session;
mod url;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::JoinSet};

use self::{
    lanes::Lanes,
    notices::Notices,
    session::{Db, Failure, Tries},
};
use crate::{
    StoreError, Stream, check,
    fence::{Acquired, Fence, FenceToken},
    wake::{Waiter, Wake},
};

pub use self::config::{PostgresConfig, PostgresOptions};

/// A store in a Postgres database. Clones share it.
///
/// Dropping the last clone stops its tasks; [`PostgresStore::close`] lets them finish.
///
/// ```no_run
/// # // It needs a server.
/// # use carrick_store::{Stream, engine::postgres::*, log::{Log, NewRecord}};
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let url = "postgres://carrick@127.0.0.1/shop?schema=messages";
/// let store = PostgresStore::connect(url, PostgresConfig::default()).await?;
/// let record = NewRecord { body: "hello".into(), ..NewRecord::default() };
/// let appended = store.append(&Stream::new("greetings")?, vec![record]).await?;
/// println!("durable under {}", appended[0].seq());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PostgresStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: PostgresOptions,
    epoch: u64,
    db: Arc<Db>,
    notices: Arc<Notices>,
    appends: Lanes<Stream, append::Append>,
    groups: Lanes<Arc<group::GroupRef>, group::Command>,
    groups_known: Mutex<queue::GroupsKnown>,
    /// Room for the bodies of waiting appends, in KiB.
    room: Arc<Semaphore>,
    /// The notifier, the listener and the housekeeper; dropped with the store, and so stopped.
    tasks: Mutex<JoinSet<()>>,
}

impl PostgresStore {
    /// Connects to a database, and makes or migrates the tables.
    ///
    /// * `url`: `postgres://user:password@host:port/database?…`. Beside the parameters of libpq it
    ///   understands `schema`, `listen`, `pgbouncer` (or `pooler`) and `max-connections`, which win
    ///   over `config`.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if the URL is not one, [`StoreError::NewerSchema`] if a newer Carrick
    /// has been here, and [`StoreError::Engine`] if the database cannot be reached or refuses.
    ///
    /// # Cancel safety
    /// Safe to drop: the tables are there or they are not.
    pub async fn connect(url: &str, config: PostgresConfig) -> Result<Self, StoreError> {
        let (url, options) = url::parse(url, config)?;
        let db = Arc::new(Db::open(url.clone(), &options));
        let epoch = prepare(&db, &options).await?;
        let listen = match (&options.listen_url, options.pooler, options.listen) {
            (_, _, false) => None,
            (Some(past), _, true) => Some(url::parse(past, PostgresConfig::default())?.0),
            (None, pooler, true) => (!pooler).then_some(url),
        };
        let notices = Arc::new(Notices::new(&options.schema, options.listen));
        let mut tasks = JoinSet::new();
        if options.listen {
            tasks.spawn(notices::tell(notices.clone(), db.clone()));
        }
        if let Some(url) = listen {
            tasks.spawn(notices::listen(notices.clone(), url));
        }
        tasks.spawn(housekeeping::work(db.clone(), options.dedupe_window));
        Ok(Self(Arc::new(Inner {
            epoch,
            db,
            notices,
            appends: Lanes::new(),
            groups: Lanes::new(),
            groups_known: Mutex::default(),
            room: Arc::new(Semaphore::new(log::WAITING_KIB as usize)),
            tasks: Mutex::new(tasks),
            options,
        })))
    }

    /// Finishes what is under way, and closes the connections. Calls that come later answer
    /// [`StoreError::Closed`].
    ///
    /// # Cancel safety
    /// What was under way is cut off: its callers are told that its outcome is unknown.
    pub async fn close(&self) {
        self.0.room.close();
        self.0.appends.close().await;
        self.0.groups.close().await;
        self.0.tasks.lock().abort_all();
        self.0.db.close().await;
    }

    fn db(&self) -> &Db {
        &self.0.db
    }
}

/// Makes what is not there, and reads what must be known.
async fn prepare(db: &Db, options: &PostgresOptions) -> Result<u64, StoreError> {
    let mut tries = Tries::default();
    loop {
        match try_prepare(db, options).await {
            Err(Unprepared::Failed(failure)) if tries.again(&failure).await => {}
            Err(Unprepared::Failed(failure)) => return Err(failure.told()),
            Err(Unprepared::Schema(error)) => return Err(error),
            Ok(epoch) => return Ok(epoch),
        }
    }
}

enum Unprepared {
    Failed(Failure),
    Schema(StoreError),
}

impl From<Failure> for Unprepared {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<sqlx::Error> for Unprepared {
    fn from(error: sqlx::Error) -> Self {
        Self::Failed(error.into())
    }
}

async fn try_prepare(db: &Db, options: &PostgresOptions) -> Result<u64, Unprepared> {
    let mut tx = db.begin(None).await?;
    let (version, sync, there): (i32, String, bool) = db
        .query_as(
            "SELECT current_setting('server_version_num')::int,
                 current_setting('synchronous_commit'),
                 EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)",
        )
        .bind(&options.schema)
        .fetch_one(tx.conn())
        .await?;
    if version < 130_000 {
        return Err(Unprepared::Schema(StoreError::Invalid {
            what: "the server",
            range: "PostgreSQL 13 or newer",
            value: format!("{}.{}", version / 10_000, version % 10_000),
        }));
    }
    if sync == "off" {
        tracing::warn!(
            "synchronous_commit is off here: a crash of the server may lose what it acknowledged"
        );
    }
    if !there {
        // Checked first: making it needs a right that using it does not.
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
            "SELECT pg_advisory_xact_lock({}); CREATE SCHEMA IF NOT EXISTS {}",
            db.lock("schema", 0).0,
            options.schema
        )))
        .execute(tx.conn())
        .await?;
    }
    for component in [&crate::fence::COMPONENT, &schema::COMPONENT] {
        crate::schema::postgres::migrate_in(tx.conn(), component)
            .await
            .map_err(Unprepared::Schema)?;
    }
    let (epoch, window): (i64, i64) =
        db.query_as("SELECT epoch, dedupe_window FROM carrick_store").fetch_one(tx.conn()).await?;
    // Looked at first: a database that cannot be written to is still good for reading.
    let wanted = count(options.dedupe_window.as_micros());
    if window < wanted {
        db.query("UPDATE carrick_store SET dedupe_window = $1 WHERE dedupe_window < $1")
            .bind(wanted)
            .execute(tx.conn())
            .await?;
    }
    tx.commit().await?;
    Ok(epoch.cast_unsigned())
}

#[async_trait]
impl Fence for PostgresStore {
    async fn acquire(&self, name: &str, ttl: Duration) -> Result<Acquired, StoreError> {
        check::lease_name(name)?;
        let work = async {
            let mut session = self.db().lease().await?;
            let acquired = crate::fence::postgres::acquire(session.conn(), name, ttl).await?;
            session.finish().await?;
            Ok(acquired)
        };
        self.db().within(work).await
    }

    async fn renew(
        &self,
        name: &str,
        token: FenceToken,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        let work = async {
            let mut session = self.db().lease().await?;
            let renewed = crate::fence::postgres::renew(session.conn(), name, token, ttl).await?;
            session.finish().await?;
            Ok(renewed)
        };
        self.db().within(work).await
    }

    async fn release_lease(&self, name: &str, token: FenceToken) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        let work = async {
            let mut session = self.db().lease().await?;
            let released = crate::fence::postgres::release(session.conn(), name, token).await?;
            session.finish().await?;
            Ok(released)
        };
        self.db().within(work).await
    }
}

#[async_trait]
impl Wake for PostgresStore {
    fn waiter(&self, stream: &Stream) -> Waiter {
        self.0.notices.waiter(stream)
    }

    fn backstop(&self) -> Duration {
        self.0.options.poll
    }
}

/// The answer to a caller whose command nobody is left to answer.
fn unanswered() -> StoreError {
    StoreError::Engine("the store ended before it answered".into())
}

/// A number as Postgres takes it; what is beyond its largest is that.
fn count(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}
