//! Layers of configuration: a file, then the environment, then flags; later ones win, and each key
//! remembers where it came from.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::de::DeserializeOwned;
use toml::{Table, Value};

/// Where a key came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file.
    File(PathBuf),
    /// A variable of the environment.
    Variable(String),
    /// A flag of the command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// Why layers cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The text is no TOML.
    #[error("{} is not TOML", .0.display())]
    Toml(PathBuf, #[source] Box<toml::de::Error>),
    /// A key is unknown or its value is of the wrong type.
    #[error("{}{message}", prefix(origin.as_ref()))]
    Shape {
        /// What is wrong, with the key.
        message: String,
        /// Where the key came from, if that is known.
        origin: Option<Origin>,
    },
    /// A key is a table in one layer and a value in another.
    #[error("{1}: {0} is a table and cannot be set to one value")]
    Clash(String, Origin),
}

/// Configuration merged from its layers.
///
/// ```
/// # use carrick_core::config::{Layers, Origin};
/// # use std::path::PathBuf;
/// #[derive(serde::Deserialize)]
/// #[serde(rename_all = "kebab-case", deny_unknown_fields)]
/// struct Hub { listen: String, retention: Retention }
/// #[derive(serde::Deserialize)]
/// #[serde(rename_all = "kebab-case", deny_unknown_fields)]
/// struct Retention { max_age: String }
///
/// let mut layers = Layers::default();
/// let file = "listen = '127.0.0.1:7070'\n[retention]\nmax-age = '7d'";
/// layers.add_toml(PathBuf::from("carrick.toml"), file)?;
/// layers.add_environment("CARRICK_", [("CARRICK_RETENTION__MAX_AGE", "1d")])?;
/// let hub: Hub = layers.read()?;
/// assert_eq!((&*hub.listen, &*hub.retention.max_age), ("127.0.0.1:7070", "1d"));
/// assert_eq!(
///     layers.origin("retention.max-age"),
///     Some(&Origin::Variable("CARRICK_RETENTION__MAX_AGE".to_owned())),
/// );
/// # Ok::<(), carrick_core::config::LayerError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Layers {
    table: Table,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    /// Adds a file's text.
    ///
    /// # Errors
    /// [`LayerError::Toml`] with the line and the column.
    pub fn add_toml(&mut self, path: PathBuf, text: &str) -> Result<(), LayerError> {
        let table: Table = match text.parse() {
            Ok(table) => table,
            Err(error) => return Err(LayerError::Toml(path, Box::new(error))),
        };
        let mut keys = Vec::new();
        leaves("", &table, &mut keys);
        let origin = Origin::File(path);
        self.origins.extend(keys.into_iter().map(|key| (key, origin.clone())));
        merge(&mut self.table, table);
        Ok(())
    }

    /// Adds variables that start with `prefix`: `CARRICK_RETENTION__MAX_AGE` is
    /// `retention.max-age`. A value is TOML if it reads as a number, a boolean or an array, else
    /// text.
    ///
    /// # Errors
    /// [`LayerError::Clash`] if a variable names a table.
    pub fn add_environment<K: AsRef<str>, V: AsRef<str>>(
        &mut self,
        prefix: &str,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<(), LayerError> {
        for (name, value) in variables {
            let name = name.as_ref();
            let Some(rest) = name.strip_prefix(prefix).filter(|rest| !rest.is_empty()) else {
                continue;
            };
            let key = rest.to_ascii_lowercase().replace("__", ".").replace('_', "-");
            self.set(&key, value.as_ref(), Origin::Variable(name.to_owned()))?;
        }
        Ok(())
    }

    /// Sets one key, as a flag does.
    ///
    /// # Errors
    /// [`LayerError::Clash`] if the key is a table.
    pub fn set(&mut self, key: &str, value: &str, origin: Origin) -> Result<(), LayerError> {
        let (path, leaf) = match key.rsplit_once('.') {
            Some((path, leaf)) => (Some(path), leaf),
            None => (None, key),
        };
        let mut table = &mut self.table;
        for part in path.into_iter().flat_map(|path| path.split('.')) {
            let entry = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(inner) = entry else {
                return Err(LayerError::Clash(key.to_owned(), origin));
            };
            table = inner;
        }
        if matches!(table.get(leaf), Some(Value::Table(_))) {
            return Err(LayerError::Clash(key.to_owned(), origin));
        }
        table.insert(leaf.to_owned(), scalar(value));
        self.origins.insert(key.to_owned(), origin);
        Ok(())
    }

    /// Where a key came from; for a table, where something in it did.
    pub fn origin(&self, key: &str) -> Option<&Origin> {
        let within = |(found, _): &(&String, &Origin)| {
            found.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.origins.iter().find(within).map(|(_, origin)| origin)
    }

    /// Reads what the layers say.
    ///
    /// # Errors
    /// [`LayerError::Shape`] for a key that is unknown or has a value of the wrong type.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, LayerError> {
        Value::Table(self.table.clone()).try_into().map_err(|error: toml::de::Error| {
            let message = error.to_string().trim_end().replace('\n', " ");
            let named = |key: &&String| {
                let leaf = key.rsplit('.').next().unwrap_or(key);
                message.contains(&format!("`{leaf}`"))
            };
            let origin = self.origins.keys().find(named).and_then(|key| self.origin(key));
            LayerError::Shape { message, origin: origin.cloned() }
        })
    }
}

fn prefix(origin: Option<&Origin>) -> String {
    origin.map(|origin| format!("{origin}: ")).unwrap_or_default()
}

fn scalar(text: &str) -> Value {
    let parsed = format!("value = {text}").parse::<Table>().ok();
    let value = parsed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    match value {
        Some(value @ (Value::Integer(_) | Value::Float(_) | Value::Boolean(_))) => value,
        Some(value @ Value::Array(_)) => value,
        _ => Value::String(text.to_owned()),
    }
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(more)) => merge(inner, more),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

fn leaves(prefix: &str, table: &Table, keys: &mut Vec<String>) {
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Table(inner) => leaves(&path, inner, keys),
            _ => keys.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Sample {
        max_count: Option<u64>,
        name: Option<String>,
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it_and_its_place() {
        let mut layers = Layers::default();
        layers.add_toml(PathBuf::from("carrick.toml"), "max-cuont = 3").unwrap();
        let error = layers.read::<Sample>().unwrap_err().to_string();
        assert!(error.starts_with("carrick.toml: "), "{error}");
        assert!(error.contains("max-cuont") && error.contains("max-count"), "{error}");
    }

    #[test]
    fn variables_are_numbers_where_they_read_as_such() {
        let mut layers = Layers::default();
        let variables = [("X_MAX_COUNT", "7"), ("X_NAME", "a = b\n[c]"), ("OTHER", "1")];
        layers.add_environment("X_", variables).unwrap();
        let sample: Sample = layers.read().unwrap();
        assert_eq!((sample.max_count, sample.name.as_deref()), (Some(7), Some("a = b\n[c]")));
    }
}
