//! Settings of retries.

use std::time::Duration;

use carrick_core::{
    backoff::Backoff,
    config::{Faults, InvalidConfig, duration, size},
};
use serde::Deserialize;

/// Settings as an operator writes them; become a [`RetryConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RetryOptions {
    /// Attempts, the first among them, 1..=20. Default 3. In a file it stands beside the timeouts that
    /// it is multiplied with.
    #[serde(skip)]
    pub max_attempts: u32,
    /// Bound of the first wait; doubles with each. 1 ms to 1 min. Default 200 ms.
    #[serde(with = "duration")]
    pub backoff: Duration,
    /// Bound of every wait, `backoff` to 10 min. Default 10 s.
    #[serde(with = "duration")]
    pub backoff_cap: Duration,
    /// The longest wait that a server may ask for, at most 1 h. Default 30 s.
    #[serde(with = "duration")]
    pub retry_after_cap: Duration,
    /// With less than this left after the wait, no try is made, at most 1 min. Default 50 ms.
    #[serde(with = "duration")]
    pub min_useful: Duration,
    /// Bytes of a body that are kept to be sent again, at most 16 MiB. Default 64 KiB.
    #[serde(with = "size")]
    pub replay: usize,
}

impl Default for RetryOptions {
    fn default() -> Self {
        let Backoff { base, cap } = Backoff::default();
        Self {
            max_attempts: 3,
            backoff: base,
            backoff_cap: cap,
            retry_after_cap: Duration::from_secs(30),
            min_useful: Duration::from_millis(50),
            replay: 64 * 1024,
        }
    }
}

/// Settings that retries can rely on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RetryOptions")]
pub struct RetryConfig {
    options: RetryOptions,
}

impl RetryConfig {
    /// Attempts, the first among them.
    pub fn max_attempts(&self) -> u32 {
        self.options.max_attempts
    }

    /// Bounds of the waits.
    pub fn backoff(&self) -> Backoff {
        Backoff { base: self.options.backoff, cap: self.options.backoff_cap }
    }

    /// The longest wait that a server may ask for.
    pub fn retry_after_cap(&self) -> Duration {
        self.options.retry_after_cap
    }

    /// What must be left for a try.
    pub fn min_useful(&self) -> Duration {
        self.options.min_useful
    }

    /// Bytes of a body that are kept.
    pub fn replay(&self) -> usize {
        self.options.replay
    }

    /// The waits between all attempts at their longest.
    pub fn worst_backoff(&self) -> Duration {
        let waits = 0..self.max_attempts().saturating_sub(1);
        waits.map(|n| self.backoff().bound(n)).fold(Duration::ZERO, Duration::saturating_add)
    }
}

impl TryFrom<RetryOptions> for RetryConfig {
    type Error = InvalidConfig;

    fn try_from(options: RetryOptions) -> Result<Self, InvalidConfig> {
        let RetryOptions {
            max_attempts,
            backoff,
            backoff_cap,
            retry_after_cap,
            min_useful,
            replay,
        } = options;
        let mut faults = Faults::default();
        let text = duration::format;
        let secs = Duration::from_secs;
        let attempts = (1..=20).contains(&max_attempts);
        faults.unless_value(attempts, "max-attempts", "1..=20", max_attempts);
        let base = (Duration::from_millis(1)..=secs(60)).contains(&backoff);
        faults.unless_value(base, "backoff", "1ms to 1m", text(backoff));
        let cap = backoff <= backoff_cap && backoff_cap <= secs(600);
        let range = format!("backoff ({}) to 10m", text(backoff));
        faults.unless_value(cap, "backoff-cap", &range, text(backoff_cap));
        let asked = retry_after_cap <= secs(3600);
        faults.unless_value(asked, "retry-after-cap", "at most 1h", text(retry_after_cap));
        faults.unless_value(min_useful <= secs(60), "min-useful", "at most 1m", text(min_useful));
        let kept = replay <= 16 * 1024 * 1024;
        faults.unless_value(kept, "replay", "at most 16MiB", size::format(replay as u64));
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let hour = Duration::from_secs(3601);
        let options = RetryOptions {
            max_attempts: 0,
            backoff: hour,
            backoff_cap: Duration::ZERO,
            retry_after_cap: hour,
            min_useful: hour,
            replay: usize::MAX,
        };
        let faults = RetryConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 6, "{faults}");
        assert_eq!(RetryConfig::default().worst_backoff(), Duration::from_millis(600));
    }
}
