//! The broker: topics that events are published to, and groups that consume them under lease.
//!
//! [`Broker`] is the promise; backends keep it, and one contract suite checks each of them.
//! [`StoreBroker`] keeps it on any engine of `carrick-store`: memory, SQLite (the embedded broker)
//! or Postgres.

#[cfg(feature = "contract")]
pub mod contract;
mod error;
mod groups;
mod shed;
mod store;

use std::{fmt, time::Duration};

use async_trait::async_trait;
use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use jiff::Timestamp;

pub(crate) use self::store::{MAX_LEASE, MIN_LEASE};
pub use self::{error::BrokerError, shed::PublishLimits, store::StoreBroker};

/// An event to publish.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// The event. Its `partitionkey` is the ordering key, its `expirytime` ends its delivery, and
    /// its `(source, id)` deduplicates it.
    pub event: Event,
    /// Not delivered before this time.
    pub due: Option<Timestamp>,
}

impl From<Event> for Outgoing {
    fn from(event: Event) -> Self {
        Self { event, due: None }
    }
}

/// What became of a published batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// For each event, in order: whether it was new. `false`: the broker already had it.
    pub fresh: Vec<bool>,
    /// Position after the last event, for brokers that have positions.
    pub position: Option<carrick_core::position::Position>,
}

/// How much a lease call takes, and how long it waits for something to take.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRequest {
    /// Events, 1..=1000.
    pub max: usize,
    /// Bytes of events; one event is returned even if it is larger.
    pub max_bytes: usize,
    /// How long the lease holds.
    pub lease: Duration,
    /// How long to wait for the first event; zero looks once.
    pub wait: Duration,
}

/// Up to 100 events and 1 MiB, held for 30 s, without waiting.
impl Default for LeaseRequest {
    fn default() -> Self {
        Self {
            max: 100,
            max_bytes: 1024 * 1024,
            lease: Duration::from_secs(30),
            wait: Duration::ZERO,
        }
    }
}

/// Names a lease to its broker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId(pub String);

/// An event under lease.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// To settle it with.
    pub lease: LeaseId,
    /// Grows with every lease call that delivers, within the group, so every delivery of an event has
    /// a higher one than its last: a fence for the handler's own writes. `None` if the broker has
    /// nothing that grows.
    pub fence: Option<u64>,
    /// How often it was delivered, this time included; from 1.
    pub attempt: u32,
    /// When it was first delivered, by the broker's clock.
    pub first_delivered_at: Timestamp,
    /// When the lease ends, by the local monotonic clock, counted from before the call was sent.
    pub expires_at: tokio::time::Instant,
    /// The event.
    pub event: Event,
}

/// What a consumer says of a delivery.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Done with it.
    Ack,
    /// Deliver it again after `delay`; `counted` tells whether this delivery was an attempt.
    Nack {
        /// How long it waits.
        delay: Duration,
        /// Whether it counts as an attempt.
        counted: bool,
    },
    /// Hold it longer: until `lease` from now.
    Extend {
        /// From now.
        lease: Duration,
    },
    /// Put it aside.
    DeadLetter {
        /// Why.
        cause: String,
    },
}

/// What became of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdicted {
    /// Done, and durable.
    Done,
    /// The lease is not held any more; nothing was changed.
    Stale,
}

/// What a broker can do by itself. What it cannot, the core fills from its own tables or refuses
/// at start, with the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Events of a key are delivered in order, also across retries.
    pub order_per_key: bool,
    /// The broker holds events back until they are due.
    pub delay: bool,
    /// The attempt count is exact and survives a crash.
    pub attempts: bool,
    /// A lease can be extended.
    pub extend: bool,
    /// Dead letters are kept, listed and redriven by the broker.
    pub dead_letters: bool,
    /// How long `(source, id)` is remembered; `None` if not at all.
    pub dedupe_window: Option<Duration>,
    /// The largest event, in bytes.
    pub max_event: usize,
}

/// Topics and consumer groups.
///
/// # Contract
/// * A publish resolves once its events are durable as far as the backend promises; a batch is
///   stored in the order given.
/// * Each group gets every event at least once, until it acknowledges or dead-letters it.
/// * Order per key: no event of a key is delivered while an earlier one of that key is unfinished,
///   except to the same lease call, ascending; if an earlier one is then nacked or dead-lettered,
///   the leases of the later ones of that call end, uncounted.
/// * Every delivery has a new lease; a lease that is not the current one changes nothing.
/// * Id, key, trace and extensions of an event are the same bytes through publish, retry, dead
///   letter and redrive.
#[async_trait]
pub trait Broker: fmt::Debug + Send + Sync + 'static {
    /// What this broker can do by itself.
    fn capabilities(&self) -> Capabilities;

    /// Publishes events in order.
    ///
    /// # Errors
    /// [`BrokerError`]; after [`BrokerError::is_transient`] the same batch may be sent again, and
    /// what had been stored is then deduplicated within the window.
    ///
    /// # Cancel safety
    /// The events may still be published.
    async fn publish(&self, topic: &Topic, events: Vec<Outgoing>)
    -> Result<Published, BrokerError>;

    /// Leases events for a group, waiting for the first one.
    ///
    /// # Cancel safety
    /// Events may be left under a lease that runs out; nothing is lost.
    async fn lease(
        &self,
        topic: &Topic,
        group: &Group,
        request: LeaseRequest,
    ) -> Result<Vec<Delivery>, BrokerError>;

    /// Settles deliveries; the answer has one entry for each, in order.
    ///
    /// # Cancel safety
    /// The verdicts may still take effect.
    async fn settle(
        &self,
        verdicts: Vec<(LeaseId, Verdict)>,
    ) -> Result<Vec<Verdicted>, BrokerError>;
}
