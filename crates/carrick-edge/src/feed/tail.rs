//! The tail of a topic: one task reads what is new, for all who are up to date.

use std::{sync::Arc, time::Duration};

use carrick_core::backoff::Backoff;
use carrick_store::{
    StoreError,
    log::{ReadLimit, Seq},
};
use parking_lot::RwLock;
use tokio::{sync::watch, time::sleep};

use super::{
    Entry, Feed, FeedConfig,
    entry::Scope,
    ring::{Found, Ring, RingLimit},
};

/// How long a tail without readers goes on: a poller's next request finds the ring still filled.
const LINGER: Duration = Duration::from_secs(10);

/// What one look takes from the store.
const LOOK: ReadLimit = ReadLimit { records: 500, bytes: 512 * 1024 };

#[derive(Debug)]
pub(super) struct Tail {
    scope: Arc<Scope>,
    /// `None` until the store has told where the topic ends.
    ring: RwLock<Option<Ring<Arc<Entry>>>>,
    /// Wakes readers: the ring grew, began, or everybody is to leave.
    signal: watch::Sender<()>,
    limit: RingLimit,
}

/// A reader's hold on a tail.
#[derive(Debug)]
pub(super) struct Watching {
    tail: Arc<Tail>,
    signal: watch::Receiver<()>,
}

impl Tail {
    pub(super) fn new(scope: Arc<Scope>, config: &FeedConfig) -> Arc<Self> {
        let options = config.options();
        let limit = RingLimit { entries: options.ring_events, bytes: options.ring_bytes };
        Arc::new(Self { scope, ring: RwLock::new(None), signal: watch::Sender::new(()), limit })
    }

    pub(super) fn watch(self: &Arc<Self>) -> Watching {
        let mut signal = self.signal.subscribe();
        // What there is already is looked at before the first wait.
        signal.mark_unchanged();
        Watching { tail: Arc::clone(self), signal }
    }

    pub(super) fn wake(&self) {
        self.signal.send_replace(());
    }
}

impl Watching {
    /// What the ring has after a number; nothing is known until the tail has begun.
    pub(super) fn after(
        &mut self,
        seq: Seq,
        entries: usize,
        bytes: usize,
    ) -> Option<Found<Arc<Entry>>> {
        // Before the look: a change after it wakes the next wait.
        self.signal.mark_unchanged();
        self.tail.ring.read().as_ref().map(|ring| ring.after(seq, entries, bytes))
    }

    /// Bytes that passed through the ring so far.
    pub(super) fn passed(&self) -> u64 {
        self.tail.ring.read().as_ref().map_or(0, Ring::passed)
    }

    /// Waits until there may be something else.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub(super) async fn changed(&mut self) {
        // The sender lives in the tail that is held here.
        self.signal.changed().await.ok();
    }
}

/// Fills the ring until nobody has read for a while.
pub(super) async fn run(feed: Feed, tail: Arc<Tail>) {
    let filling = fill(&feed, &tail);
    let deserted = async {
        loop {
            tail.signal.closed().await;
            sleep(LINGER).await;
            let mut tails = feed.0.tails.lock();
            // Under the lock, where readers attach.
            if tail.signal.receiver_count() == 0 {
                tails.remove(&tail.scope.topic);
                return;
            }
        }
    };
    tokio::select! {
        () = filling => {}
        () = deserted => {}
    }
}

async fn fill(feed: &Feed, tail: &Tail) {
    let store = &feed.0.store;
    let topic = &tail.scope.topic;
    // Made before the first look: what is appended after it is not missed.
    let waiter = store.waiter(topic);
    let mut failures = 0;
    loop {
        let woken = waiter.woken();
        let full = match look(feed, tail).await {
            Ok(full) => {
                failures = 0;
                full
            }
            Err(StoreError::Closed) => return,
            Err(error) => {
                let pause = Backoff::default().delay(failures, &mut rand::rng());
                if failures == 0 {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%topic, error, "the feed cannot read; it goes on later");
                }
                failures = failures.saturating_add(1);
                sleep(pause).await;
                continue;
            }
        };
        if full {
            continue;
        }
        tokio::select! {
            () = woken => {}
            () = sleep(store.backstop()) => {}
        }
    }
}

/// Reads what is new once; returns whether there may be more.
async fn look(feed: &Feed, tail: &Tail) -> Result<bool, StoreError> {
    let (store, topic) = (&feed.0.store, &tail.scope.topic);
    let known = tail.ring.read().as_ref().map(Ring::last);
    let Some(last) = known else {
        let last = store.bounds(topic).await?.last;
        *tail.ring.write() = Some(Ring::new(last, tail.limit));
        tail.wake();
        return Ok(false);
    };
    let records = match store.read(topic, last, LOOK).await {
        Ok(records) => records,
        Err(StoreError::Trimmed { bounds, .. } | StoreError::Beyond { bounds, .. }) => {
            // Readers find out from the store what it means for them.
            if let Some(ring) = &mut *tail.ring.write() {
                ring.restart(bounds.last);
            }
            tail.wake();
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    let bytes: usize = records.iter().map(|record| record.body.len()).sum();
    let full = records.len() == LOOK.records || bytes >= LOOK.bytes;
    if records.is_empty() {
        return Ok(false);
    }
    if let Some(ring) = &mut *tail.ring.write() {
        for record in records {
            let (seq, bytes) = (record.seq, record.body.len());
            ring.push(seq, bytes, Arc::new(Entry::new(Arc::clone(&tail.scope), record)));
        }
    }
    tail.wake();
    Ok(full)
}
