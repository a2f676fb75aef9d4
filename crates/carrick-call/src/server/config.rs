//! Settings of a server.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use serde::Deserialize;

use crate::{
    bulkhead::{BulkheadConfig, BulkheadOptions},
    deadline::{DeadlineConfig, DeadlineOptions},
    queue::{QueueConfig, QueueOptions},
};

/// Settings as an operator writes them; become a [`ServerConfig`].
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServerOptions {
    /// How long requests may take.
    pub deadline: DeadlineOptions,
    /// How many are worked on at a time.
    pub bulkhead: BulkheadOptions,
    /// How many wait, and for how long.
    pub queue: QueueOptions,
}

/// Settings that a server can rely on.
///
/// ```
/// # use std::time::Duration;
/// # use carrick_call::server::{ServerConfig, ServerOptions};
/// let mut options = ServerOptions::default();
/// options.queue.max_wait = Duration::from_secs(2);
/// let wrong = ServerConfig::try_from(options).unwrap_err();
/// let text = "queue.max-wait must be at most deadline.max (2s) less deadline.min-useful (50ms), not 2s";
/// assert_eq!(wrong.to_string(), text);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "ServerOptions")]
pub struct ServerConfig {
    pub(super) deadline: DeadlineConfig,
    pub(super) bulkhead: BulkheadConfig,
    pub(super) queue: QueueConfig,
}

impl TryFrom<ServerOptions> for ServerConfig {
    type Error = InvalidConfig;

    fn try_from(options: ServerOptions) -> Result<Self, InvalidConfig> {
        let ServerOptions { deadline, bulkhead, queue } = options;
        let mut faults = Faults::default();
        let DeadlineOptions { max, min_useful, .. } = deadline;
        let wait = queue.max_wait;
        let deadline = faults.take("deadline", DeadlineConfig::try_from(deadline));
        let bulkhead = faults.take("bulkhead", BulkheadConfig::try_from(bulkhead));
        let queue = faults.take("queue", QueueConfig::try_from(queue));
        if deadline.is_some() && queue.is_some() {
            check_wait(&mut faults, max, min_useful, wait);
        }
        faults.into_result(())?;
        Ok(Self {
            deadline: deadline.expect("checked"),
            bulkhead: bulkhead.expect("checked"),
            queue: queue.expect("checked"),
        })
    }
}

/// Who waits for as long as may be must have time left to be served.
fn check_wait(faults: &mut Faults, max: Duration, min_useful: Duration, wait: Duration) {
    let text = duration::format;
    let (max_text, useful) = (text(max), text(min_useful));
    let range = format!("at most deadline.max ({max_text}) less deadline.min-useful ({useful})");
    let fits = wait.saturating_add(min_useful) <= max;
    faults.unless_value(fits, "queue.max-wait", &range, text(wait));
}
