//! The SQLite engine passes the contract, and what is particular to a file.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use carrick_core::clock::{Clock, ManualClock};
use carrick_store::{
    Store, StoreError, Stream,
    contract::Subject,
    engine::sqlite::{SqliteConfig, SqliteOptions, SqliteStore},
    lease::{Claim, Queue},
    log::{Appended, Log, NewRecord, ReadLimit},
    schema::{self, Component, Migration},
};
use jiff::Timestamp;

struct File {
    folder: tempfile::TempDir,
    clock: Arc<ManualClock>,
}

fn file() -> File {
    let clock = Arc::new(ManualClock::at("2026-12-01T00:00:00Z".parse().unwrap()));
    File { folder: tempfile::tempdir().unwrap(), clock }
}

impl File {
    fn path(&self) -> PathBuf {
        self.folder.path().join("carrick.db")
    }

    fn store(&self) -> SqliteStore {
        let clock = self.clock.clone();
        SqliteStore::with_clock(self.path(), SqliteConfig::default(), clock).unwrap()
    }
}

#[async_trait]
impl Subject for File {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.store())
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }

    async fn now(&self) -> Timestamp {
        self.clock.wall()
    }

    fn is_durable(&self) -> bool {
        true
    }
}

carrick_store::store_contract!(file(), #[tokio::test(flavor = "multi_thread")]);

fn orders() -> Stream {
    Stream::new("orders").unwrap()
}

fn record(text: &str) -> NewRecord {
    NewRecord { body: text.to_owned().into(), ..NewRecord::default() }
}

fn open(path: &Path) -> Result<SqliteStore, StoreError> {
    SqliteStore::open(path, SqliteConfig::default())
}

#[tokio::test]
async fn a_second_engine_on_the_file_is_refused_until_the_first_is_closed() {
    let file = file();
    let first = file.store();
    let path = file.path();
    let second = tokio::task::spawn_blocking(move || open(&path)).await.unwrap();
    assert!(matches!(second, Err(StoreError::InUse { .. })), "{second:?}");
    first.close().await;
    assert!(open(&file.path()).is_ok());
}

#[tokio::test]
async fn a_dropped_store_frees_its_file() {
    let file = file();
    drop(file.store());
    let path = file.path();
    tokio::task::spawn_blocking(move || open(&path)).await.unwrap().unwrap();
}

#[tokio::test]
async fn what_is_no_database_is_refused_and_left_alone() {
    let file = file();
    let text = "this is somebody's letter, not a database".repeat(100);
    std::fs::write(file.path(), &text).unwrap();
    let error = open(&file.path()).unwrap_err();
    let told = std::error::Error::source(&error).unwrap().to_string();
    assert!(told.contains("not a database"), "{told}");
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), text);
}

#[tokio::test]
async fn a_newer_schema_is_refused_with_both_versions() {
    const NEWER: Component = Component {
        name: "store",
        migrations: &[Migration { version: 99, name: "later", sqlite: "", postgres: "" }],
    };
    let file = file();
    file.store().close().await;
    let mut conn = rusqlite::Connection::open(file.path()).unwrap();
    schema::sqlite::migrate(&mut conn, &NEWER).unwrap();
    let error = open(&file.path()).unwrap_err();
    assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tables_and_writers_share_the_file() {
    let file = file();
    let store = file.store();
    let mut conn = rusqlite::Connection::open(file.path()).unwrap();
    conn.busy_timeout(Duration::from_secs(5)).unwrap();
    conn.execute_batch("CREATE TABLE mine (n INTEGER)").unwrap();
    for n in 0..20 {
        let tx = conn.transaction().unwrap();
        tx.execute("INSERT INTO mine VALUES (?1)", [n]).unwrap();
        tx.commit().unwrap();
        store.append(&orders(), vec![record("x")]).await.unwrap();
    }
    assert_eq!(store.bounds(&orders()).await.unwrap().last, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_write_leaves_no_gap_and_the_next_one_works() {
    let file = file();
    let store = file.store();
    store.append(&orders(), vec![record("first")]).await.unwrap();
    let conn = rusqlite::Connection::open(file.path()).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER full BEFORE INSERT ON carrick_log
         BEGIN SELECT RAISE(ABORT, 'no room'); END",
    )
    .unwrap();
    let refused = store.append(&orders(), vec![record("second")]).await.unwrap_err();
    assert!(refused.is_transient(), "{refused:?}");
    conn.execute_batch("DROP TRIGGER full").unwrap();
    store.append(&orders(), vec![record("third")]).await.unwrap();
    let read = store.read(&orders(), 0, ReadLimit::default()).await.unwrap();
    let bodies: Vec<_> = read.iter().map(|record| (record.seq, &record.body[..])).collect();
    assert_eq!(bodies, [(1, &b"first"[..]), (2, b"third")], "no gap, and nothing of the refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_append_is_not_remembered_as_a_duplicate() {
    let file = file();
    let store = file.store();
    store.append(&orders(), vec![record("first")]).await.unwrap();
    let conn = rusqlite::Connection::open(file.path()).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER full BEFORE INSERT ON carrick_log
         BEGIN SELECT RAISE(ABORT, 'no room'); END",
    )
    .unwrap();
    let event = NewRecord { dedupe: Some(7), ..record("again") };
    store.append(&orders(), vec![event.clone()]).await.unwrap_err();
    conn.execute_batch("DROP TRIGGER full").unwrap();
    let appended = store.append(&orders(), vec![event]).await.unwrap();
    assert_eq!(appended[0], Appended::Stored(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_for_a_reason_of_its_own_fails_alone() {
    let file = file();
    let store = file.store();
    store.append(&orders(), vec![record("first")]).await.unwrap();
    let mut conn = rusqlite::Connection::open(file.path()).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER picky BEFORE INSERT ON carrick_log WHEN NEW.key = 'poison'
         BEGIN SELECT RAISE(ABORT, 'not that one'); END",
    )
    .unwrap();
    // While this holds the file, what is asked for gathers and goes into one transaction.
    let held = conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..40_u128 {
        let store = store.clone();
        let key = (n % 10 == 5).then(|| "poison".to_owned());
        let event = NewRecord { key, dedupe: Some(n), ..record("x") };
        tasks.spawn(async move { (n, store.append(&orders(), vec![event]).await) });
        tokio::task::yield_now().await;
    }
    drop(held);
    let mut seqs = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        let (n, appended) = ended.unwrap();
        assert_eq!(appended.is_ok(), n % 10 != 5, "{n}: {appended:?}");
        seqs.extend(appended.ok().map(|appended| appended[0]));
    }
    seqs.sort_unstable_by_key(|appended| appended.seq());
    let stored = (2..=37).map(Appended::Stored);
    assert_eq!(seqs, stored.collect::<Vec<_>>(), "without a gap");
}

/// How large the write-ahead log is.
fn log_size(file: &File) -> u64 {
    let path = file.folder.path().join("carrick.db-wal");
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn folds_early(file: &File) -> SqliteStore {
    let options = SqliteOptions { checkpoint: 64 * 1024, ..SqliteOptions::default() };
    let config = SqliteConfig::try_from(options).unwrap();
    SqliteStore::with_clock(file.path(), config, file.clock.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_write_ahead_log_stays_small() {
    let file = file();
    let store = folds_early(&file);
    for _ in 0..500 {
        store.append(&orders(), vec![record(&"x".repeat(20_000))]).await.unwrap();
    }
    let size = log_size(&file);
    assert!(size < 3 * 1024 * 1024, "{size} bytes of log after 10 MB");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stays_stops_no_writer_and_the_log_is_emptied_after_it() {
    let file = file();
    let store = folds_early(&file);
    let append = async || {
        store.append(&orders(), vec![record(&"x".repeat(20_000))]).await.unwrap();
    };
    append().await;
    let conn = rusqlite::Connection::open(file.path()).unwrap();
    conn.execute_batch("BEGIN; SELECT count(*) FROM carrick_log").unwrap();
    for _ in 0..200 {
        append().await;
    }
    assert!(log_size(&file) > 3 * 1024 * 1024, "the reader keeps it");
    let seen: i64 =
        conn.query_row("SELECT count(*) FROM carrick_log", [], |row| row.get(0)).unwrap();
    assert_eq!(seen, 1, "its snapshot");
    drop(conn);
    let start = tokio::time::Instant::now();
    while log_size(&file) > 3 * 1024 * 1024 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} bytes", log_size(&file));
        append().await;
    }
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn readers_that_left_leave_no_connections_behind() {
    let file = file();
    let store = file.store();
    let large = vec![record(&"x".repeat(100_000)); 100];
    store.append(&orders(), large).await.unwrap();
    for _ in 0..64 {
        let orders = orders();
        let reading = store.read(&orders, 0, ReadLimit { records: 100, bytes: 1 << 24 });
        drop(futures_util::future::select(reading, std::future::ready(())).await);
    }
    store.bounds(&orders()).await.unwrap();
    let path = file.path().canonicalize().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter(|fd| {
        let fd = fd.as_ref().unwrap().path();
        std::fs::read_link(fd).is_ok_and(|target| target == path)
    });
    assert!(open.count() <= 4, "the writer, the checkpointer and two readers");
}

#[tokio::test]
async fn a_file_that_cannot_be_had_is_named() {
    let file = file();
    let path = file.folder.path().join("no/such/folder.db");
    let error = open(&path).unwrap_err();
    let told = std::error::Error::source(&error).unwrap().to_string();
    assert!(told.contains("no/such/folder.db"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_forgotten_after_twice_its_window_and_not_before_one() {
    let file = file();
    let second = Duration::from_secs(1);
    let options = SqliteOptions { dedupe_window: second, ..SqliteOptions::default() };
    let config = SqliteConfig::try_from(options).unwrap();
    let open = || SqliteStore::with_clock(file.path(), config.clone(), file.clock.clone());
    let event = NewRecord { dedupe: Some(7), ..record("x") };
    let store = open().unwrap();
    store.append(&orders(), vec![event.clone()]).await.unwrap();
    file.clock.advance(second - Duration::from_micros(1));
    store.close().await;
    let store = open().unwrap();
    let again = store.append(&orders(), vec![event.clone()]).await.unwrap();
    assert_eq!(again, [Appended::Duplicate(1)]);
    for other in [8, 9] {
        file.clock.advance(second);
        let other = NewRecord { dedupe: Some(other), ..record("x") };
        store.append(&orders(), vec![other]).await.unwrap();
    }
    let late = store.append(&orders(), vec![event]).await.unwrap();
    assert_eq!(late, [Appended::Stored(4)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dedupe_table_is_pruned_with_its_window() {
    let file = file();
    let options =
        SqliteOptions { dedupe_window: Duration::from_secs(1), ..SqliteOptions::default() };
    let config = SqliteConfig::try_from(options).unwrap();
    let store = SqliteStore::with_clock(file.path(), config, file.clock.clone()).unwrap();
    for round in 0..6_u128 {
        let records = (0..50).map(|n| NewRecord { dedupe: Some(round << 64 | n), ..record("x") });
        store.append(&orders(), records.collect()).await.unwrap();
        file.clock.advance(Duration::from_secs(1));
    }
    let conn = rusqlite::Connection::open(file.path()).unwrap();
    let rows: i64 =
        conn.query_row("SELECT count(*) FROM carrick_dedupe", [], |row| row.get(0)).unwrap();
    assert!(rows <= 150, "two generations and what was just added, not {rows} of 300");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_after_the_close_says_so() {
    let file = file();
    let store = file.store();
    store.close().await;
    store.close().await;
    let refused = store.append(&orders(), vec![record("x")]).await;
    assert!(matches!(refused, Err(StoreError::Closed)));
    let claim = Claim { records: 1, bytes: 1, lease: Duration::from_secs(1) };
    let refused = store.claim(&orders(), &"g".parse().unwrap(), claim).await;
    assert!(matches!(refused, Err(StoreError::Closed)));
}

#[test]
fn a_url_names_a_file() {
    use carrick_store::engine::sqlite::path;
    assert_eq!(path("sqlite://carrick.db").unwrap(), Path::new("carrick.db"));
    assert_eq!(path("sqlite:///var/lib/c.db").unwrap(), Path::new("/var/lib/c.db"));
    for wrong in ["sqlite://", "sqlite:", "postgres://x", "sqlite://a?mode=ro"] {
        assert!(path(wrong).is_err(), "{wrong}");
    }
}
