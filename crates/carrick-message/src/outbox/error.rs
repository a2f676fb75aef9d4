//! What can go wrong with an outbox.

use carrick_store::StoreError;

/// Why an event was not appended. The caller's transaction is as usable as before, unless the
/// database itself failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// Something about the event is out of its range; says what, the range and the value.
    #[error("{field} must be {range}, not {value}")]
    Invalid {
        /// Which part of the event.
        field: &'static str,
        /// What is allowed.
        range: &'static str,
        /// What was given.
        value: String,
    },
    /// The key has an event of this version already: somebody else changed the entity meanwhile.
    /// Give up the transaction and start over from what is in the database now.
    #[error("topic {topic} has version {version} of key {key:?} already")]
    VersionTaken {
        /// The topic.
        topic: String,
        /// The key.
        key: String,
        /// The version.
        version: i64,
    },
    /// The database failed.
    #[error("the outbox cannot be written")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl AppendError {
    /// Whether the same transaction may succeed when it is started over.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::VersionTaken { .. })
    }

    pub(crate) fn database(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Database(Box::new(error))
    }
}

/// Why the outbox's database did not do what a relay asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboxError {
    /// The tables are not there, and could not be made.
    #[error("the outbox's tables cannot be prepared")]
    Schema(#[source] StoreError),
    /// The connection broke or could not be made.
    #[error("the outbox's database cannot be reached")]
    Disconnected(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database failed.
    #[error("the outbox's database failed")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It took longer than a statement may take.
    #[error("the outbox's database did not answer in time")]
    TimedOut,
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
    /// The store was closed.
    #[error("the outbox is closed")]
    Closed,
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut told = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        told.push_str(": ");
        told.push_str(&cause.to_string());
        next = cause.source();
    }
    told
}
