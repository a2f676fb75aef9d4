//! Problem details for HTTP: RFC 9457.

use std::fmt;

use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Media type of a problem.
pub const PROBLEM: &str = "application/problem+json";

/// The most of an outside value that an answer repeats, in characters.
const ENOUGH: usize = 200;

/// Why a request was not done, for machines and for people.
///
/// ```
/// # use carrick_core::problem::Problem;
/// let problem = Problem::invalid("max", "1..=1000", "0");
/// assert_eq!(problem.status, 400);
/// assert_eq!(problem.to_string(), "max must be 1..=1000, not 0");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI reference that names the kind; `about:blank` says that the status tells all.
    #[serde(rename = "type", default = "blank")]
    pub kind: String,
    /// The kind, for people.
    #[serde(default)]
    pub title: String,
    /// The HTTP status.
    #[serde(default)]
    pub status: u16,
    /// This occurrence, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// A URI reference that names this occurrence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Whatever else it says.
    #[serde(flatten)]
    pub extensions: Map<String, Value>,
}

fn blank() -> String {
    "about:blank".to_owned()
}

impl Problem {
    /// A problem of a status, with a detail.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: blank(),
            title: status.canonical_reason().unwrap_or("Error").to_owned(),
            status: status.as_u16(),
            detail: Some(detail.into()),
            instance: None,
            extensions: Map::new(),
        }
    }

    /// A field that is out of its range: names it, the range and the value.
    pub fn invalid(field: &str, range: &str, value: impl fmt::Display) -> Self {
        let value: String = value.to_string().chars().take(ENOUGH).collect();
        let detail = format!("{field} must be {range}, not {value}");
        Self::new(StatusCode::BAD_REQUEST, detail)
            .with("field", field)
            .with("range", range)
            .with("value", value)
    }

    /// With one more member.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.extensions.insert(name.to_owned(), value.into());
        self
    }

    /// With another status.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status.as_u16();
        self.title = status.canonical_reason().unwrap_or("Error").to_owned();
        self
    }

    /// With a kind of its own.
    #[must_use]
    pub fn with_kind(mut self, kind: &str, title: &str) -> Self {
        (self.kind, self.title) = (kind.to_owned(), title.to_owned());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.detail.as_deref().unwrap_or(&self.title))
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_we_do_not_know_survive() {
        let text = r#"{"type":"/p/x","title":"X","status":409,"balance":30,"accounts":["a"]}"#;
        let problem: Problem = serde_json::from_str(text).unwrap();
        assert_eq!(problem.extensions["balance"], 30);
        let again: Value = serde_json::to_value(&problem).unwrap();
        assert_eq!(again, serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn an_endless_value_is_cut() {
        let problem = Problem::invalid("id", "short", "x".repeat(100_000));
        assert!(serde_json::to_string(&problem).unwrap().len() < 1000);
    }
}
