//! Why a call went as it did: an ordered list of what was decided.
//!
//! Whoever wants to know puts an [`Explain`] into the request's extensions and keeps a clone; every
//! policy that decides something notes it there. Without one nothing is written down, and nothing is
//! allocated.

use std::{sync::Arc, time::Duration};

use carrick_core::outcome::Outcome;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

/// Notes of one call at most: retries and hops are few, and a defect must not fill the memory.
const MOST: usize = 256;

/// A call's explanation. Clones share it.
///
/// ```
/// # use carrick_call::{Policy, explain::Explain};
/// # use tokio::time::Instant;
/// let explain = Explain::new(Instant::now());
/// explain.note(Policy::Budget, || "retry 1 paid, 9 left".to_owned());
/// assert_eq!(explain.decisions()[0].to_string(), "budget: retry 1 paid, 9 left");
/// ```
#[derive(Clone, Debug)]
pub struct Explain(Arc<Mutex<Story>>);

#[derive(Debug)]
struct Story {
    start: Instant,
    attempts: Vec<Attempt>,
    decisions: Vec<Decision>,
}

/// What became of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// Its number, from 1.
    pub n: u32,
    /// Which host was asked, if one was.
    pub host: Option<String>,
    /// How it ended, in a word.
    pub outcome: &'static str,
    /// How long it took.
    #[serde(rename = "elapsed_ms", serialize_with = "millis")]
    pub elapsed: Duration,
}

/// Something that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// When, from the start of the call.
    #[serde(rename = "at_ms", serialize_with = "millis")]
    pub at: Duration,
    /// By whom.
    pub policy: &'static str,
    /// What, with the numbers that decided.
    pub text: String,
}

impl std::fmt::Display for Decision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.policy, self.text)
    }
}

/// Milliseconds with three digits after the point.
pub(crate) fn millis<S: serde::Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((span.as_secs_f64() * 1e6).round() / 1e3)
}

impl Explain {
    /// An explanation that begins now.
    pub fn new(now: Instant) -> Self {
        let story = Story { start: now, attempts: Vec::new(), decisions: Vec::new() };
        Self(Arc::new(Mutex::new(story)))
    }

    /// Notes a decision.
    pub fn note(&self, policy: crate::Policy, text: impl FnOnce() -> String) {
        self.add(policy.name(), text);
    }

    pub(crate) fn add(&self, policy: &'static str, text: impl FnOnce() -> String) {
        // What the caller says is made outside of the lock.
        let (text, now) = (text(), Instant::now());
        tracing::debug!(policy, text, "decided");
        let mut story = self.0.lock();
        if story.decisions.len() < MOST {
            let at = now.saturating_duration_since(story.start);
            story.decisions.push(Decision { at, policy, text });
        }
    }

    pub(crate) fn attempt(&self, attempt: Attempt) {
        let mut story = self.0.lock();
        if story.attempts.len() < MOST {
            story.attempts.push(attempt);
        }
    }

    /// The attempts so far, in their order.
    pub fn attempts(&self) -> Vec<Attempt> {
        self.0.lock().attempts.clone()
    }

    /// The decisions so far, in their order.
    pub fn decisions(&self) -> Vec<Decision> {
        self.0.lock().decisions.clone()
    }
}

/// An outcome in a word.
pub(crate) fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Success => "success",
        Outcome::Transient => "transient",
        Outcome::Permanent => "permanent",
        Outcome::Overload { .. } => "overload",
        Outcome::Rejected => "rejected",
        Outcome::Expired => "expired",
        Outcome::Cancelled => "cancelled",
    }
}
