//! Why a call went as it did: an ordered list of what was decided.
//!
//! Whoever wants to know puts an [`Explain`] into the request's extensions and keeps a clone; every
//! policy that decides something notes it there. Without one nothing is written down, and nothing is
//! allocated.

use std::{sync::Arc, time::Duration};

use carrick_core::outcome::Outcome;
use http::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

/// Notes of one call at most: retries and hops are few, and a defect must not fill the memory.
const MOST: usize = 256;

/// Bytes of an explanation as a header, its end mark aside.
const LONGEST: usize = 4096 - 5;

/// The header of an answer that tells why its call went as it did.
pub const EXPLAIN: HeaderName = HeaderName::from_static("x-carrick-explain");

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

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { n, host, outcome, elapsed } = self;
        let host = host.as_deref().unwrap_or("no host");
        write!(f, "attempt {n}: {outcome} from {host} in {:.1} ms", elapsed.as_secs_f64() * 1e3)
    }
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

    /// All of it in one line, attempts first, as the value of a header: at most 4 KiB of ASCII.
    pub fn to_header(&self) -> HeaderValue {
        let mut line = String::new();
        {
            let story = self.0.lock();
            let attempts = story.attempts.iter().map(ToString::to_string);
            let decisions = story.decisions.iter().map(ToString::to_string);
            for part in attempts.chain(decisions) {
                if line.len() + part.len() + 2 > LONGEST {
                    line.push_str("; ...");
                    break;
                }
                line.push_str(if line.is_empty() { "" } else { "; " });
                let plain = |char: char| if char.is_ascii_graphic() { char } else { ' ' };
                line.extend(part.chars().map(plain));
            }
        }
        HeaderValue::from_str(&line).expect("printable ASCII")
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

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;
    use crate::Policy;

    #[test]
    fn as_a_header_it_is_one_line_of_bounded_length_whatever_was_noted() {
        let explain = Explain::new(Instant::now());
        assert_eq!(explain.to_header(), "");
        let elapsed = Duration::from_micros(1234);
        let host = Some("h:80".to_owned());
        explain.attempt(Attempt { n: 1, host, outcome: "transient", elapsed });
        explain.note(Policy::Budget, || "für nothing\r\nx: y".to_owned());
        let line = "attempt 1: transient from h:80 in 1.2 ms; budget: f r nothing  x: y";
        assert_eq!(explain.to_header(), line);
        (0..100).for_each(|_| explain.note(Policy::Budget, || "x".repeat(100)));
        let header = explain.to_header();
        assert!(header.len() <= 4096 && header.len() > 3900, "{}", header.len());
        assert!(header.to_str().unwrap().ends_with("; ..."));
    }
}
