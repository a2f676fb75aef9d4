//! Settings of the SQLite engine.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration, size};
use serde::Deserialize;

/// Settings as an operator writes them; become a [`SqliteConfig`].
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SqliteOptions {
    /// How long `(source, id)` is remembered at least, 1 s to 1 d. Default 2 min. More than 450 000
    /// records within it shorten it, which is counted.
    #[serde(with = "duration")]
    pub dedupe_window: Duration,
    /// Records in one commit at most, 1..=10 000. Default 2000.
    pub commit_records: usize,
    /// How long a commit waits for callers that come back together, at most 10 ms. Default 2 ms; a
    /// caller that is alone never waits.
    #[serde(with = "duration")]
    pub commit_wait: Duration,
    /// Connections for reading, 1..=64. Default 2.
    pub readers: usize,
    /// Page cache of the writer, at least 256 KiB. Default 4 MiB.
    #[serde(with = "size")]
    pub cache: u64,
    /// How long to wait for another program that writes to the file. Default 5 s.
    #[serde(with = "duration")]
    pub busy: Duration,
    /// The write-ahead log is folded into the file when it has grown by so much. Default 4 MiB.
    #[serde(with = "size")]
    pub checkpoint: u64,
    /// Acknowledge before the disk has it: a power cut then loses what was acknowledged last.
    pub danger_not_synchronous: bool,
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self {
            dedupe_window: Duration::from_secs(120),
            commit_records: 2000,
            commit_wait: Duration::from_millis(2),
            readers: 2,
            cache: 4 * 1024 * 1024,
            busy: Duration::from_secs(5),
            checkpoint: 4 * 1024 * 1024,
            danger_not_synchronous: false,
        }
    }
}

/// Settings that the engine can rely on.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "SqliteOptions")]
pub struct SqliteConfig {
    pub(super) options: SqliteOptions,
}

impl TryFrom<SqliteOptions> for SqliteConfig {
    type Error = InvalidConfig;

    fn try_from(options: SqliteOptions) -> Result<Self, InvalidConfig> {
        let mut faults = Faults::default();
        let SqliteOptions {
            dedupe_window,
            commit_records,
            commit_wait,
            readers,
            cache,
            busy,
            checkpoint,
            danger_not_synchronous: _,
        } = options;
        let secs = Duration::from_secs;
        let window = (secs(1)..=secs(86_400)).contains(&dedupe_window);
        let text = duration::format;
        faults.unless_value(window, "dedupe-window", "1s to 1d", text(dedupe_window));
        let records = (1..=10_000).contains(&commit_records);
        faults.unless_value(records, "commit-records", "1..=10000", commit_records);
        let wait = commit_wait <= Duration::from_millis(10);
        faults.unless_value(wait, "commit-wait", "at most 10ms", text(commit_wait));
        faults.unless_value((1..=64).contains(&readers), "readers", "1..=64", readers);
        faults.unless_value(cache >= 256 * 1024, "cache", "at least 256KiB", size::format(cache));
        faults.unless_value(busy <= secs(60), "busy", "at most 1m", text(busy));
        let bound = (64 * 1024..=1 << 30).contains(&checkpoint);
        faults.unless_value(bound, "checkpoint", "64KiB to 1GiB", size::format(checkpoint));
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = SqliteOptions {
            dedupe_window: Duration::ZERO,
            commit_records: 0,
            commit_wait: Duration::from_secs(1),
            readers: 65,
            cache: 1,
            busy: Duration::from_secs(61),
            checkpoint: 1,
            ..SqliteOptions::default()
        };
        let faults = SqliteConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 7, "{faults}");
        assert!(SqliteConfig::try_from(SqliteOptions::default()).is_ok());
    }
}
