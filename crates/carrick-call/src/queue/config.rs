//! Settings of a queue.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// Settings as an operator writes them; become a [`QueueConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct QueueOptions {
    /// Calls that may wait, 1..=100 000. Default 64.
    pub length: usize,
    /// How long a call may wait, 1 ms to 10 min. Default 500 ms.
    #[serde(with = "duration")]
    pub max_wait: Duration,
    /// A wait that is fine, at most `max-wait`. Default 5 ms.
    #[serde(with = "duration")]
    pub target: Duration,
    /// When waits have been longer than `target` for so long, the newest goes first. Default 100 ms.
    #[serde(with = "duration")]
    pub interval: Duration,
    /// Whether a full line refuses. Default `enforce`.
    pub mode: Mode,
}

impl Default for QueueOptions {
    fn default() -> Self {
        let millis = Duration::from_millis;
        Self {
            length: 64,
            max_wait: millis(500),
            target: millis(5),
            interval: millis(100),
            mode: Mode::Enforce,
        }
    }
}

/// Settings that a queue can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "QueueOptions")]
pub struct QueueConfig {
    pub(super) options: QueueOptions,
}

impl QueueConfig {
    /// What was written.
    pub fn options(&self) -> &QueueOptions {
        &self.options
    }
}

impl TryFrom<QueueOptions> for QueueConfig {
    type Error = InvalidConfig;

    fn try_from(options: QueueOptions) -> Result<Self, InvalidConfig> {
        let QueueOptions { length, max_wait, target, interval: _, mode: _ } = options;
        let mut faults = Faults::default();
        faults.unless_value((1..=100_000).contains(&length), "length", "1..=100000", length);
        let span = Duration::from_millis(1)..=Duration::from_secs(600);
        let text = duration::format;
        faults.unless_value(span.contains(&max_wait), "max-wait", "1ms to 10m", text(max_wait));
        let range = format!("at most max-wait ({})", text(max_wait));
        faults.unless_value(target <= max_wait, "target", &range, text(target));
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = QueueOptions {
            length: 0,
            max_wait: Duration::ZERO,
            target: Duration::from_secs(1),
            ..QueueOptions::default()
        };
        assert_eq!(QueueConfig::try_from(options).unwrap_err().faults().len(), 3);
        assert!(QueueConfig::try_from(QueueOptions::default()).is_ok());
    }
}
