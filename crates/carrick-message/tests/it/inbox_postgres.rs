//! The inbox on Postgres.

use std::time::Duration;

use carrick_message::inbox::{
    self, EventId, Guarded, InboxError, Reserved, Seen, Versions, sqlx_postgres as driver,
};
use carrick_testkit::servers::PostgresDatabase;
use sqlx::{Connection as _, Executor as _, PgPool};
use tokio::time::sleep;

use crate::outbox_kit::postgres;

async fn open() -> (PostgresDatabase, PgPool) {
    let database = PostgresDatabase::create().await;
    let pool = postgres(database.url()).await;
    pool.execute("CREATE TABLE ledger (id text)").await.unwrap();
    (database, pool)
}

fn id(id: &str) -> EventId<'_> {
    EventId::new("/shop", id)
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn m2_a_duplicate_leaves_the_transaction_usable() {
    let (_database, pool) = open().await;
    for expected in [Seen::First, Seen::Duplicate, Seen::Duplicate] {
        let mut tx = pool.begin().await.unwrap();
        assert_eq!(driver::once(&mut tx, "ledger", &id("1")).await.unwrap(), expected);
        tx.execute("INSERT INTO ledger VALUES ('1')").await.unwrap();
        tx.commit().await.unwrap();
    }
    let mut conn = pool.acquire().await.unwrap();
    assert_eq!(driver::once(&mut conn, "mailer", &id("1")).await.unwrap(), Seen::First);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn of_two_copies_at_the_same_time_one_is_first() {
    let (_database, pool) = open().await;
    for (round, commits) in [true, false].into_iter().enumerate() {
        let name = round.to_string();
        let mut first = pool.begin().await.unwrap();
        assert_eq!(driver::once(&mut first, "ledger", &id(&name)).await.unwrap(), Seen::First);
        let second = tokio::spawn({
            let (pool, name) = (pool.clone(), name.clone());
            async move {
                let mut tx = pool.begin().await.unwrap();
                let seen = driver::once(&mut tx, "ledger", &id(&name)).await.unwrap();
                tx.commit().await.unwrap();
                seen
            }
        });
        sleep(Duration::from_millis(50)).await;
        assert!(!second.is_finished(), "it waits for what the first one does");
        if commits {
            first.commit().await.unwrap();
            assert_eq!(second.await.unwrap(), Seen::Duplicate);
        } else {
            first.rollback().await.unwrap();
            assert_eq!(second.await.unwrap(), Seen::First);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn batches_with_the_same_events_in_another_order_do_not_lock_each_other_out() {
    let (_database, pool) = open().await;
    let ids: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let batch = async |backwards: bool| {
        let mut firsts = 0;
        for _ in 0..20 {
            let mut events: Vec<EventId<'_>> = ids.iter().map(|one| id(one)).collect();
            if backwards {
                events.reverse();
            }
            let mut tx = pool.begin().await.unwrap();
            let seen = driver::once_each(&mut tx, "ledger", &events).await.unwrap();
            firsts += seen.iter().filter(|seen| **seen == Seen::First).count();
            tx.commit().await.unwrap();
        }
        firsts
    };
    let (one, two) = tokio::join!(batch(false), batch(true));
    assert_eq!(one + two, 100, "each event is first once");
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn an_effect_of_a_batch_can_fail_by_itself() {
    let (_database, pool) = open().await;
    let events = [id("1"), id("2"), id("1")];
    let mut tx = pool.begin().await.unwrap();
    let seen = driver::once_each(&mut tx, "ledger", &events).await.unwrap();
    assert_eq!(seen, [Seen::First, Seen::First, Seen::Duplicate]);
    for (event, fails) in [(&events[0], false), (&events[1], true)] {
        let mut effect = tx.begin().await.unwrap();
        let insert = sqlx::query("INSERT INTO ledger VALUES ($1)").bind(event.id.to_string());
        insert.execute(&mut *effect).await.unwrap();
        if fails {
            effect.execute("SELECT 1 / 0").await.unwrap_err();
            effect.rollback().await.unwrap();
            driver::forget(&mut tx, "ledger", std::slice::from_ref(event)).await.unwrap();
        } else {
            effect.commit().await.unwrap();
        }
    }
    tx.commit().await.unwrap();
    let ids: Vec<String> =
        sqlx::query_scalar("SELECT id FROM ledger").fetch_all(&pool).await.unwrap();
    assert_eq!(ids, ["1"]);
    let mut conn = pool.acquire().await.unwrap();
    let again = driver::once_each(&mut conn, "ledger", &events[..2]).await.unwrap();
    assert_eq!(again, [Seen::Duplicate, Seen::First]);
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn the_version_guard_tells_four_outcomes_apart() {
    let (_database, pool) = open().await;
    let mut conn = pool.acquire().await.unwrap();
    for (version, outcome) in [
        (3, Guarded::Applied),
        (3, Guarded::Duplicate),
        (2, Guarded::Stale { current: 3 }),
        (9, Guarded::Applied),
    ] {
        let found = driver::guard(&mut conn, "ledger", "A", version, Versions::Ascending).await;
        assert_eq!(found.unwrap(), outcome);
    }
    for (version, outcome) in [
        (2, Guarded::Gap { expected: 1 }),
        (1, Guarded::Applied),
        (3, Guarded::Gap { expected: 2 }),
        (2, Guarded::Applied),
        (1, Guarded::Stale { current: 2 }),
    ] {
        let versions = Versions::Contiguous { first: 1 };
        let found = driver::guard(&mut conn, "ledger", "B", version, versions).await.unwrap();
        assert_eq!(found, outcome);
    }
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_reservation_keeps_a_second_copy_from_running_until_it_ends() {
    let (_database, pool) = open().await;
    let mut conn = pool.acquire().await.unwrap();
    let hold = Duration::from_secs(60);
    let Reserved::New(first) =
        driver::reserve(&mut conn, "mailer", &id("1"), Duration::ZERO).await.unwrap()
    else {
        panic!("nobody has it")
    };
    let Reserved::New(second) = driver::reserve(&mut conn, "mailer", &id("1"), hold).await.unwrap()
    else {
        panic!("the first has ended")
    };
    let third = driver::reserve(&mut conn, "mailer", &id("1"), hold).await.unwrap();
    assert!(matches!(third, Reserved::Busy(left) if left > Duration::from_secs(50)), "{third:?}");
    assert!(!driver::complete(&mut conn, "mailer", &id("1"), first).await.unwrap());
    let mixed = driver::once(&mut conn, "mailer", &id("1")).await;
    assert!(matches!(mixed, Err(InboxError::Reserved)));
    assert!(driver::complete(&mut conn, "mailer", &id("1"), second).await.unwrap());
    let done = driver::reserve(&mut conn, "mailer", &id("1"), hold).await.unwrap();
    assert_eq!(done, Reserved::Done);
    assert!(!driver::release(&mut conn, "mailer", &id("1"), second).await.unwrap());
}

#[tokio::test]
#[ignore = "needs Postgres: ./test starts one"]
async fn m8_a_prune_is_bounded_and_skips_what_somebody_is_at() {
    let (_database, pool) = open().await;
    pool.execute(
        "INSERT INTO carrick_inbox (handler, source, id, seen_at)
         SELECT 'ledger', '/shop', n::text, '2026-01-01' FROM generate_series(1, 250) AS n",
    )
    .await
    .unwrap();
    let mut locked = pool.begin().await.unwrap();
    locked.execute("SELECT FROM carrick_inbox WHERE id = '1' FOR UPDATE").await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    driver::once(&mut conn, "ledger", &id("new")).await.unwrap();
    let day = Duration::from_secs(86_400);
    let mut counts = Vec::new();
    for _ in 0..4 {
        counts.push(inbox::sqlx_postgres::prune(&mut conn, day, 100).await.unwrap());
    }
    assert_eq!(counts, [100, 100, 49, 0]);
    locked.rollback().await.unwrap();
    assert_eq!(inbox::sqlx_postgres::prune(&mut conn, day, 100).await.unwrap(), 1);
}
