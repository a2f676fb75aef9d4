//! The embedded engine: one SQLite file, nothing else to install.
//!
//! One thread writes, in transactions that hold whatever callers want at the time (`writer`); a
//! call resolves when its transaction is on disk, which is seen to beside it (`flusher`). A few
//! connections read. The file has one engine at a time: a lock beside it sees to that, so
//! the writer may keep in memory what it would otherwise look up (`tables`). Programs may still
//! keep tables of their own in the same file, the outbox among them.

mod checkpoint;
mod config;
mod flusher;
mod reader;
mod schema;
mod tables;
mod writer;

use std::{
    fmt,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    name::Group,
};
use rusqlite::{Connection, OptionalExtension, params};

use self::{
    checkpoint::Checkpointer,
    flusher::{Flush, Flusher, Horizon},
    reader::Readers,
    tables::Tables,
    writer::Writer,
};
use crate::{
    StoreError, Stream, check,
    fence::{self, Acquired, Fence, FenceToken},
    lease::{
        BlockedKey, Claim, Claims, DeadLetter, GroupStats, LeaseToken, Queue, Select, Settle,
        Settled, Start,
    },
    log::{Appended, Bounds, Log, NewRecord, ReadLimit, Record, Seq, Trim},
    micros,
    once::{Once, OnceKey, OnceToken, Reserved},
    wake::{Waiter, Wake, Wakes},
};

pub use self::config::{SqliteConfig, SqliteOptions};

/// How long to wait for an engine that is just closing the file.
const HANDOVER: Duration = Duration::from_secs(3);

/// Only this process appends, so a look that nothing asked for finds nothing; this bounds only how
/// late a clock that was moved is noticed.
const BACKSTOP: Duration = Duration::from_millis(250);

/// What a job that writes no records counts as: some pages.
const SMALL: (usize, usize) = (1, 256);

/// A store in an SQLite file. Clones share it.
///
/// Dropping the last clone ends its threads in the background; [`SqliteStore::close`] waits for
/// them, after which the file may be opened again.
///
/// ```
/// # use carrick_store::{engine::sqlite::{SqliteConfig, SqliteStore}, log::{Log, NewRecord}};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let store = SqliteStore::open(folder.path().join("carrick.db"), SqliteConfig::default())?;
/// let record = NewRecord { body: "hello".into(), ..NewRecord::default() };
/// let appended = store.append(&"greetings".parse()?, vec![record]).await?;
/// assert_eq!(appended[0].seq(), 1); // and it is on disk
/// store.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteStore(Arc<Inner>);

struct Inner {
    path: PathBuf,
    epoch: u64,
    window: Duration,
    writer: Writer,
    readers: Arc<Readers>,
    wakes: Arc<Wakes>,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.0.path).finish_non_exhaustive()
    }
}

/// The file that `sqlite://path` names.
///
/// # Errors
/// [`StoreError::Invalid`] if the URL names none.
pub fn path(url: &str) -> Result<PathBuf, StoreError> {
    let path = url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:"));
    match path.filter(|path| !path.is_empty() && !path.contains('?')) {
        Some(path) => Ok(PathBuf::from(path)),
        None => Err(StoreError::Invalid {
            what: "the store's URL",
            range: "sqlite:// and the path of a file, without parameters",
            value: url.chars().take(200).collect(),
        }),
    }
}

impl SqliteStore {
    /// Opens a file, making or migrating its tables; blocks while it does.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another engine has the file, [`StoreError::NewerSchema`] if a newer
    /// Carrick has been here, [`StoreError::ReadOnly`] if it cannot be written,
    /// [`StoreError::Engine`] if it is no SQLite file or its folder does not exist.
    pub fn open(path: impl AsRef<Path>, config: SqliteConfig) -> Result<Self, StoreError> {
        Self::with_clock(path, config, Arc::new(SystemClock))
    }

    /// The same, by another clock.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub fn with_clock(
        path: impl AsRef<Path>,
        config: SqliteConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let path = path.as_ref();
        Self::start(path, config.options, clock).map_err(|error| about(path, error))
    }

    fn start(
        path: &Path,
        options: SqliteOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let alone = lock(path)?;
        let mut conn = connect(path).map_err(failed)?;
        prepare(&mut conn, &options)?;
        let epoch: i64 = conn
            .query_row("SELECT epoch FROM carrick_store", [], |row| row.get(0))
            .map_err(failed)?;
        let checkpointer = Checkpointer::start(path, options.checkpoint)?;
        let tables = Tables::new(conn, clock, options.dedupe_window, alone).map_err(failed)?;
        let (wakes, horizon) = (Arc::<Wakes>::default(), Arc::<Horizon>::default());
        let unable = |error: std::io::Error| StoreError::Engine(error.into());
        let flush: Flush = if options.danger_not_synchronous {
            Box::new(|| Ok(()))
        } else {
            flusher::flush_of(path).map_err(unable)?
        };
        let flusher = Flusher::start(flush, Arc::clone(&horizon), Arc::clone(&wakes));
        let writer = Writer::start(tables, &options, flusher.map_err(unable)?, checkpointer)?;
        let readers = Arc::new(Readers::new(path, options.readers, horizon));
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            epoch: epoch.cast_unsigned(),
            window: options.dedupe_window,
            writer,
            readers,
            wakes,
        })))
    }

    /// Finishes what is under way, and gives the file up. Calls that come later answer
    /// [`StoreError::Closed`].
    ///
    /// # Cancel safety
    /// Closing goes on in the background.
    pub async fn close(&self) {
        self.0.readers.close();
        self.0.writer.stop().await;
    }

    /// Runs a small job that writes.
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Tables) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.0.writer.write(SMALL, false, work).await
    }
}

/// Takes the lock that only one engine can have; it ends with the process, however that ends.
fn lock(path: &Path) -> Result<std::fs::File, StoreError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push("-lock");
    let file = std::fs::File::options().create(true).append(true).open(&beside);
    let file = file.map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::StorageFull => {
            StoreError::ReadOnly(error.into())
        }
        _ => StoreError::Engine(error.into()),
    })?;
    let until = tokio::time::Instant::now() + HANDOVER;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) if tokio::time::Instant::now() < until => {
                // A file has no wake-up for this; a closing engine takes some milliseconds.
                std::thread::park_timeout(Duration::from_millis(20));
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(StoreError::InUse { path: path.display().to_string() });
            }
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(StoreError::Engine(error.into()));
            }
        }
    }
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let conn = Connection::open(path)?;
    conn.set_prepared_statement_cache_capacity(64);
    conn.busy_timeout(Duration::from_secs(5))?;
    Ok(conn)
}

fn prepare(conn: &mut Connection, options: &SqliteOptions) -> Result<(), StoreError> {
    conn.busy_timeout(options.busy).map_err(failed)?;
    let mode: String =
        conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).map_err(failed)?;
    if mode != "wal" {
        return Err(StoreError::Engine(
            format!("the file cannot have a write-ahead log (journal mode {mode})").into(),
        ));
    }
    // Negative: in KiB, not in pages.
    let cache = -i64::try_from(options.cache / 1024).unwrap_or(i64::MAX);
    conn.pragma_update(None, "cache_size", cache).map_err(failed)?;
    conn.pragma_update(None, "wal_autocheckpoint", 0).map_err(failed)?;
    // What a log that grew too far took is given back when it begins anew.
    let most = (options.checkpoint * checkpoint::TOO_FAR).cast_signed();
    conn.pragma_update(None, "journal_size_limit", most).map_err(failed)?;
    for component in [&schema::COMPONENT, &fence::COMPONENT] {
        crate::schema::sqlite::migrate(conn, component)?;
    }
    // From here on the flusher flushes, after each commit and before its answers.
    conn.pragma_update(None, "synchronous", "NORMAL").map_err(failed)
}

fn failed(error: rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode::{DiskFull, ReadOnly};
    match error.sqlite_error_code() {
        Some(DiskFull | ReadOnly) => StoreError::ReadOnly(error.into()),
        _ => StoreError::Engine(error.into()),
    }
}

/// Says which file an error is about.
fn about(path: &Path, error: StoreError) -> StoreError {
    let told = |source: Box<dyn std::error::Error + Send + Sync>| {
        format!("{}: {source}", path.display()).into()
    };
    match error {
        StoreError::Engine(source) => StoreError::Engine(told(source)),
        StoreError::ReadOnly(source) => StoreError::ReadOnly(told(source)),
        other => other,
    }
}

#[async_trait]
impl Log for SqliteStore {
    fn epoch(&self) -> u64 {
        self.0.epoch
    }

    fn dedupe_window(&self) -> Duration {
        self.0.window
    }

    async fn append(
        &self,
        stream: &Stream,
        records: Vec<NewRecord>,
    ) -> Result<Vec<Appended>, StoreError> {
        check::append(&records)?;
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let size = (records.len(), records.iter().map(|record| record.body.len()).sum());
        let stream = stream.clone();
        self.0.writer.write(size, false, move |tables| tables.append(&stream, &records)).await
    }

    async fn read(
        &self,
        stream: &Stream,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, StoreError> {
        check::read(limit)?;
        let stream = stream.clone();
        let read = move |conn: &Connection| {
            let end = tables::end(conn, &stream).map_err(failed)?;
            let bounds = end.map_or(Bounds { first: 1, last: 0 }, |end| Bounds {
                first: end.first,
                last: end.last,
            });
            bounds.check(after)?;
            let Some(end) = end else { return Ok(Vec::new()) };
            records(conn, end.number, after, limit).map_err(failed)
        };
        self.0.readers.read(read).await
    }

    async fn bounds(&self, stream: &Stream) -> Result<Bounds, StoreError> {
        let stream = stream.clone();
        let end = move |conn: &Connection| tables::end(conn, &stream).map_err(failed);
        let end = self.0.readers.read(end).await?;
        Ok(end.map_or(Bounds { first: 1, last: 0 }, |end| Bounds {
            first: end.first,
            last: end.last,
        }))
    }

    async fn streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(Stream, Bounds)>, StoreError> {
        let after = after.map(|stream| stream.as_str().to_owned()).unwrap_or_default();
        let list = move |conn: &Connection| {
            let mut statement = conn
                .prepare_cached("SELECT name FROM carrick_stream WHERE name > ?1 ORDER BY name")
                .map_err(failed)?;
            let mut rows = statement.query([after]).map_err(failed)?;
            let mut streams = Vec::new();
            while streams.len() < limit
                && let Some(row) = rows.next().map_err(failed)?
            {
                let name: String = row.get(0).map_err(failed)?;
                let unreadable = |error| StoreError::Engine(Box::new(error));
                let stream: Stream = name.parse().map_err(unreadable)?;
                // Streams that only a group waits for are not there yet.
                if let Some(end) = tables::end(conn, &stream).map_err(failed)?
                    && end.last > 0
                {
                    streams.push((stream, Bounds { first: end.first, last: end.last }));
                }
            }
            Ok(streams)
        };
        self.0.readers.read(list).await
    }

    async fn trim(&self, stream: &Stream, trim: Trim) -> Result<usize, StoreError> {
        let name = stream.clone();
        let old = move |conn: &Connection| tables::old(conn, &name, trim).map_err(failed);
        let old = self.0.readers.read(old).await?;
        if old.is_empty() {
            return Ok(0);
        }
        let (stream, size) = (stream.clone(), (old.len(), 64 * old.len()));
        self.0.writer.write(size, false, move |tables| tables.trim(&stream, &old)).await
    }
}

fn records(
    conn: &Connection,
    number: u64,
    after: Seq,
    limit: ReadLimit,
) -> rusqlite::Result<Vec<Record>> {
    let mut statement = conn.prepare_cached(
        "SELECT place, stored_at, key, body FROM carrick_log WHERE place BETWEEN ?1 AND ?2
         ORDER BY place LIMIT ?3",
    )?;
    let (from, to) = (schema::place(number, after + 1), schema::place(number, Seq::MAX));
    let mut rows = statement.query(params![from, to, limit.records as i64])?;
    let (mut records, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next()? {
        let record = tables::record(row)?;
        bytes += record.body.len();
        if !records.is_empty() && bytes > limit.bytes {
            break;
        }
        records.push(record);
    }
    Ok(records)
}

#[async_trait]
impl Queue for SqliteStore {
    async fn create_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, StoreError> {
        let (stream, group) = (stream.clone(), group.clone());
        self.write(move |tables| Ok(tables.create_group(&stream, &group, start)?.1)).await
    }

    async fn claim(
        &self,
        stream: &Stream,
        group: &Group,
        claim: Claim,
    ) -> Result<Claims, StoreError> {
        check::claim(claim)?;
        let (stream, group) = (stream.clone(), group.clone());
        let size = (claim.records, 64 * claim.records);
        let work = move |tables: &mut Tables| tables.claim(&stream, &group, claim);
        self.0.writer.write(size, true, work).await
    }

    async fn settle(
        &self,
        settlements: Vec<(LeaseToken, Settle)>,
    ) -> Result<Vec<Settled>, StoreError> {
        check::settle(&settlements)?;
        if settlements.is_empty() {
            return Ok(Vec::new());
        }
        let size = (settlements.len(), 64 * settlements.len());
        self.0.writer.write(size, false, move |tables| tables.settle(&settlements)).await
    }

    async fn group_of(&self, token: LeaseToken) -> Result<Option<(Stream, Group)>, StoreError> {
        self.write(move |tables| tables.name_of(token.group.get())).await
    }

    async fn groups(&self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>, StoreError> {
        let stream = stream.clone();
        self.write(move |tables| tables.groups(&stream)).await
    }

    async fn dead_letters(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let (stream, group) = (stream.clone(), group.clone());
        let list = move |conn: &Connection| {
            dead_letters(conn, &stream, &group, after, limit).map_err(failed)
        };
        self.0.readers.read(list).await
    }

    async fn redrive(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let (stream, group, select) = (stream.clone(), group.clone(), select.clone());
        self.write(move |tables| tables.redrive(&stream, &group, &select, limit)).await
    }

    async fn purge(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let (stream, group, select) = (stream.clone(), group.clone(), select.clone());
        self.write(move |tables| tables.purge(&stream, &group, &select, limit)).await
    }

    async fn skip(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, StoreError> {
        let (stream, group, select) = (stream.clone(), group.clone(), select.clone());
        let cause = cause.to_owned();
        self.write(move |tables| tables.skip(&stream, &group, &select, &cause)).await
    }

    async fn blocked_keys(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, StoreError> {
        let (stream, group) = (stream.clone(), group.clone());
        self.write(move |tables| tables.blocked_keys(&stream, &group, after, limit)).await
    }
}

fn dead_letters(
    conn: &Connection,
    stream: &Stream,
    group: &Group,
    after: Seq,
    limit: usize,
) -> rusqlite::Result<Vec<DeadLetter>> {
    let found: Option<(i64, i64)> = conn
        .prepare_cached(
            "SELECT one.id, stream.id FROM carrick_group AS one
             JOIN carrick_stream AS stream ON stream.id = one.stream_id
             WHERE stream.name = ?1 AND one.name = ?2",
        )?
        .query_row([stream.as_str(), group.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((group, number)) = found else { return Ok(Vec::new()) };
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    conn.prepare_cached(
        "SELECT place, stored_at, key, body, attempts, cause, fence, first_claimed_at, buried_at
         FROM carrick_dead JOIN carrick_log ON place = ?2 + seq
         WHERE group_id = ?1 AND seq > ?3 ORDER BY seq LIMIT ?4",
    )?
    .query_map(params![group, schema::place(number.cast_unsigned(), 0), after, limit], |row| {
        Ok(DeadLetter {
            record: tables::record(row)?,
            attempts: row.get(4)?,
            cause: row.get(5)?,
            fence: row.get::<_, i64>(6)?.cast_unsigned(),
            first_claimed_at: micros::time(row.get(7)?),
            buried_at: micros::time(row.get(8)?),
        })
    })?
    .collect()
}

#[async_trait]
impl Once for SqliteStore {
    async fn reserve(&self, key: &OnceKey, hold: Duration) -> Result<Reserved, StoreError> {
        check::once(key)?;
        let key = key.clone();
        // SQLite's integers are signed: half the range is enough for a token nobody guesses.
        let token = rand::random::<u64>() >> 1;
        self.write(move |tables| reserve(tables, &key, hold, token)).await
    }

    async fn complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: Bytes,
        keep: Duration,
    ) -> Result<bool, StoreError> {
        check::once(key)?;
        let key = key.clone();
        let complete = move |tables: &mut Tables| {
            let end = tables.now().saturating_add(micros::of(keep));
            let rows = tables
                .conn()
                .prepare_cached(
                    "UPDATE carrick_once SET answer = ?4, ends_at = ?5 WHERE scope = ?1
                     AND key = ?2 AND token = ?3 AND answer IS NULL AND ends_at > ?6",
                )?
                .execute(params![
                    key.scope,
                    key.key,
                    token.0.cast_signed(),
                    &answer[..],
                    end,
                    tables.now()
                ])?;
            Ok(rows == 1)
        };
        self.write(complete).await
    }

    async fn release(&self, key: &OnceKey, token: OnceToken) -> Result<(), StoreError> {
        check::once(key)?;
        let key = key.clone();
        let release = move |tables: &mut Tables| {
            tables
                .conn()
                .prepare_cached(
                    "DELETE FROM carrick_once
                     WHERE scope = ?1 AND key = ?2 AND token = ?3 AND answer IS NULL",
                )?
                .execute(params![key.scope, key.key, token.0.cast_signed()])?;
            Ok(())
        };
        self.write(release).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, StoreError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let sweep = move |tables: &mut Tables| {
            tables
                .conn()
                .prepare_cached(
                    "DELETE FROM carrick_once WHERE (scope, key) IN (
                         SELECT scope, key FROM carrick_once WHERE ends_at <= ?1 LIMIT ?2)",
                )?
                .execute([tables.now(), limit])
        };
        self.write(sweep).await
    }
}

fn reserve(
    tables: &mut Tables,
    key: &OnceKey,
    hold: Duration,
    token: u64,
) -> rusqlite::Result<Reserved> {
    let (conn, now) = (tables.conn(), tables.now());
    let fingerprint = key.fingerprint.to_be_bytes();
    let found: Option<([u8; 16], Option<Vec<u8>>, i64)> = conn
        .prepare_cached(
            "SELECT fingerprint, answer, ends_at FROM carrick_once
             WHERE scope = ?1 AND key = ?2 AND ends_at > ?3",
        )?
        .query_row(params![key.scope, key.key, now], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })
        .optional()?;
    match found {
        Some((other, ..)) if other != fingerprint => Ok(Reserved::Mismatch),
        Some((_, Some(answer), _)) => Ok(Reserved::Done(answer.into())),
        Some((_, None, ends_at)) => {
            let left = u64::try_from(ends_at.saturating_sub(now)).unwrap_or(0);
            Ok(Reserved::Busy(Duration::from_micros(left)))
        }
        None => {
            let end = now.saturating_add(micros::of(hold));
            conn.prepare_cached(
                "INSERT OR REPLACE INTO carrick_once (scope, key, fingerprint, token, ends_at)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![
                key.scope,
                key.key,
                fingerprint,
                token.cast_signed(),
                end
            ])?;
            Ok(Reserved::New(OnceToken(token)))
        }
    }
}

#[async_trait]
impl Fence for SqliteStore {
    async fn acquire(&self, name: &str, ttl: Duration) -> Result<Acquired, StoreError> {
        check::lease_name(name)?;
        let name = name.to_owned();
        let acquire = move |tables: &mut Tables| {
            Ok(fence::sqlite::acquire_at(tables.conn(), &name, ttl, tables.now()))
        };
        self.write(acquire).await?
    }

    async fn renew(
        &self,
        name: &str,
        token: FenceToken,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        let name = name.to_owned();
        let renew = move |tables: &mut Tables| {
            Ok(fence::sqlite::renew_at(tables.conn(), &name, token, ttl, tables.now()))
        };
        self.write(renew).await?
    }

    async fn release_lease(&self, name: &str, token: FenceToken) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        let name = name.to_owned();
        let release = move |tables: &mut Tables| {
            Ok(fence::sqlite::release_at(tables.conn(), &name, token, tables.now()))
        };
        self.write(release).await?
    }
}

#[async_trait]
impl Wake for SqliteStore {
    fn waiter(&self, stream: &Stream) -> Waiter {
        self.0.wakes.waiter(stream)
    }

    fn backstop(&self) -> Duration {
        BACKSTOP
    }
}
