//! How long an inbox remembers, and whether that is long enough.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Retention settings as an operator writes them; becomes a [`Retention`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RetentionOptions {
    /// How long an event is remembered, at least 1 min. Default 40 d (`"960h"`).
    #[serde(with = "duration")]
    pub window: Duration,
    /// How long after its start a process forgets nothing: whatever was down together comes back
    /// together, and redelivers first. Default 10 min.
    #[serde(with = "duration")]
    pub grace: Duration,
    /// Between two prunes, 1 s to 24 h. Default 1 min.
    #[serde(with = "duration")]
    pub every: Duration,
    /// Rows that one statement removes, 1..=50 000. Default 5000.
    pub rows: usize,
    /// Statements of one prune, 1..=1000. Default 20.
    pub batches: usize,
}

impl Default for RetentionOptions {
    fn default() -> Self {
        Self {
            window: 40 * DAY,
            grace: Duration::from_secs(10 * 60),
            every: Duration::from_secs(60),
            rows: 5000,
            batches: 20,
        }
    }
}

/// Retention that an inbox can rely on.
///
/// ```
/// use std::time::Duration;
/// use carrick_message::inbox::{Horizon, Retention};
///
/// let day = Duration::from_secs(24 * 60 * 60);
/// let retention = Retention::default();
/// let horizon = Horizon { broker: 7 * day, dead_letters: 30 * day, replay: Duration::ZERO };
/// assert!(retention.covers(&horizon).is_ok());
/// let longer = Horizon { replay: 14 * day, ..horizon };
/// assert!(retention.covers(&longer).is_err(), "51 days do not fit into 40");
/// ```
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RetentionOptions")]
pub struct Retention {
    pub(crate) window: Duration,
    pub(crate) grace: Duration,
    pub(crate) every: Duration,
    pub(crate) rows: usize,
    pub(crate) batches: usize,
}

impl Default for Retention {
    fn default() -> Self {
        RetentionOptions::default().try_into().expect("the defaults are within their ranges")
    }
}

impl TryFrom<RetentionOptions> for Retention {
    type Error = InvalidConfig;

    fn try_from(options: RetentionOptions) -> Result<Self, InvalidConfig> {
        let RetentionOptions { window, grace, every, rows, batches } = options;
        let mut faults = Faults::default();
        faults.unless(window >= Duration::from_secs(60), "window", "at least 1m");
        faults.unless((Duration::from_secs(1)..=DAY).contains(&every), "every", "1s to 24h");
        faults.unless((1..=50_000).contains(&rows), "rows", "1..=50000");
        faults.unless((1..=1000).contains(&batches), "batches", "1..=1000");
        faults.into_result(Self { window, grace, every, rows, batches })
    }
}

/// How late an event may come again, by what may bring it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Horizon {
    /// How long the broker keeps and redelivers events.
    pub broker: Duration,
    /// How long dead letters are kept, and may be redriven.
    pub dead_letters: Duration,
    /// How far back an outbox may be replayed beyond that.
    pub replay: Duration,
}

impl Horizon {
    /// The longest way that an event can take: it waits in the broker, dies, is redriven.
    pub fn longest(&self) -> Duration {
        self.broker.saturating_add(self.dead_letters).saturating_add(self.replay)
    }
}

impl Retention {
    /// How long an event is remembered.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Checks that every repeat comes while its event is remembered.
    ///
    /// # Errors
    /// [`InvalidConfig`], which shows the sum.
    pub fn covers(&self, horizon: &Horizon) -> Result<(), InvalidConfig> {
        let mut faults = Faults::default();
        let long_enough = self.window >= horizon.longest();
        faults.unless(
            long_enough,
            "window",
            "at least the broker's retention, that of dead letters and the replay together",
        );
        faults.into_result(())
    }

    /// Whether a process may forget anything this long after its start.
    pub(crate) fn may_prune(&self, since_start: Duration) -> bool {
        since_start >= self.grace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_forgotten_right_after_the_start() {
        let retention = Retention::default();
        assert!(!retention.may_prune(Duration::from_secs(599)));
        assert!(retention.may_prune(Duration::from_secs(600)));
    }

    #[test]
    fn all_faults_are_told_at_once() {
        let options =
            RetentionOptions { window: Duration::ZERO, rows: 0, ..RetentionOptions::default() };
        let told = Retention::try_from(options).unwrap_err().to_string();
        assert!(told.contains("window") && told.contains("rows"), "{told}");
    }
}
