//! What a handler says when it could not do its work.

use std::{error::Error, fmt, time::Duration};

use carrick_core::{
    name::{Group, Topic},
    outcome::Outcome,
};

use crate::broker::BrokerError;

/// What kind of failure it was, which decides what becomes of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandlerErrorKind {
    /// May work later: tried again with backoff, until attempts or age run out.
    Transient,
    /// Will never work: put aside as a dead letter at once.
    Permanent,
    /// What the handler depends on has too much to do: tried again later without counting as an
    /// attempt, and the consumer pauses for as long as the dependency asked.
    Overload {
        /// How long the dependency asked to be left alone.
        retry_after: Option<Duration>,
    },
}

impl HandlerErrorKind {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Transient => 0,
            Self::Permanent => 1,
            Self::Overload { .. } => 2,
        }
    }
}

/// Why a handler did not do its work.
///
/// Any error becomes a *transient* one by `?`: whoever knows better says so.
///
/// ```
/// use carrick_message::consumer::{HandlerError, HandlerErrorKind};
///
/// fn amount(text: &str) -> Result<u64, HandlerError> {
///     text.parse().map_err(HandlerError::permanent) // no retry makes this a number
/// }
///
/// assert_eq!(amount("12").unwrap(), 12);
/// assert_eq!(amount("many").unwrap_err().kind(), HandlerErrorKind::Permanent);
/// ```
///
/// It does not implement [`Error`] itself, because it could then not be made from every error;
/// [`HandlerError::source`] gives the error inside.
pub struct HandlerError {
    kind: HandlerErrorKind,
    source: Box<dyn Error + Send + Sync>,
}

impl HandlerError {
    /// A failure that may pass.
    pub fn transient(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: HandlerErrorKind::Transient, source: source.into() }
    }

    /// A failure that no retry cures.
    pub fn permanent(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: HandlerErrorKind::Permanent, source: source.into() }
    }

    /// A dependency that has too much to do.
    pub fn overload(
        source: impl Into<Box<dyn Error + Send + Sync>>,
        retry_after: Option<Duration>,
    ) -> Self {
        Self { kind: HandlerErrorKind::Overload { retry_after }, source: source.into() }
    }

    /// What a call to something else came to: retried as its outcome says.
    ///
    /// What never left this process, ran out of time or was cancelled may work later.
    pub fn from_outcome(outcome: Outcome, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        match outcome {
            Outcome::Permanent => Self::permanent(source),
            Outcome::Overload { retry_after } => Self::overload(source, retry_after),
            _ => Self::transient(source),
        }
    }

    /// What kind it is.
    pub fn kind(&self) -> HandlerErrorKind {
        self.kind
    }

    /// The error inside.
    pub fn source(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.source
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::transient(error)
    }
}

/// The error and what is below it, each told once.
impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source)?;
        let mut next = self.source.source();
        while let Some(error) = next {
            write!(f, ": {error}")?;
            next = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerError")
            .field("kind", &self.kind)
            .field("source", &self.source)
            .finish()
    }
}

/// Why a consumer ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The broker refused, in a way that no retry cures.
    #[error("the broker refused the consumer of {topic} as {group}")]
    Broker {
        /// The topic.
        topic: Topic,
        /// The group.
        group: Group,
        /// What it said.
        #[source]
        source: BrokerError,
    },
    /// The broker cannot do what this configuration rests on; nothing was consumed.
    #[error("the broker cannot {what}: {consequence}")]
    Incapable {
        /// What is missing.
        what: &'static str,
        /// What would go wrong.
        consequence: String,
    },
    /// The task that consumes was aborted, or panicked.
    #[error("the consumer's task was stopped")]
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_error_is_transient_and_tells_its_whole_chain_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("could not reserve")]
        struct Outer(#[source] std::io::Error);

        fn fails() -> Result<(), HandlerError> {
            Err(Outer(std::io::Error::other("broken pipe")))?
        }
        let error = fails().unwrap_err();
        assert_eq!(error.kind(), HandlerErrorKind::Transient);
        assert_eq!(error.to_string(), "could not reserve: broken pipe");
    }
}
