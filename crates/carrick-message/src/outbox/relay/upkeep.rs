//! What a relay does on the side: prunes what was kept long enough, and tells how the outbox is.
//!
//! A prune is a bounded number of bounded statements, each by itself, on its own timer (defects.md
//! M8). The age of the oldest snapshot is watched because of what it does: while somebody holds one,
//! nothing that was published or removed since can be cleaned up, and every reader of the database
//! slows down.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::{debug, warn};

use super::{config::RelayConfig, leases::Holdings, status::Progress};
use crate::{
    consumer::log_limit::LogLimit,
    outbox::{
        error::chain,
        store::{Health, OutboxStore},
    },
};

/// Between two looks at how the outbox is.
const LOOK: Duration = Duration::from_secs(5);
/// A snapshot held for longer is worth a warning.
const OLD_SNAPSHOT: Duration = Duration::from_secs(5 * 60);
/// Between two statements of a prune: others may write.
const BREATH: Duration = Duration::from_millis(10);

/// Prunes on its own timer, if this relay has the first bucket: one relay of all does.
pub(super) async fn prune(
    store: Arc<dyn OutboxStore>,
    config: RelayConfig,
    held: watch::Receiver<Holdings>,
) {
    let mut ticks = interval(config.prune_every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut log = LogLimit::default();
    let mut after = 0;
    loop {
        ticks.tick().await;
        if !held.borrow().contains_key(&0) {
            continue;
        }
        for _ in 0..config.prune_batches {
            match store.prune(after, config.keep, config.prune_rows).await {
                Ok(pruned) => {
                    metrics::counter!("carrick_outbox_pruned_total").increment(pruned.rows);
                    after = pruned.next.unwrap_or(0);
                    if pruned.next.is_none() {
                        break;
                    }
                }
                Err(error) => {
                    if let Some(more) = log.pass(Instant::now()) {
                        warn!(error = chain(&error), more, "published rows cannot be pruned");
                    }
                    break;
                }
            }
            sleep(BREATH).await;
        }
    }
}

/// Looks at how the outbox is, and tells it.
pub(super) async fn watch(
    store: Arc<dyn OutboxStore>,
    held: watch::Receiver<Holdings>,
    progress: watch::Receiver<Progress>,
    told: watch::Sender<Health>,
) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut log = LogLimit::default();
    loop {
        ticks.tick().await;
        let floor = progress.borrow().floor;
        let buckets: Vec<_> = held.borrow().keys().copied().collect();
        let health = match store.health(floor, &buckets).await {
            Ok(health) => health,
            Err(error) => {
                debug!(error = chain(&error), "the outbox cannot be looked at");
                continue;
            }
        };
        let seconds = |age: Option<Duration>| age.unwrap_or_default().as_secs_f64();
        metrics::gauge!("carrick_outbox_oldest_unpublished_seconds").set(seconds(health.oldest));
        if let Some(age) = health.oldest_snapshot {
            metrics::gauge!("carrick_outbox_oldest_snapshot_seconds").set(age.as_secs_f64());
            if age > OLD_SNAPSHOT
                && let Some(more) = log.pass(Instant::now())
            {
                warn!(
                    age_seconds = age.as_secs(),
                    more,
                    "a transaction holds an old snapshot: published rows cannot be cleaned up until \
                     it ends; SELECT pid, xact_start, query FROM pg_stat_activity \
                     WHERE backend_xmin IS NOT NULL ORDER BY xact_start shows which"
                );
            }
        }
        told.send_replace(health);
    }
}
