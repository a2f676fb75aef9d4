//! Outbox: an event leaves if, and only if, the transaction that wrote it commits.
//!
//! Writing to a database and to a broker is two steps, and a crash between them loses an event or
//! tells of something that never happened. So the event is a row in the caller's own transaction,
//! and a [`Relay`] carries it to the broker afterwards, at least once and in the order of its key.
//!
//! * Writing: [`rusqlite::append`], [`sqlx_sqlite::append`], [`sqlx_postgres::append`], or a plain
//!   `INSERT` in any language: the table is a public contract, told in `docs/tables.md`.
//! * Carrying: [`Relay`], as many as one likes, each on its share of the keys.
//! * Looking after it: [`Outbox::failures`], [`Outbox::retry`], [`Outbox::skip`],
//!   [`Outbox::replay`].
//!
//! Order per key needs writers of one key to wait for each other before they take a number, which
//! they nearly always do anyway (they change the same row). Then an earlier row of a key is visible
//! whenever a later one is, and a long transaction delays its own keys only.
//!
//! Source: pattern document, outbox listings. Differs: defects.md M1, M7, M8.

mod compose;
mod error;
mod event;
#[cfg(feature = "sqlx-postgres")]
mod notify;
mod relay;
mod replay;
#[cfg(feature = "rusqlite")]
pub mod rusqlite;
mod schema;
#[cfg(feature = "sqlx-postgres")]
pub mod sqlx_postgres;
#[cfg(feature = "sqlx-sqlite")]
pub mod sqlx_sqlite;
mod store;
mod waker;

use std::sync::Arc;

#[cfg(feature = "sqlx-postgres")]
pub use self::notify::Notifier;
use self::store::OutboxStore;
pub use self::{
    error::{AppendError, OutboxError},
    event::OutboxEvent,
    relay::{Relay, RelayConfig, RelayOptions, RelayStatus},
    replay::{Replay, ReplayError, Replayed},
    schema::COMPONENT,
    store::Failure,
    waker::Waker,
};

/// The most rows that one listing or change takes.
const MAX_ROWS: usize = 1000;

/// The database that holds an outbox, as whoever looks after it sees it.
///
/// A clone is the same one.
#[derive(Clone, Debug)]
pub struct Outbox {
    store: Arc<dyn OutboxStore>,
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
