//! A circuit for each key: each endpoint, tenant or host has its own.

use std::{
    fmt,
    hash::{BuildHasher, Hash},
    time::Duration,
};

use hashbrown::{DefaultHashBuilder, HashMap};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Breaker, BreakerConfig, State};

/// Shards, so that callers of different keys seldom wait for each other.
const SHARDS: usize = 16;

/// Circuits by key: at most so many, and none that was idle for so long.
///
/// All tell their metrics under the one name of the map: a label for each key would be without bound.
///
/// ```
/// # use std::time::Duration;
/// # use carrick_call::breaker::{BreakerConfig, BreakerMap};
/// # use tokio::time::Instant;
/// let map = BreakerMap::new("pricing", BreakerConfig::default(), 1000, Duration::from_secs(600));
/// let permit = map.of(&"/v1/prices", Instant::now()).admit_owned(Instant::now());
/// assert!(permit.is_ok());
/// ```
pub struct BreakerMap<K> {
    name: String,
    config: BreakerConfig,
    most: usize,
    idle: Duration,
    hasher: DefaultHashBuilder,
    shards: [Mutex<HashMap<K, Entry>>; SHARDS],
}

struct Entry {
    breaker: Breaker,
    used: Instant,
}

impl<K: Hash + Eq + Clone> BreakerMap<K> {
    /// A map of at most `most` circuits; one that is not asked for `idle` may go.
    pub fn new(name: &str, config: BreakerConfig, most: usize, idle: Duration) -> Self {
        Self {
            name: name.to_owned(),
            config,
            most: most.div_ceil(SHARDS).max(1),
            idle,
            hasher: DefaultHashBuilder::default(),
            shards: std::array::from_fn(|_| Mutex::default()),
        }
    }

    /// The circuit of a key, made if it is new.
    ///
    /// Where the map is full, idle circuits go first, then the closed one that was asked longest ago:
    /// an open one is what protects somebody.
    pub fn of(&self, key: &K, now: Instant) -> Breaker {
        let shard = self.hasher.hash_one(key) as usize % SHARDS;
        let mut shard = self.shards[shard].lock();
        if let Some(entry) = shard.get_mut(key) {
            entry.used = now;
            return entry.breaker.clone();
        }
        if shard.len() >= self.most {
            shard.retain(|_, one| now.saturating_duration_since(one.used) < self.idle);
        }
        while shard.len() >= self.most {
            let open = |one: &Entry| one.breaker.state() != State::Closed;
            let oldest = shard.iter().min_by_key(|(_, one)| (open(one), one.used));
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { break };
            shard.remove(&oldest);
        }
        let breaker = Breaker::new(&self.name, self.config.clone());
        shard.insert(key.clone(), Entry { breaker: breaker.clone(), used: now });
        breaker
    }

    /// Circuits that are kept.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K> fmt::Debug for BreakerMap<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BreakerMap").field("name", &self.name).finish_non_exhaustive()
    }
}
