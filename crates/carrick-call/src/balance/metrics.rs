//! What the balancer counts.

use metrics::{Counter, Gauge, counter, gauge};

pub(super) struct Metrics {
    /// In observe mode: the second host drawn would have been taken.
    pub(super) would_move: Counter,
    /// The host to avoid was taken, because there is no other.
    pub(super) again: Counter,
    pub(super) empty: Counter,
    pub(super) ejected: Counter,
    /// Calls that were dropped unsettled.
    pub(super) abandoned: Counter,
    pub(super) updates: Counter,
    pub(super) lookup_failures: Counter,
    pub(super) hosts: Gauge,
}

impl Metrics {
    pub(super) fn new(name: &str) -> Self {
        let label = || name.to_owned();
        let refused = "carrick_balance_refused_total";
        Self {
            would_move: counter!("carrick_balance_would_move_total", "name" => label()),
            again: counter!("carrick_balance_again_total", "name" => label()),
            empty: counter!(refused, "name" => label(), "reason" => "empty"),
            ejected: counter!(refused, "name" => label(), "reason" => "ejected"),
            abandoned: counter!("carrick_balance_abandoned_total", "name" => label()),
            updates: counter!("carrick_balance_updates_total", "name" => label()),
            lookup_failures: counter!("carrick_balance_lookup_failures_total", "name" => label()),
            hosts: gauge!("carrick_balance_hosts", "name" => label()),
        }
    }
}
