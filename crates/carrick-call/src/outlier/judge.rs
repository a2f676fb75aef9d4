//! Who stands out of a fleet over one interval.

use std::time::Duration;

use super::{HostId, Kind, OutlierOptions, stats::Window};

/// What one serving host did in the interval.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    pub(super) host: HostId,
    pub(super) window: Window,
    /// A limit of failures in a row that it reached when the cap was full.
    pub(super) in_a_row: Option<Kind>,
}

/// The hosts to eject, each kind's worst first, so that a cap is spent on those who deserve it. A
/// host may be named by several kinds.
pub(super) fn worst_first(options: &OutlierOptions, hosts: &[Judged]) -> Vec<(HostId, Kind)> {
    let mut found: Vec<_> =
        hosts.iter().filter_map(|host| Some((host.host, host.in_a_row?))).collect();
    found.extend(by_success_rate(options, hosts));
    found.extend(by_failure_share(options, hosts));
    found.extend(by_latency(options, hosts));
    found
}

fn by_success_rate(options: &OutlierOptions, hosts: &[Judged]) -> Vec<(HostId, Kind)> {
    let enough = |host: &&Judged| host.window.total() >= options.success_rate_requests;
    let rates = hosts.iter().filter(enough).map(|host| (host.host, host.window.success_rate()));
    let rates: Vec<_> = rates.collect();
    if options.success_rate_deviations == 0.0 || rates.len() < options.min_hosts {
        return Vec::new();
    }
    let count = rates.len() as f64;
    let mean = rates.iter().map(|(_, rate)| rate).sum::<f64>() / count;
    let variance = rates.iter().map(|(_, rate)| (rate - mean).powi(2)).sum::<f64>() / count;
    let threshold = mean - options.success_rate_deviations * variance.sqrt();
    // Hosts that are all alike differ by rounding alone.
    worst(rates.into_iter().map(|(host, rate)| (host, threshold - rate - 1e-9)), Kind::SuccessRate)
}

fn by_failure_share(options: &OutlierOptions, hosts: &[Judged]) -> Vec<(HostId, Kind)> {
    let enough = |host: &&Judged| host.window.total() >= options.failure_requests;
    if !options.failure_percentage || hosts.iter().filter(enough).count() < options.min_hosts {
        return Vec::new();
    }
    let over = |host: &Judged| {
        (host.host, 1.0 - host.window.success_rate() - options.failure_share + 1e-9)
    };
    worst(hosts.iter().filter(enough).map(over), Kind::FailurePercentage)
}

fn by_latency(options: &OutlierOptions, hosts: &[Judged]) -> Vec<(HostId, Kind)> {
    let p95 = |host: &Judged| match host.window.p95 {
        Some((p95, count)) if count >= options.latency_requests => Some((host.host, p95)),
        _ => None,
    };
    let p95s: Vec<_> = hosts.iter().filter_map(p95).collect();
    if p95s.len() < options.min_hosts {
        return Vec::new();
    }
    let mut sorted: Vec<Duration> = p95s.iter().map(|(_, p95)| *p95).collect();
    sorted.sort_unstable();
    // The lower middle: of two equal halves, the fast one tells what can be expected.
    let median = sorted[(sorted.len() - 1) / 2];
    let limit = median.mul_f64(options.latency_factor).max(options.latency_floor);
    let over = |(host, p95): (HostId, Duration)| (host, p95.as_secs_f64() - limit.as_secs_f64());
    worst(p95s.into_iter().map(over), Kind::Latency)
}

/// Those above zero, the highest first.
fn worst(excess: impl Iterator<Item = (HostId, f64)>, kind: Kind) -> Vec<(HostId, Kind)> {
    let mut over: Vec<_> = excess.filter(|(_, excess)| *excess > 0.0).collect();
    over.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    over.into_iter().map(|(host, _)| (host, kind)).collect()
}
