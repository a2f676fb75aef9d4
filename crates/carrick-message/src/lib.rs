//! From a row that commits to an effect that happens once.
//!
//! * [`broker`]: topics, consumer groups, leases; one trait and its backends.
//! * [`consumer`]: runs a handler over a group: bounded, in order per key, retried, drained.
//! * [`dead_letter`]: what was put aside: listed, redriven, skipped, purged.
//! * [`outbox`]: events leave with the transaction that wrote them; a relay carries them.
//! * [`inbox`]: effects happen once, in the transaction that remembers the event.
//!
//! Events travel as [`Event`](carrick_core::event::Event) documents whose bytes no hop changes.

pub mod broker;
pub mod consumer;
pub mod dead_letter;
#[cfg(any(feature = "rusqlite", feature = "sqlx-sqlite", feature = "sqlx-postgres"))]
pub mod inbox;
#[cfg(any(feature = "rusqlite", feature = "sqlx-sqlite", feature = "sqlx-postgres"))]
pub mod outbox;
