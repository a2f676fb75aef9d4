//! How fast does an outbox drain into the in-process broker, how long is it from a commit to a
//! handler, and how many guarded effects happen in a second? Judge each line by the bare line of its
//! database in the same run: the same rows read in pages and marked in hundreds, and nothing else.
//!
//! CPU time is this process's own, and tells more than the rate does on a machine that others use.
//!
//! Postgres is measured if `CARRICK_TEST_POSTGRES` names a server.

use std::{cell::RefCell, ops::Range, path::Path, sync::Arc, time::Duration};

use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_message::{
    broker::{Broker, Delivery, LeaseRequest, StoreBroker, Verdict},
    inbox::{self, EventId, Seen},
    outbox::{self, Outbox, OutboxEvent, Relay, RelayConfig, sqlx_postgres::KeyOrder},
};
use carrick_store::{
    Store,
    engine::{memory::MemoryStore, sqlite::SqliteStore},
    schema,
};
use carrick_testkit::servers::PostgresDatabase;
use sqlx::{Executor, PgPool};
use tokio::time::Instant as Wall;

const EVENTS: usize = 60_000;
const KEYS: usize = 500;
const EFFECTS: usize = 40_000;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return; // `cargo test --benches` builds it, and that is all
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        println!("{:<58} {:>10} {:>7} {:>7}", "events of 1 KiB", "per second", "ratio", "CPU µs");
        sqlite().await;
        if std::env::var_os("CARRICK_TEST_POSTGRES").is_some() {
            postgres().await;
        }
    });
}

struct Table {
    bare: Option<f64>,
}

/// Work since its start, on the wall and on the processor.
struct Span {
    wall: Wall,
    cpu: Duration,
}

impl Span {
    fn start() -> Self {
        Self { wall: Wall::now(), cpu: cpu() }
    }
}

/// Processor time of this process; zero where it is not told.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 10) // a tick is 10 ms
}

impl Table {
    /// A line; the first one is what the others are compared with.
    fn line(&mut self, what: &str, count: usize, span: &Span) {
        let rate = count as f64 / span.wall.elapsed().as_secs_f64();
        let cpu = (cpu() - span.cpu).as_secs_f64() * 1e6 / count as f64;
        let ratio = rate / *self.bare.get_or_insert(rate);
        println!("{what:<58} {rate:>10.0} {ratio:>7.2} {cpu:>7.1}");
    }
}

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn event(number: usize) -> OutboxEvent {
    let event = Event::builder("order.placed.v1").source("/bench").id(number.to_string());
    let event = event.data_json(&"x".repeat(850)).build().unwrap();
    OutboxEvent::new(topic(), event).key(&format!("k{}", number % KEYS)).unwrap()
}

fn open(path: &Path) -> rusqlite::Connection {
    let mut conn = rusqlite::Connection::open(path).unwrap();
    conn.busy_timeout(Duration::from_secs(10)).unwrap();
    conn.pragma_update(None, "journal_mode", "WAL").unwrap();
    for component in [&outbox::COMPONENT, &inbox::COMPONENT] {
        schema::sqlite::migrate(&mut conn, component).unwrap();
    }
    conn.execute_batch("CREATE TABLE IF NOT EXISTS ledger (id TEXT, amount INTEGER)").unwrap();
    conn
}

async fn sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let mut conn = open(&path);
    let fill = |conn: &mut rusqlite::Connection| {
        conn.execute_batch("DELETE FROM carrick_outbox").unwrap();
        let tx = conn.transaction().unwrap();
        for number in 0..EVENTS {
            outbox::rusqlite::append(&tx, &event(number)).unwrap();
        }
        tx.commit().unwrap();
    };

    fill(&mut conn);
    let mut table = Table { bare: None };
    let span = Span::start();
    bare_sqlite(&mut conn);
    table.line("SQLite, bare: read in pages, mark in hundreds", EVENTS, &span);

    let file: Arc<dyn Store> =
        Arc::new(SqliteStore::open(folder.path().join("hub.db"), Default::default()).unwrap());
    for (name, store) in [("memory", memory()), ("an SQLite file", file)] {
        fill(&mut conn);
        let outbox = Outbox::sqlite(&path).await.unwrap();
        let span = Span::start();
        drain(&outbox, store).await;
        table.line(&format!("SQLite, relay to the broker on {name}"), EVENTS, &span);
    }

    let outbox = Outbox::sqlite(&path).await.unwrap();
    latency("SQLite", &outbox, async |numbers| {
        let tx = conn.unchecked_transaction().unwrap();
        for number in numbers {
            outbox::rusqlite::append(&tx, &event(number)).unwrap();
        }
        tx.commit().unwrap();
    })
    .await;

    let events: Vec<Event> = (0..EFFECTS).map(|number| event(number).event().clone()).collect();
    let mut table = Table { bare: None };
    let span = Span::start();
    for batch in events.chunks(100) {
        let tx = conn.transaction().unwrap();
        let mut insert = tx.prepare_cached("INSERT INTO ledger VALUES (?1, 10)").unwrap();
        for event in batch {
            insert.execute([event.id()]).unwrap();
        }
        drop(insert);
        tx.commit().unwrap();
    }
    table.line("SQLite, bare: one-row effects, a hundred a commit", EFFECTS, &span);
    let span = Span::start();
    for batch in events.chunks(100) {
        let tx = conn.transaction().unwrap();
        inbox::rusqlite::each(&tx, "ledger", batch, |conn, event| {
            let mut insert = conn.prepare_cached("INSERT INTO ledger VALUES (?1, 10)")?;
            insert.execute([event.id()])
        })
        .unwrap();
        tx.commit().unwrap();
    }
    table.line("SQLite, the same with an inbox", EFFECTS, &span);
}

fn bare_sqlite(conn: &mut rusqlite::Connection) {
    let mut after = 0i64;
    loop {
        let rows: Vec<(i64, String)> = conn
            .prepare_cached(
                "SELECT seq, event FROM carrick_outbox
                 WHERE published_at IS NULL AND seq > ?1 ORDER BY seq LIMIT 500",
            )
            .unwrap()
            .query_map([after], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap()
            .map(Result::unwrap)
            .collect();
        let Some((last, _)) = rows.last() else { return };
        after = *last;
        for batch in rows.chunks(100) {
            let tx = conn.transaction().unwrap();
            let mut mark = tx
                .prepare_cached("UPDATE carrick_outbox SET published_at = ?2 WHERE seq = ?1")
                .unwrap();
            for (seq, _) in batch {
                mark.execute((seq, "2026-12-01T00:00:00.000Z")).unwrap();
            }
            drop(mark);
            tx.commit().unwrap();
        }
    }
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

/// Runs a relay until all events are marked.
async fn drain(outbox: &Outbox, store: Arc<dyn Store>) {
    let broker = Arc::new(StoreBroker::new(store));
    let relay = Relay::spawn(outbox, broker, RelayConfig::default());
    while relay.status().published < EVENTS as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        relay.waker().wake();
    }
    relay.stop().await;
}

/// From the end of a commit to a handler, with a wake-up after it: idle, and at 5000 a second.
/// `append` commits events of these numbers in one transaction.
async fn latency(name: &str, outbox: &Outbox, mut append: impl AsyncFnMut(Range<usize>)) {
    let broker = Arc::new(StoreBroker::new(memory()));
    let relay = Relay::spawn(outbox, broker.clone(), RelayConfig::default());
    let group = Group::new("bench").unwrap();
    let request =
        LeaseRequest { wait: Duration::from_secs(5), max: 1000, ..LeaseRequest::default() };
    let ack = async |deliveries: &[Delivery]| {
        let acks = deliveries.iter().map(|delivery| (delivery.lease.clone(), Verdict::Ack));
        broker.settle(acks.collect()).await.unwrap();
    };
    let mut idle = Vec::new();
    for number in EVENTS..EVENTS + 200 {
        append(number..number + 1).await;
        let committed = Wall::now();
        relay.waker().wake();
        let got = broker.lease(&topic(), &group, request).await.unwrap();
        idle.push(committed.elapsed());
        ack(&got).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    tell(&format!("{name}, idle"), &mut idle);

    const STEADY: usize = 20_000;
    const AT_ONCE: usize = 25;
    let first = EVENTS + 200;
    let committed = RefCell::new(vec![None; STEADY]);
    let produce = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        for at in (0..STEADY).step_by(AT_ONCE) {
            ticks.tick().await;
            append(first + at..first + at + AT_ONCE).await;
            committed.borrow_mut()[at..at + AT_ONCE].fill(Some(Wall::now()));
            relay.waker().wake();
        }
    };
    let mut steady = Vec::with_capacity(STEADY);
    let consume = async {
        while steady.len() < STEADY {
            let got = broker.lease(&topic(), &group, request).await.unwrap();
            let now = Wall::now();
            for delivery in &got {
                let number: usize = delivery.event.id().parse().unwrap();
                // The handler may come before the writer has looked at its watch.
                let since = committed.borrow()[number - first].unwrap_or(now);
                steady.push(now - since);
            }
            ack(&got).await;
        }
    };
    tokio::join!(produce, consume);
    tell(&format!("{name}, 5000 a second"), &mut steady);
    relay.stop().await;
}

fn tell(what: &str, times: &mut [Duration]) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: commit to handler p50 {:.1?}, p99 {:.1?}", at(0.5), at(0.99));
}

async fn postgres() {
    let database = PostgresDatabase::create().await;
    let pool = sqlx::postgres::PgPoolOptions::new().connect(database.url()).await.unwrap();
    for component in [&outbox::COMPONENT, &inbox::COMPONENT] {
        schema::postgres::migrate(&pool, component).await.unwrap();
    }
    pool.execute("CREATE TABLE ledger (id text, amount bigint)").await.unwrap();
    let fill = async || {
        pool.execute("TRUNCATE carrick_outbox").await.unwrap();
        for batch in (0..EVENTS).collect::<Vec<_>>().chunks(1000) {
            let events: Vec<OutboxEvent> = batch.iter().map(|number| event(*number)).collect();
            let mut conn = pool.acquire().await.unwrap();
            outbox::sqlx_postgres::append_all(&mut conn, &events, KeyOrder::Caller).await.unwrap();
        }
        pool.execute("CHECKPOINT").await.unwrap();
    };
    fill().await;
    let mut table = Table { bare: None };
    let span = Span::start();
    bare_postgres(&pool).await;
    table.line("Postgres, bare: read in pages, mark in hundreds", EVENTS, &span);
    let outbox = Outbox::postgres(database.url()).await.unwrap();
    fill().await;
    let span = Span::start();
    drain(&outbox, memory()).await;
    table.line("Postgres, relay to the broker on memory", EVENTS, &span);
    let folder = tempfile::tempdir().unwrap();
    let file: Arc<dyn Store> =
        Arc::new(SqliteStore::open(folder.path().join("hub.db"), Default::default()).unwrap());
    fill().await;
    let span = Span::start();
    drain(&outbox, file).await;
    table.line("Postgres, relay to the broker on an SQLite file", EVENTS, &span);
    latency("Postgres", &outbox, async |numbers| {
        let events: Vec<OutboxEvent> = numbers.map(event).collect();
        let mut tx = pool.begin().await.unwrap();
        outbox::sqlx_postgres::append_all(&mut tx, &events, KeyOrder::Lock).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
    effects(&pool).await;
}

async fn bare_postgres(pool: &PgPool) {
    let mut conn = pool.acquire().await.unwrap();
    conn.execute("SET synchronous_commit = off").await.unwrap();
    let mut after = 0i64;
    loop {
        let rows: Vec<(i64, String)> = sqlx::query_as(
            "SELECT seq, event FROM carrick_outbox
             WHERE published_at IS NULL AND seq > $1 ORDER BY seq LIMIT 500",
        )
        .bind(after)
        .fetch_all(&mut *conn)
        .await
        .unwrap();
        let Some((last, _)) = rows.last() else { return };
        after = *last;
        for batch in rows.chunks(100) {
            let seqs: Vec<i64> = batch.iter().map(|(seq, _)| *seq).collect();
            sqlx::query("UPDATE carrick_outbox SET published_at = now() WHERE seq = ANY($1)")
                .bind(seqs)
                .execute(&mut *conn)
                .await
                .unwrap();
        }
    }
}

async fn effects(pool: &PgPool) {
    let ids: Vec<String> = (0..EFFECTS).map(|number| number.to_string()).collect();
    let insert = "INSERT INTO ledger SELECT id, 10 FROM unnest($1::text[]) AS one (id)";
    let mut table = Table { bare: None };
    let span = Span::start();
    for batch in ids.chunks(100) {
        sqlx::query(insert).bind(batch).execute(pool).await.unwrap();
    }
    table.line("Postgres, bare: one-row effects, a hundred a commit", EFFECTS, &span);
    let span = Span::start();
    for batch in ids.chunks(100) {
        let events: Vec<EventId<'_>> =
            batch.iter().map(|id| EventId::new("/bench", id.as_str())).collect();
        let mut tx = pool.begin().await.unwrap();
        let seen = inbox::sqlx_postgres::once_each(&mut tx, "ledger", &events).await.unwrap();
        let firsts = events.iter().zip(&seen).filter(|(_, seen)| **seen == Seen::First);
        let firsts: Vec<&str> = firsts.map(|(event, _)| &*event.id).collect();
        sqlx::query(insert).bind(firsts).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    table.line("Postgres, the same with an inbox", EFFECTS, &span);
}
