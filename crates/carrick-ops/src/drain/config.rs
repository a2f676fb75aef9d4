//! How long each phase of a drain may take.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig};
use serde::{Deserialize, Serialize};

use super::Trigger;

/// Drain settings as an operator writes them; becomes a [`DrainConfig`].
///
/// `window` + `grace` + `force` must fit what the orchestrator grants before it kills:
/// Kubernetes' `terminationGracePeriodSeconds`, 30 s unless set. The defaults take 42 s and are made
/// for the 45 s of the pattern document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct DrainOptions {
    /// How long work is accepted after readiness has failed. At most 5 min. Default 10 s: two
    /// readiness probes of 5 s.
    #[serde(with = "carrick_core::config::duration")]
    pub window: Duration,
    /// The same after SIGINT. At most 5 min. Default 0: whoever types Ctrl-C has no load balancer.
    #[serde(with = "carrick_core::config::duration")]
    pub interrupt_window: Duration,
    /// How long running work may take to finish once nothing new is accepted. At most 1 h.
    /// Default 30 s.
    #[serde(with = "carrick_core::config::duration")]
    pub grace: Duration,
    /// How long work that is being cut off may take to let go. 100 ms to 1 min. Default 2 s.
    #[serde(with = "carrick_core::config::duration")]
    pub force: Duration,
}

impl Default for DrainOptions {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(10),
            interrupt_window: Duration::ZERO,
            grace: Duration::from_secs(30),
            force: Duration::from_secs(2),
        }
    }
}

/// Drain settings that were checked.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "DrainOptions")]
pub struct DrainConfig {
    window: Duration,
    interrupt_window: Duration,
    grace: Duration,
    force: Duration,
}

impl DrainConfig {
    /// How long work is accepted after `trigger`.
    pub fn window(&self, trigger: Trigger) -> Duration {
        match trigger {
            Trigger::Terminate | Trigger::Requested => self.window,
            Trigger::Interrupt => self.interrupt_window,
        }
    }

    /// How long running work may take to finish.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// How long work that is cut off may take to let go.
    pub fn force(&self) -> Duration {
        self.force
    }

    /// What a drain takes at most: what the orchestrator must grant.
    pub fn total(&self) -> Duration {
        self.window + self.grace + self.force
    }
}

impl Default for DrainConfig {
    fn default() -> Self {
        DrainOptions::default().try_into().expect("the defaults are in their ranges")
    }
}

impl TryFrom<DrainOptions> for DrainConfig {
    type Error = InvalidConfig;

    fn try_from(options: DrainOptions) -> Result<Self, InvalidConfig> {
        let DrainOptions { window, interrupt_window, grace, force } = options;
        let five_minutes = Duration::from_secs(300);
        let mut faults = Faults::default();
        faults.unless(window <= five_minutes, "window", "at most 5 min");
        faults.unless(interrupt_window <= five_minutes, "interrupt-window", "at most 5 min");
        faults.unless(grace <= Duration::from_secs(3_600), "grace", "at most 1 h");
        let can_let_go = (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&force);
        faults.unless(can_let_go, "force", "100 ms to 1 min");
        faults.into_result(Self { window, interrupt_window, grace, force })
    }
}
