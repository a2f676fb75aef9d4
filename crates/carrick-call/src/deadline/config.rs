//! Settings of both sides.

use std::{ops::RangeInclusive, time::Duration};

use carrick_core::{
    config::{Faults, InvalidConfig, duration},
    deadline::{Deadline, Limits},
};
use serde::Deserialize;
use tokio::time::Instant;

use crate::Mode;

const SPAN: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(86_400);

/// Settings of a server as an operator writes them; become a [`DeadlineConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeadlineOptions {
    /// The longest that any request may take, 1 ms to 1 d. Default 2 s.
    #[serde(with = "duration")]
    pub max: Duration,
    /// With less left, work is not started, at most `max`. Default 50 ms.
    #[serde(with = "duration")]
    pub min_useful: Duration,
    /// An absolute deadline further in the past than this is a wrong clock. Default 5 s.
    #[serde(with = "duration")]
    pub skew: Duration,
    /// Share of requests that may be refused in 10 s, in [0, 1], so that one caller with a wrong
    /// setting cannot shut a service. Default 0.2.
    pub max_refused: f64,
    /// Until when answers that are streams may go on.
    pub stream: StreamOptions,
    /// Whether a request that comes with too little time left is refused, or only counted. Default
    /// `observe`: look at the counters before you enforce it.
    pub refuse: Mode,
    /// Whether requests are ended when their time is over, or only counted. Default `enforce`.
    pub mode: Mode,
}

impl Default for DeadlineOptions {
    fn default() -> Self {
        let Limits { max, min_useful, skew } = Limits::default();
        Self {
            max,
            min_useful,
            skew,
            max_refused: 0.2,
            stream: StreamOptions::default(),
            refuse: Mode::Observe,
            mode: Mode::Enforce,
        }
    }
}

/// Settings that a server can rely on.
///
/// ```
/// # use carrick_call::deadline::{DeadlineConfig, DeadlineOptions};
/// # use std::time::Duration;
/// let long = DeadlineOptions { min_useful: Duration::from_secs(3), ..Default::default() };
/// let wrong = DeadlineConfig::try_from(long).unwrap_err();
/// assert_eq!(wrong.to_string(), "min-useful must be at most max (2s), not 3s");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "DeadlineOptions")]
pub struct DeadlineConfig {
    pub(super) options: DeadlineOptions,
}

impl TryFrom<DeadlineOptions> for DeadlineConfig {
    type Error = InvalidConfig;

    fn try_from(options: DeadlineOptions) -> Result<Self, InvalidConfig> {
        let DeadlineOptions { max, min_useful, skew: _, max_refused, stream, refuse: _, mode: _ } =
            options;
        let mut faults = Faults::default();
        check_spans(&mut faults, "max", max, min_useful);
        let share = (0.0..=1.0).contains(&max_refused);
        faults.unless_value(share, "max-refused", "in [0, 1]", max_refused);
        faults.take("stream", StreamConfig::try_from(stream));
        faults.into_result(Self { options })
    }
}

/// Settings of streams as an operator writes them; become a [`StreamConfig`].
///
/// A stream has no total deadline from its head on: it may go on while something comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamOptions {
    /// How long the first frame may take after the head, 1 ms to 1 d. Default 10 s.
    #[serde(with = "duration")]
    pub first_byte: Duration,
    /// How long it may be silent, 1 ms to 1 d. Default 1 min.
    #[serde(with = "duration")]
    pub idle: Duration,
    /// How long it may live, 1 ms to 1 d. Default 1 h.
    #[serde(with = "duration")]
    pub lifetime: Duration,
}

impl Default for StreamOptions {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { first_byte: seconds(10), idle: seconds(60), lifetime: seconds(3600) }
    }
}

/// Settings of streams that can be relied on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "StreamOptions")]
pub struct StreamConfig {
    options: StreamOptions,
}

impl StreamConfig {
    /// What was written.
    pub fn options(&self) -> &StreamOptions {
        &self.options
    }
}

impl StreamOptions {
    /// When a stream that begins now ends in any case; `asked` is what its caller said.
    pub(crate) fn ends(&self, asked: Option<Deadline>, now: Instant) -> Deadline {
        let age = Deadline::at(now + self.lifetime);
        asked.map_or(age, |asked| asked.earlier(age))
    }
}

impl TryFrom<StreamOptions> for StreamConfig {
    type Error = InvalidConfig;

    fn try_from(options: StreamOptions) -> Result<Self, InvalidConfig> {
        let StreamOptions { first_byte, idle, lifetime } = options;
        let mut faults = Faults::default();
        for (key, span) in [("first-byte", first_byte), ("idle", idle), ("lifetime", lifetime)] {
            faults.unless_value(SPAN.contains(&span), key, "1ms to 1d", duration::format(span));
        }
        faults.into_result(Self { options })
    }
}

/// Settings of a client as an operator writes them; become a [`ClientDeadlineConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClientDeadlineOptions {
    /// How long a call may take in all if its caller has no shorter deadline, 1 ms to 1 d. Default 2 s.
    #[serde(with = "duration")]
    pub timeout: Duration,
    /// With less left, nothing is sent, at most `timeout`. Default 50 ms.
    #[serde(with = "duration")]
    pub min_useful: Duration,
    /// Until when answers that are streams may go on.
    pub stream: StreamOptions,
    /// Whether calls are refused and ended, or it is only counted which would be. What is sent of the
    /// deadline is sent in both. Default `enforce`.
    pub mode: Mode,
}

impl Default for ClientDeadlineOptions {
    fn default() -> Self {
        let Limits { max, min_useful, .. } = Limits::default();
        let stream = StreamOptions::default();
        Self { timeout: max, min_useful, stream, mode: Mode::default() }
    }
}

/// Settings that a client can rely on.
///
/// ```
/// # use carrick_call::deadline::{ClientDeadlineConfig, ClientDeadlineOptions};
/// # use std::time::Duration;
/// let none = ClientDeadlineOptions { timeout: Duration::ZERO, ..Default::default() };
/// let wrong = ClientDeadlineConfig::try_from(none).unwrap_err();
/// assert_eq!(wrong.faults().len(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "ClientDeadlineOptions")]
pub struct ClientDeadlineConfig {
    pub(super) options: ClientDeadlineOptions,
}

impl TryFrom<ClientDeadlineOptions> for ClientDeadlineConfig {
    type Error = InvalidConfig;

    fn try_from(options: ClientDeadlineOptions) -> Result<Self, InvalidConfig> {
        let ClientDeadlineOptions { timeout, min_useful, stream, mode: _ } = options;
        let mut faults = Faults::default();
        check_spans(&mut faults, "timeout", timeout, min_useful);
        faults.take("stream", StreamConfig::try_from(stream));
        faults.into_result(Self { options })
    }
}

fn check_spans(faults: &mut Faults, key: &str, max: Duration, min_useful: Duration) {
    let text = duration::format;
    faults.unless_value(SPAN.contains(&max), key, "1ms to 1d", text(max));
    let range = format!("at most {key} ({})", text(max));
    faults.unless_value(min_useful <= max, "min-useful", &range, text(min_useful));
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = DeadlineOptions {
            max: Duration::ZERO,
            min_useful: Duration::from_secs(1),
            max_refused: f64::NAN,
            stream: StreamOptions {
                first_byte: Duration::ZERO,
                idle: Duration::from_secs(86_401),
                lifetime: Duration::MAX,
            },
            ..DeadlineOptions::default()
        };
        let wrong = DeadlineConfig::try_from(options).unwrap_err();
        let keys: Vec<_> = wrong.faults().iter().map(|fault| fault.key.as_str()).collect();
        let streams = ["stream.first-byte", "stream.idle", "stream.lifetime"];
        assert_eq!(keys, [&["max", "min-useful", "max-refused"][..], &streams[..]].concat());
        assert!(DeadlineConfig::try_from(DeadlineOptions::default()).is_ok());
        assert!(ClientDeadlineConfig::try_from(ClientDeadlineOptions::default()).is_ok());
    }

    #[test]
    fn both_are_read_from_toml_and_unknown_keys_are_errors() {
        let text = "max = \"500ms\"\nstream.idle = \"5s\"\nrefuse = \"enforce\"";
        let config: DeadlineConfig = toml::from_str(text).unwrap();
        assert_eq!(config.options.max, Duration::from_millis(500));
        assert_eq!(config.options.stream.idle, Duration::from_secs(5));
        assert_eq!(config.options.refuse, Mode::Enforce);
        let config: ClientDeadlineConfig = toml::from_str("timeout = \"500ms\"").unwrap();
        assert_eq!(config.options.timeout, Duration::from_millis(500));
        assert!(toml::from_str::<ClientDeadlineConfig>("max = \"500ms\"").is_err());
    }
}
