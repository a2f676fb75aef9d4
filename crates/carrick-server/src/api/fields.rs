//! The members of a request's JSON, and the parameters of its query: each checked where it is read,
//! so that a fault names its field, its range and its value. What is unknown is ignored.

#![expect(clippy::result_large_err, reason = "a refused field ends its request: never hot")]

use std::{fmt, ops::RangeInclusive, time::Duration};

use carrick_core::{config::duration, problem::Problem};
use serde_json::{Map, Value};

/// Members by name.
#[derive(Debug, Default)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a JSON object; an empty body is an empty object.
    pub(super) fn from_json(body: &[u8]) -> Result<Self, Problem> {
        if body.trim_ascii().is_empty() {
            return Ok(Self::default());
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(Problem::invalid("body", "a JSON object", "another JSON value")),
            Err(error) => Err(Problem::invalid("body", "a JSON object", error)),
        }
    }

    /// Reads a query; of a repeated parameter the last counts.
    pub(super) fn from_query(query: Option<&str>) -> Self {
        Self(pairs(query).map(|(name, value)| (name, Value::String(value))).collect())
    }

    fn present(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, Problem> {
        match self.present(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(Problem::invalid(name, "a string", other)),
        }
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, Problem> {
        match self.present(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(Problem::invalid(name, "true or false", other)),
        }
    }

    pub(super) fn count(
        &self,
        name: &str,
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Result<usize, Problem> {
        let Some(value) = self.present(name) else { return Ok(default) };
        let count = match value {
            Value::String(text) => text.parse().ok(),
            other => other.as_u64().and_then(|count| usize::try_from(count).ok()),
        };
        match count.filter(|count| range.contains(count)) {
            Some(count) => Ok(count),
            None => Err(Problem::invalid(name, &format!("{range:?}"), Plain(value))),
        }
    }

    pub(super) fn duration(
        &self,
        name: &str,
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Result<Duration, Problem> {
        let Some(value) = self.present(name) else { return Ok(default) };
        let parsed = value.as_str().and_then(|text| duration::parse(text).ok());
        parsed.filter(|length| range.contains(length)).ok_or_else(|| {
            let (least, most) = (duration::format(*range.start()), duration::format(*range.end()));
            Problem::invalid(
                name,
                &format!("a duration from \"{least}\" to \"{most}\""),
                Plain(value),
            )
        })
    }

    /// An array of strings with a bounded length.
    pub(super) fn texts(&self, name: &str, most: usize) -> Result<Vec<&str>, Problem> {
        let range = format!("1 to {most} strings");
        let Some(Value::Array(values)) = self.present(name) else {
            return Err(Problem::invalid(name, &range, "absent or not an array"));
        };
        if values.is_empty() || values.len() > most {
            return Err(Problem::invalid(name, &range, values.len()));
        }
        let text = |value: &Value| match value {
            Value::String(_) => Ok(()),
            other => Err(Problem::invalid(name, &range, Plain(other))),
        };
        values.iter().try_for_each(text)?;
        Ok(values.iter().filter_map(Value::as_str).collect())
    }

    /// An array of numbers from 1.
    pub(super) fn numbers(&self, name: &str, most: usize) -> Result<Option<Vec<u64>>, Problem> {
        let range = format!("1 to {most} numbers");
        let values = match self.present(name) {
            None => return Ok(None),
            Some(Value::Array(values)) if (1..=most).contains(&values.len()) => values,
            Some(other) => return Err(Problem::invalid(name, &range, Plain(other))),
        };
        let number = |value: &Value| {
            value.as_u64().ok_or_else(|| Problem::invalid(name, &range, Plain(value)))
        };
        values.iter().map(number).collect::<Result<_, _>>().map(Some)
    }
}

/// The parameters of a query, in their order.
fn pairs(query: Option<&str>) -> impl Iterator<Item = (String, String)> {
    let decode = |text: &str| {
        let text = text.replace('+', " ");
        percent_encoding::percent_decode_str(&text).decode_utf8_lossy().into_owned()
    };
    let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs.map(move |pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name), decode(value))
    })
}

/// The values of a parameter that may come several times.
pub(super) fn repeated(query: Option<&str>, name: &str) -> Vec<String> {
    pairs(query).filter(|(found, _)| found == name).map(|(_, value)| value).collect()
}

/// A value as a person wrote it: a string without quotes.
struct Plain<'a>(&'a Value);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::String(text) => f.write_str(text),
            other => write!(f, "{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_field_range_and_value() {
        let fields =
            Fields::from_json(br#"{"max":0,"lease":"1y","leases":[],"all":"yes"}"#).unwrap();
        let told = |problem: Problem| problem.to_string();
        let max = fields.count("max", 10, 1..=1000).map_err(told);
        assert_eq!(max.unwrap_err(), "max must be 1..=1000, not 0");
        let second = Duration::from_secs(1);
        let lease = fields.duration("lease", second, second..=2 * second).map_err(told);
        assert_eq!(lease.unwrap_err(), "lease must be a duration from \"1s\" to \"2s\", not 1y");
        assert!(fields.texts("leases", 10).is_err() && fields.flag("all", false).is_err());
        assert_eq!(fields.count("absent", 7, 1..=9), Ok(7));
    }

    #[test]
    fn a_query_is_decoded_and_its_last_value_counts() {
        let fields = Fields::from_query(Some("after=a%2Bb+c&limit=1&limit=20&x"));
        assert_eq!(fields.text("after").unwrap(), Some("a+b c"));
        assert_eq!(fields.count("limit", 1, 1..=100), Ok(20));
        let query = Some("topic=a&after=x&topic=b%2E");
        assert_eq!(repeated(query, "topic"), ["a", "b."]);
    }
}
