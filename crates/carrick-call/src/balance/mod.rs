//! Balancing: each call goes to the better of two hosts drawn at random.
//!
//! Two are drawn by weight, and the one with the lower cost is taken: expected latency times calls
//! under way. Comparing all hosts would send every caller to the same best one at once; round robin
//! would send a tenth of the calls to the slow one of ten. The expected latency jumps to a higher
//! sample at once and comes down slowly, failures are charged as slow calls, so that a host that fails
//! fast draws no load, and hosts that an [outlier detector](crate::outlier) ejected are left out.
//!
//! [`Balancer`] keeps the hosts and picks; [`Balance`] does it as a service; [`discovery`] keeps the
//! set of hosts up to date in a task of its own, so that a dead host goes without a call having to
//! find it. The list is a snapshot that is replaced as a whole: a pick takes no lock.
//!
//! Source: power of two choices (Mitzenmacher); peak EWMA and the penalty of unknown hosts from
//! Finagle; rendezvous subsets from gRFC A68. Differs: no draw twice of one host; weights decide the
//! draw and divide the calls under way, not the whole cost; a host that joins starts from the median
//! of the others; a failure moves the average and does not replace it.

mod config;
mod core;
pub mod discovery;
mod endpoint;
mod ewma;
mod host;
mod layer;
mod metrics;
#[cfg(all(test, not(carrick_loom)))]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use arc_swap::ArcSwap;
use rand::Rng;
use tokio::time::Instant;

pub use self::{
    config::{BalanceConfig, BalanceOptions, Strategy},
    endpoint::Endpoint,
    host::{Host, HostId, Pick},
    layer::{Balance, BalanceFuture},
};
use self::{core::Wheel, host::Shared};
use crate::{Policy, Refusal, outlier::Detector};

/// Picks hosts of one dependency. A clone shares them, and what is known of them.
///
/// ```
/// use carrick_call::balance::{BalanceConfig, Balancer, Endpoint};
/// use tokio::time::Instant;
///
/// let (balancer, now) = (Balancer::new("pricing", BalanceConfig::default()), Instant::now());
/// balancer.update(vec![Endpoint::new("a:80"), Endpoint::new("b:80")], now);
/// let first = balancer.pick(now, &mut rand::rng(), None)?;
/// let other = balancer.pick(now, &mut rand::rng(), Some(first.host().id()))?;
/// assert_ne!(first.host().endpoint(), other.host().endpoint());
/// # Ok::<(), carrick_call::Refusal>(())
/// ```
pub struct Balancer<T = ()>(Arc<Inner<T>>);

struct Inner<T> {
    shared: Arc<Shared>,
    detector: Option<Detector>,
    make: Box<dyn Fn(&Endpoint) -> T + Send + Sync>,
    set: ArcSwap<Set<T>>,
}

/// The hosts that may be picked: neither draining nor without weight. No more than the subset.
struct Set<T> {
    slots: Box<[Slot<T>]>,
    wheel: Wheel,
}

struct Slot<T> {
    host: Arc<Host<T>>,
    /// Its weight as a multiple of the mean.
    weight: f32,
}

impl Balancer {
    /// A balancer without hosts, for callers that connect by themselves; `name` labels its metrics.
    pub fn new(name: &str, config: BalanceConfig) -> Self {
        Self::with(name, config, None, |_| ())
    }
}

impl<T> Balancer<T> {
    /// A balancer that leaves out what the detector ejects, and charges it with how calls ended.
    ///
    /// `make` gives each host the value that callers find at [`Host::value`]. It runs within
    /// [`update`](Self::update), and twice for a host if two updates meet; let it connect lazily.
    pub fn with(
        name: &str,
        config: BalanceConfig,
        detector: Option<Detector>,
        make: impl Fn(&Endpoint) -> T + Send + Sync + 'static,
    ) -> Self {
        let shared = Arc::new(Shared::new(name, config.options));
        let set = ArcSwap::from_pointee(Set::of(Vec::new()));
        Self(Arc::new(Inner { shared, detector, make: Box::new(make), set }))
    }

    /// Replaces the set of hosts. Known addresses keep their host; new ones start from the median of
    /// what is known; calls to hosts that are gone go on, and no new ones are sent there.
    ///
    /// Of an address that is told twice, the first counts.
    pub fn update(&self, endpoints: Vec<Endpoint>, now: Instant) {
        let Inner { shared, set, .. } = &*self.0;
        let mut told = HashSet::new();
        let mut wanted: Vec<_> = endpoints
            .into_iter()
            .filter(|endpoint| told.insert(Arc::clone(&endpoint.address)))
            .filter(|endpoint| endpoint.weight > 0 && !endpoint.draining)
            .collect();
        let (subset, client_id) = (shared.options.subset, &shared.options.client_id);
        core::keep_subset(&mut wanted, subset, client_id, |endpoint| &endpoint.address);
        loop {
            let current = set.load_full();
            let next = Arc::new(self.following(&current, &wanted, now));
            let found = set.compare_and_swap(&current, Arc::clone(&next));
            if Arc::ptr_eq(&found, &current) {
                self.forget(&current, &next);
                break;
            }
            // Another update came first; hosts made for this one were never seen.
            self.forget(&next, &current);
        }
        shared.metrics.updates.increment(1);
        shared.metrics.hosts.set(wanted.len() as f64);
    }

    /// Picks the host for one call.
    ///
    /// `exclude` is a host to avoid, the one that the last try of the same call failed at; it is
    /// taken all the same if there is no other.
    ///
    /// # Errors
    /// A [`Refusal`] if no host is known, or all are ejected.
    pub fn pick(
        &self,
        now: Instant,
        rng: &mut (impl Rng + ?Sized),
        exclude: Option<HostId>,
    ) -> Result<Pick<T>, Refusal> {
        let Inner { shared, detector, set, .. } = &*self.0;
        if let Some(detector) = detector {
            detector.tick(now);
        }
        let set = set.load();
        let mut slot = set.choose(shared, now, rng, exclude);
        if slot.is_none() && exclude.is_some() {
            slot = set.choose(shared, now, rng, None);
            shared.metrics.again.increment(u64::from(slot.is_some()));
        }
        if let Some(slot) = slot {
            return Ok(Pick::start(Arc::clone(&slot.host), now));
        }
        let (counter, reason) = if set.slots.is_empty() {
            (&shared.metrics.empty, "no host is known")
        } else {
            (&shared.metrics.ejected, "every host is ejected")
        };
        counter.increment(1);
        Err(Refusal::new(Policy::Balance, reason))
    }

    /// The hosts that may be picked, ejected ones included.
    pub fn hosts(&self) -> Vec<Arc<Host<T>>> {
        self.0.set.load().slots.iter().map(|slot| Arc::clone(&slot.host)).collect()
    }

    fn following(&self, current: &Set<T>, wanted: &[Endpoint], now: Instant) -> Set<T> {
        let Inner { shared, detector, make, .. } = &*self.0;
        let tick = shared.tick(now);
        let known: HashMap<&str, &Arc<Host<T>>> =
            current.slots.iter().map(|slot| (&*slot.host.endpoint().address, &slot.host)).collect();
        let latencies = known.values().filter_map(|host| host.seconds(tick)).collect();
        let median = core::median(latencies);
        let since = (!known.is_empty()).then_some(now);
        let host = |endpoint: &Endpoint| {
            if let Some(host) = known.get(&*endpoint.address) {
                return (Arc::clone(host), endpoint.weight);
            }
            let value = make(endpoint);
            let member = detector.as_ref().map(|detector| detector.add(&endpoint.address, now));
            let (shared, endpoint) = (Arc::clone(shared), endpoint.clone());
            let weight = endpoint.weight;
            let host = Host::new(shared, endpoint, value, member, median, since, tick);
            (Arc::new(host), weight)
        };
        Set::of(wanted.iter().map(host).collect())
    }

    /// Takes out of the detector what is in one set and not in the other.
    fn forget(&self, gone: &Set<T>, stays: &Set<T>) {
        let Some(detector) = &self.0.detector else { return };
        let stays: HashSet<_> = stays.slots.iter().map(|slot| Arc::as_ptr(&slot.host)).collect();
        let gone = gone.slots.iter().filter(|slot| !stays.contains(&Arc::as_ptr(&slot.host)));
        for member in gone.filter_map(|slot| slot.host.member.as_ref()) {
            detector.remove(member);
        }
    }

    fn shared(&self) -> &Shared {
        &self.0.shared
    }
}

impl<T> Set<T> {
    fn of(hosts: Vec<(Arc<Host<T>>, u16)>) -> Self {
        let wheel = Wheel::new(hosts.iter().map(|(_, weight)| *weight));
        let mean = wheel.total() as f32 / hosts.len().max(1) as f32;
        let slot = |(host, weight)| Slot { host, weight: f32::from(weight) / mean };
        Self { wheel, slots: hosts.into_iter().map(slot).collect() }
    }

    fn choose(
        &self,
        shared: &Shared,
        now: Instant,
        rng: &mut (impl Rng + ?Sized),
        exclude: Option<HostId>,
    ) -> Option<&Slot<T>> {
        let usable = |place: usize| {
            let host = &*self.slots[place].host;
            !host.is_ejected() && exclude != Some(host.id())
        };
        let first = self.wheel.draw(rng, None, usable)?;
        let first_slot = &self.slots[first];
        let Some(second) = self.wheel.draw(rng, Some(first), usable) else {
            return Some(first_slot);
        };
        let second_slot = &self.slots[second];
        let tick = shared.tick(now);
        let see = |slot: &Slot<T>| slot.host.see(tick, slot.weight, now);
        let (first, second) = (see(first_slot), see(second_slot));
        if !core::second_is_better(&shared.options, rng, first, second) {
            return Some(first_slot);
        }
        if shared.options.mode.enforces() {
            return Some(second_slot);
        }
        shared.metrics.would_move.increment(1);
        Some(first_slot)
    }
}

impl<T> Clone for Balancer<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Balancer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balancer").field("hosts", &self.hosts()).finish_non_exhaustive()
    }
}
