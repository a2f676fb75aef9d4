//! What can go wrong with an inbox.

/// Why an inbox could not decide. Nothing was decided then: roll back, and let the event come again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InboxError {
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
    /// The event is under a reservation: one handler uses one mode, not both.
    #[error("the event is reserved: a handler either reserves first or does not")]
    Reserved,
    /// The database failed.
    #[error("the inbox's database failed")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl InboxError {
    pub(crate) fn database(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Database(Box::new(error))
    }
}
