//! The outbox on SQLite: appends through both drivers and in plain SQL, and the relay.

use std::{sync::Arc, time::Duration};

use carrick_core::{deadline::Deadline, event::Event, name::Topic, trace::TraceContext};
use carrick_message::outbox::{
    self, AppendError, Outbox, OutboxEvent, Relay, RelayOptions, Replay,
};
use sqlx::{Connection as _, SqliteConnection};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::outbox_kit::{
    Recorder, assert_key_order, config, event, eventually, quick, refused, sqlite,
};

struct Shop {
    _folder: TempDir,
    path: std::path::PathBuf,
    conn: rusqlite::Connection,
    broker: Recorder,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.db");
        let conn = sqlite(&path);
        Self { _folder: folder, path, conn, broker: Recorder::default() }
    }

    async fn relay(&self, options: RelayOptions) -> Relay {
        let outbox = Outbox::sqlite(&self.path).await.unwrap();
        Relay::spawn(&outbox, Arc::new(self.broker.clone()), config(options))
    }

    fn append(&self, id: &str, key: &str) {
        outbox::rusqlite::append(&self.conn, &event(id, key)).unwrap();
    }

    fn number(&self, sql: &str) -> i64 {
        self.conn.query_row(sql, (), |row| row.get(0)).unwrap()
    }

    fn unpublished(&self) -> i64 {
        self.number("SELECT count(*) FROM carrick_outbox WHERE published_at IS NULL")
    }

    async fn drained(&self) {
        eventually("all rows are marked", async || self.unpublished() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_leaves_with_its_transaction_or_never_was() {
    let mut shop = Shop::new();
    let relay = shop.relay(quick()).await;
    let tx = shop.conn.transaction().unwrap();
    outbox::rusqlite::append(&tx, &event("rolled-back", "a")).unwrap();
    tx.rollback().unwrap();
    let tx = shop.conn.transaction().unwrap();
    outbox::rusqlite::append(&tx, &event("committed", "a")).unwrap();
    tx.commit().unwrap();
    relay.waker().wake();
    shop.broker.wait_for(1).await;
    shop.drained().await;
    relay.stop().await;
    assert_eq!(shop.broker.ids(), ["committed"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_rust_program_appends_arrives_byte_for_byte() {
    let shop = Shop::new();
    let document = br#"{ "specversion":"1.0","id":"1","source":"/s","type":"t.v1",
        "n": 123456789012345678901234567890, "data": {"b":1,"a":2,"b":3, "big":9007199254740993} }"#;
    let original = Event::parse(document.to_vec()).unwrap();
    let topic = Topic::new("orders").unwrap();
    outbox::rusqlite::append(&shop.conn, &OutboxEvent::new(topic, original.clone())).unwrap();
    let relay = shop.relay(quick()).await;
    shop.broker.wait_for(1).await;
    assert_eq!(shop.broker.taken()[0].1.as_json(), original.as_json());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_insert_of_any_language_is_enough() {
    let shop = Shop::new();
    shop.conn
        .execute_batch(
            r#"INSERT INTO carrick_outbox (topic, key, type, source, data, extensions) VALUES
                 ('orders', 'A-1', 'order.placed.v1', '/shop',
                  '{"big": 12345678901234567890123, "z": 1, "a": 2}', '{"tenant": "acme", "n": 7}');
               INSERT INTO carrick_outbox (topic, type, source, data_binary, datacontenttype, time)
               VALUES ('acme/files', 'file.stored.v1', '/shop', x'00ff', 'image/png',
                       '2026-01-02T03:04:05Z');"#,
        )
        .unwrap();
    let relay = shop.relay(quick()).await;
    shop.broker.wait_for(2).await;
    let taken = shop.broker.taken();
    let placed = taken.iter().find(|(topic, _)| topic.as_str() == "default/orders").unwrap();
    let (json, event) = (std::str::from_utf8(placed.1.as_json()).unwrap(), &placed.1);
    assert!(json.contains(r#""data":{"big": 12345678901234567890123, "z": 1, "a": 2}"#), "{json}");
    assert!(json.contains(r#""tenant":"acme""#) && json.contains(r#""n":7"#), "{json}");
    assert_eq!(event.partition_key().as_deref(), Some("A-1"));
    assert!(event.time().is_some() && event.id().len() == 32);
    let stored = taken.iter().find(|(topic, _)| topic.as_str() == "acme/files").unwrap();
    let data = stored.1.data().unwrap();
    assert_eq!((&data.bytes[..], data.content_type.as_str()), (&b"\0\xff"[..], "image/png"));
    relay.stop().await;
}

#[test]
fn wrong_input_is_refused_at_the_insert_with_a_reason() {
    let shop = Shop::new();
    for (columns, values, why) in [
        ("topic, type, source", "'a b', 't', '/s'", "topic_is_a_name"),
        ("topic, type", "'a', 't'", "type_and_source"),
        ("topic, type, source, key", "'a', 't', '/s', ''", "key_has_1_to_500_bytes"),
        ("topic, type, source, version", "'a', 't', '/s', 1", "needs_a_key"),
        ("topic, type, source, data", "'a', 't', '/s', '{bad'", "data_is_json"),
        ("topic, type, source, extensions", "'a', 't', '/s', '[1]'", "extensions_is_a_json_object"),
        ("topic, type, source, time", "'a', 't', '/s', 'yesterday'", "time_is_rfc3339"),
        (
            "topic, type, source, data, data_binary",
            "'a', 't', '/s', '1', x'00'",
            "payload_is_one_of",
        ),
    ] {
        let sql = format!("INSERT INTO carrick_outbox ({columns}) VALUES ({values})");
        let error = shop.conn.execute_batch(&sql).unwrap_err().to_string();
        assert!(error.contains(why), "{sql}: {error}");
    }
}

#[tokio::test]
async fn a_version_of_a_key_is_appended_once_through_either_driver() {
    let shop = Shop::new();
    let first = event("a-1", "a").version(1);
    outbox::rusqlite::append(&shop.conn, &first).unwrap();
    let mut conn = SqliteConnection::connect(shop.path.to_str().unwrap()).await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    let error = outbox::sqlx_sqlite::append(&mut tx, &event("other", "a").version(1)).await;
    assert!(matches!(error, Err(AppendError::VersionTaken { version: 1, .. })), "{error:?}");
    outbox::sqlx_sqlite::append(&mut tx, &event("a-2", "a").version(2)).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(shop.number("SELECT count(*) FROM carrick_outbox"), 2);
    let no_key = outbox::rusqlite::append(&shop.conn, &event("x", "").version(1)).unwrap_err();
    assert!(matches!(no_key, AppendError::Invalid { field: "version", .. }));
}

#[tokio::test]
async fn an_event_takes_the_trace_of_its_context_unless_it_has_one() {
    let shop = Shop::new();
    let trace = TraceContext::new();
    let context = carrick_core::context::Context::new(
        Deadline::at(Instant::now() + Duration::from_secs(5)),
        trace.clone(),
    );
    context.scope(async { shop.append("a", "") }).await;
    shop.append("b", "");
    let parents: Vec<Option<String>> = ["a", "b"]
        .map(|id| {
            let sql = format!("SELECT event FROM carrick_outbox WHERE id = '{id}'");
            let document: String = shop.conn.query_row(&sql, (), |row| row.get(0)).unwrap();
            let event = Event::parse(document.into_bytes()).unwrap();
            event.traceparent().map(|parent| parent.to_string())
        })
        .to_vec();
    assert_eq!(parents, [Some(trace.to_string()), None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_row_does_not_wedge_the_relay_and_is_listed_mended_or_skipped() {
    let shop = Shop::new();
    shop.conn
        .execute_batch(
            r#"INSERT INTO carrick_outbox (topic, key, type, source, extensions, id) VALUES
                 ('orders', 'bad', 't.v1', '/s', '{"Not A Name": 1}', 'bad-1');
               INSERT INTO carrick_outbox (topic, key, type, source, id) VALUES
                 ('orders', 'bad', 't.v1', '/s', 'bad-2'), ('orders', 'good', 't.v1', '/s', 'good-1');
               INSERT INTO carrick_outbox (topic, key, type, source, extensions, id) VALUES
                 ('orders', 'worse', 't.v1', '/s', '{"id": "x"}', 'worse-1');
               INSERT INTO carrick_outbox (topic, key, type, source, id) VALUES
                 ('orders', 'worse', 't.v1', '/s', 'worse-2');"#,
        )
        .unwrap();
    let relay = shop.relay(quick()).await;
    let outbox = Outbox::sqlite(&shop.path).await.unwrap();
    shop.broker.wait_for(1).await;
    eventually("both are listed", async || outbox.failures(0, 10).await.unwrap().len() == 2).await;
    let failures = outbox.failures(0, 10).await.unwrap();
    assert!(failures[0].error.contains("Not A Name"), "{failures:?}");
    assert_eq!(shop.broker.ids(), ["good-1"]);
    shop.conn
        .execute("UPDATE carrick_outbox SET extensions = NULL WHERE id = 'bad-1'", ())
        .unwrap();
    outbox.retry(&[failures[0].seq]).await.unwrap();
    assert_eq!(outbox.skip(&[failures[1].seq], "cannot be mended").await.unwrap(), 1);
    shop.broker.wait_for(4).await;
    let mut ids = shop.broker.ids();
    ids.retain(|id| id.starts_with("bad"));
    assert_eq!(ids, ["bad-1", "bad-2"]);
    assert!(!shop.broker.ids().contains(&"worse-1".to_owned()));
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m1_one_failed_publish_leaves_the_marks_of_the_others_alone() {
    let shop = Shop::new();
    for number in 1..=300 {
        shop.append(&format!("k{}-{number}", number % 10), &format!("k{}", number % 10));
    }
    shop.broker.refuse(|event| (event.id() == "k3-3").then(|| refused("not this one")));
    let relay = shop.relay(quick()).await;
    eventually("all but one key", async || shop.unpublished() == 30).await;
    let outbox = Outbox::sqlite(&shop.path).await.unwrap();
    let failures = outbox.failures(0, 10).await.unwrap();
    assert_eq!((failures.len(), failures[0].id.as_str()), (1, "k3-3"));
    assert!(failures[0].error.contains("not this one"));
    assert!(relay.status().blocked_keys <= 1);
    shop.broker.accept_all();
    shop.drained().await;
    assert_key_order(&shop.broker.taken());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_publish_holds_up_its_own_key_only() {
    let shop = Shop::new();
    shop.append("slow-1", "slow");
    shop.broker.delay("slow", Duration::from_secs(30));
    let relay = shop.relay(quick()).await;
    eventually("it is under way", async || shop.broker.publishes().len() == 1).await;
    let start = Instant::now();
    for number in 1..=200 {
        shop.append(&format!("fast-{number}"), "fast");
    }
    relay.waker().wake();
    shop.broker.wait_for(200).await;
    eventually("they are marked", async || shop.unpublished() == 1).await;
    assert!(start.elapsed() < Duration::from_secs(20), "nobody waited for the slow one");
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_stands_by_and_takes_over_within_two_leases() {
    let shop = Shop::new();
    let lease = Duration::from_secs(2);
    let quick = || RelayOptions { lease, ..quick() };
    let first = shop.relay(quick()).await;
    eventually("the first has it", async || first.status().buckets == 1).await;
    let second = shop.relay(quick()).await;
    for number in 1..=50 {
        shop.append(&format!("a-{number}"), "a");
    }
    shop.broker.wait_for(50).await;
    assert_eq!(second.status().published, 0);
    let crash = Instant::now();
    drop(first); // at once, leaving its lease behind
    for number in 51..=100 {
        shop.append(&format!("a-{number}"), "a");
    }
    shop.broker.wait_for(100).await;
    let took = crash.elapsed();
    assert!(took < 2 * lease, "{took:?}");
    assert_key_order(&shop.broker.taken());
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m1_relays_killed_at_any_moment_keep_the_order_of_a_key_and_lose_nothing() {
    let shop = Shop::new();
    shop.broker.jitter();
    let mut written = 0;
    for round in 0..8u64 {
        // Some end in good order, some in the middle.
        let relay = shop.relay(RelayOptions { batch: 4, page: 20, ..quick() }).await;
        for _ in 0..100 {
            written += 1;
            let key = written % 5;
            shop.append(&format!("k{key}-{written}"), &format!("k{key}"));
        }
        relay.waker().wake();
        let progress = shop.broker.count() + 20 * (round as usize % 4);
        shop.broker.wait_for(progress.min(written)).await;
        if round % 3 == 0 { relay.stop().await } else { drop(relay) }
    }
    let last = shop.relay(quick()).await;
    shop.broker.wait_for(written).await;
    shop.drained().await;
    last.stop().await;
    assert_eq!(shop.broker.count(), written, "the broker knows repeats by their ids");
    assert_key_order(&shop.broker.taken());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_restored_database_drain() {
    // Field report 4: published is a fact about each row, so nothing depends on numbers that a
    // restore sets back.
    let shop = Shop::new();
    let relay = shop.relay(quick()).await;
    for number in 1..=20 {
        shop.append(&format!("a-{number}"), "a");
    }
    shop.broker.wait_for(20).await;
    shop.drained().await;
    // As restored from before rows 11 to 20 were published, under a running relay.
    shop.conn
        .execute_batch("UPDATE carrick_outbox SET published_at = NULL WHERE seq > 10")
        .unwrap();
    shop.broker.forget();
    shop.broker.wait_for(30).await;
    shop.drained().await;
    assert_eq!(&shop.broker.ids()[20..], &shop.broker.ids()[10..20], "again, in order");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m8_a_prune_is_bounded_and_takes_published_rows_only() {
    let shop = Shop::new();
    shop.conn
        .execute_batch(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)
             INSERT INTO carrick_outbox (topic, type, source, created_at, published_at)
             SELECT 'orders', 't.v1', '/s', '2026-01-01T00:00:00.000Z',
                    CASE WHEN i % 10 = 0 THEN NULL ELSE '2026-01-01T00:00:01.000Z' END FROM n;
             INSERT INTO carrick_outbox (topic, type, source, published_at)
             SELECT 'orders', 't.v1', '/s', strftime('%Y-%m-%dT%H:%M:%fZ', 'now');",
        )
        .unwrap();
    shop.broker.refuse(|_| Some(refused("so that they stay unpublished")));
    let options = RelayOptions {
        prune_every: Duration::from_secs(1),
        prune_rows: 100,
        prune_batches: 2,
        ..quick()
    };
    let relay = shop.relay(options).await;
    let count = || shop.number("SELECT count(*) FROM carrick_outbox");
    let mut seen = vec![count()];
    eventually("all that is over is gone", async || {
        let now = count();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        now == 51
    })
    .await;
    let steps: Vec<i64> = seen.windows(2).map(|pair| pair[0] - pair[1]).collect();
    assert!(steps.iter().all(|gone| *gone <= 180), "{seen:?}");
    assert_eq!(shop.unpublished(), 50);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_publishes_a_time_range_again_with_the_same_ids() {
    let shop = Shop::new();
    let relay = shop.relay(quick()).await;
    for number in 1..=30 {
        shop.append(&format!("a-{number}"), "a");
    }
    shop.drained().await;
    relay.stop().await;
    shop.conn
        .execute_batch(
            "UPDATE carrick_outbox SET published_at = '2026-01-01T00:00:00.000Z' WHERE seq <= 10",
        )
        .unwrap();
    let outbox = Outbox::sqlite(&shop.path).await.unwrap();
    let replay = Replay {
        from: "2025-12-31T00:00:00Z".parse().unwrap(),
        to: "2026-01-02T00:00:00Z".parse().unwrap(),
        topic: Some(Topic::new("orders").unwrap()),
        per_second: 10_000,
        after: 0,
    };
    let broker = Arc::new(shop.broker.clone());
    let done = outbox.replay(broker.clone(), &replay).await.unwrap();
    assert_eq!((done.published, done.remembered), (0, 10), "within the broker's window: dropped");
    shop.broker.forget();
    let done = outbox.replay(broker.clone(), &replay).await.unwrap();
    assert_eq!((done.published, done.remembered), (10, 0));
    assert_eq!(shop.broker.ids()[30..], shop.broker.ids()[..10]);
    assert_eq!(shop.unpublished(), 0, "a replay changes nothing in the outbox");
    let other = Replay { topic: Some(Topic::new("other").unwrap()), ..replay };
    assert_eq!(outbox.replay(broker, &other).await.unwrap().published, 0);
}

#[tokio::test]
async fn a_url_of_another_kind_is_refused_with_what_is_allowed() {
    let error = Outbox::open("mysql://root:secret@host/db").await.unwrap_err().to_string();
    assert!(error.contains("sqlite://") && !error.contains("secret"), "{error}");
}
