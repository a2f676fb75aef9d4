//! What the detector counts and says.

use metrics::{Counter, Gauge, counter, gauge};
use tracing::{debug, info, warn};

use super::{Change, Kind, What};

const KINDS: [Kind; 6] = [
    Kind::ConsecutiveFailures,
    Kind::ConsecutiveGateway,
    Kind::ConsecutiveLocal,
    Kind::SuccessRate,
    Kind::FailurePercentage,
    Kind::Latency,
];

impl Kind {
    /// The kind's name in metrics and events.
    pub fn name(self) -> &'static str {
        match self {
            Self::ConsecutiveFailures => "consecutive-failures",
            Self::ConsecutiveGateway => "consecutive-gateway",
            Self::ConsecutiveLocal => "consecutive-local",
            Self::SuccessRate => "success-rate",
            Self::FailurePercentage => "failure-percentage",
            Self::Latency => "latency",
        }
    }
}

pub(super) struct Metrics {
    name: String,
    ejections: [Counter; 6],
    capped: [Counter; 6],
    returned: Counter,
    spared: Counter,
    hosts: Gauge,
    ejected: Gauge,
    panic: Gauge,
}

impl Metrics {
    pub(super) fn new(name: &str) -> Self {
        let label = |name: &str| name.to_owned();
        Self {
            name: label(name),
            ejections: KINDS.map(|kind| {
                counter!("carrick_outlier_ejections_total", "name" => label(name), "kind" => kind.name())
            }),
            capped: KINDS.map(|kind| {
                counter!("carrick_outlier_capped_total", "name" => label(name), "kind" => kind.name())
            }),
            returned: counter!("carrick_outlier_returned_total", "name" => label(name)),
            spared: counter!("carrick_outlier_spared_total", "name" => label(name)),
            hosts: gauge!("carrick_outlier_hosts", "name" => label(name)),
            ejected: gauge!("carrick_outlier_ejected", "name" => label(name)),
            panic: gauge!("carrick_outlier_panic", "name" => label(name)),
        }
    }

    pub(super) fn tell(&self, changes: &[Change]) {
        let name = &self.name;
        for Change { label: host, what, .. } in changes {
            match *what {
                What::Ejected { kind, time } => {
                    self.ejections[kind as usize].increment(1);
                    warn!(name, %host, kind = kind.name(), ?time, "host ejected");
                }
                What::Capped { kind } => {
                    self.capped[kind as usize].increment(1);
                    debug!(name, %host, kind = kind.name(), "host not ejected: too many are");
                }
                What::Returned => {
                    self.returned.increment(1);
                    info!(name, %host, "host back");
                }
                What::Spared => {
                    self.spared.increment(1);
                    info!(name, %host, "host back before its time: the fleet shrank");
                }
            }
        }
    }

    pub(super) fn settle(&self, hosts: usize, ejected: usize, panicked: bool, panics: bool) {
        self.hosts.set(hosts as f64);
        self.ejected.set(ejected as f64);
        self.panic.set(if panics { 1.0 } else { 0.0 });
        let name = &self.name;
        match (panicked, panics) {
            (false, true) => warn!(name, hosts, ejected, "too few hosts serve: ejections ignored"),
            (true, false) => info!(name, hosts, ejected, "enough hosts serve: ejections count"),
            _ => {}
        }
    }
}
