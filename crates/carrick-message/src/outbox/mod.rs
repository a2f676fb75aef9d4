//! Outbox: an event leaves if, and only if, the transaction that wrote it commits.
//!
//! Writing to a database and to a broker is two steps, and a crash between them loses an event or
//! tells of something that never happened. So the event is a row in the caller's own transaction,
//! and a [`Relay`] carries it to the broker afterwards, at least once and in the order of its key.
//!
//! * Writing: [`rusqlite::append`], [`sqlx_sqlite::append`], [`sqlx_postgres::append`], or a plain
//!   `INSERT` in any language: the table is a public contract, told in `docs/tables.md`.
//! * Carrying: [`Relay`], as many as one likes, each on its share of the keys.
//! * Looking after it: [`Outbox::failures`], [`Outbox::retry`], [`Outbox::skip`],
//!   [`Outbox::replay`].
//!
//! Order per key needs writers of one key to wait for each other before they take a number, which
//! they nearly always do anyway (they change the same row). Then an earlier row of a key is visible
//! whenever a later one is, and a long transaction delays its own keys only.
//!
//! Source: pattern document, outbox listings. Differs: defects.md M1, M7, M8.

#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod compose;
mod error;
mod event;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod handle;
#[cfg(feature = "sqlx-postgres")]
mod notify;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod relay;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod replay;
#[cfg(feature = "rusqlite")]
pub mod rusqlite;
mod schema;
#[cfg(feature = "sqlx-postgres")]
pub mod sqlx_postgres;
#[cfg(feature = "sqlx-sqlite")]
pub mod sqlx_sqlite;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod store;
mod waker;

#[cfg(feature = "sqlx-postgres")]
pub use self::notify::Notifier;
pub use self::{
    error::{AppendError, OutboxError},
    event::OutboxEvent,
    schema::COMPONENT,
    waker::Waker,
};
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
pub use self::{
    handle::Outbox,
    relay::{Relay, RelayConfig, RelayOptions, RelayStatus},
    replay::{Replay, ReplayCause, ReplayError, Replayed},
    store::Failure,
};
