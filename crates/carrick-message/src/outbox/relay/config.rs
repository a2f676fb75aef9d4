//! Settings of a relay: as written, and as checked.

use std::time::Duration;

use carrick_core::{
    backoff::Backoff,
    config::{Faults, InvalidConfig, duration, size},
};
use serde::Deserialize;

use super::core::Limits;

/// Relay settings as an operator writes them; becomes a [`RelayConfig`].
///
/// ```
/// use carrick_message::outbox::{RelayConfig, RelayOptions};
///
/// let options = RelayOptions { batch: 200, ..RelayOptions::default() };
/// assert!(RelayConfig::try_from(options).is_ok());
/// let options = RelayOptions { batch: 0, ..RelayOptions::default() };
/// assert!(RelayConfig::try_from(options).unwrap_err().to_string().contains("batch"));
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RelayOptions {
    /// Events of one publish, 1..=1000. Default 100.
    pub batch: usize,
    /// Bytes of one publish, at least 1 KiB; one event may be larger. Default 1 MiB.
    #[serde(with = "size")]
    pub batch_bytes: usize,
    /// Publishes under way at a time, 1..=64. Default 8.
    pub window: usize,
    /// Rows of one read, 1..=5000. Default 500.
    pub page: usize,
    /// Bytes of rows in memory, at least 1 MiB. Default 32 MiB.
    #[serde(with = "size")]
    pub buffer_bytes: usize,
    /// How long a publish may take, above zero. Default 30 s.
    #[serde(with = "duration")]
    pub publish_timeout: Duration,
    /// Until the next look after one that found something, 1 ms to 1 s. Default 5 ms.
    #[serde(with = "duration")]
    pub busy_poll: Duration,
    /// Until the next look at most, while nothing is found and nobody wakes the relay; `busy-poll`
    /// to 10 s. Default 250 ms.
    #[serde(with = "duration")]
    pub idle_poll: Duration,
    /// Between two sweeps, which find what no read can: rows that were restored, or marked
    /// unpublished by hand. 1 s to 1 h. Default 30 s.
    #[serde(with = "duration")]
    pub sweep: Duration,
    /// How long leases hold, 1 s to 10 min: after a crash, rows wait for at most twice that.
    /// Default 30 s.
    #[serde(with = "duration")]
    pub lease: Duration,
    /// First pause before a failed row is tried again, above zero; doubles, with full jitter.
    /// Default 1 s.
    #[serde(with = "duration")]
    pub backoff: Duration,
    /// Longest such pause, at least `backoff`. Default 5 min.
    #[serde(with = "duration")]
    pub max_backoff: Duration,
    /// How long published rows are kept, for replay. Default 7 d (`"168h"`).
    #[serde(with = "duration")]
    pub keep: Duration,
    /// Between two prunes of rows that were kept long enough, 1 s to 24 h. Default 1 min.
    #[serde(with = "duration")]
    pub prune_every: Duration,
    /// Rows that one statement removes, 1..=50 000. Default 5000.
    pub prune_rows: usize,
    /// Statements of one prune, 1..=1000. Default 20.
    pub prune_batches: usize,
    /// How long publishes under way may go on once the relay is stopped. Default 10 s.
    #[serde(with = "duration")]
    pub grace: Duration,
}

impl Default for RelayOptions {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_secs(60);
        Self {
            batch: 100,
            batch_bytes: 1024 * 1024,
            window: 8,
            page: 500,
            buffer_bytes: 32 * 1024 * 1024,
            publish_timeout: Duration::from_secs(30),
            busy_poll: Duration::from_millis(5),
            idle_poll: Duration::from_millis(250),
            sweep: Duration::from_secs(30),
            lease: Duration::from_secs(30),
            backoff: Duration::from_secs(1),
            max_backoff: 5 * MINUTE,
            keep: 7 * 24 * 60 * MINUTE,
            prune_every: MINUTE,
            prune_rows: 5000,
            prune_batches: 20,
            grace: Duration::from_secs(10),
        }
    }
}

/// Settings that a relay can rely on.
///
/// ```
/// use carrick_message::outbox::{RelayConfig, RelayOptions};
///
/// let config: RelayConfig = RelayOptions::default().try_into()?;
/// # drop(config);
/// # Ok::<(), carrick_core::config::InvalidConfig>(())
/// ```
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RelayOptions")]
pub struct RelayConfig {
    pub(crate) limits: Limits,
    pub(crate) publish_timeout: Duration,
    pub(crate) lease: Duration,
    pub(crate) keep: Duration,
    pub(crate) prune_every: Duration,
    pub(crate) prune_rows: usize,
    pub(crate) prune_batches: usize,
    pub(crate) grace: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        RelayOptions::default().try_into().expect("the defaults are within their ranges")
    }
}

impl TryFrom<RelayOptions> for RelayConfig {
    type Error = InvalidConfig;

    fn try_from(options: RelayOptions) -> Result<Self, InvalidConfig> {
        let RelayOptions {
            batch,
            batch_bytes,
            window,
            page,
            buffer_bytes,
            publish_timeout,
            busy_poll,
            idle_poll,
            sweep,
            lease,
            backoff,
            max_backoff,
            keep,
            prune_every,
            prune_rows,
            prune_batches,
            grace,
        } = options;
        let second = Duration::from_secs(1);
        let mut faults = Faults::default();
        faults.unless((1..=1000).contains(&batch), "batch", "1..=1000");
        faults.unless(batch_bytes >= 1024, "batch-bytes", "at least 1KiB");
        faults.unless((1..=64).contains(&window), "window", "1..=64");
        faults.unless((1..=5000).contains(&page), "page", "1..=5000");
        faults.unless(buffer_bytes >= 1024 * 1024, "buffer-bytes", "at least 1MiB");
        faults.unless(!publish_timeout.is_zero(), "publish-timeout", "above zero");
        let is_busy = (Duration::from_millis(1)..=second).contains(&busy_poll);
        faults.unless(is_busy, "busy-poll", "1ms to 1s");
        let is_idle = (busy_poll..=10 * second).contains(&idle_poll);
        faults.unless(is_idle, "idle-poll", "busy-poll to 10s");
        faults.unless((second..=3600 * second).contains(&sweep), "sweep", "1s to 1h");
        faults.unless((second..=600 * second).contains(&lease), "lease", "1s to 10m");
        faults.unless(!backoff.is_zero(), "backoff", "above zero");
        faults.unless(max_backoff >= backoff, "max-backoff", "at least backoff");
        let is_period = (second..=86_400 * second).contains(&prune_every);
        faults.unless(is_period, "prune-every", "1s to 24h");
        faults.unless((1..=50_000).contains(&prune_rows), "prune-rows", "1..=50000");
        faults.unless((1..=1000).contains(&prune_batches), "prune-batches", "1..=1000");
        faults.into_result(Self {
            limits: Limits {
                batch,
                batch_bytes,
                window,
                page,
                // Enough for a full window, its marks and the next page.
                buffer: (2 * batch * window + page).max(4 * page),
                buffer_bytes,
                busy_poll,
                idle_poll,
                sweep,
                retry: Backoff { base: backoff, cap: max_backoff },
                outage: Backoff { base: Duration::from_millis(50), cap: 5 * second },
            },
            publish_timeout,
            lease,
            keep,
            prune_every,
            prune_rows,
            prune_batches,
            grace,
        })
    }
}
