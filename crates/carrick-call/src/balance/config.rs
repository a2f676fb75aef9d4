//! Settings of the balancer.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// What makes one host better than another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Expected latency times calls under way.
    #[default]
    PeakEwma,
    /// Calls under way alone, to the power of `bias`.
    LeastRequest,
}

/// Settings as an operator writes them; become a [`BalanceConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct BalanceOptions {
    /// Whether hosts are compared. In `observe` the first host drawn is taken, by weight alone, and
    /// what would have been taken is counted. Default `enforce`.
    pub mode: Mode,
    /// What is compared. Default `peak-ewma`.
    pub strategy: Strategy,
    /// How much `least-request` minds calls under way, in [0, 10]; 0 is by weight alone. Default 1.
    pub bias: f64,
    /// Time in which an old latency loses 63 % of its weight, 100 ms to 10 min. Default 10 s.
    #[serde(with = "duration")]
    pub decay: Duration,
    /// Latency that a failure counts as at least, at most 10 min. Make it no less than the timeout
    /// of a call. Default 2 s.
    #[serde(with = "duration")]
    pub failure_penalty: Duration,
    /// Time in which a new host comes up to its full share, from a tenth, at most 1 h; 0 is at once.
    /// Hosts of the first set are not new. Default 0.
    #[serde(with = "duration")]
    pub slow_start: Duration,
    /// Hosts that are used at most, 1 to 10 000; of more, each client takes its own choice. Default
    /// 1000.
    pub subset: usize,
    /// Names this client among its peers, so that they choose differently. Needed for a subset of
    /// less than 1000. Default empty.
    pub client_id: String,
}

impl Default for BalanceOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Enforce,
            strategy: Strategy::PeakEwma,
            bias: 1.0,
            decay: Duration::from_secs(10),
            failure_penalty: Duration::from_secs(2),
            slow_start: Duration::ZERO,
            subset: 1000,
            client_id: String::new(),
        }
    }
}

/// Settings that a balancer can rely on.
///
/// ```
/// # use carrick_call::balance::{BalanceConfig, BalanceOptions};
/// let wrong = BalanceOptions { subset: 20, ..BalanceOptions::default() };
/// let fault = BalanceConfig::try_from(wrong).unwrap_err();
/// assert_eq!(
///     fault.to_string(),
///     "client-id must be this client's name if the subset is less than 1000",
/// );
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "BalanceOptions")]
pub struct BalanceConfig {
    pub(super) options: BalanceOptions,
}

impl BalanceConfig {
    /// What was written.
    pub fn options(&self) -> &BalanceOptions {
        &self.options
    }
}

impl TryFrom<BalanceOptions> for BalanceConfig {
    type Error = InvalidConfig;

    fn try_from(options: BalanceOptions) -> Result<Self, InvalidConfig> {
        let BalanceOptions {
            mode: _,
            strategy: _,
            bias,
            decay,
            failure_penalty,
            slow_start,
            subset,
            ref client_id,
        } = options;
        let mut faults = Faults::default();
        let (text, secs) = (duration::format, Duration::from_secs);
        faults.unless_value((0.0..=10.0).contains(&bias), "bias", "in [0, 10]", bias);
        let holds = (Duration::from_millis(100)..=secs(600)).contains(&decay);
        faults.unless_value(holds, "decay", "100ms to 10m", text(decay));
        let (key, holds) = ("failure-penalty", failure_penalty <= secs(600));
        faults.unless_value(holds, key, "at most 10m", text(failure_penalty));
        let holds = slow_start <= secs(3600);
        faults.unless_value(holds, "slow-start", "at most 1h", text(slow_start));
        faults.unless_value((1..=10_000).contains(&subset), "subset", "1..=10000", subset);
        let named = subset >= 1000 || !client_id.is_empty();
        faults.unless(named, "client-id", "this client's name if the subset is less than 1000");
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = BalanceOptions {
            bias: f64::NAN,
            decay: Duration::ZERO,
            failure_penalty: Duration::MAX,
            slow_start: Duration::MAX,
            subset: 0,
            ..BalanceOptions::default()
        };
        let faults = BalanceConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 6, "{faults}");
        assert!(BalanceConfig::try_from(BalanceOptions::default()).is_ok());
    }

    #[test]
    fn an_operator_writes_kebab_case_and_an_unknown_key_is_an_error() {
        let config: BalanceConfig = toml::from_str("strategy = \"least-request\"").unwrap();
        assert_eq!(config.options.strategy, Strategy::LeastRequest);
        assert!(toml::from_str::<BalanceConfig>("strategie = \"random\"").is_err());
    }
}
