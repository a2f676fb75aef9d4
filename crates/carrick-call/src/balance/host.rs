//! A host that is balanced over, and a call to it.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use carrick_core::outcome::Outcome;
use tokio::time::Instant;

use super::{
    BalanceOptions, Endpoint, core,
    core::Seen,
    ewma::{PeakEwma, TICK_BITS},
    metrics::Metrics,
};
use crate::outlier::{Member, Verdict};

/// What all hosts of a balancer share.
pub(super) struct Shared {
    pub(super) options: BalanceOptions,
    pub(super) metrics: Metrics,
    /// The first moment that was told; ticks are counted from it.
    origin: OnceLock<Instant>,
    /// Decays per tick.
    rate: f32,
}

impl Shared {
    pub(super) fn new(name: &str, options: BalanceOptions) -> Self {
        let rate = (1u64 << TICK_BITS) as f32 / options.decay.as_nanos() as f32;
        Self { options, metrics: Metrics::new(name), origin: OnceLock::new(), rate }
    }

    pub(super) fn tick(&self, now: Instant) -> u32 {
        let origin = *self.origin.get_or_init(|| now);
        (now.saturating_duration_since(origin).as_nanos() >> TICK_BITS) as u32
    }
}

/// Names a host for as long as that is in use; afterwards another may get the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostId(pub(crate) usize);

/// A host that is balanced over, with the caller's value for it (a connection, a service).
pub struct Host<T = ()> {
    endpoint: Endpoint,
    value: T,
    pub(super) member: Option<Member>,
    latency: PeakEwma,
    pending: AtomicU32,
    /// When it joined a set that was there before; `None` for hosts of the first set.
    since: Option<Instant>,
    shared: Arc<Shared>,
}

impl<T> Host<T> {
    pub(super) fn new(
        shared: Arc<Shared>,
        endpoint: Endpoint,
        value: T,
        member: Option<Member>,
        latency: Option<f32>,
        since: Option<Instant>,
        tick: u32,
    ) -> Self {
        let latency =
            latency.map_or_else(PeakEwma::empty, |seconds| PeakEwma::starting_at(seconds, tick));
        Self { endpoint, value, member, latency, pending: AtomicU32::new(0), since, shared }
    }

    /// What discovery told of it when it came.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Which host it is.
    pub fn id(&self) -> HostId {
        HostId(std::ptr::from_ref(self).addr())
    }

    /// The caller's value for it.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// How many calls are under way.
    pub fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }

    /// How long a call is expected to take; `None` if it never answered one.
    pub fn latency(&self, now: Instant) -> Option<Duration> {
        self.seconds(self.shared.tick(now)).map(Duration::from_secs_f32)
    }

    /// Whether it is left out, by the detector.
    pub fn is_ejected(&self) -> bool {
        self.member.as_ref().is_some_and(Member::is_ejected)
    }

    pub(super) fn seconds(&self, tick: u32) -> Option<f32> {
        self.latency.read(tick, self.shared.rate)
    }

    pub(super) fn see(&self, tick: u32, weight: f32, now: Instant) -> Seen {
        let warmth = match self.since {
            Some(since) => {
                let age = now.saturating_duration_since(since);
                core::warmth(self.shared.options.slow_start, age)
            }
            None => 1.0,
        };
        Seen { latency: self.seconds(tick), pending: self.pending(), weight, warmth }
    }
}

impl<T> fmt::Debug for Host<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("endpoint", &self.endpoint)
            .field("pending", &self.pending)
            .field("latency", &self.latency)
            .finish_non_exhaustive()
    }
}

/// A call to a host, counted as under way until it is settled or dropped.
///
/// It holds the host and not a place in a list, so a set that changes meanwhile cannot make it count
/// against another. A call that is dropped unsettled is charged the time it took as the least that it
/// would have taken: a host that never answers must not look fast because nobody waits for it.
///
/// ```
/// # use std::time::Duration;
/// # use carrick_call::balance::{Balancer, BalanceConfig, Endpoint};
/// # use carrick_core::outcome::Outcome;
/// # use tokio::time::Instant;
/// let (balancer, now) = (Balancer::new("pricing", BalanceConfig::default()), Instant::now());
/// balancer.update(vec![Endpoint::new("a:80")], now);
/// let pick = balancer.pick(now, &mut rand::rng(), None)?;
/// let host = pick.host().clone();
/// assert_eq!(host.pending(), 1);
/// pick.settle(Outcome::Success, Duration::from_millis(3), now);
/// assert_eq!(host.pending(), 0);
/// # Ok::<(), carrick_call::Refusal>(())
/// ```
pub struct Pick<T = ()> {
    host: Arc<Host<T>>,
    started: Instant,
    settled: bool,
}

impl<T> Pick<T> {
    pub(super) fn start(host: Arc<Host<T>>, now: Instant) -> Self {
        host.pending.fetch_add(1, Relaxed);
        Self { host, started: now, settled: false }
    }

    /// The host that was picked.
    pub fn host(&self) -> &Arc<Host<T>> {
        &self.host
    }

    /// When it was picked.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Charges the host with how the call ended, and gives its place back.
    ///
    /// * `verdict`: an [`Outcome`] counts as the host's answer; say [`Verdict::local`] if none came.
    /// * `elapsed`: time to the answer's head, or to the failure.
    pub fn settle(mut self, verdict: impl Into<Verdict>, elapsed: Duration, now: Instant) {
        self.settled = true;
        let verdict = verdict.into();
        if verdict.outcome == Outcome::Rejected {
            return;
        }
        let Host { latency, member, shared, .. } = &*self.host;
        let (tick, seconds) = (shared.tick(now), elapsed.as_secs_f32());
        match verdict.outcome {
            Outcome::Cancelled => latency.raise(tick, shared.rate, seconds),
            outcome if verdict.is_failure() => {
                let retry_after = match outcome {
                    Outcome::Overload { retry_after } => retry_after,
                    _ => None,
                };
                // As a mean and not as a peak: else a single failure keeps a host without a call for
                // more than a minute, and the detector never sees the second.
                let mean = core::penalty(&shared.options, elapsed, retry_after).as_secs_f32();
                latency.observe(tick, shared.rate, seconds, mean);
            }
            _ => latency.observe(tick, shared.rate, seconds, seconds),
        }
        if let Some(member) = member {
            member.record(verdict, elapsed, now);
        }
    }
}

impl<T> Drop for Pick<T> {
    fn drop(&mut self) {
        let Host { pending, latency, shared, .. } = &*self.host;
        pending.fetch_sub(1, Relaxed);
        if !self.settled {
            let now = Instant::now();
            let elapsed = now.saturating_duration_since(self.started).as_secs_f32();
            latency.raise(shared.tick(now), shared.rate, elapsed);
            shared.metrics.abandoned.increment(1);
        }
    }
}

impl<T> fmt::Debug for Pick<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pick")
            .field("host", &self.host)
            .field("started", &self.started)
            .finish_non_exhaustive()
    }
}
