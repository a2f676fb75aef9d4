//! Configuration: all faults at once, each with its key, its range and its numbers.
//!
//! What an operator writes (`…Options`) becomes what code may rely on (`…Config`) through one check
//! that collects [`Faults`]. Units stand in types and texts (`"30s"`, `"64MiB"`), not in names.

pub mod duration;
mod layers;
pub mod size;

use std::fmt;

pub use self::layers::{LayerError, Layers, Origin};

/// What is wrong with a configuration, collected while it is checked.
///
/// ```
/// # use carrick_core::config::Faults;
/// let (rate, tries) = (1.5, 0);
/// let mut faults = Faults::default();
/// faults.unless_value(0.0 < rate && rate <= 1.0, "failure-rate", "in (0, 1]", rate);
/// faults.unless_value(tries > 0, "max-attempts", "at least 1", tries);
/// let wrong = faults.into_result(()).unwrap_err();
/// assert_eq!(
///     wrong.to_string(),
///     "failure-rate must be in (0, 1], not 1.5; max-attempts must be at least 1, not 0",
/// );
/// ```
#[derive(Clone, Debug, Default)]
pub struct Faults(Vec<Fault>);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The key, with its tables: `dependency.pricing.timeout`.
    pub key: String,
    /// What is allowed.
    pub range: String,
    /// What was found, if it is worth saying.
    pub value: Option<String>,
    /// Where it was found: a file, a variable or a flag.
    pub origin: Option<String>,
}

/// A configuration that cannot be used; tells all that is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", list(.0))]
pub struct InvalidConfig(Vec<Fault>);

fn list(faults: &[Fault]) -> String {
    faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, range, value, origin } = self;
        if let Some(origin) = origin {
            write!(f, "{origin}: ")?;
        }
        write!(f, "{key} must be {range}")?;
        match value {
            Some(value) => write!(f, ", not {value}"),
            None => Ok(()),
        }
    }
}

impl Faults {
    /// Notes a fault unless the condition holds.
    pub fn unless(&mut self, holds: bool, key: &str, range: &str) {
        if !holds {
            self.push(key, range, None);
        }
    }

    /// Notes a fault, with the value that was found, unless the condition holds.
    pub fn unless_value(&mut self, holds: bool, key: &str, range: &str, value: impl fmt::Display) {
        if !holds {
            self.push(key, range, Some(value.to_string()));
        }
    }

    /// Takes over the faults of a table within this one.
    pub fn nest(&mut self, table: &str, inner: InvalidConfig) {
        self.0.extend(inner.0.into_iter().map(|mut fault| {
            fault.key = format!("{table}.{}", fault.key);
            fault
        }));
    }

    /// The value of a table within this one, if nothing is wrong with it; else takes over its faults.
    pub fn take<T>(&mut self, table: &str, inner: Result<T, InvalidConfig>) -> Option<T> {
        inner.map_err(|faults| self.nest(table, faults)).ok()
    }

    /// The value, if nothing is wrong with it.
    ///
    /// # Errors
    /// [`InvalidConfig`] with every fault that was noted.
    pub fn into_result<T>(self, value: T) -> Result<T, InvalidConfig> {
        if self.0.is_empty() { Ok(value) } else { Err(InvalidConfig(self.0)) }
    }

    fn push(&mut self, key: &str, range: &str, value: Option<String>) {
        let (key, range) = (key.to_owned(), range.to_owned());
        self.0.push(Fault { key, range, value, origin: None });
    }
}

impl InvalidConfig {
    /// What is wrong, in the order in which it was found.
    pub fn faults(&self) -> &[Fault] {
        &self.0
    }

    /// Names where each key came from, as the layers know it.
    #[must_use]
    pub fn located(mut self, layers: &Layers) -> Self {
        for fault in &mut self.0 {
            fault.origin = layers.origin(&fault.key).map(ToString::to_string);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_inner_tables_carry_the_whole_key() {
        let mut inner = Faults::default();
        inner.unless(false, "cool-down", "above zero");
        let mut outer = Faults::default();
        outer.nest("breaker", inner.into_result(()).unwrap_err());
        outer.unless(false, "timeout", "at most 1h");
        let wrong = outer.into_result(()).unwrap_err();
        assert_eq!(
            wrong.to_string(),
            "breaker.cool-down must be above zero; timeout must be at most 1h"
        );
    }
}
