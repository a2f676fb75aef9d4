//! The inbox on SQLite, through both drivers.

use std::time::Duration;

use carrick_core::event::Event;
use carrick_message::inbox::{
    self, EventId, Guarded, InboxError, Reserved, Seen, Versions, rusqlite::Handled,
};
use sqlx::{Connection as _, SqliteConnection};
use tempfile::TempDir;

use crate::outbox_kit::sqlite;

fn open() -> (TempDir, std::path::PathBuf, rusqlite::Connection) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let conn = sqlite(&path);
    conn.execute_batch("CREATE TABLE ledger (id TEXT)").unwrap();
    (folder, path, conn)
}

fn id(id: &str) -> EventId<'_> {
    EventId::new("/shop", id)
}

fn event(id: &str, key: &str) -> Event {
    let event = Event::builder("order.placed.v1").source("/shop").id(id);
    event.extension("partitionkey", key).build().unwrap()
}

#[test]
fn m2_the_second_copy_finds_the_first_and_the_transaction_goes_on() {
    let (_folder, _, mut conn) = open();
    for (n, expected) in [Seen::First, Seen::Duplicate, Seen::Duplicate].into_iter().enumerate() {
        let tx = conn.transaction().unwrap();
        let seen = inbox::rusqlite::once(&tx, "ledger", &id("1")).unwrap();
        assert_eq!(seen, expected);
        tx.execute("INSERT INTO ledger VALUES (?1)", [n.to_string()]).unwrap();
        tx.commit().unwrap();
    }
    let rows: i64 = conn.query_row("SELECT count(*) FROM ledger", (), |row| row.get(0)).unwrap();
    assert_eq!(rows, 3, "a duplicate leaves the transaction usable");
    let other = inbox::rusqlite::once(&conn, "mailer", &id("1")).unwrap();
    assert_eq!(other, Seen::First, "each handler does its part");
    let other = inbox::rusqlite::once(&conn, "ledger", &EventId::new("/else", "1")).unwrap();
    assert_eq!(other, Seen::First, "an id is unique within its source");
}

#[tokio::test]
async fn a_program_without_any_of_our_code_gets_its_tables_by_url() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let url = format!("sqlite://{}", path.display());
    for _ in 0..2 {
        inbox::make_tables(&url).await.unwrap();
    }
    let conn = rusqlite::Connection::open(&path).unwrap();
    for fresh in [1, 0] {
        let sql = "INSERT INTO carrick_inbox (handler, source, id) VALUES ('ledger', '/shop', '1')
                   ON CONFLICT DO NOTHING";
        assert_eq!(conn.execute(sql, ()).unwrap(), fresh);
    }
    let strict = "SELECT count(*) FROM sqlite_schema WHERE sql LIKE '%STRICT%'";
    let strict: i64 = conn.query_row(strict, (), |row| row.get(0)).unwrap();
    assert_eq!(strict, 0, "an SQLite before 3.37 could not open the file any more");
    let error = inbox::make_tables("mysql://localhost/x").await.unwrap_err();
    assert_eq!(error.to_string(), "database must be sqlite://path or postgres://…, not mysql");
}

#[test]
fn a_rolled_back_effect_takes_its_dedupe_row_with_it() {
    let (_folder, _, mut conn) = open();
    let tx = conn.transaction().unwrap();
    assert_eq!(inbox::rusqlite::once(&tx, "ledger", &id("1")).unwrap(), Seen::First);
    tx.rollback().unwrap();
    assert_eq!(inbox::rusqlite::once(&conn, "ledger", &id("1")).unwrap(), Seen::First);
}

#[test]
fn in_a_batch_a_failed_effect_takes_only_its_own_key_with_it() {
    let (_folder, _, mut conn) = open();
    let events =
        [event("1", "a"), event("2", "b"), event("3", "a"), event("4", "b"), event("1", "c")];
    let mut run = |fails: bool| {
        let tx = conn.transaction().unwrap();
        let handled = inbox::rusqlite::each(&tx, "ledger", &events, |conn, event| {
            conn.execute("INSERT INTO ledger VALUES (?1)", [event.id()]).unwrap();
            if fails && event.id() == "1" { Err("not now") } else { Ok(()) }
        });
        tx.commit().unwrap();
        handled.unwrap()
    };
    use Handled::{Done, Duplicate, Failed, Held};
    assert_eq!(
        run(true),
        [Failed("not now"), Done(()), Held, Done(()), Failed("not now")],
        "3 would overtake 1"
    );
    assert_eq!(run(false), [Done(()), Duplicate, Done(()), Duplicate, Duplicate]);
    let mut ids = conn.prepare("SELECT id FROM ledger ORDER BY rowid").unwrap();
    let ids: Vec<String> =
        ids.query_map((), |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    assert_eq!(ids, ["2", "4", "1", "3"], "a failed effect leaves nothing behind");
}

#[test]
fn the_version_guard_tells_four_outcomes_apart() {
    let (_folder, _, conn) = open();
    let ascending = |version| {
        inbox::rusqlite::guard(&conn, "ledger", "A", version, Versions::Ascending).unwrap()
    };
    assert_eq!(ascending(3), Guarded::Applied);
    assert_eq!(ascending(3), Guarded::Duplicate);
    assert_eq!(ascending(2), Guarded::Stale { current: 3 });
    assert_eq!(ascending(9), Guarded::Applied, "a gap does not matter");
    let contiguous = |version| {
        let versions = Versions::Contiguous { first: 1 };
        inbox::rusqlite::guard(&conn, "ledger", "B", version, versions).unwrap()
    };
    assert_eq!(contiguous(2), Guarded::Gap { expected: 1 });
    assert_eq!(contiguous(1), Guarded::Applied);
    assert_eq!(contiguous(3), Guarded::Gap { expected: 2 });
    assert_eq!(contiguous(2), Guarded::Applied);
    assert_eq!(contiguous(1), Guarded::Stale { current: 2 });
    assert_eq!(contiguous(2), Guarded::Duplicate);
}

#[test]
fn a_reservation_keeps_a_second_copy_from_running_until_it_ends() {
    let (_folder, _, conn) = open();
    let hold = Duration::from_secs(60);
    let reserve = |hold| inbox::rusqlite::reserve(&conn, "mailer", &id("1"), hold).unwrap();
    let Reserved::New(first) = reserve(hold) else { panic!("nobody has it") };
    assert!(matches!(reserve(hold), Reserved::Busy(left) if left > Duration::from_secs(50)));
    assert!(inbox::rusqlite::release(&conn, "mailer", &id("1"), first).unwrap());
    let Reserved::New(second) = reserve(Duration::ZERO) else { panic!("it was given back") };
    // It has ended: another one takes over, and the late holder completes nothing.
    let Reserved::New(third) = reserve(hold) else { panic!("it has ended") };
    assert!(!inbox::rusqlite::complete(&conn, "mailer", &id("1"), second).unwrap());
    assert!(inbox::rusqlite::complete(&conn, "mailer", &id("1"), third).unwrap());
    assert_eq!(reserve(hold), Reserved::Done);
    assert!(first.0 < second.0 && second.0 < third.0);
    let Reserved::New(_) = inbox::rusqlite::reserve(&conn, "mailer", &id("2"), hold).unwrap()
    else {
        panic!("another event")
    };
    let mixed = inbox::rusqlite::once(&conn, "mailer", &id("2"));
    assert!(matches!(mixed, Err(InboxError::Reserved)), "a lost effect otherwise");
}

#[test]
fn m8_a_prune_takes_the_oldest_rows_a_bounded_number_at_a_time() {
    let (_folder, _, conn) = open();
    conn.execute_batch(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 250)
         INSERT INTO carrick_inbox (handler, source, id, seen_at)
         SELECT 'ledger', '/shop', 'old' || i, '2026-01-01T00:00:00.000Z' FROM n",
    )
    .unwrap();
    inbox::rusqlite::once(&conn, "ledger", &id("new")).unwrap();
    let day = Duration::from_secs(86_400);
    let counts: Vec<u64> =
        (0..4).map(|_| inbox::rusqlite::prune(&conn, day, 100).unwrap()).collect();
    assert_eq!(counts, [100, 100, 50, 0]);
    assert_eq!(inbox::rusqlite::once(&conn, "ledger", &id("new")).unwrap(), Seen::Duplicate);
}

#[tokio::test]
async fn the_sqlx_driver_decides_the_same() {
    let (_folder, path, conn) = open();
    let mut other = SqliteConnection::connect(path.to_str().unwrap()).await.unwrap();
    use inbox::sqlx_sqlite as driver;
    let mut tx = other.begin().await.unwrap();
    let seen = driver::once_each(&mut tx, "ledger", &[id("1"), id("2"), id("1")]).await.unwrap();
    assert_eq!(seen, [Seen::First, Seen::First, Seen::Duplicate]);
    assert_eq!(driver::forget(&mut tx, "ledger", &[id("2")]).await.unwrap(), 1);
    let gap = driver::guard(&mut tx, "ledger", "A", 2, Versions::Contiguous { first: 1 }).await;
    assert_eq!(gap.unwrap(), Guarded::Gap { expected: 1 });
    let applied = driver::guard(&mut tx, "ledger", "A", 2, Versions::Ascending).await.unwrap();
    assert_eq!(applied, Guarded::Applied);
    tx.commit().await.unwrap();
    assert_eq!(inbox::rusqlite::once(&conn, "ledger", &id("1")).unwrap(), Seen::Duplicate);
    assert_eq!(driver::once(&mut other, "ledger", &id("2")).await.unwrap(), Seen::First);
    let hold = Duration::from_secs(60);
    let Reserved::New(token) = driver::reserve(&mut other, "mailer", &id("1"), hold).await.unwrap()
    else {
        panic!("nobody has it")
    };
    let busy = driver::reserve(&mut other, "mailer", &id("1"), hold).await.unwrap();
    assert!(matches!(busy, Reserved::Busy(_)));
    assert!(driver::complete(&mut other, "mailer", &id("1"), token).await.unwrap());
    let done = driver::reserve(&mut other, "mailer", &id("1"), hold).await.unwrap();
    assert_eq!(done, Reserved::Done);
    conn.execute("UPDATE carrick_inbox SET seen_at = '2026-01-01T00:00:00.000Z'", ()).unwrap();
    assert_eq!(driver::prune(&mut other, Duration::from_secs(60), 100).await.unwrap(), 3);
}

#[test]
fn limits_are_told_with_what_was_given() {
    let (_folder, _, conn) = open();
    let error = inbox::rusqlite::once(&conn, "", &id("1")).unwrap_err().to_string();
    assert_eq!(error, "handler must be 1 to 200 bytes, not 0 bytes");
    let many: Vec<Event> = (0..1001).map(|n| event(&n.to_string(), "a")).collect();
    let error = inbox::rusqlite::each(&conn, "ledger", &many, |_, _| Ok::<_, ()>(())).unwrap_err();
    assert!(error.to_string().contains("at most 1000"));
}
