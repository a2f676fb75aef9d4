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
    /// Events that all publishers together publish in a measurement; one alone publishes a tenth.
    #[arg(long, default_value_t = 300_000)]
    events: usize,
    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Measures bare SQLite and the broker in turn, with the same events, which are made beforehand.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let [mut bare_many, mut bare_same, mut many, mut bare_one, mut one, mut bare_all, mut all] =
        std::array::from_fn(|_| Vec::new());
    let mut stall = Vec::new();
    let documents: Vec<Bytes> =
        (0..options.events as u64).map(|n| load::event("e", n).into()).collect();
    let few = &documents[..options.events / 10];
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bare_many.push(bare(&documents, 100, false)?);
        bare_same.push(bare(&documents, options.publishers, false)?);
        let (figure, slowest) = runtime.block_on(publish(&documents, options.publishers))?;
        many.push(figure);
        stall.push(slowest);
        bare_one.push(bare(few, 1, false)?);
        one.push(runtime.block_on(publish(few, 1))?.0);
        bare_all.push(bare(&documents, 100, true)?);
        all.push(runtime.block_on(everything(&documents, options.publishers))?);
    }
    let mut table =
        Table::new(&["in process, SQLite FULL, 1 KiB", "events/s", "of bare", "target"]);
    let mut row = |label: String, figures: &[f64], bare: &[f64], target: &str| {
        let ratios = figures.iter().zip(bare).map(|(ours, bare)| ours / bare).collect();
        let ratio = format!("{:.2}", median(ratios));
        table.row(vec![label, rate(median(figures.to_vec())), ratio, target.to_owned()]);
    };
    let publishers = options.publishers;
    row("bare: 100 rows a transaction".to_owned(), &bare_many, &bare_many, "");
    row(format!("bare: {publishers} rows a transaction"), &bare_same, &bare_many, "");
    row(format!("broker, {publishers} publishers, 1 event each"), &many, &bare_many, "0.8");
    row("bare: 1 row a transaction".to_owned(), &bare_one, &bare_one, "");
    row("broker, 1 publisher".to_owned(), &one, &bare_one, "0.8");
    row("bare: insert 100, claim 100, delete 100".to_owned(), &bare_all, &bare_all, "");
    let label = format!("broker: publish by {publishers}, lease and ack by 100");
    row(label, &all, &bare_all, "0.7");
    println!(
        "{} rounds of {} events, medians; ratios within a round\n",
        options.rounds, options.events
    );
    println!("{table}");
    println!("publish of {publishers} publishers, p99.9: {:.1} ms", median(stall) * 1e3);
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
fn bare(documents: &[Bytes], rows: usize, consume: bool) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir()?;
    let mut conn = open(&folder.path().join("bare.db"))?;
    let start = Instant::now();
    let mut done = 0_i64;
    for batch in documents.chunks(rows) {
        let tx = conn.transaction()?;
        for (number, body) in (done..).zip(batch) {
            tx.prepare_cached("INSERT INTO log VALUES (?1, ?2, ?3, ?4)")?.execute(params![
                number,
                number,
                "key-123",
                &body[..]
            ])?;
            let mut identity = [0; 16];
            let mixed = number.wrapping_mul(0x1e37_79b9_7f4a_7c15);
            identity[..8].copy_from_slice(&mixed.to_be_bytes());
            tx.prepare_cached("INSERT INTO dedupe VALUES (?1, ?2, ?3)")?
                .execute(params![number, identity, number])?;
        }
        tx.commit()?;
        let end = done + batch.len() as i64;
        if consume {
            let tx = conn.transaction()?;
            let mut claimed = 0;
            let mut statement =
                tx.prepare_cached("SELECT place, body FROM log WHERE place >= ?1 LIMIT ?2")?;
            let mut found = statement.query([done, batch.len() as i64])?;
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
            for number in done..end {
                tx.prepare_cached("DELETE FROM delivery WHERE seq = ?1")?.execute([number])?;
            }
            tx.commit()?;
        }
        done = end;
    }
    Ok(documents.len() as f64 / start.elapsed().as_secs_f64())
}

fn broker(folder: &Path) -> anyhow::Result<(SqliteStore, Arc<StoreBroker>, Topic)> {
    let store = SqliteStore::open(folder.join("ours.db"), SqliteConfig::default())?;
    let broker = Arc::new(StoreBroker::new(Arc::new(store.clone())));
    Ok((store, broker, Topic::new("bench")?))
}

/// Events, parsed, in equal parts for so many publishers.
fn parts(documents: &[Bytes], publishers: usize) -> anyhow::Result<Vec<Vec<Event>>> {
    let part = documents.len().div_ceil(publishers);
    let parse = |part: &[Bytes]| part.iter().map(|one| Ok(Event::parse(one.clone())?)).collect();
    documents.chunks(part).map(parse).collect()
}

/// Publishers that each publish one event after the other; also the slowest of a thousand.
async fn publish(documents: &[Bytes], publishers: usize) -> anyhow::Result<(f64, f64)> {
    let folder = tempfile::tempdir()?;
    let (store, broker, topic) = broker(folder.path())?;
    let parts = parts(documents, publishers)?;
    let start = Instant::now();
    let mut times: Vec<f64> = Vec::new();
    for times_of_one in spawn_publishers(&broker, &topic, parts).join_all().await {
        times.extend(times_of_one?);
    }
    let figure = times.len() as f64 / start.elapsed().as_secs_f64();
    store.close().await;
    times.sort_by(f64::total_cmp);
    Ok((figure, times[times.len() * 999 / 1000]))
}

fn spawn_publishers(
    broker: &Arc<StoreBroker>,
    topic: &Topic,
    parts: Vec<Vec<Event>>,
) -> tokio::task::JoinSet<anyhow::Result<Vec<f64>>> {
    let mut tasks = tokio::task::JoinSet::new();
    for part in parts {
        let (broker, topic) = (Arc::clone(broker), topic.clone());
        tasks.spawn(async move {
            let mut times = Vec::with_capacity(part.len());
            for event in part {
                let began = Instant::now();
                broker.publish(&topic, vec![event.into()]).await?;
                times.push(began.elapsed().as_secs_f64());
            }
            Ok(times)
        });
    }
    tasks
}

/// Publishers, and consumers that lease and acknowledge what they publish, until all is done.
async fn everything(documents: &[Bytes], publishers: usize) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir()?;
    let (store, broker, topic) = broker(folder.path())?;
    let group = Group::new("bench")?;
    let parts = parts(documents, publishers)?;
    let left = Arc::new(AtomicU64::new(documents.len() as u64));
    let start = Instant::now();
    let tasks = spawn_publishers(&broker, &topic, parts);
    let mut consumers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (broker, topic, group) = (Arc::clone(&broker), topic.clone(), group.clone());
        let left = Arc::clone(&left);
        consumers.spawn(async move {
            while left.load(Ordering::Relaxed) > 0 {
                let wait = Duration::from_millis(50);
                let ask = LeaseRequest { wait, ..LeaseRequest::default() };
                let leased = broker.lease(&topic, &group, ask).await?;
                let count = leased.len() as u64;
                let acks = leased.into_iter().map(|delivery| (delivery.lease, Verdict::Ack));
                broker.settle(acks.collect()).await?;
                left.fetch_sub(count, Ordering::Relaxed);
            }
            anyhow::Ok(start.elapsed().as_secs_f64())
        });
    }
    let mut took = f64::INFINITY;
    for ended in consumers.join_all().await {
        // The others wait in vain for what is no more, up to their patience.
        took = took.min(ended?);
    }
    for ended in tasks.join_all().await {
        ended?;
    }
    store.close().await;
    Ok(documents.len() as f64 / took)
}
