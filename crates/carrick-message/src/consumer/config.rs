//! Settings of a consumer: as written, and as checked.

use std::{ops::RangeInclusive, time::Duration};

use carrick_core::{
    backoff::Backoff,
    config::{Faults, InvalidConfig, duration, size},
};
use serde::Deserialize;

use super::core::{CircuitRules, LeaseRules, Limits, Rules};
use crate::broker::{MAX_LEASE, MIN_LEASE};

/// The largest event must fit.
const LEAST_BYTES: usize = 1024 * 1024;
/// The longest wait that brokers take.
const MAX_WAIT: Duration = Duration::from_secs(5 * 60);
/// Gathered for longer, acknowledgements would only make a crash cost more.
const MAX_SETTLE_AFTER: Duration = Duration::from_secs(1);

/// Consumer settings as an operator writes them; becomes a [`ConsumerConfig`].
///
/// ```
/// use carrick_message::consumer::{ConsumerConfig, ConsumerOptions};
///
/// let options = ConsumerOptions { concurrency: 4, ..ConsumerOptions::default() };
/// assert!(ConsumerConfig::try_from(options).is_ok());
///
/// let options = ConsumerOptions { concurrency: 0, ..ConsumerOptions::default() };
/// let error = ConsumerConfig::try_from(options).unwrap_err();
/// assert!(error.to_string().contains("concurrency"));
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConsumerOptions {
    /// Handlers that run at a time, 1..=10 000. Default 64.
    pub concurrency: usize,
    /// Events fetched ahead at most, 0..=1000; how many really depends on `latency-target`.
    /// Default 500.
    pub prefetch: usize,
    /// Bytes of events held at a time, at least 1 MiB, the largest event. Default 64 MiB.
    #[serde(with = "size")]
    pub in_flight_bytes: usize,
    /// Events of one key held behind its head, 1..=1000. Default 32.
    pub lane: usize,
    /// How long an event may wait here for a free handler; bounds what is fetched ahead by the
    /// handling times measured. Above zero. Default 100 ms.
    #[serde(with = "duration")]
    pub latency_target: Duration,
    /// How long a fetch waits at the broker for the first event, up to 5 min. Default 25 s, below
    /// what proxies cut off.
    #[serde(with = "duration")]
    pub wait: Duration,
    /// How long a lease holds, 1 s to 12 h; extended at a third. Default 30 s.
    #[serde(with = "duration")]
    pub lease: Duration,
    /// How long an event is held in all, with every extension: at least `handler-timeout` and
    /// `lease`. Default 10 min.
    #[serde(with = "duration")]
    pub lease_cap: Duration,
    /// How long one run of the handler may take, above zero. Default 5 min.
    #[serde(with = "duration")]
    pub handler_timeout: Duration,
    /// Deliveries before an event is put aside, from 1. Default 10.
    pub max_attempts: u32,
    /// Time after its first delivery at which an event that fails is put aside, above zero.
    /// Default 24 h.
    #[serde(with = "duration")]
    pub max_age: Duration,
    /// First pause between attempts, above zero; doubles, with full jitter. Default 1 s.
    #[serde(with = "duration")]
    pub backoff: Duration,
    /// Longest pause between attempts, at least `backoff`. Default 5 min.
    #[serde(with = "duration")]
    pub max_backoff: Duration,
    /// How long verdicts are gathered before they are sent, up to 1 s. Default 2 ms.
    #[serde(with = "duration")]
    pub settle_after: Duration,
    /// Verdicts that are sent at once, 1..=1000. Default 100.
    pub settle_batch: usize,
    /// Results that the circuit looks at, 5..=1000. Default 20.
    pub circuit_window: usize,
    /// Share of them that must fail alike to open it, in (0, 1]. Default 0.9.
    pub circuit_share: f64,
    /// First cool-down of the circuit, above zero; doubles. Default 30 s.
    #[serde(with = "duration")]
    pub circuit_cool_down: Duration,
    /// Longest cool-down, at least `circuit-cool-down`. Default 5 min.
    #[serde(with = "duration")]
    pub circuit_max_cool_down: Duration,
    /// First attempts on events younger than this continue their producer's trace; all others start
    /// a trace of their own and link to it. Default 0 s: always link.
    #[serde(with = "duration")]
    pub trace_join: Duration,
    /// How long running handlers may go on once the consumer is stopped. Default 30 s.
    #[serde(with = "duration")]
    pub grace: Duration,
}

impl Default for ConsumerOptions {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_secs(60);
        Self {
            concurrency: 64,
            prefetch: 500,
            in_flight_bytes: 64 * 1024 * 1024,
            lane: 32,
            latency_target: Duration::from_millis(100),
            wait: Duration::from_secs(25),
            lease: Duration::from_secs(30),
            lease_cap: 10 * MINUTE,
            handler_timeout: 5 * MINUTE,
            max_attempts: 10,
            max_age: 24 * 60 * MINUTE,
            backoff: Duration::from_secs(1),
            max_backoff: 5 * MINUTE,
            settle_after: Duration::from_millis(2),
            settle_batch: 100,
            circuit_window: 20,
            circuit_share: 0.9,
            circuit_cool_down: Duration::from_secs(30),
            circuit_max_cool_down: 5 * MINUTE,
            trace_join: Duration::ZERO,
            grace: Duration::from_secs(30),
        }
    }
}

/// Settings that a consumer can rely on.
///
/// ```
/// use carrick_message::consumer::{ConsumerConfig, ConsumerOptions};
///
/// let config: ConsumerConfig = ConsumerOptions::default().try_into()?;
/// # drop(config);
/// # Ok::<(), carrick_core::config::InvalidConfig>(())
/// ```
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "ConsumerOptions")]
pub struct ConsumerConfig {
    rules: Rules,
    wait: Duration,
    trace_join: Duration,
    grace: Duration,
}

impl ConsumerConfig {
    pub(super) fn rules(&self) -> Rules {
        self.rules.clone()
    }

    pub(super) fn lease(&self) -> Duration {
        self.rules.leases.lease
    }

    pub(super) fn wait(&self) -> Duration {
        self.wait
    }

    pub(super) fn trace_join(&self) -> Duration {
        self.trace_join
    }

    pub(super) fn grace(&self) -> Duration {
        self.grace
    }
}

impl Default for ConsumerConfig {
    fn default() -> Self {
        ConsumerOptions::default().try_into().expect("the defaults are within their ranges")
    }
}

impl TryFrom<ConsumerOptions> for ConsumerConfig {
    type Error = InvalidConfig;

    fn try_from(options: ConsumerOptions) -> Result<Self, InvalidConfig> {
        let ConsumerOptions {
            concurrency,
            prefetch,
            in_flight_bytes,
            lane,
            latency_target,
            wait,
            lease,
            lease_cap,
            handler_timeout,
            max_attempts,
            max_age,
            backoff,
            max_backoff,
            settle_after,
            settle_batch,
            circuit_window,
            circuit_share,
            circuit_cool_down,
            circuit_max_cool_down,
            trace_join,
            grace,
        } = options;
        let share_is_one = 0.0 < circuit_share && circuit_share <= 1.0; // refuses NaN too
        let mut faults = Faults::default();
        let mut count = |within: &RangeInclusive<usize>, key, range, value| {
            faults.unless_value(within.contains(&value), key, range, value);
        };
        count(&(1..=10_000), "concurrency", "1..=10000", concurrency);
        count(&(0..=1000), "prefetch", "0..=1000", prefetch);
        count(&(1..=1000), "lane", "1..=1000", lane);
        count(&(1..=1000), "settle-batch", "1..=1000", settle_batch);
        count(&(5..=1000), "circuit-window", "5..=1000", circuit_window);
        let large = in_flight_bytes >= LEAST_BYTES;
        let given = size::format(in_flight_bytes as u64);
        faults.unless_value(large, "in-flight-bytes", "at least 1MiB", given);
        faults.unless_value(max_attempts >= 1, "max-attempts", "at least 1", max_attempts);
        faults.unless_value(share_is_one, "circuit-share", "in (0, 1]", circuit_share);
        let mut time = |holds, key, range: &str, value| {
            faults.unless_value(holds, key, range, duration::format(value));
        };
        time(!latency_target.is_zero(), "latency-target", "above zero", latency_target);
        time(wait <= MAX_WAIT, "wait", "at most 5m", wait);
        time((MIN_LEASE..=MAX_LEASE).contains(&lease), "lease", "1s to 12h", lease);
        time(!handler_timeout.is_zero(), "handler-timeout", "above zero", handler_timeout);
        time(!max_age.is_zero(), "max-age", "above zero", max_age);
        time(!backoff.is_zero(), "backoff", "above zero", backoff);
        time(settle_after <= MAX_SETTLE_AFTER, "settle-after", "at most 1s", settle_after);
        time(!circuit_cool_down.is_zero(), "circuit-cool-down", "above zero", circuit_cool_down);
        // What depends on another setting names it with its number.
        for (key, value, least, than) in [
            ("lease-cap", lease_cap, lease, "lease"),
            ("lease-cap", lease_cap, handler_timeout, "handler-timeout"),
            ("max-backoff", max_backoff, backoff, "backoff"),
            (
                "circuit-max-cool-down",
                circuit_max_cool_down,
                circuit_cool_down,
                "circuit-cool-down",
            ),
        ] {
            let range = format!("at least {than} ({})", duration::format(least));
            time(value >= least, key, &range, value);
        }
        faults.into_result(Self {
            rules: Rules {
                concurrency,
                prefetch,
                in_flight_bytes,
                lane,
                latency_target,
                handler_timeout,
                settle_after,
                settle_batch,
                leases: LeaseRules { lease, cap: lease_cap },
                limits: Limits {
                    max_attempts,
                    max_age: Some(max_age),
                    backoff: Backoff { base: backoff, cap: max_backoff },
                },
                circuit: CircuitRules {
                    window: circuit_window,
                    share: circuit_share,
                    cool_down: circuit_cool_down,
                    max_cool_down: circuit_max_cool_down,
                },
            },
            wait,
            trace_join,
            grace,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_faults_are_told_at_once_with_key_range_and_numbers() {
        let second = Duration::from_secs(1);
        let options = ConsumerOptions {
            concurrency: 0,
            circuit_share: f64::NAN,
            lease_cap: 60 * second,
            max_backoff: second / 2,
            ..ConsumerOptions::default()
        };
        let error = ConsumerConfig::try_from(options).unwrap_err().to_string();
        for told in [
            "concurrency must be 1..=10000, not 0",
            "circuit-share must be in (0, 1], not NaN",
            "lease-cap must be at least handler-timeout (5m), not 1m",
            "max-backoff must be at least backoff (1s), not 500ms",
        ] {
            assert!(error.contains(told), "{told:?} is missing in {error:?}");
        }
        assert_eq!(error.matches(" must be ").count(), 4, "{error}");
    }

    #[test]
    fn limits_at_their_ends_are_allowed() {
        let least = ConsumerOptions {
            concurrency: 1,
            prefetch: 0,
            in_flight_bytes: LEAST_BYTES,
            lane: 1,
            lease: MIN_LEASE,
            max_attempts: 1,
            settle_after: Duration::ZERO,
            settle_batch: 1,
            circuit_window: 5,
            circuit_share: 1.0,
            ..ConsumerOptions::default()
        };
        assert!(ConsumerConfig::try_from(least).is_ok());
        let most = ConsumerOptions {
            concurrency: 10_000,
            prefetch: 1000,
            lane: 1000,
            lease: MAX_LEASE,
            lease_cap: MAX_LEASE,
            ..ConsumerOptions::default()
        };
        assert!(ConsumerConfig::try_from(most).is_ok());
    }

    #[test]
    fn an_unknown_key_is_an_error_and_texts_have_units() {
        let config: Result<ConsumerConfig, _> =
            serde_json::from_str(r#"{"lease": "45s", "in-flight-bytes": "2MiB"}"#);
        assert_eq!(config.unwrap().lease(), Duration::from_secs(45));
        assert!(serde_json::from_str::<ConsumerConfig>(r#"{"leese": "45s"}"#).is_err());
    }
}
