//! Settings of a throttle.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// Settings as an operator writes them; become a [`ThrottleConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ThrottleOptions {
    /// Calls that are let through for each that is accepted, in [1, 100]. Default 2.
    pub k: f64,
    /// How long is looked back, 1 s to 1 h. Default 2 min.
    #[serde(with = "duration")]
    pub window: Duration,
    /// The highest chance of a refusal, in [0, 1]. Default 0.75.
    pub max_refused: f64,
    /// Calls a second that always go through, at most 1000. Default 5.
    pub floor: u32,
    /// Whether it acts. Default `enforce`.
    pub mode: Mode,
}

impl Default for ThrottleOptions {
    fn default() -> Self {
        let window = Duration::from_secs(120);
        Self { k: 2.0, window, max_refused: 0.75, floor: 5, mode: Mode::Enforce }
    }
}

/// Settings that a throttle can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "ThrottleOptions")]
pub struct ThrottleConfig {
    pub(super) options: ThrottleOptions,
}

impl TryFrom<ThrottleOptions> for ThrottleConfig {
    type Error = InvalidConfig;

    fn try_from(options: ThrottleOptions) -> Result<Self, InvalidConfig> {
        let ThrottleOptions { k, window, max_refused, floor, mode: _ } = options;
        let mut faults = Faults::default();
        faults.unless_value((1.0..=100.0).contains(&k), "k", "in [1, 100]", k);
        let span = Duration::from_secs(1)..=Duration::from_secs(3600);
        let text = duration::format(window);
        faults.unless_value(span.contains(&window), "window", "1s to 1h", text);
        let share = (0.0..=1.0).contains(&max_refused);
        faults.unless_value(share, "max-refused", "in [0, 1]", max_refused);
        faults.unless_value(floor <= 1000, "floor", "at most 1000", floor);
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = ThrottleOptions {
            k: f64::NAN,
            window: Duration::ZERO,
            max_refused: 2.0,
            floor: 1001,
            ..ThrottleOptions::default()
        };
        assert_eq!(ThrottleConfig::try_from(options).unwrap_err().faults().len(), 4);
        assert!(ThrottleConfig::try_from(ThrottleOptions::default()).is_ok());
    }
}
