//! Appends, reads and trims.

use std::time::Duration;

use carrick_store::{
    StoreError,
    engine::postgres::PostgresOptions,
    log::{Appended, Log, NewRecord, ReadLimit},
    wake::Wake,
};
use sqlx::Connection;

use super::{Beside, Scratch, median, record, stream, until};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn numbers_have_no_gap_however_many_write_at_once() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.store().await, scratch.store().await);
    let orders = stream("orders");
    let writers: Vec<_> = (0..16)
        .map(|writer| {
            let store = if writer % 2 == 0 { one.clone() } else { two.clone() };
            let orders = orders.clone();
            tokio::spawn(async move {
                let mut seqs = Vec::new();
                for n in 0..50 {
                    let batch = vec![record("", format!("{writer}.{n}")); 1 + n % 3];
                    let appended = store.append(&orders, batch).await.unwrap();
                    let first = appended[0].seq();
                    for (place, appended) in appended.iter().enumerate() {
                        assert_eq!(*appended, Appended::Stored(first + place as u64));
                        seqs.push(appended.seq());
                    }
                }
                seqs
            })
        })
        .collect();

    // A reader that follows never sees a number before every lower one.
    let reader = {
        let (store, orders) = (one.clone(), orders.clone());
        tokio::spawn(async move {
            let (mut after, total) = (0, 16 * 99);
            while after < total {
                for record in store.read(&orders, after, ReadLimit::default()).await.unwrap() {
                    assert_eq!(record.seq, after + 1);
                    after = record.seq;
                }
            }
        })
    };
    let mut seqs = Vec::new();
    for writer in writers {
        seqs.extend(writer.await.unwrap());
    }
    seqs.sort_unstable();
    let expected: Vec<u64> = (1..=seqs.len() as u64).collect();
    assert_eq!(seqs, expected);
    assert_eq!(seqs.len(), 16 * 99);
    reader.await.unwrap();
    one.close().await;
    two.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn an_identity_is_known_for_its_window_and_over_a_turn_of_the_tables() {
    let scratch = Scratch::new();
    let window = Duration::from_secs(1);
    let options = PostgresOptions { dedupe_window: window, ..scratch.options() };
    let store = scratch.store_with(options).await;
    let orders = stream("orders");
    let known = |id| NewRecord { dedupe: Some(id), ..record("k", "body") };

    let appended = store.append(&orders, vec![known(1), known(2), known(1)]).await.unwrap();
    let expected = [Appended::Stored(1), Appended::Stored(2), Appended::Duplicate(1)];
    assert_eq!(appended, expected);

    // Other streams have identities of their own.
    let others = store.append(&stream("others"), vec![known(1)]).await.unwrap();
    assert_eq!(others, [Appended::Stored(1)]);

    let start = tokio::time::Instant::now();
    let mut turns = 0;
    let mut operator = scratch.operator().await;
    while start.elapsed() < window {
        let appended = store.append(&orders, vec![known(2), known(1)]).await.unwrap();
        if start.elapsed() < window {
            assert_eq!(appended, [Appended::Duplicate(2), Appended::Duplicate(1)]);
        }
        turns = sqlx::query_scalar::<_, i64>("SELECT max(turn) FROM carrick_dedupe_turn")
            .fetch_one(&mut operator)
            .await
            .unwrap();
    }
    // And it is forgotten some time after, so that the tables do not grow for ever.
    until("the identities are forgotten", async || {
        sqlx::query_scalar::<_, bool>(
            "SELECT NOT EXISTS (SELECT FROM carrick_dedupe_0 WHERE seq <= 2)
                 AND NOT EXISTS (SELECT FROM carrick_dedupe_1 WHERE seq <= 2)",
        )
        .fetch_one(&mut scratch.operator().await)
        .await
        .unwrap()
    })
    .await;
    let turned: i64 = sqlx::query_scalar("SELECT max(turn) FROM carrick_dedupe_turn")
        .fetch_one(&mut operator)
        .await
        .unwrap();
    assert!(turned > turns);
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_read_ends_at_its_bytes_and_gives_one_record_at_least() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let orders = stream("orders");
    let big = "x".repeat(600);
    let records = vec![record("a\0b", &big), record("", &big), record("", "\u{1F980}\0")];
    store.append(&orders, records).await.unwrap();
    let read = async |after, bytes| {
        let limit = ReadLimit { records: 10, bytes };
        store.read(&orders, after, limit).await.unwrap()
    };
    assert_eq!(read(0, 0).await.len(), 1);
    assert_eq!(read(0, 1199).await.len(), 1);
    assert_eq!(read(0, 1200).await.len(), 2);
    let all = read(0, 1_000_000).await;
    assert_eq!(all.len(), 3);
    assert_eq!(all[0].key.as_deref(), Some("a\0b"));
    assert_eq!(all[2].body, "\u{1F980}\0");
    assert_eq!(read(3, 100).await, []);
    let beyond = store.read(&orders, 4, ReadLimit::default()).await;
    assert!(matches!(beyond, Err(StoreError::Beyond { after: 4, .. })), "{beyond:?}");
    let beyond = store.read(&orders, u64::MAX, ReadLimit::default()).await;
    assert!(matches!(beyond, Err(StoreError::Beyond { .. })), "{beyond:?}");
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_waiter_is_woken_by_another_process_and_at_once_by_its_own() {
    let scratch = Scratch::new();
    // A poll that comes too late to be mistaken for a wake-up.
    let options = || PostgresOptions { poll: Duration::from_secs(10), ..scratch.options() };
    let (here, there) = (scratch.store_with(options()).await, scratch.store_with(options()).await);
    let orders = stream("orders");
    let waiter = here.waiter(&orders);
    let woken = waiter.woken();
    here.append(&orders, vec![record("", "own")]).await.unwrap();
    tokio::time::timeout(Duration::ZERO, woken).await.expect("woken by the time it resolves");
    // The listener may still be connecting: what it misses until then is for the poll.
    until("a notice arrives", async || {
        let woken = waiter.woken();
        there.append(&orders, vec![record("", "other")]).await.unwrap();
        tokio::time::timeout(Duration::from_millis(500), woken).await.is_ok()
    })
    .await;
    here.close().await;
    there.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn an_append_slows_by_nothing_while_somebody_keeps_a_snapshot() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let orders = stream("orders");
    let mut operator = scratch.operator().await;
    let mut beside = Beside::new(&scratch).await;
    let mut run = async || {
        let mut ratios = Vec::new();
        for _ in 0..400 {
            let start = tokio::time::Instant::now();
            store.append(&orders, vec![record("k", "x"); 10]).await.unwrap();
            let time = start.elapsed();
            ratios.push(time.as_secs_f64() / beside.time().await.as_secs_f64());
        }
        median(ratios)
    };
    run().await;
    let without = run().await;
    let snapshot = operator
        .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM carrick_log")
        .await
        .unwrap();
    for _ in 0..3 {
        run().await;
    }
    let with = run().await;
    snapshot.rollback().await.unwrap();
    eprintln!("append of 10: {:.2}x with a snapshot open", with / without);
    assert!(with < without * 2.0);
    store.close().await;
    scratch.drop().await;
}
