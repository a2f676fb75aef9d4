//! What can go wrong between a program and its broker.

use std::time::Duration;

use carrick_store::StoreError;

/// Why the broker did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// An argument is out of its range; says which, the range and the value.
    #[error("{field} must be {range}, not {value}")]
    Invalid {
        /// Which argument, in the words of the interface.
        field: &'static str,
        /// What is allowed.
        range: &'static str,
        /// What was given.
        value: String,
    },
    /// An event or a batch is larger than the broker takes; nothing was published.
    #[error("{what} has {size} bytes, and at most {limit} are taken")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// Too much is outstanding already; nothing was published. Worth another try after a while.
    #[error("the broker has too much outstanding")]
    Overloaded {
        /// How long to leave it alone at least.
        retry_after: Duration,
    },
    /// The broker cannot be reached or cannot work now; whether the call took effect is unknown.
    #[error("the broker is unavailable")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The broker was closed.
    #[error("the broker is closed")]
    Closed,
    /// The broker refused, and will refuse the same call again.
    #[error("the broker refused")]
    Refused(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl BrokerError {
    /// Whether the same call may succeed later without anybody changing anything else.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Overloaded { .. } | Self::Unavailable(_))
    }

    /// How long to leave the broker alone, if it said so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after } => Some(*retry_after),
            _ => None,
        }
    }
}

/// How long a full queue is left alone: the smallest step that the header `Retry-After` can tell.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

impl From<StoreError> for BrokerError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Invalid { what, range, value } => {
                Self::Invalid { field: what, range, value }
            }
            StoreError::Overloaded => Self::Overloaded { retry_after: RETRY_AFTER },
            StoreError::Closed => Self::Closed,
            error if error.is_transient() => Self::Unavailable(Box::new(error)),
            error => Self::Refused(Box::new(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_worth_a_retry_and_a_newer_schema_is_not() {
        let full = BrokerError::from(StoreError::ReadOnly("disk full".into()));
        assert!(full.is_transient());
        let newer = BrokerError::from(StoreError::NewerSchema { found: 9, known: 1 });
        assert!(!newer.is_transient(), "retrying cannot upgrade a program");
        let busy = BrokerError::from(StoreError::Overloaded);
        assert_eq!(busy.retry_after(), Some(RETRY_AFTER));
    }

    #[test]
    fn a_refusal_names_field_range_and_value() {
        let error = BrokerError::Invalid { field: "max", range: "1..=1000", value: "0".to_owned() };
        assert_eq!(error.to_string(), "max must be 1..=1000, not 0");
    }
}
