//! The Postgres engine on a real server.
//!
//! `CARRICK_TEST_POSTGRES` is the URL of one; each test makes a schema of its own there and drops it
//! at the end. `./test` starts one and runs these by name.

mod chaos;
mod contract;
mod fence;
mod log;
mod pooler;
mod queue;
mod schema;
mod server;

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use carrick_store::{
    Stream,
    engine::postgres::{PostgresConfig, PostgresOptions, PostgresStore},
    log::NewRecord,
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

/// A schema of its own in the test server.
pub(crate) struct Scratch {
    pub(crate) url: String,
    pub(crate) schema: String,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let url = std::env::var("CARRICK_TEST_POSTGRES")
            .expect("CARRICK_TEST_POSTGRES is the URL of a server; ./test starts one");
        Self::on(url)
    }

    pub(crate) fn on(url: String) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { url, schema: format!("carrick_test_{}_{next}", std::process::id()) }
    }

    pub(crate) fn options(&self) -> PostgresOptions {
        PostgresOptions { schema: self.schema.clone(), max_connections: 4, ..Default::default() }
    }

    pub(crate) async fn store(&self) -> PostgresStore {
        self.store_with(self.options()).await
    }

    pub(crate) async fn store_with(&self, options: PostgresOptions) -> PostgresStore {
        let config = PostgresConfig::try_from(options).unwrap();
        PostgresStore::connect(&self.url, config).await.unwrap()
    }

    /// Names the connections of this test's stores, so that they can be told from others.
    pub(crate) fn name_connections(&mut self) {
        let separator = if self.url.contains('?') { '&' } else { '?' };
        self.url = format!("{}{separator}application_name={}", self.url, self.schema);
    }

    /// Kills every connection of this test's stores.
    pub(crate) async fn kill_connections(&self) {
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = $1 AND pid <> pg_backend_pid()",
        )
        .bind(&self.schema)
        .execute(&mut self.operator().await)
        .await
        .unwrap();
    }

    /// A connection as an operator would have it.
    pub(crate) async fn operator(&self) -> PgConnection {
        let mut operator = PgConnection::connect(&self.url).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("SET search_path = {}", self.schema)))
            .execute(&mut operator)
            .await
            .unwrap();
        operator
    }

    /// Drops the schema. A test that failed leaves it, to be looked at.
    pub(crate) async fn drop(self) {
        let mut operator = self.operator().await;
        sqlx::raw_sql(AssertSqlSafe(format!(
            "SET lock_timeout = '10s'; DROP SCHEMA {} CASCADE",
            self.schema
        )))
        .execute(&mut operator)
        .await
        .unwrap();
    }
}

pub(crate) fn stream(name: &str) -> Stream {
    Stream::new(name).unwrap()
}

pub(crate) fn record(key: &str, body: impl Into<String>) -> NewRecord {
    let key = (!key.is_empty()).then(|| key.to_owned());
    NewRecord { key, body: body.into().into(), ..NewRecord::default() }
}

/// A measure for times on a machine that does other things too: a bare insertion of a few rows, made
/// beside each thing that is measured. No snapshot is in its way.
pub(crate) struct Beside {
    operator: PgConnection,
}

impl Beside {
    pub(crate) async fn new(scratch: &Scratch) -> Self {
        let mut operator = scratch.operator().await;
        let make = "CREATE TABLE IF NOT EXISTS beside (n bigint, body bytea)";
        sqlx::raw_sql(make).execute(&mut operator).await.unwrap();
        Self { operator }
    }

    /// How long a bare insertion takes now.
    pub(crate) async fn time(&mut self) -> Duration {
        let start = tokio::time::Instant::now();
        sqlx::query("INSERT INTO beside SELECT n, $1 FROM generate_series(1, 50) AS n")
            .bind(&[0_u8; 64][..])
            .execute(&mut self.operator)
            .await
            .unwrap();
        start.elapsed()
    }
}

pub(crate) fn median<T: PartialOrd + Copy>(mut values: Vec<T>) -> T {
    values.sort_by(|one, two| one.partial_cmp(two).expect("no value is NaN"));
    values[values.len() / 2]
}

/// Waits until something holds, and fails if it does not within half a minute.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
