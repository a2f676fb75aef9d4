//! Settings of the feed, as written and as checked.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration, size};
use serde::Deserialize;

/// What an operator writes; becomes a [`FeedConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct FeedOptions {
    /// Readers that wait or stream, 1..=1 000 000. Default 20 000.
    pub subscribers: usize,
    /// Streams that may begin a second, 1..=1 000 000. Default 1000: five thousand clients are all
    /// back five seconds after a restart.
    pub admission: u32,
    /// Streams that may begin at once, 1..=1 000 000. Default 1000.
    pub admission_burst: u32,
    /// Events of a topic that its ring holds, 16..=65 536. Default 1024.
    pub ring_events: usize,
    /// Bytes of events of a topic that its ring holds, 64 KiB to 64 MiB. Default 1 MiB.
    #[serde(with = "size")]
    pub ring_bytes: usize,
    /// Silence before a stream is written to, 1 s to 5 min. Default 15 s: half of the shortest limit
    /// of the usual proxies.
    #[serde(with = "duration")]
    pub keep_alive: Duration,
    /// A reader is cut when so much waits for it, and for so long. 64 KiB to 1 GiB. Default 1 MiB.
    #[serde(with = "size")]
    pub slow_bytes: usize,
    /// See `slow-bytes`. 100 ms to 10 min. Default 5 s.
    #[serde(with = "duration")]
    pub slow_after: Duration,
    /// A reader that takes nothing is cut when so much waits for it, however short the time.
    /// `slow-bytes` to 1 GiB. Default 4 MiB.
    #[serde(with = "size")]
    pub slow_bytes_most: usize,
}

impl Default for FeedOptions {
    fn default() -> Self {
        Self {
            subscribers: 20_000,
            admission: 1000,
            admission_burst: 1000,
            ring_events: 1024,
            ring_bytes: 1 << 20,
            keep_alive: Duration::from_secs(15),
            slow_bytes: 1 << 20,
            slow_after: Duration::from_secs(5),
            slow_bytes_most: 4 << 20,
        }
    }
}

impl FeedOptions {
    /// Whether a reader is cut for whom so much waits, and who has taken nothing for so long.
    pub fn is_slow(&self, waiting: u64, blocked: Duration) -> bool {
        let at_least = |bytes: usize| waiting >= bytes as u64;
        at_least(self.slow_bytes_most) || at_least(self.slow_bytes) && blocked >= self.slow_after
    }
}

/// Settings that were checked.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "FeedOptions")]
pub struct FeedConfig(FeedOptions);

impl FeedConfig {
    /// The values.
    pub fn options(&self) -> &FeedOptions {
        &self.0
    }
}

impl Default for FeedConfig {
    fn default() -> Self {
        FeedOptions::default().try_into().expect("the defaults are in their ranges")
    }
}

impl TryFrom<FeedOptions> for FeedConfig {
    type Error = InvalidConfig;

    fn try_from(options: FeedOptions) -> Result<Self, InvalidConfig> {
        let FeedOptions {
            subscribers,
            admission,
            admission_burst,
            ring_events,
            ring_bytes,
            keep_alive,
            slow_bytes,
            slow_after,
            slow_bytes_most,
        } = options;
        let mut faults = Faults::default();
        let many = "1..=1000000";
        faults.unless_value(
            (1..=1_000_000).contains(&subscribers),
            "subscribers",
            many,
            subscribers,
        );
        let rates = 1..=1_000_000;
        faults.unless_value(rates.contains(&admission), "admission", many, admission);
        faults.unless_value(
            rates.contains(&admission_burst),
            "admission-burst",
            many,
            admission_burst,
        );
        let events = (16..=65_536).contains(&ring_events);
        faults.unless_value(events, "ring-events", "16..=65536", ring_events);
        let bytes = |value: usize| size::format(value as u64);
        let ring = (64 << 10..=64 << 20).contains(&ring_bytes);
        faults.unless_value(ring, "ring-bytes", "64KiB to 64MiB", bytes(ring_bytes));
        let silence = (Duration::from_secs(1)..=Duration::from_secs(300)).contains(&keep_alive);
        faults.unless_value(silence, "keep-alive", "1s to 5m", duration::format(keep_alive));
        let slow = (64 << 10..=1 << 30).contains(&slow_bytes);
        faults.unless_value(slow, "slow-bytes", "64KiB to 1GiB", bytes(slow_bytes));
        let after = (Duration::from_millis(100)..=Duration::from_secs(600)).contains(&slow_after);
        faults.unless_value(after, "slow-after", "100ms to 10m", duration::format(slow_after));
        let most = (slow_bytes..=1 << 30).contains(&slow_bytes_most);
        let range = "slow-bytes to 1GiB";
        faults.unless_value(most, "slow-bytes-most", range, bytes(slow_bytes_most));
        faults.into_result(Self(options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_names_its_key_and_its_value() {
        let options = FeedOptions { ring_events: 3, slow_bytes_most: 1, ..FeedOptions::default() };
        let told = FeedConfig::try_from(options).unwrap_err().to_string();
        assert!(told.contains("ring-events must be 16..=65536, not 3"), "{told}");
        assert!(told.contains("slow-bytes-most must be slow-bytes to 1GiB"), "{told}");
    }
}
