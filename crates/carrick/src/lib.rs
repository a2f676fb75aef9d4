//! Carrick joins services: the patterns by which two programs talk to each other without losing,
//! doubling, reordering or hanging anything.
//!
//! This crate re-exports the families by feature, so that one line in `Cargo.toml` is enough:
//!
//! * `core` (always): [`core::event`], [`core::deadline`], [`core::context`] and the other words that
//!   all patterns share.
//! * `message` (default): [`message::broker`], [`message::outbox`], [`message::inbox`],
//!   [`message::consumer`], [`message::dead_letter`], and the [`store`] they stand on. `postgres` and
//!   `sqlx-sqlite` add drivers.
//! * `call`: [`call::client`] with its policies: [`call::deadline`], [`call::retry`],
//!   [`call::budget`], [`call::breaker`], [`call::outlier`], [`call::balance`], [`call::bulkhead`],
//!   [`call::queue`], [`call::throttle`], [`call::hedge`], [`call::scatter`], [`call::fault`],
//!   [`call::egress`]; [`call::server`] for the other side.
//! * `edge`: [`edge::feed`] and its doors: [`edge::long_poll`], [`edge::sse`], [`edge::websocket`].
//! * `ops`: [`ops::health`], [`ops::drain`], [`ops::telemetry`].
//!
//! The example `message_path` shows one event from the row that commits it to the effect that
//! happens once.

#[cfg(feature = "call")]
pub use carrick_call as call;
pub use carrick_core as core;
#[cfg(feature = "edge")]
pub use carrick_edge as edge;
#[cfg(feature = "message")]
pub use carrick_message as message;
#[cfg(feature = "ops")]
pub use carrick_ops as ops;
#[cfg(feature = "message")]
pub use carrick_store as store;
