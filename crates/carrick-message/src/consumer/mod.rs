//! The consumer: runs a handler for each event of a group, under lease.
//!
//! What the obvious loop (lease ten, handle ten, acknowledge ten) gets wrong is why this exists:
//!
//! * *Bounded*: so many handlers at a time, so many bytes, and only as much fetched ahead as is
//!   handled within the latency target. A slot is refilled as soon as it is free.
//! * *Acknowledged last*: after the handler, in batches, under the lease's own token.
//! * *Leases kept*: extended at a third, together, up to a cap. A lost lease stops its handler.
//! * *In order per key*: a key is a lane; a failed head returns its lane and no other.
//! * *Retried with reason*: by kind of failure, with full jitter, up to attempts and age; then put
//!   aside with the cause ([`dead_letter`](crate::dead_letter)).
//! * *Stopped when it is not the event*: a circuit opens when everything fails alike, instead of
//!   filling the dead letters.
//! * *Drained*: unstarted events go back at once, running ones finish until the grace is over.
//!
//! `core` decides all this without a clock or a broker; `service` does it. Events come at
//! least once: for effects that happen once, see [`inbox`](crate::inbox).
//!
//! Source: pattern document, competing consumers. Differs: defects.md M5 (spans are linked, not
//! nested) and M6 (extensions that fail, have no cap, or leave the handler running; batches that
//! wait for their slowest).

mod config;
mod core;
mod error;
mod handler;
pub(crate) mod log_limit;
mod service;
mod status;
mod trace;

use std::{fmt, sync::Arc};

use carrick_core::{
    clock::{Clock, SystemClock},
    config::duration,
    name::{Group, Topic},
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::{
    service::{Parts, Service},
    status::Gauges,
};
use crate::broker::{Broker, Capabilities};

pub use self::{
    config::{ConsumerConfig, ConsumerOptions},
    error::{ConsumerError, HandlerError, HandlerErrorKind},
    handler::{Handler, Incoming},
    status::{ConsumerReport, ConsumerStatus, StatusReader},
};

/// Consumes a topic as a member of a group.
///
/// ```
/// # use carrick_message::{broker::{Broker, StoreBroker}, consumer::{Consumer, ConsumerConfig, Incoming}};
/// # use carrick_core::{event::Event, name::{Group, Topic}};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = Arc::new(StoreBroker::new(Arc::new(carrick_store::engine::memory::MemoryStore::new())));
/// let (orders, billing) = (Topic::new("orders")?, Group::new("billing")?);
/// let (billed, mut seen) = tokio::sync::mpsc::channel(1);
///
/// let handler = move |incoming: Incoming| {
///     let billed = billed.clone();
///     async move {
///         billed.send(incoming.event.id().to_string()).await?; // an error is retried
///         Ok(())
///     }
/// };
/// let consumer =
///     Consumer::new(broker.clone(), orders.clone(), billing, ConsumerConfig::default(), handler);
/// let running = consumer.spawn();
///
/// let event = Event::builder("order.placed.v1").id("4471").source("/shop").build()?;
/// broker.publish(&orders, vec![event.into()]).await?;
/// assert_eq!(seen.recv().await.as_deref(), Some("4471"));
///
/// let report = running.drain().await?;
/// assert_eq!(report.status.handled, 1);
/// # Ok(())
/// # }
/// ```
pub struct Consumer<H> {
    broker: Arc<dyn Broker>,
    topic: Topic,
    group: Group,
    config: ConsumerConfig,
    handler: Arc<H>,
    clock: Arc<dyn Clock>,
    status: StatusReader,
}

impl<H: Handler> Consumer<H> {
    /// A consumer that does nothing until it is run.
    pub fn new(
        broker: Arc<dyn Broker>,
        topic: Topic,
        group: Group,
        config: ConsumerConfig,
        handler: H,
    ) -> Self {
        let (handler, clock) = (Arc::new(handler), Arc::new(SystemClock));
        let status = StatusReader::default();
        Self { broker, topic, group, config, handler, clock, status }
    }

    /// Tells the time by another clock: expiry and age go by it.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Reads how it stands, also while it runs.
    pub fn status(&self) -> StatusReader {
        self.status.clone()
    }

    /// Consumes until `stop`, then drains: returns what was not started, lets running handlers
    /// finish until the grace is over, and gives back the rest.
    ///
    /// # Errors
    /// [`ConsumerError::Incapable`] at once, if the broker cannot do what the configuration rests
    /// on; [`ConsumerError::Broker`] if it refuses in a way that no retry cures. A broker that is
    /// away is waited for.
    ///
    /// # Cancel safety
    /// Dropping it is a crash: handlers are aborted, their leases run out, their events come again.
    pub async fn run(self, stop: CancellationToken) -> Result<ConsumerReport, ConsumerError> {
        check(self.broker.capabilities(), &self.config)?;
        let gauges = Gauges::new(&self.topic, &self.group, self.status);
        let Self { broker, topic, group, config, handler, clock, .. } = self;
        let parts = Parts { broker, topic, group, config, handler, clock, gauges };
        Service::new(parts).run(stop).await
    }

    /// Runs it as a task, which the handle owns.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn spawn(self) -> ConsumerHandle {
        let stop = CancellationToken::new();
        let status = self.status();
        let task = tokio::spawn(self.run(stop.clone()));
        ConsumerHandle { stop, status, task }
    }
}

/// Refuses what would go wrong unnoticed, with the reason.
fn check(can: Capabilities, config: &ConsumerConfig) -> Result<(), ConsumerError> {
    let refuse = |what, consequence: String| Err(ConsumerError::Incapable { what, consequence });
    if !can.dead_letters {
        return refuse("keep dead letters", "what always fails would block or be lost".to_owned());
    }
    if !can.attempts {
        return refuse("count deliveries", "what always fails would be tried for ever".to_owned());
    }
    if !can.delay {
        return refuse("hold retries back", "what fails would be tried without a pause".to_owned());
    }
    let (lease, timeout) = (config.lease(), config.rules().handler_timeout);
    if !can.extend && timeout > lease {
        let text = |time| duration::format(time);
        let (lease, timeout) = (text(lease), text(timeout));
        let consequence = format!("handler-timeout ({timeout}) must not exceed lease ({lease})");
        return refuse("extend leases", consequence);
    }
    Ok(())
}

impl<H> fmt::Debug for Consumer<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("topic", &self.topic)
            .field("group", &self.group)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Owns a running consumer. Dropping it stops the consumer as a crash would: drain it instead.
#[derive(Debug)]
pub struct ConsumerHandle {
    stop: CancellationToken,
    status: StatusReader,
    task: JoinHandle<Result<ConsumerReport, ConsumerError>>,
}

impl ConsumerHandle {
    /// Starts the drain and returns at once; [`ConsumerHandle::drain`] waits for its end.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Reads how it stands.
    pub fn status(&self) -> ConsumerStatus {
        self.status.read()
    }

    /// Drains it, and waits until it has ended.
    ///
    /// # Errors
    /// [`ConsumerError`] if it had ended by itself.
    ///
    /// # Cancel safety
    /// Dropping it stops the consumer as a crash would.
    pub async fn drain(self) -> Result<ConsumerReport, ConsumerError> {
        self.stop();
        self.ended().await
    }

    /// Waits until it ends by itself, which only an error makes it do.
    ///
    /// # Errors
    /// [`ConsumerError`], why it ended.
    ///
    /// # Cancel safety
    /// Dropping it stops the consumer as a crash would.
    pub async fn ended(mut self) -> Result<ConsumerReport, ConsumerError> {
        (&mut self.task).await.unwrap_or(Err(ConsumerError::Stopped))
    }
}

impl Drop for ConsumerHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}
