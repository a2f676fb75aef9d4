//! Settings of the connections to a dependency.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

/// Settings of a pool as an operator writes them; become a [`PoolConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PoolOptions {
    /// Speak HTTP/2 without asking. With `https` it is otherwise chosen with the peer. Default no.
    pub http2: bool,
    /// How long a connection may take to be made, 1 ms to 1 min. Default 1 s.
    #[serde(with = "duration")]
    pub connect_timeout: Duration,
    /// Idle connections kept to each host, 1..=10 000. Default 64.
    pub max_idle: usize,
    /// How long an idle connection is kept, 1 s to 1 h. Default 50 s: shorter than servers keep
    /// theirs, so that a request seldom meets one that is just being closed.
    #[serde(with = "duration")]
    pub idle_timeout: Duration,
    /// Requests that a connection carries, 1..=1 000 000 000, give or take a tenth. Default 100 000.
    pub max_requests: u32,
    /// How long a connection is used, 1 s to 1 d, give or take a tenth. Default 10 min: new hosts and
    /// new certificates are met within that.
    #[serde(with = "duration")]
    pub max_age: Duration,
    /// With requests under way on HTTP/2, how long a connection may be silent before it is asked
    /// whether it lives, 1 s to 1 h. Default 30 s.
    #[serde(with = "duration")]
    pub keep_alive: Duration,
    /// How long it may take to answer that, 100 ms to 1 min. Default 10 s.
    #[serde(with = "duration")]
    pub keep_alive_timeout: Duration,
}

impl Default for PoolOptions {
    fn default() -> Self {
        let secs = Duration::from_secs;
        Self {
            http2: false,
            connect_timeout: secs(1),
            max_idle: 64,
            idle_timeout: secs(50),
            max_requests: 100_000,
            max_age: secs(600),
            keep_alive: secs(30),
            keep_alive_timeout: secs(10),
        }
    }
}

/// Settings that a pool can rely on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "PoolOptions")]
pub struct PoolConfig {
    options: PoolOptions,
}

impl PoolConfig {
    /// Whether HTTP/2 is spoken without asking.
    pub fn is_http2(&self) -> bool {
        self.options.http2
    }

    /// How long a connection may take to be made.
    pub fn connect_timeout(&self) -> Duration {
        self.options.connect_timeout
    }

    /// Idle connections kept to each host.
    pub fn max_idle(&self) -> usize {
        self.options.max_idle
    }

    /// How long an idle connection is kept.
    pub fn idle(&self) -> Duration {
        self.options.idle_timeout
    }

    /// Requests that a connection carries, before jitter.
    pub fn max_requests(&self) -> u32 {
        self.options.max_requests
    }

    /// How long a connection is used, before jitter.
    pub fn max_age(&self) -> Duration {
        self.options.max_age
    }

    /// How long an HTTP/2 connection may be silent.
    pub fn keep_alive(&self) -> Duration {
        self.options.keep_alive
    }

    /// How long it may take to answer.
    pub fn keep_alive_timeout(&self) -> Duration {
        self.options.keep_alive_timeout
    }
}

impl TryFrom<PoolOptions> for PoolConfig {
    type Error = InvalidConfig;

    fn try_from(options: PoolOptions) -> Result<Self, InvalidConfig> {
        let PoolOptions {
            http2: _,
            connect_timeout,
            max_idle,
            idle_timeout,
            max_requests,
            max_age,
            keep_alive,
            keep_alive_timeout,
        } = options;
        let mut faults = Faults::default();
        let (millis, secs) = (Duration::from_millis, Duration::from_secs);
        let mut span = |key, value: Duration, least: Duration, most: Duration| {
            let range = format!("{} to {}", duration::format(least), duration::format(most));
            let holds = (least..=most).contains(&value);
            faults.unless_value(holds, key, &range, duration::format(value));
        };
        span("connect-timeout", connect_timeout, millis(1), secs(60));
        span("idle-timeout", idle_timeout, secs(1), secs(3600));
        span("max-age", max_age, secs(1), secs(86_400));
        span("keep-alive", keep_alive, secs(1), secs(3600));
        span("keep-alive-timeout", keep_alive_timeout, millis(100), secs(60));
        faults.unless_value((1..=10_000).contains(&max_idle), "max-idle", "1..=10000", max_idle);
        let requests = (1..=1_000_000_000).contains(&max_requests);
        faults.unless_value(requests, "max-requests", "1..=1000000000", max_requests);
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let zero = Duration::ZERO;
        let options = PoolOptions {
            http2: true,
            connect_timeout: zero,
            max_idle: 0,
            idle_timeout: zero,
            max_requests: 0,
            max_age: zero,
            keep_alive: zero,
            keep_alive_timeout: zero,
        };
        let faults = PoolConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 7, "{faults}");
        assert!(PoolConfig::try_from(PoolOptions::default()).is_ok());
    }
}
