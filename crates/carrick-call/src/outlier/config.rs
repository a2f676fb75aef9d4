//! Settings of the outlier detector.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// Settings as an operator writes them; become an [`OutlierConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct OutlierOptions {
    /// Whether ejections are acted on. Default `enforce`.
    pub mode: Mode,
    /// Time between two sweeps, 100 ms to 10 min. Default 10 s.
    #[serde(with = "duration")]
    pub interval: Duration,
    /// How long a first ejection lasts; the n-th in a row lasts n times as long. 100 ms to 1 h.
    /// Default 30 s.
    #[serde(with = "duration")]
    pub ejection_time: Duration,
    /// The longest ejection, from `ejection-time` to 1 d. Default 5 min.
    #[serde(with = "duration")]
    pub max_ejection_time: Duration,
    /// Share by which an ejection is lengthened at random, in [0, 1], so that hosts do not come back
    /// together. Default 0.1.
    pub jitter: f64,
    /// Share of the hosts that may be ejected, in [0, 1], counted with the one about to be. Default
    /// 0.5.
    pub max_ejected: f64,
    /// Whether one host may be ejected even if that alone exceeds `max-ejected`. Default false.
    pub always_allow_one: bool,
    /// Hosts that are always left, at most 10 000. Default 1.
    pub min_serving: usize,
    /// Share of serving hosts below which ejections are ignored, in [0, 1]; 0 is never. Default 0.5.
    pub panic_below: f64,
    /// Answers in a row that speak against a host, at most 10 000; 0 is off. Default 5.
    pub consecutive_failures: u32,
    /// Gateway errors (502, 503, 504) in a row, at most 10 000; 0 is off. Default 0.
    pub consecutive_gateway: u32,
    /// Calls in a row that got no answer at all (connect, reset, timeout), at most 10 000; 0 is off.
    /// Default 5.
    pub consecutive_local: u32,
    /// Hosts with enough requests that the three kinds below need, 2 to 10 000. Default 5.
    pub min_hosts: usize,
    /// Standard deviations below the mean at which a success rate ejects, in [0, 10]; 0 is off.
    /// Default 1.9.
    pub success_rate_deviations: f64,
    /// Requests in one interval that make a success rate count, 1 to 1 000 000. Default 100.
    pub success_rate_requests: u32,
    /// Whether a high share of failures ejects by itself. Default false.
    pub failure_percentage: bool,
    /// That share, in (0, 1]. Default 0.85.
    pub failure_share: f64,
    /// Requests in one interval that make it count, 1 to 1 000 000. Default 50.
    pub failure_requests: u32,
    /// Whether being slow ejects. Default false.
    pub latency: bool,
    /// How many times the fleet's median p95 a host's p95 must exceed, in (1, 1000]. Default 3.
    pub latency_factor: f64,
    /// Requests in one interval that make a p95 count, 20 to 1 000 000. Default 100.
    pub latency_requests: u32,
    /// Below this p95 no host is slow, at most 1 min. Default 10 ms.
    #[serde(with = "duration")]
    pub latency_floor: Duration,
}

impl Default for OutlierOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Enforce,
            interval: Duration::from_secs(10),
            ejection_time: Duration::from_secs(30),
            max_ejection_time: Duration::from_secs(300),
            jitter: 0.1,
            max_ejected: 0.5,
            always_allow_one: false,
            min_serving: 1,
            panic_below: 0.5,
            consecutive_failures: 5,
            consecutive_gateway: 0,
            consecutive_local: 5,
            min_hosts: 5,
            success_rate_deviations: 1.9,
            success_rate_requests: 100,
            failure_percentage: false,
            failure_share: 0.85,
            failure_requests: 50,
            latency: false,
            latency_factor: 3.0,
            latency_requests: 100,
            latency_floor: Duration::from_millis(10),
        }
    }
}

/// Settings that a detector can rely on.
///
/// ```
/// # use carrick_call::outlier::{OutlierConfig, OutlierOptions};
/// let wrong = OutlierOptions { max_ejected: 50.0, ..OutlierOptions::default() };
/// let fault = OutlierConfig::try_from(wrong).unwrap_err();
/// assert_eq!(fault.to_string(), "max-ejected must be in [0, 1], not 50");
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "OutlierOptions")]
pub struct OutlierConfig {
    pub(super) options: OutlierOptions,
}

impl TryFrom<OutlierOptions> for OutlierConfig {
    type Error = InvalidConfig;

    fn try_from(options: OutlierOptions) -> Result<Self, InvalidConfig> {
        let OutlierOptions {
            mode: _,
            interval,
            ejection_time,
            max_ejection_time,
            jitter,
            max_ejected,
            always_allow_one: _,
            min_serving,
            panic_below,
            consecutive_failures,
            consecutive_gateway,
            consecutive_local,
            min_hosts,
            success_rate_deviations,
            success_rate_requests,
            failure_percentage: _,
            failure_share,
            failure_requests,
            latency: _,
            latency_factor,
            latency_requests,
            latency_floor,
        } = options;
        let mut faults = Faults::default();
        let mut time =
            |key: &str, value: Duration, range: &str, least: Duration, most: Duration| {
                let holds = (least..=most).contains(&value);
                faults.unless_value(holds, key, range, duration::format(value));
            };
        let (tick, secs) = (Duration::from_millis(100), Duration::from_secs);
        time("interval", interval, "100ms to 10m", tick, secs(600));
        time("ejection-time", ejection_time, "100ms to 1h", tick, secs(3600));
        let range = "from ejection-time to 1d";
        time("max-ejection-time", max_ejection_time, range, ejection_time, secs(86_400));
        time("latency-floor", latency_floor, "at most 1m", Duration::ZERO, secs(60));
        for (key, share) in
            [("jitter", jitter), ("max-ejected", max_ejected), ("panic-below", panic_below)]
        {
            faults.unless_value((0.0..=1.0).contains(&share), key, "in [0, 1]", share);
        }
        faults.unless_value(min_serving <= 10_000, "min-serving", "at most 10000", min_serving);
        for (key, count) in [
            ("consecutive-failures", consecutive_failures),
            ("consecutive-gateway", consecutive_gateway),
            ("consecutive-local", consecutive_local),
        ] {
            faults.unless_value(count <= 10_000, key, "at most 10000", count);
        }
        let hosts = (2..=10_000).contains(&min_hosts);
        faults.unless_value(hosts, "min-hosts", "2..=10000", min_hosts);
        let key = "success-rate-deviations";
        let deviations = success_rate_deviations;
        faults.unless_value((0.0..=10.0).contains(&deviations), key, "in [0, 10]", deviations);
        for (key, count, range, least) in [
            ("success-rate-requests", success_rate_requests, "1..=1000000", 1),
            ("failure-requests", failure_requests, "1..=1000000", 1),
            ("latency-requests", latency_requests, "20..=1000000", 20),
        ] {
            faults.unless_value((least..=1_000_000).contains(&count), key, range, count);
        }
        let share = 0.0 < failure_share && failure_share <= 1.0;
        faults.unless_value(share, "failure-share", "in (0, 1]", failure_share);
        let factor = 1.0 < latency_factor && latency_factor <= 1000.0;
        faults.unless_value(factor, "latency-factor", "in (1, 1000]", latency_factor);
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = OutlierOptions {
            interval: Duration::ZERO,
            ejection_time: Duration::ZERO,
            max_ejection_time: Duration::MAX,
            jitter: f64::NAN,
            max_ejected: -0.1,
            min_serving: 10_001,
            panic_below: 1.1,
            consecutive_failures: u32::MAX,
            consecutive_gateway: u32::MAX,
            consecutive_local: u32::MAX,
            min_hosts: 1,
            success_rate_deviations: f64::INFINITY,
            success_rate_requests: 0,
            failure_share: 0.0,
            failure_requests: 0,
            latency_factor: 1.0,
            latency_requests: 1,
            latency_floor: Duration::MAX,
            ..OutlierOptions::default()
        };
        let faults = OutlierConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 18, "{faults}");
        assert!(OutlierConfig::try_from(OutlierOptions::default()).is_ok());
    }

    #[test]
    fn an_operator_writes_kebab_case_and_an_unknown_key_is_an_error() {
        let config: OutlierConfig =
            toml::from_str("ejection-time = \"5s\"\nmode = \"observe\"").unwrap();
        assert_eq!(config.options.ejection_time, Duration::from_secs(5));
        assert_eq!(config.options.mode, Mode::Observe);
        assert!(toml::from_str::<OutlierConfig>("ejection_time = \"5s\"").is_err());
    }
}
