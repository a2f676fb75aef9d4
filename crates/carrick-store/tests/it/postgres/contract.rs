//! The engine passes the contract. Its clock is the database's, so that is what the suite sets.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use carrick_store::{Store, contract::Subject};
use jiff::Timestamp;

use super::Scratch;

/// A schema whose clock stands still, except when the suite moves it.
struct Database(Scratch);

fn database() -> Database {
    Database(Scratch::new())
}

impl Database {
    /// Stops the clock of a store that was opened; opened again, it finds it stopped.
    async fn stop_clock(&self) {
        sqlx::raw_sql(
            "CREATE TABLE IF NOT EXISTS clock AS SELECT carrick_now() AS now;
             CREATE OR REPLACE FUNCTION carrick_now() RETURNS bigint LANGUAGE sql
                 AS 'SELECT now FROM clock'",
        )
        .execute(&mut self.0.operator().await)
        .await
        .unwrap();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // what a failed check left is there to be looked at
        }
        let scratch = Scratch { url: self.0.url.clone(), schema: self.0.schema.clone() };
        // A runtime of its own: this may run within another one, which must not wait for itself.
        let dropped = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(scratch.drop());
        });
        dropped.join().unwrap();
    }
}

#[async_trait]
impl Subject for Database {
    async fn open(&self) -> Arc<dyn Store> {
        let store = self.0.store().await;
        self.stop_clock().await;
        Arc::new(store)
    }

    async fn pass(&self, time: Duration) {
        sqlx::query("UPDATE clock SET now = now + $1")
            .bind(i64::try_from(time.as_micros()).unwrap())
            .execute(&mut self.0.operator().await)
            .await
            .unwrap();
    }

    async fn now(&self) -> Timestamp {
        let mut operator = self.0.operator().await;
        let now: i64 =
            sqlx::query_scalar("SELECT now FROM clock").fetch_one(&mut operator).await.unwrap();
        Timestamp::from_microsecond(now).unwrap()
    }

    fn is_durable(&self) -> bool {
        true
    }
}

carrick_store::store_contract!(
    database(),
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "needs Postgres: ./test starts one"]
);
