//! What a circuit tells of itself.

use metrics::{Counter, Gauge, counter, gauge};

use super::core::State;

pub(super) struct Metrics {
    pub(super) refused: Counter,
    /// Verdicts of an earlier state.
    pub(super) late: Counter,
    opened: Counter,
    /// 0 closed, 1 half-open, 2 open; forced states alike.
    state: Gauge,
}

impl Metrics {
    pub(super) fn new(name: &str) -> Self {
        let label = || name.to_owned();
        let state = gauge!("carrick_breaker_state", "dependency" => label());
        state.set(0.0);
        Self {
            refused: counter!("carrick_breaker_refused_total", "dependency" => label()),
            late: counter!("carrick_breaker_late_total", "dependency" => label()),
            opened: counter!("carrick_breaker_opened_total", "dependency" => label()),
            state,
        }
    }

    pub(super) fn turned(&self, state: State) {
        let level = match state {
            State::Closed | State::Disabled => 0.0,
            State::HalfOpen => 1.0,
            State::Open | State::ForcedOpen => 2.0,
        };
        self.state.set(level);
        if state == State::Open {
            self.opened.increment(1);
        }
    }
}
