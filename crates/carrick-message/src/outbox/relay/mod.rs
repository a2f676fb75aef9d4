//! The relay: publishes what the outbox holds, in three short steps.
//!
//! 1. *Read* unpublished rows of the buckets whose leases it holds.
//! 2. *Publish* them, several batches at a time, with no transaction open anywhere.
//! 3. *Mark* what the broker has, in one statement a batch, under the lease's fence.
//!
//! A crash between the last two publishes some events again, with the same ids; the broker's window
//! and the consumers' inboxes take that away. [`core`] decides, [`leases`] shares the buckets out,
//! and [`service`] does what both say. The pattern document's listing did all of it in one
//! transaction with row-wise SKIP LOCKED, which loses the order of a key (defects.md M1).

mod config;
pub(crate) mod core;
mod leases;
mod service;
mod status;
mod upkeep;

use std::{fmt, sync::Arc};

use hashbrown::HashMap;
use tokio::{
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;

pub use self::{
    config::{RelayConfig, RelayOptions},
    status::RelayStatus,
};
use self::{
    leases::{Holdings, Leases},
    service::Service,
    status::Progress,
};
use super::{Outbox, Waker, store::Health};
use crate::broker::Broker;

/// Buckets that may be let go at a time: all of them.
const QUIET: usize = 64;

/// A running relay. Any number may run on one outbox, in any number of processes.
///
/// Dropping it stops it at once: what was being published may be published again by another one.
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// # use carrick_core::{event::Event, name::{Group, Topic}};
/// # use carrick_message::{broker::{Broker, LeaseRequest, StoreBroker}, outbox::{self, Outbox, OutboxEvent, Relay, RelayConfig}};
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("shop.db");
/// # let broker = Arc::new(StoreBroker::new(Arc::new(carrick_store::engine::memory::MemoryStore::new())));
/// # let orders = Topic::new("orders")?;
/// let outbox = Outbox::sqlite(&path).await?;
/// let relay = Relay::spawn(&outbox, broker.clone(), RelayConfig::default());
///
/// let mut conn = rusqlite::Connection::open(&path)?;
/// let tx = conn.transaction()?;
/// let event = Event::builder("order.placed.v1").source("/shop").id("A-4471-placed").build()?;
/// outbox::rusqlite::append(&tx, &OutboxEvent::new(orders.clone(), event))?;
/// tx.commit()?;
/// relay.waker().wake();
///
/// let request = LeaseRequest { wait: Duration::from_secs(10), ..LeaseRequest::default() };
/// let got = broker.lease(&orders, &Group::new("billing")?, request).await?;
/// assert_eq!(got[0].event.id(), "A-4471-placed");
/// relay.stop().await;
/// # Ok(())
/// # }
/// ```
pub struct Relay {
    waker: Waker,
    stop: CancellationToken,
    task: JoinHandle<()>,
    held: watch::Receiver<Holdings>,
    progress: watch::Receiver<Progress>,
    health: watch::Receiver<Health>,
}

impl Relay {
    /// Starts a relay from an outbox to a broker.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn spawn(outbox: &Outbox, broker: Arc<dyn Broker>, config: RelayConfig) -> Self {
        let store = Arc::clone(&outbox.store);
        let waker = Waker::default();
        let stop = CancellationToken::new();
        let (holdings, held) = watch::channel(HashMap::new());
        let (quiet, let_go) = mpsc::channel(QUIET);
        let (progressed, progress) = watch::channel(Progress::default());
        let (looked, health) = watch::channel(Health::default());
        // Process ids and pod names come back; this does not (field report 32).
        let name = format!("{:032x}", rand::random::<u128>());
        let leases = Leases::new(Arc::clone(&store), name, config.lease, holdings, let_go);
        let service = Service::new(
            Arc::clone(&store),
            broker,
            config.clone(),
            waker.clone(),
            held.clone(),
            quiet,
            progressed,
        );
        let task = tokio::spawn({
            let (stop, held, progress) = (stop.clone(), held.clone(), progress.clone());
            let hinted = waker.clone();
            async move {
                // Aborted with this future, should it be dropped.
                let mut side = JoinSet::new();
                let end_of_leases = CancellationToken::new();
                let mut keeper = JoinSet::new();
                keeper.spawn(leases.keep(end_of_leases.clone()));
                side.spawn(upkeep::prune(Arc::clone(&store), config.clone(), held.clone()));
                side.spawn(upkeep::watch(Arc::clone(&store), held, progress, looked));
                side.spawn(async move {
                    loop {
                        store.hint().await;
                        hinted.wake();
                    }
                });
                service.run(stop).await;
                side.shutdown().await;
                end_of_leases.cancel();
                while keeper.join_next().await.is_some() {}
            }
        });
        Self { waker, stop, task, held, progress, health }
    }

    /// Wakes this relay; for writers in this process, after their commit.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// How it is doing.
    pub fn status(&self) -> RelayStatus {
        let progress = *self.progress.borrow();
        let health = *self.health.borrow();
        RelayStatus {
            buckets: self.held.borrow().len(),
            in_memory: progress.in_memory,
            blocked_keys: progress.blocked,
            published: progress.published,
            failed: progress.failed,
            oldest_unpublished: health.oldest,
            oldest_snapshot: health.oldest_snapshot,
        }
    }

    /// Stops it: nothing new is read or published, what is under way is finished and marked within
    /// the grace, and its leases are given back.
    ///
    /// # Cancel safety
    /// Dropping the future stops the relay at once.
    pub async fn stop(mut self) {
        self.stop.cancel();
        // An error is a panic of the task, which was reported when it happened.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("status", &self.status()).finish_non_exhaustive()
    }
}
