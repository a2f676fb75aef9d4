//! Named leases by plain connections, as a relay has them in somebody else's database.

use std::{collections::BTreeSet, time::Duration};

use carrick_store::fence::{Acquired, Fence, postgres};

use super::{Scratch, record, stream, until};
use carrick_store::log::Log;

const TTL: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn several_names_go_to_one_holder_each() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let names: Vec<String> = (0..64).map(|bucket| format!("relay/{bucket}")).collect();
    let holders = (0..8).map(|_| async {
        let mut conn = scratch.operator().await;
        let mut held = Vec::new();
        for _ in 0..4 {
            held.extend(postgres::acquire_some(&mut conn, &names, 3, TTL).await.unwrap());
        }
        held
    });
    let held: Vec<_> = futures_util::future::join_all(holders).await.concat();
    let distinct: BTreeSet<&String> = held.iter().map(|(name, _)| name).collect();
    assert_eq!(distinct.len(), held.len(), "a name was given twice");
    assert!(held.len() >= 32);

    let mut conn = scratch.operator().await;
    let mut asked = held.clone();
    asked[0].1 += 1;
    let renewed = postgres::renew_some(&mut conn, &asked, TTL).await.unwrap();
    assert_eq!(renewed.len(), held.len() - 1, "a wrong token renews nothing");
    assert_eq!(postgres::release_some(&mut conn, &asked).await.unwrap(), held.len() - 1);
    let again = postgres::acquire_some(&mut conn, &names, 64, TTL).await.unwrap();
    assert_eq!(again.len(), 63, "all but the one that is still held");
    for (name, token) in &held[1..] {
        let (_, next) = again.iter().find(|(one, _)| one == name).unwrap();
        assert!(next > token, "tokens of a name only grow");
    }
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_renewal_goes_through_while_callers_hold_every_connection() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let Acquired::Held(token) = store.acquire("leader", TTL).await.unwrap() else { panic!() };
    store.append(&stream("warm"), vec![record("", "x")]).await.unwrap();
    let mut operator = scratch.operator().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE carrick_log").execute(&mut operator).await.unwrap();
    let stuck: Vec<_> = (0..8)
        .map(|n| {
            let store = store.clone();
            let topic = stream(&format!("stuck.{n}"));
            tokio::spawn(async move { store.append(&topic, vec![record("", "x")]).await })
        })
        .collect();
    let mut watch = scratch.operator().await;
    until("every connection waits", async || {
        let waiting: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'carrick_log'::regclass",
        )
        .fetch_one(&mut watch)
        .await
        .unwrap();
        waiting == i64::from(scratch.options().max_connections)
    })
    .await;
    let renewed = tokio::time::timeout(Duration::from_secs(1), store.renew("leader", token, TTL));
    assert!(renewed.await.expect("a renewal waits for nobody").unwrap());
    sqlx::raw_sql("ROLLBACK").execute(&mut operator).await.unwrap();
    for append in stuck {
        append.await.unwrap().unwrap();
    }
    store.close().await;
    scratch.drop().await;
}
