//! Engines: what implements the primitives.
//!
//! * [`memory`]: nothing outlives the process; for tests, examples and work that may be lost.
//! * `sqlite`: the embedded default, one file.
//! * `postgres`: shared by any number of hubs.

pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::sync::Arc;

use async_trait::async_trait;

use crate::{Store, StoreError};

/// Opens the store that a URL names: `memory:`, `sqlite://path/to/file.db` or
/// `postgres://user@host/database`.
///
/// # Errors
/// [`StoreError::Invalid`] for another URL, and those of the engine.
///
/// # Cancel safety
/// Safe to drop; a store that was made stays.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let scheme = url.split(':').next().unwrap_or_default();
    match scheme {
        "memory" => Ok(Arc::new(memory::MemoryStore::new())),
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let path = sqlite::path(url)?;
            Ok(Arc::new(sqlite::SqliteStore::open(path, sqlite::SqliteConfig::default())?))
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let config = postgres::PostgresConfig::default();
            Ok(Arc::new(postgres::PostgresStore::connect(url, config).await?))
        }
        other => Err(StoreError::Invalid {
            what: "the store's URL",
            range: "memory:, sqlite://file or postgres://… (each if this build has it)",
            // Only the scheme: the rest may hold a password.
            value: other.chars().take(80).collect(),
        }),
    }
}

#[async_trait]
impl Store for memory::MemoryStore {
    async fn close(&self) {
        Self::close(self).await;
    }
}

#[cfg(feature = "sqlite")]
#[async_trait]
impl Store for sqlite::SqliteStore {
    async fn close(&self) {
        Self::close(self).await;
    }
}

#[cfg(feature = "postgres")]
#[async_trait]
impl Store for postgres::PostgresStore {
    async fn close(&self) {
        Self::close(self).await;
    }
}
