//! The hub: a store, a broker on it, and their upkeep.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use carrick_core::{
    clock::{Clock, SystemClock},
    config::size,
    name::{Group, Topic},
    seal::Seal,
};
use carrick_message::{
    broker::{PublishLimits, StoreBroker},
    dead_letter::{DeadLetters, Select},
};
use carrick_store::{
    Store,
    engine::{self, sqlite},
    log::Trim,
};
use tokio_util::sync::CancellationToken;

use crate::config::{HubConfig, RetentionOptions, hexadecimal};

/// Topics looked at in one step of the upkeep: bounds its memory.
const TOPICS: usize = 100;

/// Records removed in one transaction (defects.md M8).
const TRIMMED: usize = 1000;

/// Topics and groups whose backlog is a metric: beyond that the series would be too many.
const MEASURED: usize = 1000;

/// A running hub, apart from its listeners.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The broker.
    pub broker: StoreBroker,
    /// What seals positions, cursors and leases.
    pub seal: Seal,
}

impl Hub {
    /// Opens the store that the configuration names.
    ///
    /// # Errors
    /// The store cannot be opened, or its key cannot be read or made.
    ///
    /// # Cancel safety
    /// Safe to drop; a store that was made stays.
    pub async fn open(config: &HubConfig) -> anyhow::Result<Self> {
        let shown = config.store.split('@').next_back().unwrap_or_default();
        let store = engine::open(&config.store)
            .await
            .with_context(|| format!("cannot open the store {shown}"))?;
        let seal = Seal::new(key(config)?);
        let limits = PublishLimits {
            events: config.limits.publishing,
            bytes: config.limits.publishing_bytes,
        };
        Ok(Self { broker: StoreBroker::with(store, Arc::new(SystemClock), limits), seal })
    }

    /// The store below.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.broker.store()
    }

    /// Removes what was kept long enough, and measures the groups, until `stop`.
    ///
    /// # Cancel safety
    /// Safe to drop: each step is a transaction of its own.
    pub async fn upkeep(&self, retention: &RetentionOptions, stop: CancellationToken) {
        loop {
            if let Err(error) = self.look_after(retention).await {
                tracing::warn!(error = &*error, "upkeep of the store failed; it goes on later");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(retention.every) => {}
            }
        }
    }

    async fn look_after(&self, retention: &RetentionOptions) -> anyhow::Result<()> {
        let now = SystemClock.wall();
        let before = |age: Duration| now.checked_sub(age).unwrap_or(jiff::Timestamp::MIN);
        let (old, dead) = (before(retention.age), before(retention.dead_age));
        while self.store().sweep(TRIMMED).await? == TRIMMED {}
        let mut after: Option<Topic> = None;
        let mut measured = 0;
        loop {
            let topics = self.store().streams(after.as_ref(), TOPICS).await?;
            for (topic, _) in &topics {
                for (group, stats) in self.store().groups(topic).await? {
                    measured += 1;
                    if measured <= MEASURED {
                        measure(topic, &group, stats, now);
                    }
                    self.forget_dead(topic, &group, dead).await?;
                }
                let trim = Trim { stored_before: old, limit: TRIMMED };
                loop {
                    let trimmed = self.store().trim(topic, trim).await?;
                    metrics::counter!("carrick_hub_trimmed_total").increment(trimmed as u64);
                    if trimmed < TRIMMED {
                        break;
                    }
                }
            }
            let full = topics.len() == TOPICS;
            after = topics.into_iter().next_back().map(|(topic, _)| topic);
            if !full {
                return Ok(());
            }
        }
    }

    /// Removes dead letters that were buried before a time.
    async fn forget_dead(
        &self,
        topic: &Topic,
        group: &Group,
        before: jiff::Timestamp,
    ) -> anyhow::Result<()> {
        let mut after = 0;
        loop {
            let letters = self.broker.letters(topic, group, after, TOPICS).await?;
            let old: Vec<_> = letters
                .iter()
                .filter(|letter| letter.buried_at < before)
                .map(|letter| letter.seq)
                .collect();
            if !old.is_empty() {
                let count = old.len();
                self.broker.purge(topic, group, &Select::Seqs(old), count).await?;
                tracing::info!(%topic, %group, count, "dead letters were kept long enough");
            }
            match letters.last() {
                Some(last) if letters.len() == TOPICS => after = last.seq,
                _ => return Ok(()),
            }
        }
    }
}

fn measure(
    topic: &Topic,
    group: &Group,
    stats: carrick_store::lease::GroupStats,
    now: jiff::Timestamp,
) {
    let labels = [("topic", topic.to_string()), ("group", group.to_string())];
    metrics::gauge!("carrick_group_backlog", &labels).set(stats.backlog as f64);
    metrics::gauge!("carrick_group_leased", &labels).set(stats.leased as f64);
    metrics::gauge!("carrick_group_dead", &labels).set(stats.dead as f64);
    let age = stats.oldest.map_or(0.0, |oldest| now.duration_since(oldest).as_secs_f64());
    metrics::gauge!("carrick_group_oldest_seconds", &labels).set(age.max(0.0));
}

/// The key from the configuration, or the one beside the store, made if it is not there.
fn key(config: &HubConfig) -> anyhow::Result<[u8; 32]> {
    if let Some(key) = config.seal_key {
        return Ok(key);
    }
    if config.store.starts_with("memory:") {
        return Ok(Seal::random_key(&mut rand::rng()));
    }
    if !config.store.starts_with("sqlite:") {
        bail!(
            "seal-key must be set when the store is a database: hubs that share it need the same \
             one (openssl rand -hex 32)"
        );
    }
    let path = sqlite::path(&config.store)?.with_extension("key");
    read_or_make(&path).with_context(|| format!("cannot use the key file {}", path.display()))
}

fn read_or_make(path: &Path) -> anyhow::Result<[u8; 32]> {
    use std::io::Write;
    match std::fs::read_to_string(path) {
        Ok(text) => match hexadecimal(text.trim()) {
            Some(key) => return Ok(key),
            None => {
                bail!("it must hold 64 hexadecimal digits, not {}", size::format(text.len() as u64))
            }
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let key = Seal::random_key(&mut rand::rng());
    let text: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut options = std::fs::File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // Whole or absent: a start that is killed here must not leave half a key behind.
    let fresh = path.with_extension(format!("key-{:08x}", rand::random::<u32>()));
    let mut file = options.open(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    Ok(key)
}

impl Hub {
    /// Waits for what is under way, and closes the store.
    ///
    /// # Cancel safety
    /// The store closes when the last handle on it is dropped.
    pub async fn close(&self) {
        self.broker.close().await;
        self.store().close().await;
    }
}
