//! The feed: one log, one position, several doors.
//!
//! A reader is a position and a wake slot, never a queue. While it is behind it reads the store at
//! its own pace; once it is up to date it reads a ring that all readers of the topic share, filled by
//! one tail task. There is no list between replay and live: both are the same log by the same
//! numbers, so nothing can be lost, doubled or swapped where one becomes the other. A position is
//! `(epoch, seq)`, sealed to its topics and tenant, and valid on every door of every hub that shares
//! the store; one that cannot be gone on from is answered with a [`Batch::Reset`], never with part of
//! what was missed.
//!
//! [`Feed`] hands out [`Subscription`]s; [`crate::sse`] and [`crate::long_poll`] are doors on them.
//!
//! Source: pattern document, the listings on long poll, SSE and WebSocket; Centrifugo for epochs.
//! Differs: a slow reader is found by how far it is behind in the log, as it has no buffer of its
//! own; defects.md E2–E7.

mod admission;
mod config;
mod ended;
mod entry;
mod filter;
mod reader;
mod ring;
mod subscription;
mod tail;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use carrick_core::{name::Topic, position::Position, seal::Seal};
use carrick_store::{Store, StoreError, log::Seq};
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

pub(crate) use self::reader::{LOOK, Next, Reader};
pub use self::{
    admission::Admission,
    config::{FeedConfig, FeedOptions},
    ended::Ended,
    entry::Entry,
    filter::{Filter, matches},
    subscription::{Batch, Item, Limit, Subscription},
};
use self::{
    entry::Scope,
    tail::{Tail, Watching},
};

/// Topics of one subscription at most: bounds its position, and what a wake-up looks at.
pub const MAX_TOPICS: usize = 32;

/// What positions over several topics are sealed for.
const PURPOSE: &str = "positions";

/// The feed of a store. Clones share it.
#[derive(Clone, Debug)]
pub struct Feed(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Arc<dyn Store>,
    seal: Seal,
    config: FeedConfig,
    tails: Mutex<HashMap<Topic, Arc<Tail>>>,
    places: Arc<Semaphore>,
    admission: Mutex<Admission>,
    /// One more than the milliseconds that leaving may take, once the feed drains; 0 until then.
    draining: AtomicU64,
}

/// Where a subscription starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// At the oldest event that is kept.
    Earliest,
    /// After the newest event.
    Latest,
    /// Where an earlier subscription to the same topics came to.
    At(Resume),
    /// Somewhere that is not known any more: with a [`Batch::Reset`], at the oldest event.
    Lost,
}

/// A position that was opened: a number for each topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume(Vec<Seq>);

/// A text that is no position of these topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a position of these topics")]
pub struct NotAPosition;

/// Why a reader is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There are as many readers as there may be.
    #[error("too many readers (feed.subscribers)")]
    Full {
        /// When to try again.
        retry_after: Duration,
    },
    /// Too many come at a time.
    #[error("too many readers come at once (feed.admission)")]
    TooFast {
        /// When to try again; later for each that is refused.
        retry_after: Duration,
    },
    /// The feed drains.
    #[error("the hub is closing")]
    Draining,
}

impl Refused {
    /// When to try again at the earliest.
    pub fn retry_after(self) -> Duration {
        match self {
            Self::Full { retry_after } | Self::TooFast { retry_after } => retry_after,
            Self::Draining => Duration::from_secs(1),
        }
    }

    /// For a label of a metric.
    pub fn label(self) -> &'static str {
        match self {
            Self::Full { .. } => "full",
            Self::TooFast { .. } => "too_fast",
            Self::Draining => "draining",
        }
    }
}

/// A place among the readers, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    _permit: OwnedSemaphorePermit,
    _own: Option<OwnedSemaphorePermit>,
    door: &'static str,
}

impl Place {
    /// With another permit that is given back with it, such as one of the reader's own share.
    #[must_use]
    pub fn with(mut self, own: Option<OwnedSemaphorePermit>) -> Self {
        self._own = own;
        self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        metrics::gauge!("carrick_feed_subscribers", "door" => self.door).decrement(1.0);
    }
}

impl Feed {
    /// A feed of a store; the seal is the hub's.
    pub fn new(store: Arc<dyn Store>, seal: Seal, config: FeedConfig) -> Self {
        let options = config.options();
        let admission = Admission::new(options.admission, options.admission_burst, Instant::now());
        Self(Arc::new(Inner {
            places: Arc::new(Semaphore::new(options.subscribers)),
            admission: Mutex::new(admission),
            store,
            seal,
            config,
            tails: Mutex::default(),
            draining: AtomicU64::new(0),
        }))
    }

    /// Its settings.
    pub fn config(&self) -> &FeedConfig {
        &self.0.config
    }

    /// A place for a request that waits: whoever is here may stay, newcomers are refused.
    ///
    /// # Errors
    /// [`Refused::Full`] or [`Refused::Draining`].
    pub fn place(&self, door: &'static str) -> Result<Place, Refused> {
        let refused = |refused: Refused| {
            let reason = refused.label();
            metrics::counter!("carrick_feed_refused_total", "door" => door, "reason" => reason)
                .increment(1);
            Err(refused)
        };
        if self.leave_within().is_some() {
            return refused(Refused::Draining);
        }
        match Arc::clone(&self.0.places).try_acquire_owned() {
            Ok(permit) => {
                metrics::gauge!("carrick_feed_subscribers", "door" => door).increment(1.0);
                Ok(Place { _permit: permit, _own: None, door })
            }
            Err(_) => {
                let spread = rand::random_range(5_000..15_000);
                refused(Refused::Full { retry_after: Duration::from_millis(spread) })
            }
        }
    }

    /// A place for a stream; so many begin a second, and no more.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn admit(&self, door: &'static str) -> Result<Place, Refused> {
        let place = self.place(door)?;
        let admitted = self.0.admission.lock().admit(Instant::now());
        admitted.map(|()| place).map_err(|retry_after| {
            let reason = "too_fast";
            metrics::counter!("carrick_feed_refused_total", "door" => door, "reason" => reason)
                .increment(1);
            Refused::TooFast { retry_after }
        })
    }

    /// Reads where a client wants to go on: `earliest`, `latest`, or a position of these topics.
    ///
    /// # Errors
    /// [`NotAPosition`] if it is neither.
    pub fn start(&self, topics: &[Topic], text: &str) -> Result<Start, NotAPosition> {
        match text {
            "earliest" => return Ok(Start::Earliest),
            "latest" => return Ok(Start::Latest),
            _ => {}
        }
        let epoch = self.0.store.epoch();
        let (found, seqs) = match topics {
            [topic] => {
                let position = Position::open(&self.0.seal, topic.as_str(), text);
                let position = position.map_err(|_| NotAPosition)?;
                (position.epoch, vec![position.seq])
            }
            topics => {
                let payload = self.0.seal.open(PURPOSE, &scope_of(topics), text);
                let payload = payload.map_err(|_| NotAPosition)?;
                let mut numbers = payload
                    .chunks_exact(8)
                    .map(|chunk| chunk.try_into().map_or(0, u64::from_be_bytes));
                let epoch = numbers.next().ok_or(NotAPosition)?;
                (epoch, numbers.collect())
            }
        };
        if seqs.len() != topics.len() {
            return Err(NotAPosition);
        }
        Ok(if found == epoch { Start::At(Resume(seqs)) } else { Start::Lost })
    }

    /// A reader of topics, 1..=[`MAX_TOPICS`] of them, in this order for its positions.
    ///
    /// # Errors
    /// The store cannot tell how far a topic reaches.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn subscribe(
        &self,
        topics: &[Topic],
        start: Start,
        filter: Filter,
    ) -> Result<Subscription, StoreError> {
        Subscription::start(self.clone(), topics, start, filter).await
    }

    /// Tells every reader to leave within a time, each at one of its own, and lets nobody in.
    pub fn drain(&self, over: Duration) {
        let millis = u64::try_from(over.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        self.0.draining.store(millis, Ordering::SeqCst);
        for tail in self.0.tails.lock().values() {
            tail.wake();
        }
    }

    /// How long leaving may take, once the feed drains.
    pub fn leave_within(&self) -> Option<Duration> {
        self.0.draining.load(Ordering::SeqCst).checked_sub(1).map(Duration::from_millis)
    }

    fn scope(&self, topic: &Topic) -> Arc<Scope> {
        let (epoch, seal) = (self.0.store.epoch(), self.0.seal.clone());
        Arc::new(Scope { topic: topic.clone(), epoch, seal })
    }

    /// Attaches to the tail of a topic, which is started if nobody else has.
    fn watch(&self, scope: &Arc<Scope>) -> Watching {
        let mut tails = self.0.tails.lock();
        if let Some(tail) = tails.get(&scope.topic) {
            return tail.watch();
        }
        let tail = Tail::new(Arc::clone(scope), &self.0.config);
        tails.insert(scope.topic.clone(), Arc::clone(&tail));
        let watching = tail.watch();
        drop(tails);
        // Ends when it has had no reader for a while.
        tokio::spawn(tail::run(self.clone(), tail));
        watching
    }
}

/// What a position over several topics is sealed to.
fn scope_of(topics: &[Topic]) -> String {
    let names: Vec<_> = topics.iter().map(Topic::as_str).collect();
    names.join(" ")
}
