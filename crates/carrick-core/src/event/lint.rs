//! What could be better about an event.

use std::fmt;

use super::{Event, SOFT_LIMIT};

/// Advice to a producer; its `Display` is a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lint {
    /// The type does not say what happened in the past tense.
    NotPastTense,
    /// The type has no version at its end.
    NoVersion,
    /// The event does not say when it was recorded.
    NoTime,
    /// The event is larger than [`SOFT_LIMIT`].
    Large {
        /// Its size in bytes.
        size: usize,
    },
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPastTense => f.write_str(
                "the type should say what happened, in the past tense, as order.placed.v1 does",
            ),
            Self::NoVersion => f.write_str("the type should end in a version, such as .v1"),
            Self::NoTime => f.write_str("the event should say when it was recorded, in `time`"),
            Self::Large { size } => write!(
                f,
                "the event has {size} bytes; above {SOFT_LIMIT} its data is better kept elsewhere, \
                 with `dataref`"
            ),
        }
    }
}

pub(super) fn lints(event: &Event) -> Vec<Lint> {
    let ty = event.ty();
    let mut parts: Vec<&str> = ty.split(['.', '/', ':']).collect();
    let mut lints = Vec::new();
    if parts.last().is_some_and(|last| is_version(last)) {
        parts.pop();
    } else {
        lints.push(Lint::NoVersion);
    }
    if !parts.last().is_some_and(|verb| is_past(verb)) {
        lints.push(Lint::NotPastTense);
    }
    if event.time().is_none() {
        lints.push(Lint::NoTime);
    }
    let size = event.as_json().len();
    if size > SOFT_LIMIT {
        lints.push(Lint::Large { size });
    }
    lints
}

fn is_version(part: &str) -> bool {
    let digits = part.strip_prefix('v').unwrap_or(part);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a word, or the last word of `orderPlaced` or `order_placed`, is in the past tense.
fn is_past(words: &str) -> bool {
    /// Verbs of business that do not end in `ed`.
    const IRREGULAR: [&str; 24] = [
        "become", "begun", "bought", "broken", "built", "chosen", "done", "found", "given", "gone",
        "held", "left", "lost", "made", "met", "paid", "put", "read", "sent", "set", "sold",
        "taken", "won", "written",
    ];
    let lower = words.to_ascii_lowercase();
    lower.ends_with("ed") || IRREGULAR.iter().any(|verb| lower.ends_with(verb))
}
