//! Settings of the Postgres engine.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

/// Postgres settings as an operator writes them; becomes a [`PostgresConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PostgresOptions {
    /// Connections for everything but leases and wake-ups, 2..=200. Default 10. Those take four
    /// more: two for leases, so that busy callers cannot starve a renewal, and two for wake-ups.
    pub max_connections: u32,
    /// Schema of the tables: 1..=48 characters of `a-z 0-9 _`, not starting with a digit. It is
    /// made if it is not there. Default `carrick`.
    pub schema: String,
    /// How long a statement may run, 100 ms..=5 min. Default 10 s.
    #[serde(with = "duration")]
    pub statement_timeout: Duration,
    /// How long a statement may wait for a lock, 10 ms..=1 min, and no longer than it may run.
    /// Default 5 s.
    #[serde(with = "duration")]
    pub lock_timeout: Duration,
    /// How long a caller waits for a free connection before it is told that the store is
    /// overloaded, 10 ms..=1 min. Default 5 s.
    #[serde(with = "duration")]
    pub acquire_timeout: Duration,
    /// How long an event's identity is remembered at least, 1 s..=7 d. Default 2 min. The largest
    /// of those that programs have asked for holds for all of them.
    #[serde(with = "duration")]
    pub dedupe_window: Duration,
    /// How often a waiter looks by itself, whether or not it was woken, 50 ms..=10 s. Default
    /// 250 ms.
    #[serde(with = "duration")]
    pub poll: Duration,
    /// Whether to be woken by other processes over a `LISTEN` connection, and to wake them. Default
    /// true. Without it they see new events at their next poll.
    pub listen: bool,
    /// Whether connections go through a pooler that hands them out for a transaction at a time
    /// (PgBouncer's `transaction` mode): then nothing is left in a session, statements are not
    /// prepared by name, and timeouts are set in each transaction. Default false.
    pub pooler: bool,
    /// A URL past the pooler for the `LISTEN` connection, which no pooler can carry. Without one,
    /// `listen` is off behind a pooler. Default none.
    pub listen_url: Option<String>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            max_connections: 10,
            schema: "carrick".to_owned(),
            statement_timeout: Duration::from_secs(10),
            lock_timeout: Duration::from_secs(5),
            acquire_timeout: Duration::from_secs(5),
            dedupe_window: Duration::from_secs(120),
            poll: Duration::from_millis(250),
            listen: true,
            pooler: false,
            listen_url: None,
        }
    }
}

/// Settings the engine can rely on.
///
/// ```
/// # use carrick_store::engine::postgres::{PostgresConfig, PostgresOptions};
/// let options = PostgresOptions { max_connections: 1, ..PostgresOptions::default() };
/// let wrong = PostgresConfig::try_from(options).unwrap_err();
/// assert_eq!(wrong.to_string(), "max-connections must be 2 to 200, not 1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "PostgresOptions")]
pub struct PostgresConfig {
    options: PostgresOptions,
}

impl Default for PostgresConfig {
    fn default() -> Self {
        Self::try_from(PostgresOptions::default()).expect("the defaults are within their ranges")
    }
}

impl PostgresConfig {
    /// The options, within their ranges.
    pub fn options(&self) -> &PostgresOptions {
        &self.options
    }

    /// The options, to change some and check them again.
    pub fn into_options(self) -> PostgresOptions {
        self.options
    }
}

impl TryFrom<PostgresOptions> for PostgresConfig {
    type Error = InvalidConfig;

    fn try_from(options: PostgresOptions) -> Result<Self, InvalidConfig> {
        let PostgresOptions {
            max_connections,
            ref schema,
            statement_timeout,
            lock_timeout,
            acquire_timeout,
            dedupe_window,
            poll,
            listen: _,
            pooler: _,
            listen_url: _,
        } = options;
        let millis = Duration::from_millis;
        let mut faults = Faults::default();
        let mut within = |key, duration: Duration, least: u64, most: u64, range| {
            let holds = (millis(least)..=millis(most)).contains(&duration);
            faults.unless_value(holds, key, range, format_args!("{duration:?}"));
        };
        within("statement-timeout", statement_timeout, 100, 300_000, "100ms to 5m");
        within("lock-timeout", lock_timeout, 10, 60_000, "10ms to 1m");
        within("acquire-timeout", acquire_timeout, 10, 60_000, "10ms to 1m");
        within("dedupe-window", dedupe_window, 1000, 7 * 86_400_000, "1s to 7d");
        within("poll", poll, 50, 10_000, "50ms to 10s");
        faults.unless_value(
            lock_timeout <= statement_timeout,
            "lock-timeout",
            &format!("at most statement-timeout, which is {statement_timeout:?}"),
            format_args!("{lock_timeout:?}"),
        );
        faults.unless_value(
            (2..=200).contains(&max_connections),
            "max-connections",
            "2 to 200",
            max_connections,
        );
        faults.unless_value(
            is_schema_name(schema),
            "schema",
            "1 to 48 characters of a-z 0-9 _, not starting with a digit",
            schema,
        );
        faults.into_result(Self { options })
    }
}

/// Whether a text can be written into SQL as an identifier without quotes changing its meaning.
/// 48 leaves room, below Postgres' 63, for the prefix of the notification channel.
fn is_schema_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=48).contains(&text.len())
        && text.bytes().all(allowed)
        && !text.as_bytes()[0].is_ascii_digit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_within_their_ranges() {
        assert_eq!(*PostgresConfig::default().options(), PostgresOptions::default());
    }

    #[test]
    fn every_fault_is_reported_at_once() {
        let options = PostgresOptions {
            max_connections: 1,
            schema: "Carrick; drop".to_owned(),
            lock_timeout: Duration::from_secs(11),
            poll: Duration::ZERO,
            ..PostgresOptions::default()
        };
        let told = PostgresConfig::try_from(options).unwrap_err().to_string();
        for key in ["max-connections", "schema", "lock-timeout", "poll"] {
            assert!(told.contains(key), "{key} is missing in {told:?}");
        }
    }

    #[test]
    fn a_schema_name_cannot_carry_sql() {
        for name in ["carrick", "_c1", &"x".repeat(48)] {
            assert!(is_schema_name(name), "{name:?}");
        }
        for name in ["", "1a", "a b", "a\"b", "a;b", "É", "A", &"x".repeat(49)] {
            assert!(!is_schema_name(name), "{name:?}");
        }
    }
}
