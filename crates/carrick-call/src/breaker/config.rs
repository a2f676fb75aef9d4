//! Settings of a breaker.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::{Deserialize, Deserializer};

use crate::Mode;

/// Settings as an operator writes them; become a [`BreakerConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct BreakerOptions {
    /// Which calls are looked at.
    pub window: WindowOptions,
    /// Calls that must be there before anything is concluded, at least 1. Default 20.
    pub min_calls: u32,
    /// Share of failed calls at which the circuit opens, in (0, 1]. Default 0.5.
    pub failure_rate: f64,
    /// Share of slow calls at which it opens, in (0, 1]. Default none: slowness does not open it.
    pub slow_rate: Option<f64>,
    /// From when on a call is slow, above zero. Default 1 s.
    #[serde(with = "duration")]
    pub slow_call: Duration,
    /// Whether "too much" (429, 503, `RESOURCE_EXHAUSTED`) does not count. Default no.
    pub ignore_overload: bool,
    /// First cool-down; doubles with each failure after it. Above zero. Default 30 s.
    #[serde(with = "duration")]
    pub cool_down: Duration,
    /// The longest cool-down, at least `cool-down`. Default 5 min.
    #[serde(with = "duration")]
    pub cool_down_cap: Duration,
    /// After so long closed the next cool-down is the first again. Default 1 min.
    #[serde(with = "duration")]
    pub healthy_after: Duration,
    /// Probes at a time while half-open, 1..=1000. Default 1.
    pub probes: u32,
    /// Probes that must succeed, one after the other or together, 1..=1000. Default 1.
    pub successes: u32,
    /// After so long a probe that did not come back is lost, and another may go. Above zero.
    /// Default 30 s.
    #[serde(with = "duration")]
    pub probe_age: Duration,
    /// For so long after closing, a share lets through that grows from a tenth to all. Default none.
    #[serde(deserialize_with = "optional")]
    pub ramp: Option<Duration>,
    /// Whether it acts. Default `enforce`.
    pub mode: Mode,
}

/// Which calls a breaker looks at.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct WindowOptions {
    /// The last so many, 1..=10 000. Default 100.
    pub calls: u32,
    /// Those of the last so long instead, 1 s to 1 h.
    #[serde(deserialize_with = "optional")]
    pub time: Option<Duration>,
}

fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    duration::deserialize(from).map(Some)
}

impl Default for WindowOptions {
    fn default() -> Self {
        Self { calls: 100, time: None }
    }
}

impl Default for BreakerOptions {
    fn default() -> Self {
        let secs = Duration::from_secs;
        Self {
            window: WindowOptions::default(),
            min_calls: 20,
            failure_rate: 0.5,
            slow_rate: None,
            slow_call: secs(1),
            ignore_overload: false,
            cool_down: secs(30),
            cool_down_cap: secs(300),
            healthy_after: secs(60),
            probes: 1,
            successes: 1,
            probe_age: secs(30),
            ramp: None,
            mode: Mode::Enforce,
        }
    }
}

/// Settings that a breaker can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "BreakerOptions")]
pub struct BreakerConfig {
    pub(super) options: BreakerOptions,
}

impl BreakerConfig {
    /// What was written.
    pub fn options(&self) -> &BreakerOptions {
        &self.options
    }
}

impl TryFrom<BreakerOptions> for BreakerConfig {
    type Error = InvalidConfig;

    fn try_from(options: BreakerOptions) -> Result<Self, InvalidConfig> {
        let BreakerOptions {
            window: WindowOptions { calls, time },
            min_calls,
            failure_rate,
            slow_rate,
            slow_call,
            ignore_overload: _,
            cool_down,
            cool_down_cap,
            healthy_after: _,
            probes,
            successes,
            probe_age,
            ramp,
            mode: _,
        } = options;
        let mut faults = Faults::default();
        let text = duration::format;
        let is_share = |share: f64| 0.0 < share && share <= 1.0; // refuses NaN too
        let hour = Duration::from_secs(3600);
        faults.unless_value((1..=10_000).contains(&calls), "window.calls", "1..=10000", calls);
        if let Some(time) = time {
            let bound = (Duration::from_secs(1)..=hour).contains(&time);
            faults.unless_value(bound, "window.time", "1s to 1h", text(time));
            faults.unless_value(min_calls >= 1, "min-calls", "at least 1", min_calls);
        } else {
            // A window that cannot hold the minimum never concludes anything.
            let range = format!("1..={calls} (window.calls)");
            faults.unless_value((1..=calls).contains(&min_calls), "min-calls", &range, min_calls);
        }
        faults.unless_value(is_share(failure_rate), "failure-rate", "in (0, 1]", failure_rate);
        if let Some(rate) = slow_rate {
            faults.unless_value(is_share(rate), "slow-rate", "in (0, 1]", rate);
        }
        faults.unless_value(!slow_call.is_zero(), "slow-call", "above zero", text(slow_call));
        faults.unless_value(!cool_down.is_zero(), "cool-down", "above zero", text(cool_down));
        let range = format!("at least cool-down ({})", text(cool_down));
        let cap = cool_down <= cool_down_cap;
        faults.unless_value(cap, "cool-down-cap", &range, text(cool_down_cap));
        faults.unless_value((1..=1000).contains(&probes), "probes", "1..=1000", probes);
        faults.unless_value((1..=1000).contains(&successes), "successes", "1..=1000", successes);
        faults.unless_value(!probe_age.is_zero(), "probe-age", "above zero", text(probe_age));
        let ramps = ramp.is_none_or(|ramp| !ramp.is_zero() && ramp <= hour);
        faults.unless_value(
            ramps,
            "ramp",
            "above zero, at most 1h",
            text(ramp.unwrap_or_default()),
        );
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let zero = Duration::ZERO;
        let options = BreakerOptions {
            window: WindowOptions { calls: 0, time: Some(zero) },
            min_calls: 0,
            failure_rate: f64::NAN,
            slow_rate: Some(1.1),
            slow_call: zero,
            cool_down: zero,
            cool_down_cap: zero,
            probes: 0,
            successes: 0,
            probe_age: zero,
            ramp: Some(zero),
            ..BreakerOptions::default()
        };
        let faults = BreakerConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 11, "{faults}");
        let written: BreakerOptions =
            toml::from_str("window = { time = \"10s\" }\nramp = \"30s\"").unwrap();
        assert_eq!(written.window.time, Some(Duration::from_secs(10)));
        assert!(BreakerConfig::try_from(written).is_ok());
    }

    #[test]
    fn resilience4j_903_a_window_that_cannot_hold_the_minimum_is_refused() {
        let options = BreakerOptions { min_calls: 101, ..BreakerOptions::default() };
        let faults = BreakerConfig::try_from(options).unwrap_err().to_string();
        assert!(faults.contains("min-calls") && faults.contains("1..=100"), "{faults}");
    }
}
