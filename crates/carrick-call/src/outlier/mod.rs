//! Outlier detection: a host that fails, or is slow, is left out for a while.
//!
//! Every call's end is charged to the host that served it. Failures in a row eject at once; a sweep
//! ejects hosts that stand out of the fleet, and brings back those whose time is over. Never so many
//! are out that the rest is overrun: a cap counts the host that is about to go, and if fewer than half
//! serve all the same, ejections are ignored, for then the fault is not the hosts'.
//!
//! A breaker asks "is the dependency well?" and refuses; a detector asks "is this host worse than its
//! peers?" and sends elsewhere. [`Detector`] keeps the hosts, [`Member`] is one of them. No task is
//! needed: whoever asks for a host calls [`Detector::tick`], and a fleet that nobody asks has nobody
//! to protect.
//!
//! Source: pattern document, outlier ejection; Envoy's documents and gRFC A50 for kinds and numbers.
//! Differs: the cap is that after the ejection, local and peer failures are always apart, failures
//! in a row survive a sweep, slow hosts can be ejected, ejections are jittered.

mod config;
mod core;
mod judge;
mod metrics;
mod stats;
#[cfg(all(test, not(carrick_loom)))]
mod tests;

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use carrick_core::outcome::Outcome;
use http::StatusCode;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

pub use self::{
    config::{OutlierConfig, OutlierOptions},
    core::{may_eject, panics},
};
use self::{core::Fleet, metrics::Metrics, stats::Stats};

/// Names one host of one detector; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(u64);

/// Whose word a verdict is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// No answer came: connect, reset, timeout.
    Local,
    /// The host answered.
    Peer,
}

/// How a call ended, and who says so.
///
/// ```
/// # use carrick_call::outlier::Verdict;
/// # use http::StatusCode;
/// assert!(Verdict::from_status(StatusCode::BAD_GATEWAY).gateway);
/// assert!(!Verdict::from_status(StatusCode::INTERNAL_SERVER_ERROR).gateway);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The one classifier's verdict.
    pub outcome: Outcome,
    /// Whether the host answered.
    pub origin: Origin,
    /// Whether the answer was that of a gateway without its service: 502, 503 or 504.
    pub gateway: bool,
}

impl Verdict {
    /// The verdict on an answer.
    pub const fn peer(outcome: Outcome) -> Self {
        Self { outcome, origin: Origin::Peer, gateway: false }
    }

    /// The verdict on a call that got no answer.
    pub const fn local(outcome: Outcome) -> Self {
        Self { outcome, origin: Origin::Local, gateway: false }
    }

    /// The verdict on an HTTP answer.
    pub fn from_status(status: StatusCode) -> Self {
        let gateway = matches!(status.as_u16(), 502..=504);
        Self { gateway, ..Self::peer(Outcome::from_status(status, None)) }
    }

    /// Whether it speaks against the host. A call that cannot be made at all does, be it for a lasting
    /// reason such as a certificate; an answer that the caller is wrong does not.
    pub fn is_failure(self) -> bool {
        let unreachable = self.origin == Origin::Local && self.outcome == Outcome::Permanent;
        self.outcome.is_failure() || unreachable
    }
}

/// An answer, of which no more is known.
impl From<Outcome> for Verdict {
    fn from(outcome: Outcome) -> Self {
        Self::peer(outcome)
    }
}

/// Why a host is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Bad answers in a row.
    ConsecutiveFailures,
    /// Gateway errors in a row.
    ConsecutiveGateway,
    /// Calls without an answer in a row.
    ConsecutiveLocal,
    /// It succeeds less than its peers.
    SuccessRate,
    /// It fails nearly always.
    FailurePercentage,
    /// It is slower than its peers.
    Latency,
}

/// What became of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The host.
    pub host: HostId,
    /// What it was called when it was added.
    pub label: Arc<str>,
    /// What happened.
    pub what: What,
}

/// What happened to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// It is out.
    Ejected {
        /// Why.
        kind: Kind,
        /// For how long; it ends with the first sweep after.
        time: Duration,
    },
    /// It would be out, but too many are.
    Capped {
        /// Why it would be.
        kind: Kind,
    },
    /// Its time was over.
    Returned,
    /// It is back before its time, because the fleet shrank.
    Spared,
}

/// Finds the hosts of one dependency that are worse than their peers. A clone shares them all.
///
/// ```
/// use std::time::Duration;
/// use carrick_call::outlier::{Detector, OutlierConfig, Verdict};
/// use carrick_core::outcome::Outcome;
/// use tokio::time::Instant;
///
/// let detector = Detector::new("pricing", OutlierConfig::default());
/// let now = Instant::now();
/// let hosts: Vec<_> = ["a", "b", "c"].map(|label| detector.add(label, now)).into();
/// for _ in 0..5 {
///     hosts[0].record(Verdict::peer(Outcome::Transient), Duration::from_millis(1), now);
/// }
/// assert!(hosts[0].is_ejected() && !hosts[1].is_ejected());
/// detector.sweep(now + Duration::from_secs(40));
/// assert!(!hosts[0].is_ejected());
/// ```
#[derive(Clone)]
pub struct Detector(Arc<Inner>);

/// One host of a detector. A clone is the same host.
///
/// ```
/// # use carrick_call::outlier::{Detector, OutlierConfig};
/// # use tokio::time::Instant;
/// let detector = Detector::new("pricing", OutlierConfig::default());
/// let host = detector.add("10.0.0.1:80", Instant::now());
/// detector.remove(&host);
/// assert_eq!(detector.hosts(), 0);
/// ```
#[derive(Clone)]
pub struct Member {
    id: HostId,
    stats: Arc<Stats>,
    detector: Detector,
}

struct Inner {
    options: OutlierOptions,
    fleet: Mutex<Fleet>,
    /// The first moment that was told; the next sweep is counted from it.
    origin: OnceLock<Instant>,
    next_sweep: AtomicU64,
    /// Whether ejections are not acted on: a panic, or a detector that only watches.
    ignored: AtomicBool,
    panics: AtomicBool,
    metrics: Metrics,
}

impl Detector {
    /// A detector without hosts; `name` labels its metrics.
    pub fn new(name: &str, config: OutlierConfig) -> Self {
        Self::seeded(name, config, RandomState::new().hash_one(name))
    }

    /// The same with a seed for its jitter, for runs that must repeat.
    pub fn seeded(name: &str, config: OutlierConfig, seed: u64) -> Self {
        let OutlierConfig { options } = config;
        Self(Arc::new(Inner {
            fleet: Mutex::new(Fleet::new(seed)),
            origin: OnceLock::new(),
            next_sweep: AtomicU64::new(0),
            ignored: AtomicBool::new(!options.mode.enforces()),
            panics: AtomicBool::new(false),
            metrics: Metrics::new(name),
            options,
        }))
    }

    /// Adds a host; `label` names it in events.
    pub fn add(&self, label: &str, now: Instant) -> Member {
        let stats = Arc::new(Stats::new(&self.0.options));
        let mut fleet = self.0.fleet.lock();
        let id = fleet.add(label.into(), Arc::clone(&stats));
        if fleet.len() == 1 {
            self.0.next_sweep.store(self.next_sweep(now), Relaxed);
        }
        self.publish(fleet, &[]);
        Member { id, stats, detector: self.clone() }
    }

    /// Removes a host. If too many of those that are left are out, the least bad come back.
    pub fn remove(&self, host: &Member) -> Vec<Change> {
        let mut fleet = self.0.fleet.lock();
        let changes = fleet.remove(&self.0.options, host.id);
        self.publish(fleet, &changes);
        changes
    }

    /// Sweeps if it is time to; costs one comparison if not.
    pub fn tick(&self, now: Instant) {
        let due = self.0.next_sweep.load(Relaxed);
        if self.since_start(now) < due {
            return;
        }
        // One caller of many sweeps: a second sweep at once would judge an empty interval.
        let next = self.next_sweep(now);
        if self.0.next_sweep.compare_exchange(due, next, Relaxed, Relaxed).is_ok() {
            self.sweep(now);
        }
    }

    /// Brings back whose time is over and judges the interval, now.
    pub fn sweep(&self, now: Instant) -> Vec<Change> {
        let mut fleet = self.0.fleet.lock();
        self.0.next_sweep.store(self.next_sweep(now), Relaxed);
        let changes = fleet.sweep(&self.0.options, now);
        self.publish(fleet, &changes);
        changes
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.0.fleet.lock().len()
    }

    /// How many of them are out, whether or not that is acted on.
    pub fn ejected(&self) -> usize {
        self.0.fleet.lock().ejected()
    }

    /// Whether so few serve that ejections are ignored.
    pub fn is_panicking(&self) -> bool {
        self.0.panics.load(Relaxed)
    }

    fn since_start(&self, now: Instant) -> u64 {
        let origin = *self.0.origin.get_or_init(|| now);
        let nanos = now.saturating_duration_since(origin).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    fn next_sweep(&self, now: Instant) -> u64 {
        core::next_sweep(&self.0.options, Duration::from_nanos(self.since_start(now)))
    }

    /// Makes what follows from who is out visible to callers, and tells it once the lock is free.
    fn publish(&self, fleet: MutexGuard<'_, Fleet>, changes: &[Change]) {
        let (hosts, ejected) = (fleet.len(), fleet.ejected());
        let panics = panics(&self.0.options, hosts, ejected);
        self.0.ignored.store(panics || !self.0.options.mode.enforces(), Relaxed);
        let panicked = self.0.panics.swap(panics, Relaxed);
        drop(fleet);
        self.0.metrics.settle(hosts, ejected, panicked, panics);
        self.0.metrics.tell(changes);
    }
}

impl Member {
    /// Its name in changes.
    pub fn id(&self) -> HostId {
        self.id
    }

    /// Charges a call to this host; tells the change if failures in a row made one.
    ///
    /// `latency` is the time to the answer's head, or to the failure.
    pub fn record(
        &self,
        verdict: impl Into<Verdict>,
        latency: Duration,
        now: Instant,
    ) -> Option<Change> {
        let Inner { options, fleet, .. } = &*self.detector.0;
        let kind = self.stats.record(verdict.into(), latency, options)?;
        let mut fleet = fleet.lock();
        let change = fleet.eject(options, self.id, kind, now)?;
        self.detector.publish(fleet, std::slice::from_ref(&change));
        Some(change)
    }

    /// Whether this host is to be left out now; false in a panic and in observe mode.
    pub fn is_ejected(&self) -> bool {
        self.stats.ejected.load(Relaxed) && !self.detector.0.ignored.load(Relaxed)
    }
}

impl fmt::Debug for Detector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detector").field("fleet", &self.0.fleet).finish_non_exhaustive()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("id", &self.id).field("stats", &self.stats).finish()
    }
}
