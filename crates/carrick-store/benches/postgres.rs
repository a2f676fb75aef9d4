//! What do appends, claims and acknowledgements on Postgres cost beside bare insertions of the same
//! rows? Judge by the ratios of one run.
//!
//! `CARRICK_TEST_POSTGRES=postgres://… cargo bench -p carrick-store --features postgres --bench
//! postgres`; it makes a schema of its own there and drops it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use carrick_core::name::Group;
use carrick_store::{
    Stream,
    engine::postgres::{PostgresConfig, PostgresOptions, PostgresStore},
    lease::{Claim, Queue, Settle},
    log::{Log, NewRecord},
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::time::Instant;

const BODY: usize = 1024;
const SCHEMA: &str = "carrick_bench";

fn main() {
    // Cargo passes `--bench`, and `--test` when it only wants to know that this builds and starts.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let Ok(url) = std::env::var("CARRICK_TEST_POSTGRES") else {
        eprintln!("skipped: CARRICK_TEST_POSTGRES names no server");
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(run(&url)).expect("the server works");
}

async fn run(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut operator = PgConnection::connect(url).await?;
    let drop_it = format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE");
    sqlx::raw_sql(AssertSqlSafe(drop_it.clone())).execute(&mut operator).await?;
    let options = PostgresOptions { schema: SCHEMA.to_owned(), ..PostgresOptions::default() };
    let store = PostgresStore::connect(url, PostgresConfig::try_from(options)?).await?;
    sqlx::raw_sql(AssertSqlSafe(format!(
        "CREATE TABLE {SCHEMA}.bare (LIKE {SCHEMA}.carrick_log INCLUDING ALL); SET search_path = {SCHEMA}"
    )))
    .execute(&mut operator)
    .await?;

    println!("{:<52} {:>12} {:>9}", "1 KiB events", "events/s", "of bare");
    let bare_one = bare(&mut operator, 0, 1).await?;
    let bare_hundred = bare(&mut operator, 10_000_000, 100).await?;
    row("bare: one row a commit, one connection", bare_one, bare_one);
    row("bare: 100 rows a commit, one connection", bare_hundred, bare_hundred);
    row("append: 1 publisher, single events", append(&store, "one", 1, 1).await?, bare_one);
    row("append: 64 publishers, single events", append(&store, "many", 64, 1).await?, bare_hundred);
    row(
        "append: 1 publisher, batches of 100",
        append(&store, "batch", 1, 100).await?,
        bare_hundred,
    );
    row(
        "append: 8 publishers, batches of 100",
        append(&store, "work", 8, 100).await?,
        bare_hundred,
    );
    row("claim and ack: 1 worker, 100 at a time", work(&store, "one", 1, 100).await?, bare_hundred);
    row(
        "claim and ack: 8 workers, 100 at a time",
        work(&store, "work", 8, 100).await?,
        bare_hundred,
    );
    store.close().await;
    sqlx::raw_sql(AssertSqlSafe(drop_it)).execute(&mut operator).await?;
    Ok(())
}

fn row(what: &str, rate: f64, bare: f64) {
    println!("{what:<52} {rate:>12.0} {:>8.2}x", rate / bare);
}

/// How long one measurement takes.
const TIME: Duration = Duration::from_secs(3);

async fn bare(
    operator: &mut PgConnection,
    from: i64,
    rows: i64,
) -> Result<f64, Box<dyn std::error::Error>> {
    let start = Instant::now();
    let mut next = from;
    let body = vec![b'x'; BODY];
    while start.elapsed() < TIME {
        sqlx::query(
            "INSERT INTO bare (stream_id, seq, stored_at, key, body)
             SELECT 1, seq, 1, 'k', body
             FROM unnest($1::bigint[], $2::bytea[]) AS one (seq, body)",
        )
        .bind((next..next + rows).collect::<Vec<_>>())
        .bind(vec![&body[..]; rows as usize])
        .execute(&mut *operator)
        .await?;
        next += rows;
    }
    Ok((next - from) as f64 / start.elapsed().as_secs_f64())
}

async fn append(
    store: &PostgresStore,
    topic: &str,
    publishers: u128,
    batch: u128,
) -> Result<f64, Box<dyn std::error::Error>> {
    let stream = Stream::new(topic)?;
    let start = Instant::now();
    let publishers = (0..publishers).map(|publisher| {
        let (store, stream) = (store.clone(), stream.clone());
        tokio::spawn(async move {
            let body = bytes::Bytes::from(vec![b'x'; BODY]);
            let mut next = 0;
            while start.elapsed() < TIME {
                let records = (next..next + batch).map(|n| NewRecord {
                    key: Some(format!("k{}", n % 500)),
                    dedupe: Some((publisher << 64 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c)),
                    body: body.clone(),
                    ..NewRecord::default()
                });
                store.append(&stream, records.collect()).await?;
                next += batch;
            }
            Ok::<_, carrick_store::StoreError>(next)
        })
    });
    let mut total = 0;
    for publisher in publishers.collect::<Vec<_>>() {
        total += publisher.await??;
    }
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

async fn work(
    store: &PostgresStore,
    topic: &str,
    workers: usize,
    batch: usize,
) -> Result<f64, Box<dyn std::error::Error>> {
    let (stream, group) = (Stream::new(topic)?, Group::new("bench")?);
    let claim = Claim { records: batch, bytes: usize::MAX, lease: Duration::from_secs(60) };
    let start = Instant::now();
    let total = Arc::new(AtomicUsize::new(0));
    let workers = (0..workers).map(|_| {
        let (store, stream, group) = (store.clone(), stream.clone(), group.clone());
        let total = total.clone();
        tokio::spawn(async move {
            while start.elapsed() < TIME {
                let claimed = store.claim(&stream, &group, claim).await?.claimed;
                if claimed.is_empty() {
                    break;
                }
                total.fetch_add(claimed.len(), Ordering::Relaxed);
                let acks = claimed.iter().map(|one| (one.token, Settle::Ack)).collect();
                store.settle(acks).await?;
            }
            Ok::<_, carrick_store::StoreError>(())
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await??;
    }
    Ok(total.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64())
}
