//! A database of its own for each test, on the server that `./test` starts.

use std::{fmt, thread};

use sqlx::{ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use uuid::Uuid;

/// The environment variable with the URL of a PostgreSQL server on which tests may make databases.
pub const POSTGRES_VARIABLE: &str = "CARRICK_TEST_POSTGRES";

/// A new, empty database; dropping the value drops it, with whoever is still connected.
pub struct PostgresDatabase {
    server: PgConnectOptions,
    name: String,
    url: String,
}

impl PostgresDatabase {
    /// Makes a database on the server of [`POSTGRES_VARIABLE`].
    ///
    /// Tests that call it are marked `#[ignore = "needs Postgres"]`; `./test` runs them when it has a
    /// server, and reports them as skipped when it has none.
    ///
    /// # Panics
    /// If the variable is not set or the server cannot be used: a test that needs a server and has
    /// none has failed.
    ///
    /// # Cancel safety
    /// A database may be left behind; the server of `./test` is thrown away anyway.
    pub async fn create() -> Self {
        let url = std::env::var(POSTGRES_VARIABLE).unwrap_or_else(|_| {
            panic!("{POSTGRES_VARIABLE} names no PostgreSQL server; run ./test, which starts one")
        });
        let server: PgConnectOptions = url
            .parse()
            .unwrap_or_else(|error| panic!("{POSTGRES_VARIABLE} is not a Postgres URL: {error}"));
        let name = format!("carrick_test_{}", Uuid::new_v4().simple());
        let mut connection = PgConnection::connect_with(&server)
            .await
            .unwrap_or_else(|error| panic!("the server of {POSTGRES_VARIABLE} refuses: {error}"));
        connection
            .execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .await
            .unwrap_or_else(|error| panic!("no database can be made there: {error}"));
        let url = server.clone().database(&name).to_url_lossy().to_string();
        Self { server, name, url }
    }

    /// The URL of this database.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for PostgresDatabase {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // A thread with a runtime of its own: this may run inside another one, which must not block
        // on itself.
        let dropped = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut connection = PgConnection::connect_with(&server).await?;
                let drop = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                connection.execute(sqlx::AssertSqlSafe(drop)).await
            })
        });
        match dropped.join() {
            Ok(Ok(_)) => {}
            // A panic here would hide the test's own.
            failed => eprintln!("database {} was left behind: {failed:?}", self.name),
        }
    }
}

impl fmt::Debug for PostgresDatabase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresDatabase").field("name", &self.name).finish_non_exhaustive()
    }
}
