//! What can go wrong in a store.

use crate::log::{Bounds, Seq};

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Records after the asked position are gone; start over at `bounds.first - 1`.
    #[error("records after {after} are gone: the stream now starts at {}", bounds.first)]
    Trimmed {
        /// The position asked for.
        after: Seq,
        /// What there is.
        bounds: Bounds,
    },
    /// The asked position is ahead of the stream: it belongs to another store.
    #[error("position {after} is ahead of the stream, which ends at {}", bounds.last)]
    Beyond {
        /// The position asked for.
        after: Seq,
        /// What there is.
        bounds: Bounds,
    },
    /// An argument is out of its range; says which, the range and the value.
    #[error("{what} must be {range}, not {value}")]
    Invalid {
        /// Which argument.
        what: &'static str,
        /// What is allowed.
        range: &'static str,
        /// What was given.
        value: String,
    },
    /// Too much is waiting already; nothing was written. Try again later.
    #[error("the store's queue is full")]
    Overloaded,
    /// The store was made by a newer Carrick; upgrade, or use another store.
    #[error(
        "the store has schema version {found}, and this Carrick knows up to {known}: upgrade Carrick"
    )]
    NewerSchema {
        /// Version in the store.
        found: i64,
        /// Newest version this program knows.
        known: i64,
    },
    /// Another engine has the file open.
    #[error("{path} is in use by another program")]
    InUse {
        /// Which file.
        path: String,
    },
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
    /// The disk is full or the database refuses writes; nothing was written.
    #[error("the store cannot write")]
    ReadOnly(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The engine failed; whether a write took effect is unknown unless the engine says so.
    #[error("the store failed")]
    Engine(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl StoreError {
    /// Whether the same call may succeed later without anybody changing anything else.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Overloaded | Self::ReadOnly(_) | Self::Engine(_))
    }
}
