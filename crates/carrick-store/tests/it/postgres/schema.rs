//! Migrations on a real server.

use carrick_store::{
    StoreError,
    engine::postgres::{PostgresConfig, PostgresStore},
    log::Log,
};
use sqlx::AssertSqlSafe;

use super::{Scratch, record, stream};

async fn connect(scratch: &Scratch, url: &str) -> Result<PostgresStore, StoreError> {
    let config = PostgresConfig::try_from(scratch.options()).unwrap();
    PostgresStore::connect(url, config).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn programs_that_start_together_migrate_once() {
    let scratch = Scratch::new();
    let stores = futures_util::future::join_all((0..6).map(|_| scratch.store())).await;
    let epochs: Vec<u64> = stores.iter().map(Log::epoch).collect();
    assert!(epochs.iter().all(|epoch| *epoch == epochs[0]));
    let versions: Vec<(String, i64)> =
        sqlx::query_as("SELECT component, version FROM carrick_schema ORDER BY 1, 2")
            .fetch_all(&mut scratch.operator().await)
            .await
            .unwrap();
    assert_eq!(versions, [("fence".to_owned(), 1), ("store".to_owned(), 1)]);
    for store in stores {
        store.close().await;
    }
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn tables_of_a_newer_carrick_are_refused() {
    let scratch = Scratch::new();
    scratch.store().await.close().await;
    sqlx::raw_sql(AssertSqlSafe(
        "UPDATE carrick_schema SET version = 99 WHERE component = 'store'",
    ))
    .execute(&mut scratch.operator().await)
    .await
    .unwrap();
    let refused = connect(&scratch, &scratch.url).await.unwrap_err();
    assert!(matches!(refused, StoreError::NewerSchema { found: 99, known: 1 }), "{refused:?}");
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_database_that_cannot_be_written_to_is_read_and_says_so() {
    let scratch = Scratch::new();
    let writer = scratch.store().await;
    writer.append(&stream("orders"), vec![record("", "x")]).await.unwrap();
    let separator = if scratch.url.contains('?') { '&' } else { '?' };
    let url = format!("{}{separator}options=-c%20default_transaction_read_only%3Don", scratch.url);
    let reader = connect(&scratch, &url).await.unwrap();
    assert_eq!(reader.bounds(&stream("orders")).await.unwrap().last, 1);
    let refused = reader.append(&stream("orders"), vec![record("", "x")]).await.unwrap_err();
    assert!(matches!(refused, StoreError::ReadOnly(_)), "{refused:?}");
    assert!(refused.is_transient());
    reader.close().await;
    let closed = reader.append(&stream("orders"), vec![record("", "x")]).await.unwrap_err();
    assert!(matches!(closed, StoreError::Closed), "{closed:?}");
    writer.close().await;
    scratch.drop().await;
}
