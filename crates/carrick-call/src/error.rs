//! Why a guarded call gave no response.

use std::{borrow::Cow, fmt, time::Duration};

/// The policy that refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Too little time is left to start.
    Deadline,
    /// Retries are not paid for.
    Budget,
    /// The circuit is open.
    Breaker,
    /// As many calls as may be are under way.
    Bulkhead,
    /// The queue is full, or the wait in it was too long.
    Queue,
    /// The dependency refuses so many that asking it is of no use.
    Throttle,
    /// No host can take the call.
    Balance,
    /// An injected fault.
    Fault,
    /// The address must not be reached.
    Egress,
}

impl Policy {
    /// The policy's one name: its folder, its table in the configuration, its prefix in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::Budget => "budget",
            Self::Breaker => "breaker",
            Self::Bulkhead => "bulkhead",
            Self::Queue => "queue",
            Self::Throttle => "throttle",
            Self::Balance => "balance",
            Self::Fault => "fault",
            Self::Egress => "egress",
        }
    }
}

/// A call, or another attempt of one, that was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Who refused.
    pub policy: Policy,
    /// Why, in a few words with the numbers that decided.
    pub reason: Cow<'static, str>,
    /// When another try makes sense, if that is known.
    pub retry_after: Option<Duration>,
    /// Whether an earlier attempt of the same call was sent. If not, the dependency never saw the call,
    /// and a repeat cannot double its effect.
    pub sent: bool,
}

impl Refusal {
    /// A refusal for a fixed reason; allocates nothing.
    pub const fn new(policy: Policy, reason: &'static str) -> Self {
        Self { policy, reason: Cow::Borrowed(reason), retry_after: None, sent: false }
    }

    /// The same, with the time after which another try makes sense.
    #[must_use]
    pub fn with_retry_after(self, after: Duration) -> Self {
        Self { retry_after: Some(after), ..self }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused by the {}: {}", self.policy.name(), self.reason)
    }
}

impl std::error::Error for Refusal {}

/// Why a guarded call gave no response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError<E> {
    /// The dependency failed, or the way to it; its own error, untouched.
    #[error("the call to the dependency failed")]
    Inner(#[source] E),
    /// A policy refused, and nothing was sent, or nothing more.
    #[error(transparent)]
    Refused(Refusal),
    /// Time ran out; what was sent may still take effect.
    #[error("the deadline passed")]
    Expired,
}

impl<E> CallError<E> {
    /// Whether the dependency never saw the call, so that a repeat cannot double its effect.
    pub fn was_never_sent(&self) -> bool {
        matches!(self, Self::Refused(refusal) if !refusal.sent)
    }
}

impl<E> From<Refusal> for CallError<E> {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
