//! An outbox, as whoever runs a relay on it or looks after it sees it.

use std::sync::Arc;

use super::{
    Failure, OutboxError,
    store::{self, OutboxStore},
};

/// The most rows that one listing or change takes.
const MAX_ROWS: usize = 1000;

/// The database that holds an outbox, as whoever looks after it sees it.
///
/// A clone is the same one.
#[derive(Clone, Debug)]
pub struct Outbox {
    pub(super) store: Arc<dyn OutboxStore>,
}

impl Outbox {
    /// Opens the outbox at a URL: `sqlite://path` or `postgres://…`; its tables are made if they are
    /// not there. `?pgbouncer=true` makes do without anything that a transaction pooler forbids.
    ///
    /// # Errors
    /// [`OutboxError::Invalid`] for another kind of URL; otherwise as the database has it.
    ///
    /// # Cancel safety
    /// Safe to drop; the tables may have been made.
    pub async fn open(url: &str) -> Result<Self, OutboxError> {
        #[cfg(feature = "rusqlite")]
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return Self::sqlite(path.as_ref()).await;
        }
        #[cfg(feature = "sqlx-postgres")]
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Self::postgres(url).await;
        }
        let scheme = url.split(':').next().unwrap_or_default().chars().take(20).collect();
        Err(OutboxError::Invalid {
            what: "database",
            range: "sqlite://path or postgres://…",
            value: scheme,
        })
    }

    /// Opens the outbox in an SQLite file, which other programs may use meanwhile.
    ///
    /// # Errors
    /// [`OutboxError`] if the file cannot be opened or its tables cannot be made.
    ///
    /// # Cancel safety
    /// Safe to drop; the tables may have been made.
    #[cfg(feature = "rusqlite")]
    pub async fn sqlite(path: &std::path::Path) -> Result<Self, OutboxError> {
        Ok(Self { store: Arc::new(store::sqlite::SqliteOutbox::open(path).await?) })
    }

    /// Opens the outbox in a Postgres database.
    ///
    /// # Errors
    /// [`OutboxError`] if the database cannot be reached or its tables cannot be made.
    ///
    /// # Cancel safety
    /// Safe to drop; the tables may have been made.
    #[cfg(feature = "sqlx-postgres")]
    pub async fn postgres(url: &str) -> Result<Self, OutboxError> {
        Ok(Self { store: Arc::new(store::postgres::PostgresOutbox::connect(url).await?) })
    }

    /// Lists rows that could not be published so far, by their numbers; each blocks its key.
    ///
    /// * `after`: the last number that was listed before; 0 from the start.
    /// * `limit`: 1..=1000.
    ///
    /// # Errors
    /// [`OutboxError`].
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn failures(&self, after: u64, limit: usize) -> Result<Vec<Failure>, OutboxError> {
        self.store.failures(after, limit.clamp(1, MAX_ROWS)).await
    }

    /// Makes failed rows due now, at most 1000; returns how many there were. A running relay takes
    /// notice at its next sweep, or at the time they were due anyway.
    ///
    /// # Errors
    /// [`OutboxError`].
    ///
    /// # Cancel safety
    /// The rows may be due nevertheless.
    pub async fn retry(&self, seqs: &[u64]) -> Result<u64, OutboxError> {
        self.store.retry(&seqs[..seqs.len().min(MAX_ROWS)]).await
    }

    /// Gives failed rows up, at most 1000: they count as published, with the reason beside them, and
    /// their keys go on. Returns how many there were.
    ///
    /// # Errors
    /// [`OutboxError`].
    ///
    /// # Cancel safety
    /// The rows may be given up nevertheless.
    pub async fn skip(&self, seqs: &[u64], reason: &str) -> Result<u64, OutboxError> {
        let reason = format!("skipped: {reason}");
        self.store.skip(&seqs[..seqs.len().min(MAX_ROWS)], &reason).await
    }

    /// Closes its connections; relays on it end up with errors, so stop them first.
    ///
    /// # Cancel safety
    /// Safe to drop; the connections are closed when the last clone is dropped.
    pub async fn close(&self) {
        self.store.close().await;
    }
}
