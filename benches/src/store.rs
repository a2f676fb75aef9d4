//! What does the embedded broker add to bare SQLite? Judge it by the run's own bare rows: the same
//! records, in the same kind of file, with `synchronous=FULL`.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_message::broker::{Broker, LeaseRequest, StoreBroker, Verdict};
use carrick_store::engine::sqlite::{SqliteConfig, SqliteStore};
use clap::Args;
use rusqlite::{Connection, params};
use tokio::time::Instant;

use crate::{
    load,
    table::{Table, median, rate},
};

/// How to measure.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Publishers at a time.
    #[arg(long, default_value_t = 64)]
    publishers: usize,
    /// Seconds a measurement takes.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Measures bare SQLite and the broker in turn.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let length = Duration::from_secs(options.seconds);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let [mut bare_many, mut many, mut bare_one, mut one, mut bare_all, mut all, mut stall] =
        std::array::from_fn(|_| Vec::new());
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bare_many.push(bare(length, 100, false)?);
        let (figure, slowest) = runtime.block_on(publish(length, options.publishers))?;
        many.push(figure);
        stall.push(slowest);
        bare_one.push(bare(length, 1, false)?);
        one.push(runtime.block_on(publish(length, 1))?.0);
        bare_all.push(bare(length, 100, true)?);
        all.push(runtime.block_on(everything(length, options.publishers))?);
    }
    let mut table =
        Table::new(&["in process, SQLite FULL, 1 KiB", "events/s", "of bare", "target"]);
    let mut pair = |bare: Vec<f64>, name: &str, ours: Vec<f64>, label: &str, target: &str| {
        let ratios = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
        table.row(vec![name.to_owned(), rate(median(bare)), "1".to_owned(), String::new()]);
        let ratio = format!("{:.2}", median(ratios));
        table.row(vec![label.to_owned(), rate(median(ours)), ratio, target.to_owned()]);
    };
    let label = format!("broker, {} publishers, 1 event each", options.publishers);
    pair(bare_many, "bare: 100 rows a transaction", many, &label, "0.8");
    pair(bare_one, "bare: 1 row a transaction", one, "broker, 1 publisher", "0.8");
    let label = format!("broker: publish by {}, lease and ack by 100", options.publishers);
    pair(bare_all, "bare: insert 100, claim 100, delete 100", all, &label, "0.7");
    println!(
        "{} rounds of {} s, medians; ratios within a round\n",
        options.rounds, options.seconds
    );
    println!("{table}");
    println!("publish of {} publishers, p99.9: {:.1} ms", options.publishers, median(stall) * 1e3);
    Ok(())
}

fn open(path: &Path) -> rusqlite::Result<Connection> {
    let conn = Connection::open(path)?;
    conn.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
         CREATE TABLE log (place INTEGER PRIMARY KEY, stored_at INTEGER, key TEXT, body BLOB);
         CREATE TABLE dedupe (id INTEGER PRIMARY KEY, identity BLOB, seq INTEGER);
         CREATE TABLE delivery (seq INTEGER PRIMARY KEY, until INTEGER, fence INTEGER)",
    )?;
    Ok(conn)
}

/// The same rows by hand, in a loop without anybody to wait for.
fn bare(length: Duration, rows: u64, consume: bool) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir()?;
    let mut conn = open(&folder.path().join("bare.db"))?;
    let body = load::event("bare", 1).into_bytes();
    let start = Instant::now();
    let mut done = 0_u64;
    while start.elapsed() < length {
        let tx = conn.transaction()?;
        for n in done..done + rows {
            let number = n.cast_signed();
            tx.prepare_cached("INSERT INTO log VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![number, number, "key-123", &body])?;
            let mut identity = [0; 16];
            identity[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
            tx.prepare_cached("INSERT INTO dedupe VALUES (?1, ?2, ?3)")?
                .execute(params![number, identity, number])?;
        }
        tx.commit()?;
        if consume {
            let tx = conn.transaction()?;
            let mut claimed = 0;
            let mut statement =
                tx.prepare_cached("SELECT place, body FROM log WHERE place >= ?1 LIMIT ?2")?;
            let mut found = statement.query([done.cast_signed(), rows.cast_signed()])?;
            while let Some(row) = found.next()? {
                let (place, body): (i64, Vec<u8>) = (row.get(0)?, row.get(1)?);
                claimed += body.len();
                tx.prepare_cached("INSERT INTO delivery VALUES (?1, ?2, ?3)")?
                    .execute([place, place, place])?;
            }
            drop(found);
            drop(statement);
            anyhow::ensure!(claimed > 0, "the rows are there");
            tx.commit()?;
            let tx = conn.transaction()?;
            for n in done..done + rows {
                tx.prepare_cached("DELETE FROM delivery WHERE seq = ?1")?
                    .execute([n.cast_signed()])?;
            }
            tx.commit()?;
        }
        done += rows;
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

fn broker(folder: &Path) -> anyhow::Result<(SqliteStore, Arc<StoreBroker>, Topic)> {
    let store = SqliteStore::open(folder.join("ours.db"), SqliteConfig::default())?;
    let broker = Arc::new(StoreBroker::new(Arc::new(store.clone())));
    Ok((store, broker, Topic::new("bench")?))
}

/// Publishers that each publish one event after the other; also the slowest of a thousand.
async fn publish(length: Duration, publishers: usize) -> anyhow::Result<(f64, f64)> {
    let folder = tempfile::tempdir()?;
    let (store, broker, topic) = broker(folder.path())?;
    let start = Instant::now();
    let tasks = publish_until(&broker, &topic, start, length, publishers);
    let mut times: Vec<f64> = Vec::new();
    for times_of_one in tasks.join_all().await {
        times.extend(times_of_one?);
    }
    let figure = times.len() as f64 / start.elapsed().as_secs_f64();
    store.close().await;
    times.sort_by(f64::total_cmp);
    Ok((figure, times[times.len() * 999 / 1000]))
}

fn publish_until(
    broker: &Arc<StoreBroker>,
    topic: &Topic,
    start: Instant,
    length: Duration,
    publishers: usize,
) -> tokio::task::JoinSet<anyhow::Result<Vec<f64>>> {
    let mut tasks = tokio::task::JoinSet::new();
    for publisher in 0..publishers {
        let (broker, topic) = (Arc::clone(broker), topic.clone());
        tasks.spawn(async move {
            let mut times = Vec::new();
            let run = format!("p{publisher}");
            while start.elapsed() < length {
                let document = Bytes::from(load::event(&run, times.len() as u64));
                let event = Event::parse(document)?;
                let began = Instant::now();
                broker.publish(&topic, vec![event.into()]).await?;
                times.push(began.elapsed().as_secs_f64());
            }
            Ok(times)
        });
    }
    tasks
}

/// Publishers, and consumers that lease and acknowledge what they publish; counts what went through.
async fn everything(length: Duration, publishers: usize) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir()?;
    let (store, broker, topic) = broker(folder.path())?;
    let group = Group::new("bench")?;
    let acked = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let tasks = publish_until(&broker, &topic, start, length, publishers);
    let mut consumers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (broker, topic, group) = (Arc::clone(&broker), topic.clone(), group.clone());
        let acked = Arc::clone(&acked);
        consumers.spawn(async move {
            while start.elapsed() < length {
                let wait = Duration::from_millis(50);
                let ask = LeaseRequest { wait, ..LeaseRequest::default() };
                let leased = broker.lease(&topic, &group, ask).await?;
                let count = leased.len() as u64;
                let acks = leased.into_iter().map(|delivery| (delivery.lease, Verdict::Ack));
                broker.settle(acks.collect()).await?;
                acked.fetch_add(count, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    for ended in consumers.join_all().await {
        ended?;
    }
    let figure = acked.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
    for ended in tasks.join_all().await {
        ended?;
    }
    store.close().await;
    Ok(figure)
}
