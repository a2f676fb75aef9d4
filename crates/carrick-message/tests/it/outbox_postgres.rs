//! The outbox on Postgres: late commits, pinned snapshots, several relays, crashes.

use std::{sync::Arc, time::Duration};

use carrick_message::outbox::{
    AppendError, Notifier, Outbox, Relay, RelayOptions, Replay,
    sqlx_postgres::{KeyOrder, append, append_all},
};
use carrick_testkit::servers::PostgresDatabase;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sqlx::{Executor as _, PgPool};
use tokio::time::{Instant, sleep, timeout};

use crate::outbox_kit::{
    PATIENCE, Recorder, assert_key_order, config, event, eventually, postgres, quick, refused,
};

struct Shop {
    pool: PgPool,
    broker: Recorder,
    database: PostgresDatabase,
}

impl Shop {
    async fn new() -> Self {
        let database = PostgresDatabase::create().await;
        Self { pool: postgres(database.url()).await, broker: Recorder::default(), database }
    }

    async fn outbox(&self) -> Outbox {
        Outbox::postgres(self.database.url()).await.unwrap()
    }

    async fn relay(&self, options: RelayOptions) -> Relay {
        Relay::spawn(&self.outbox().await, Arc::new(self.broker.clone()), config(options))
    }

    async fn append(&self, id: &str, key: &str) {
        let mut tx = self.pool.begin().await.unwrap();
        append(&mut tx, &event(id, key), KeyOrder::Lock).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Rows `prefix-1` to `prefix-count`, in one statement, spread over keys.
    async fn fill(&self, count: i64, keys: i64) {
        sqlx::query(
            "INSERT INTO carrick_outbox (topic, key, type, source, id, data)
             SELECT 'orders', 'k' || n % $2, 't.v1', '/s', 'k' || n % $2 || '-' || nextval('fill'),
                    json_build_object('n', n)
             FROM generate_series(1, $1) AS n",
        )
        .bind(count)
        .bind(keys)
        .execute(&self.pool)
        .await
        .unwrap();
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    async fn unpublished(&self) -> i64 {
        self.number("SELECT count(*) FROM carrick_outbox WHERE published_at IS NULL").await
    }

    async fn drained(&self) {
        eventually("all rows are marked", async || self.unpublished().await == 0).await;
    }
}

/// Finds rows by its reads alone: the sweep comes too late for the test.
fn without_sweep() -> RelayOptions {
    RelayOptions { sweep: Duration::from_secs(3600), ..quick() }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_plain_insert_of_any_language_is_enough() {
    let shop = Shop::new().await;
    shop.pool
        .execute(
            r#"INSERT INTO carrick_outbox (topic, key, type, source, data, extensions) VALUES
                 ('orders', 'A-1', 'order.placed.v1', '/shop',
                  '{"big": 12345678901234567890123, "z": 1, "a": 2, "a": 3}', '{"tenant": "acme"}');
               INSERT INTO carrick_outbox (topic, type, source, data_binary, datacontenttype, time)
               VALUES ('acme/files', 'file.stored.v1', '/shop', '\x00ff', 'image/png',
                       '2026-01-02T03:04:05.000006+01:00')"#,
        )
        .await
        .unwrap();
    let relay = shop.relay(quick()).await;
    shop.broker.wait_for(2).await;
    let taken = shop.broker.taken();
    let placed = taken.iter().find(|(topic, _)| topic.as_str() == "default/orders").unwrap();
    let json = std::str::from_utf8(placed.1.as_json()).unwrap();
    let data = r#""data":{"big": 12345678901234567890123, "z": 1, "a": 2, "a": 3}"#;
    assert!(json.contains(data) && json.contains(r#""tenant":"acme""#), "{json}");
    assert_eq!(placed.1.partition_key().as_deref(), Some("A-1"));
    let stored = taken.iter().find(|(topic, _)| topic.as_str() == "acme/files").unwrap();
    assert_eq!(&stored.1.data().unwrap().bytes[..], b"\0\xff");
    assert_eq!(stored.1.time().unwrap().to_string(), "2026-01-02T02:04:05.000006Z");
    relay.stop().await;
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn wrong_input_is_refused_at_the_insert_with_a_reason() {
    let shop = Shop::new().await;
    for (columns, values, why) in [
        ("topic, type, source", "'a b', 't', '/s'", "topic_is_a_name"),
        ("topic, type", "'a', 't'", "type_and_source"),
        ("topic, type, source, key", "'a', 't', '/s', ''", "key_has_1_to_500_bytes"),
        ("topic, type, source, version", "'a', 't', '/s', 1", "version_needs_a_key"),
        (
            "topic, type, source, data",
            "'a', 't', '/s', '{bad'",
            "invalid input syntax for type json",
        ),
        ("topic, type, source, extensions", "'a', 't', '/s', '[1]'", "extensions_is_a_json_object"),
        ("topic, type, source, data, event", "'a', 't', '/s', '1', '{}'", "payload_is_one_of"),
    ] {
        let sql = format!("INSERT INTO carrick_outbox ({columns}) VALUES ({values})");
        let error = shop.pool.execute(sqlx::AssertSqlSafe(sql)).await.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_taken_version_is_told_and_the_transaction_goes_on() {
    let shop = Shop::new().await;
    let mut tx = shop.pool.begin().await.unwrap();
    append(&mut tx, &event("a-1", "a").version(1), KeyOrder::Lock).await.unwrap();
    let error = append(&mut tx, &event("x", "a").version(1), KeyOrder::Lock).await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    append(&mut tx, &event("a-2", "a").version(2), KeyOrder::Caller).await.unwrap();
    let batch = [event("b-1", "b").version(1), event("x", "a").version(2), event("c-1", "")];
    let error = append_all(&mut tx, &batch, KeyOrder::Lock).await.unwrap_err();
    assert!(
        matches!(&error, AppendError::VersionTaken { key, version: 2, .. } if key == "a"),
        "{error}"
    );
    tx.commit().await.unwrap();
    assert_eq!(shop.number("SELECT count(*) FROM carrick_outbox").await, 4);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_batch_keeps_its_order_and_writers_with_many_keys_do_not_lock_each_other_out() {
    let shop = Shop::new().await;
    let writer = async |name: &str, backwards: bool| {
        for round in 0..30 {
            let mut keys: Vec<usize> = (0..20).collect();
            if backwards {
                keys.reverse();
            }
            let events =
                keys.iter().map(|key| event(&format!("{name}-{round}-{key}"), &format!("k{key}")));
            let mut tx = shop.pool.begin().await.unwrap();
            append_all(&mut tx, &events.collect::<Vec<_>>(), KeyOrder::Lock).await.unwrap();
            tx.commit().await.unwrap();
        }
    };
    tokio::join!(writer("one", false), writer("two", true));
    let out_of_order = shop
        .number(
            "SELECT count(*) FROM carrick_outbox AS a JOIN carrick_outbox AS b
             ON a.id LIKE 'one-%' AND b.id LIKE 'one-%' AND a.seq < b.seq
             WHERE split_part(a.id, '-', 2)::int * 100 + split_part(a.id, '-', 3)::int
                 > split_part(b.id, '-', 2)::int * 100 + split_part(b.id, '-', 3)::int",
        )
        .await;
    assert_eq!(out_of_order, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_row_that_commits_late_is_published_soon_after() {
    // Field report 1: the number is taken first and committed last.
    let shop = Shop::new().await;
    let relay = shop.relay(without_sweep()).await;
    shop.append("warm-1", "warm").await;
    shop.broker.wait_for(1).await;
    let mut late = shop.pool.begin().await.unwrap();
    append(&mut late, &event("late-1", "late"), KeyOrder::Lock).await.unwrap();
    for number in 1..=50 {
        shop.append(&format!("other-{number}"), "other").await;
    }
    shop.broker.wait_for(51).await;
    // Ids of transactions pass the open one by, in reads without rows as well.
    for _ in 0..5 {
        shop.pool.execute("SELECT pg_current_xact_id()").await.unwrap();
        sleep(Duration::from_millis(30)).await;
    }
    late.commit().await.unwrap();
    timeout(Duration::from_secs(10), shop.broker.wait_for(52)).await.expect("found by reads alone");
    assert_eq!(shop.broker.ids()[51], "late-1");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn transaction_ids_opposite_to_the_order_of_locks_do_not_swap_a_key() {
    let shop = Shop::new().await;
    let relay = shop.relay(without_sweep()).await;
    for round in 0..10 {
        // The first id, the second lock.
        let mut early = shop.pool.begin().await.unwrap();
        early.execute("SELECT pg_current_xact_id()").await.unwrap();
        let mut tx = shop.pool.begin().await.unwrap();
        let first = format!("a-{}", 2 * round + 1);
        append(&mut tx, &event(&first, "a"), KeyOrder::Lock).await.unwrap();
        let second = event(&format!("a-{}", 2 * round + 2), "a");
        let waits = tokio::spawn(async move {
            append(&mut early, &second, KeyOrder::Lock).await.unwrap();
            early.commit().await.unwrap();
        });
        sleep(Duration::from_millis(20)).await;
        assert!(!waits.is_finished(), "the lock comes before the number");
        tx.commit().await.unwrap();
        waits.await.unwrap();
    }
    shop.broker.wait_for(20).await;
    assert_key_order(&shop.broker.taken());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn m1_writers_at_random_and_relays_killed_lose_nothing_and_keep_the_order_of_a_key() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let shop = Shop::new().await;
    shop.broker.jitter();
    let options = || RelayOptions { batch: 4, page: 50, ..without_sweep() };
    let relays = [shop.relay(options()).await, shop.relay(options()).await];
    let writers = (0..8u64).map(|writer| {
        let pool = shop.pool.clone();
        tokio::spawn(async move {
            let mut rng = StdRng::seed_from_u64(seed ^ writer);
            let mut committed = 0;
            for _ in 0..60 {
                let mut tx = pool.begin().await.unwrap();
                let key = format!("k{}", rng.random_range(0..12));
                // The number of its place in the key, under the lock that an append takes.
                sqlx::query("SELECT carrick_outbox_lock('default/orders', $1)")
                    .bind(&key)
                    .execute(&mut *tx)
                    .await
                    .unwrap();
                let place: i64 =
                    sqlx::query_scalar("SELECT count(*) + 1 FROM carrick_outbox WHERE key = $1")
                        .bind(&key)
                        .fetch_one(&mut *tx)
                        .await
                        .unwrap();
                let event = event(&format!("{key}-{place}"), &key);
                append(&mut tx, &event, KeyOrder::Caller).await.unwrap();
                sleep(Duration::from_millis(rng.random_range(0..30))).await;
                if rng.random_range(0..5) == 0 {
                    tx.rollback().await.unwrap();
                } else {
                    tx.commit().await.unwrap();
                    committed += 1;
                }
            }
            committed
        })
    });
    let writers: Vec<_> = writers.collect();
    let mut relays = Vec::from(relays);
    for round in 0..6 {
        sleep(Duration::from_millis(250)).await;
        let killed = relays.remove(0);
        if round % 2 == 0 {
            drop(killed)
        } else {
            killed.stop().await
        }
        relays.push(shop.relay(options()).await);
    }
    let mut committed = 0;
    for writer in writers {
        committed += writer.await.unwrap();
    }
    shop.broker.wait_for(committed).await;
    shop.drained().await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(shop.broker.count(), committed);
    assert_key_order(&shop.broker.taken());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn buckets_are_shared_out_fairly_as_relays_come_and_go() {
    let shop = Shop::new().await;
    let first = shop.relay(quick()).await;
    eventually("one has all", async || first.status().buckets == 64).await;
    let second = shop.relay(quick()).await;
    let halves = async || first.status().buckets == 32 && second.status().buckets == 32;
    eventually("halves", halves).await;
    let third = shop.relay(quick()).await;
    let shares = async || {
        let counts = [&first, &second, &third].map(|relay| relay.status().buckets);
        counts.iter().sum::<usize>() == 64 && counts.iter().all(|count| *count <= 22)
    };
    eventually("thirds", shares).await;
    second.stop().await;
    drop(third);
    eventually("all again", async || first.status().buckets == 64).await;
    first.stop().await;
    let held = "SELECT count(*) FROM carrick_fence WHERE name LIKE 'relay/%'
                AND ends_at > extract(epoch FROM clock_timestamp()) * 1000000";
    assert_eq!(shop.number(held).await, 0, "a stop gives leases back");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn rows_of_a_crashed_relay_are_published_within_two_leases() {
    let shop = Shop::new().await;
    shop.pool.execute("CREATE SEQUENCE fill").await.unwrap();
    let lease = Duration::from_secs(2);
    let options = || RelayOptions { lease, ..quick() };
    let dying = shop.relay(options()).await;
    eventually("it has all", async || dying.status().buckets == 64).await;
    let other = shop.relay(options()).await;
    let crash = Instant::now();
    drop(dying);
    shop.fill(200, 50).await;
    shop.broker.wait_for(200).await;
    assert!(crash.elapsed() < 2 * lease, "{:?}", crash.elapsed());
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_relay_whose_leases_went_to_another_marks_nothing() {
    let shop = Shop::new().await;
    let relay = shop.relay(RelayOptions { lease: Duration::from_secs(30), ..quick() }).await;
    eventually("it has all", async || relay.status().buckets == 64).await;
    shop.broker.delay("slow", Duration::from_millis(500));
    shop.append("slow-1", "slow").await;
    eventually("it is under way", async || !shop.broker.publishes().is_empty()).await;
    // As after a pause past the end of the leases: another one has them now.
    shop.pool.execute("UPDATE carrick_fence SET token = token + 1").await.unwrap();
    shop.broker.wait_for(1).await;
    eventually("the mark was tried", async || relay.status().published == 1).await;
    assert_eq!(shop.unpublished().await, 1, "whoever has the lease decides");
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_snapshot_held_open_does_not_slow_the_relay_down_by_more_than_two() {
    // Field report 23: what was published since cannot be cleaned up; nobody may read it each time.
    let shop = Shop::new().await;
    shop.pool.execute("CREATE SEQUENCE fill").await.unwrap();
    // The best of some rounds, each of some commits with a look at once.
    let best = async |relay: &Relay| {
        let mut times = Vec::new();
        for _ in 0..4 {
            let start = Instant::now();
            for _ in 0..20 {
                let done = shop.broker.count() + 25;
                shop.fill(25, 25).await;
                relay.waker().wake();
                shop.broker.wait_for(done).await;
            }
            times.push(start.elapsed());
        }
        times.into_iter().min().unwrap()
    };
    let relay = shop.relay(without_sweep()).await;
    eventually("it has all", async || relay.status().buckets == 64).await;
    best(&relay).await;
    let before = best(&relay).await;
    relay.stop().await;

    let mut pinned = shop.pool.begin().await.unwrap();
    pinned.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    pinned.execute("SELECT count(*) FROM carrick_outbox").await.unwrap();
    shop.fill(200_000, 50).await;
    let publish = "UPDATE carrick_outbox SET published_at = now() WHERE published_at IS NULL";
    shop.pool.execute(publish).await.unwrap();

    let relay = shop.relay(without_sweep()).await;
    eventually("it has all", async || relay.status().buckets == 64).await;
    best(&relay).await;
    let after = best(&relay).await;
    println!("{before:?} before, {after:?} with a snapshot held over 200 000 rows");
    assert!(after < 2 * before + Duration::from_millis(20), "{before:?} before, {after:?} after");
    pinned.rollback().await.unwrap();
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_notification_of_another_process_spares_the_pause() {
    let shop = Shop::new().await;
    let options = RelayOptions { idle_poll: Duration::from_secs(10), ..without_sweep() };
    let relay = shop.relay(options).await;
    let notifier = Notifier::spawn(shop.pool.clone());
    eventually("it has all", async || relay.status().buckets == 64).await;
    // Until its pauses are long.
    sleep(Duration::from_secs(3)).await;
    let mut waits = Vec::new();
    for number in 1..=5 {
        shop.append(&format!("a-{number}"), "a").await;
        let committed = Instant::now();
        notifier.notify();
        shop.broker.wait_for(number).await;
        waits.push(committed.elapsed());
    }
    waits.sort();
    assert!(waits[2] < Duration::from_secs(1), "{waits:?}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_restarted_server_is_found_again() {
    let shop = Shop::new().await;
    let relay = shop.relay(quick()).await;
    shop.append("a-1", "a").await;
    shop.broker.wait_for(1).await;
    // All of its connections are cut, the listener's too.
    shop.pool
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'carrick relay' AND datname = current_database()",
        )
        .await
        .unwrap();
    for number in 2..=20 {
        shop.append(&format!("a-{number}"), "a").await;
    }
    shop.broker.wait_for(20).await;
    shop.drained().await;
    assert_key_order(&shop.broker.taken());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn without_anything_that_a_pooler_forbids_it_works_too() {
    let shop = Shop::new().await;
    shop.pool.execute("CREATE SEQUENCE fill").await.unwrap();
    let joint = if shop.database.url().contains('?') { '&' } else { '?' };
    let url = format!("{}{joint}pgbouncer=true", shop.database.url());
    let outbox = Outbox::open(&url).await.unwrap();
    let relay = Relay::spawn(&outbox, Arc::new(shop.broker.clone()), config(quick()));
    shop.fill(500, 20).await;
    shop.broker.wait_for(500).await;
    shop.drained().await;
    let named = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'
                 AND datname = current_database()";
    assert_eq!(shop.number(named).await, 0);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn failed_rows_are_listed_retried_and_skipped() {
    let shop = Shop::new().await;
    shop.broker.refuse(|event| event.id().starts_with("bad").then(|| refused("not this one")));
    for number in 1..=5 {
        shop.append(&format!("bad-{number}"), "bad").await;
        shop.append(&format!("good-{number}"), "good").await;
    }
    let relay = shop.relay(quick()).await;
    shop.broker.wait_for(5).await;
    let outbox = shop.outbox().await;
    eventually("one is listed", async || outbox.failures(0, 10).await.unwrap().len() == 1).await;
    let failure = outbox.failures(0, 10).await.unwrap().remove(0);
    assert_eq!((failure.id.as_str(), failure.key.as_deref()), ("bad-1", Some("bad")));
    assert!(failure.error.contains("not this one"));
    assert_eq!(outbox.skip(&[failure.seq], "operator").await.unwrap(), 1);
    shop.broker.accept_all();
    shop.broker.wait_for(9).await;
    assert!(!shop.broker.ids().contains(&"bad-1".to_owned()));
    assert_key_order(&shop.broker.taken());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn m8_a_prune_is_bounded_and_skips_locked_rows() {
    let shop = Shop::new().await;
    shop.pool
        .execute(
            "INSERT INTO carrick_outbox (topic, type, source, created_at, published_at)
             SELECT 'orders', 't.v1', '/s', '2026-01-01', '2026-01-01' FROM generate_series(1, 450)",
        )
        .await
        .unwrap();
    let mut locked = shop.pool.begin().await.unwrap();
    locked.execute("SELECT FROM carrick_outbox WHERE seq = 10 FOR UPDATE").await.unwrap();
    let options = RelayOptions {
        prune_every: Duration::from_secs(1),
        prune_rows: 100,
        prune_batches: 2,
        ..quick()
    };
    let relay = shop.relay(options).await;
    let mut seen = vec![450];
    eventually("all but the locked one are gone", async || {
        let now = shop.number("SELECT count(*) FROM carrick_outbox").await;
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        now == 1
    })
    .await;
    let steps: Vec<i64> = seen.windows(2).map(|pair| pair[0] - pair[1]).collect();
    assert!(steps.iter().all(|gone| *gone <= 200), "{seen:?}");
    locked.rollback().await.unwrap();
    let gone = async || shop.number("SELECT count(*) FROM carrick_outbox").await == 0;
    eventually("and that one, later", gone).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_replay_publishes_a_time_range_again() {
    let shop = Shop::new().await;
    shop.pool.execute("CREATE SEQUENCE fill").await.unwrap();
    shop.fill(300, 10).await;
    let relay = shop.relay(quick()).await;
    shop.drained().await;
    relay.stop().await;
    shop.broker.forget();
    shop.pool
        .execute("UPDATE carrick_outbox SET published_at = '2026-01-01' WHERE seq <= 250")
        .await
        .unwrap();
    let replay = Replay {
        from: "2025-12-31T00:00:00Z".parse().unwrap(),
        to: "2026-01-02T00:00:00Z".parse().unwrap(),
        topic: None,
        per_second: 100_000,
        after: 0,
    };
    let broker = Arc::new(shop.broker.clone());
    let done = timeout(PATIENCE, shop.outbox().await.replay(broker, &replay)).await.unwrap();
    assert_eq!(done.unwrap().published, 250);
    assert_key_order(&shop.broker.taken()[300..]);
}
