//! Settings of faults.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use http::StatusCode;
use serde::Deserialize;

/// Settings as an operator writes them; become a [`FaultConfig`]. By default nothing goes wrong.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct FaultOptions {
    /// Makes calls late.
    pub delay: Option<DelayOptions>,
    /// Makes calls fail.
    pub abort: Option<AbortOptions>,
    /// Only calls with this header, as `["name", "value"]`. Default all.
    pub header: Option<(String, String)>,
    /// Faults under way at a time, at least 1. Default 1000.
    pub max_active: u32,
}

/// A delay.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DelayOptions {
    /// Share of calls, in [0, 1].
    pub share: f64,
    /// How long, at most 10 min.
    #[serde(with = "duration")]
    pub time: Duration,
    /// And up to so much more, at most 10 min. Default none.
    #[serde(with = "duration", default)]
    pub jitter: Duration,
}

/// A failure.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AbortOptions {
    /// Share of calls, in [0, 1].
    pub share: f64,
    /// The status that is answered, 200..=599.
    pub status: u16,
}

impl AbortOptions {
    pub(super) fn code(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

impl Default for FaultOptions {
    fn default() -> Self {
        Self { delay: None, abort: None, header: None, max_active: 1000 }
    }
}

/// Settings that can be relied on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "FaultOptions")]
pub struct FaultConfig {
    options: FaultOptions,
}

impl FaultConfig {
    /// What was written.
    pub fn options(&self) -> &FaultOptions {
        &self.options
    }
}

impl TryFrom<FaultOptions> for FaultConfig {
    type Error = InvalidConfig;

    fn try_from(options: FaultOptions) -> Result<Self, InvalidConfig> {
        let mut faults = Faults::default();
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        let most = Duration::from_secs(600);
        if let Some(DelayOptions { share, time, jitter }) = &options.delay {
            faults.unless_value(is_share(*share), "delay.share", "in [0, 1]", share);
            let text = duration::format;
            faults.unless_value(*time <= most, "delay.time", "at most 10m", text(*time));
            faults.unless_value(*jitter <= most, "delay.jitter", "at most 10m", text(*jitter));
        }
        if let Some(AbortOptions { share, status }) = &options.abort {
            faults.unless_value(is_share(*share), "abort.share", "in [0, 1]", share);
            faults.unless_value((200..=599).contains(status), "abort.status", "200..=599", status);
        }
        if let Some((name, _)) = &options.header {
            let is_name = name.parse::<http::HeaderName>().is_ok();
            faults.unless_value(is_name, "header", "the name of a header, and a value", name);
        }
        let active = options.max_active;
        faults.unless_value(active >= 1, "max-active", "at least 1", active);
        faults.into_result(Self { options })
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let hour = Duration::from_secs(3600);
        let options = FaultOptions {
            delay: Some(DelayOptions { share: 2.0, time: hour, jitter: hour }),
            abort: Some(AbortOptions { share: f64::NAN, status: 99 }),
            header: Some(("no name".to_owned(), String::new())),
            max_active: 0,
        };
        assert_eq!(FaultConfig::try_from(options).unwrap_err().faults().len(), 7);
        assert!(FaultConfig::try_from(FaultOptions::default()).is_ok());
    }
}
