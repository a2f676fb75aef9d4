//! Settings of a bulkhead.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::Mode;

/// Settings as an operator writes them; become a [`BulkheadConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct BulkheadOptions {
    /// Calls at a time with a fixed limit, 1..=1 000 000. Default 100.
    pub max: u32,
    /// Whether the limit is fixed or adapts. Default fixed.
    pub limit: LimitOptions,
    /// Keep the last tenth for critical calls, and the tenth before from sheddable ones. Default no.
    pub reserve: bool,
    /// Whether it acts. Default `enforce`.
    pub mode: Mode,
}

/// How the limit is found.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitOptions {
    /// It is `max`.
    #[default]
    Fixed,
    /// By additive increase and multiplicative decrease.
    Aimd(AimdOptions),
    /// By latency.
    Gradient(GradientOptions),
}

/// Additive increase, multiplicative decrease.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct AimdOptions {
    /// The limit at first, `min..=max`. Default 20.
    pub start: u32,
    /// The least, at least 1. Default 4.
    pub min: u32,
    /// The most, at most 1 000 000. Default 1000.
    pub max: u32,
    /// What it is multiplied by when a call was too much, in [0.5, 1). Default 0.9.
    pub decrease: f64,
    /// A call that took longer was too much. Default 5 s.
    #[serde(with = "duration")]
    pub timeout: Duration,
}

/// A limit that follows latency.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct GradientOptions {
    /// The limit at first, `min..=max`. Default 20.
    pub start: u32,
    /// The least, at least 1. Default 3.
    pub min: u32,
    /// The most, at most 1 000 000. Default 1000.
    pub max: u32,
    /// Calls at a time while the best latency is measured, at least 1. Default 3. Apart from `min`,
    /// and never a reason to let more through than before.
    pub probe: u32,
    /// How often the best latency is measured anew. Default 1 min.
    #[serde(with = "duration")]
    pub probe_every: Duration,
    /// How much longer than the best a call may take, in [0, 10]. Default 0.25.
    pub tolerance: f64,
    /// How long latencies are gathered before the limit changes. Default 100 ms.
    #[serde(with = "duration")]
    pub window: Duration,
    /// And how many at least, at least 1. Default 50.
    pub min_samples: usize,
}

impl Default for BulkheadOptions {
    fn default() -> Self {
        Self { max: 100, limit: LimitOptions::Fixed, reserve: false, mode: Mode::Enforce }
    }
}

impl Default for AimdOptions {
    fn default() -> Self {
        Self { start: 20, min: 4, max: 1000, decrease: 0.9, timeout: Duration::from_secs(5) }
    }
}

impl Default for GradientOptions {
    fn default() -> Self {
        Self {
            start: 20,
            min: 3,
            max: 1000,
            probe: 3,
            probe_every: Duration::from_secs(60),
            tolerance: 0.25,
            window: Duration::from_millis(100),
            min_samples: 50,
        }
    }
}

/// Settings that a bulkhead can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "BulkheadOptions")]
pub struct BulkheadConfig {
    pub(super) options: BulkheadOptions,
}

impl BulkheadConfig {
    /// What was written.
    pub fn options(&self) -> &BulkheadOptions {
        &self.options
    }
}

impl TryFrom<BulkheadOptions> for BulkheadConfig {
    type Error = InvalidConfig;

    fn try_from(options: BulkheadOptions) -> Result<Self, InvalidConfig> {
        let mut faults = Faults::default();
        let is_count = |count: u32| (1..=1_000_000).contains(&count);
        faults.unless_value(is_count(options.max), "max", "1..=1000000", options.max);
        let mut bounds = |table: &str, start: u32, min: u32, max: u32| {
            let key = |name: &str| format!("limit.{table}.{name}");
            faults.unless_value(is_count(min), &key("min"), "1..=1000000", min);
            let range = format!("min ({min}) to 1000000");
            faults.unless_value(is_count(max) && min <= max, &key("max"), &range, max);
            let range = format!("min ({min}) to max ({max})");
            faults.unless_value(min <= start && start <= max, &key("start"), &range, start);
        };
        match &options.limit {
            LimitOptions::Fixed => {}
            LimitOptions::Aimd(AimdOptions { start, min, max, decrease, timeout: _ }) => {
                bounds("aimd", *start, *min, *max);
                let cut = (0.5..1.0).contains(decrease);
                faults.unless_value(cut, "limit.aimd.decrease", "in [0.5, 1)", decrease);
            }
            LimitOptions::Gradient(gradient) => {
                let GradientOptions { start, min, max, probe, tolerance, window, .. } = gradient;
                bounds("gradient", *start, *min, *max);
                faults.unless_value(*probe >= 1, "limit.gradient.probe", "at least 1", probe);
                let span = (0.0..=10.0).contains(tolerance);
                faults.unless_value(span, "limit.gradient.tolerance", "in [0, 10]", tolerance);
                let (holds, text) = (!window.is_zero(), duration::format(*window));
                faults.unless_value(holds, "limit.gradient.window", "above zero", text);
                let (samples, key) = (gradient.min_samples, "limit.gradient.min-samples");
                // More than are kept would never be reached.
                faults.unless_value((1..=1000).contains(&samples), key, "1..=1000", samples);
            }
        }
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[track_caller]
    fn check(options: BulkheadOptions, faults: usize) {
        let found = BulkheadConfig::try_from(options.clone());
        let count = found.as_ref().err().map_or(0, |found| found.faults().len());
        assert_eq!(count, faults, "{options:?}: {found:?}");
    }

    #[test]
    fn cowprotocol_4804_every_setting_is_checked_and_no_number_means_without_limit() {
        check(BulkheadOptions::default(), 0);
        check(BulkheadOptions { max: 0, ..BulkheadOptions::default() }, 1);
        let aimd =
            AimdOptions { start: 0, min: 0, max: 0, decrease: 1.0, ..AimdOptions::default() };
        check(BulkheadOptions { limit: LimitOptions::Aimd(aimd), ..Default::default() }, 3);
        let gradient = GradientOptions {
            start: 2000,
            probe: 0,
            tolerance: f64::NAN,
            window: Duration::ZERO,
            min_samples: 0,
            ..GradientOptions::default()
        };
        check(BulkheadOptions { limit: LimitOptions::Gradient(gradient), ..Default::default() }, 5);
        let written: BulkheadOptions =
            toml::from_str("limit.gradient = { max = 50 }\nreserve = true").unwrap();
        check(written, 0);
    }
}
