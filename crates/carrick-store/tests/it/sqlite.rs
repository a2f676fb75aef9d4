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
    log::{Log, NewRecord, ReadLimit},
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
async fn a_full_disk_refuses_and_space_that_returns_is_used() {
    let file = file();
    let store = file.store();
    store.append(&orders(), vec![record("first")]).await.unwrap();
    // A database that may not grow stands for a disk that is full.
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
    assert_eq!(appended[0], carrick_store::log::Appended::Stored(2));
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
