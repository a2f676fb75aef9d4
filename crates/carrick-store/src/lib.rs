//! Carrick's durable engine: four primitives on which every durable pattern stands.
//!
//! * [`log`]: append-only streams whose sequence has no gaps for a reader.
//! * [`lease`]: a queue over a stream for each consumer group, with lease tokens, per-key order,
//!   retries and dead letters.
//! * [`once`]: a dedupe table that remembers what was done and what it answered.
//! * [`fence`]: named leases whose tokens only grow.
//!
//! [`wake`] tells waiters that a stream grew. An [`engine`] implements all of them; three exist
//! (memory, SQLite, Postgres) and all pass the one contract suite in `contract`. Patterns above are
//! thin state machines over these: none keeps its own storage, scheduler or retry loop.

mod check;
#[cfg(feature = "contract")]
pub mod contract;
pub mod engine;
pub mod error;
pub mod fence;
pub mod lease;
pub mod log;
mod micros;
pub mod once;
pub mod schema;
pub mod wake;

use std::fmt;

use async_trait::async_trait;
use carrick_core::name::Topic;

pub use self::error::StoreError;

/// Everything an engine offers, as one object that an operator chooses by URL.
#[async_trait]
pub trait Store:
    log::Log
    + lease::Queue
    + once::Once
    + fence::Fence
    + wake::Wake
    + fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// Finishes what is under way, and gives up what the engine holds. Calls that come later answer
    /// [`StoreError::Closed`].
    ///
    /// # Cancel safety
    /// Closing goes on in the background.
    async fn close(&self);
}

/// The name of a stream: a topic with its tenant.
pub type Stream = Topic;
