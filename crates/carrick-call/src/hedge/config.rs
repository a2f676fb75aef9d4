//! Settings of hedging.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// Settings as an operator writes them; become a [`HedgeConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct HedgeOptions {
    /// Share of calls that are faster than the delay, in [0.5, 1). Default 0.95.
    pub percentile: f64,
    /// The shortest delay, at most 1 min. Default 1 ms.
    #[serde(with = "duration")]
    pub min_delay: Duration,
    /// Hedges for each call, in [0, 1]. Default 0.05.
    pub share: f64,
    /// Whether hedges are made, or only counted. Default `enforce`.
    pub mode: Mode,
}

impl Default for HedgeOptions {
    fn default() -> Self {
        let min_delay = Duration::from_millis(1);
        Self { percentile: 0.95, min_delay, share: 0.05, mode: Mode::Enforce }
    }
}

/// Settings that hedging can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "HedgeOptions")]
pub struct HedgeConfig {
    pub(super) options: HedgeOptions,
}

impl TryFrom<HedgeOptions> for HedgeConfig {
    type Error = InvalidConfig;

    fn try_from(options: HedgeOptions) -> Result<Self, InvalidConfig> {
        let HedgeOptions { percentile, min_delay, share, mode: _ } = options;
        let mut faults = Faults::default();
        let holds = (0.5..1.0).contains(&percentile);
        faults.unless_value(holds, "percentile", "in [0.5, 1)", percentile);
        let (holds, text) = (min_delay <= Duration::from_secs(60), duration::format(min_delay));
        faults.unless_value(holds, "min-delay", "at most 1m", text);
        faults.unless_value((0.0..=1.0).contains(&share), "share", "in [0, 1]", share);
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = HedgeOptions {
            percentile: 1.0,
            min_delay: Duration::from_secs(61),
            share: f64::NAN,
            ..HedgeOptions::default()
        };
        assert_eq!(HedgeConfig::try_from(options).unwrap_err().faults().len(), 3);
        assert!(HedgeConfig::try_from(HedgeOptions::default()).is_ok());
    }
}
