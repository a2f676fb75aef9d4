//! Inbox: an effect happens once, however often its event arrives.
//!
//! Every broker delivers some event twice. So the handler writes which event it has seen in the same
//! transaction as the effect: whoever comes second finds the row, and does nothing.
//!
//! * *Optimistic* ([`Seen`]): one `INSERT … ON CONFLICT DO NOTHING` decides, by its row count, and
//!   commits with the effect. For everything that happens in the same database.
//! * *Reserve first* ([`Reserved`]): a row with an end is committed before the work, so that two
//!   copies that arrive together do not both send the letter. For effects outside the database; if
//!   the holder dies, the reservation ends and the work is done again.
//! * *Version guard* ([`Guarded`]): an older version under a new event id must not overwrite a newer
//!   one. Deduplication does not see that; the guard does.
//!
//! Rows are scoped by handler: two handlers of one event each do their part once. How long they are
//! kept ([`Retention`]) is the time over which a repeat is noticed, and no matter of tidiness.
//!
//! A consumer's delivery also has a fence that grows; a handler that writes a row of its own can
//! refuse late writers with `… SET fence = $fence WHERE id = $id AND fence <= $fence`, and needs no
//! table of ours for it.
//!
//! Source: pattern document, inbox listing. Differs: defects.md M2 (a caught unique violation leaves
//! a Postgres transaction unusable).

mod error;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod prune;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod retention;
#[cfg(feature = "rusqlite")]
pub mod rusqlite;
mod schema;
#[cfg(feature = "sqlx-postgres")]
pub mod sqlx_postgres;
#[cfg(feature = "sqlx-sqlite")]
pub mod sqlx_sqlite;
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
mod tables;

use std::{borrow::Cow, time::Duration};

use carrick_core::event::Event;

pub use self::{error::InboxError, schema::COMPONENT};
#[cfg(any(feature = "rusqlite", feature = "sqlx-postgres"))]
pub use self::{
    prune::Pruner,
    retention::{Horizon, Retention, RetentionOptions},
    tables::make_tables,
};

/// The most events of one batch.
pub const MAX_BATCH: usize = 1000;

/// What identifies an event: its source, and its id there.
///
/// ```
/// # use carrick_core::event::Event;
/// # use carrick_message::inbox::EventId;
/// let event = Event::builder("order.placed.v1").source("/shop").id("4471").build()?;
/// assert_eq!(EventId::from(&event), EventId::new("/shop", "4471"));
/// # Ok::<(), carrick_core::event::EventError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventId<'a> {
    /// The event's `source`.
    pub source: Cow<'a, str>,
    /// The event's `id`.
    pub id: Cow<'a, str>,
}

impl<'a> EventId<'a> {
    /// The id of an event.
    pub fn new(source: impl Into<Cow<'a, str>>, id: impl Into<Cow<'a, str>>) -> Self {
        Self { source: source.into(), id: id.into() }
    }
}

impl<'a> From<&'a Event> for EventId<'a> {
    fn from(event: &'a Event) -> Self {
        Self { source: event.source(), id: event.id() }
    }
}

/// Whether a handler has seen an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Not before: do it, in this transaction.
    First,
    /// It did it before: do nothing, and acknowledge.
    Duplicate,
}

/// What a reservation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// Do it, then complete or release with this token.
    New(ReservationToken),
    /// Somebody is at it, and its reservation ends by itself in this time: try again then.
    Busy(Duration),
    /// It was done before: do nothing, and acknowledge.
    Done,
}

/// Proves a reservation; grows with every reservation of the same event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationToken(pub i64);

/// Which versions follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versions {
    /// Any higher one: what lies between does not matter, as when each event has the whole state.
    Ascending,
    /// The next one only, from `first`: each event is a change to the one before.
    Contiguous {
        /// The first version of an entity.
        first: i64,
    },
}

/// What a version guard found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// It is the present one now: apply it, in this transaction.
    Applied,
    /// It was the present one already: do nothing, and acknowledge.
    Duplicate,
    /// A later one was there: do nothing, and acknowledge.
    Stale {
        /// The present one.
        current: i64,
    },
    /// One before it is missing: roll back and try again later, or fetch what is missing.
    Gap {
        /// The one that is missing first.
        expected: i64,
    },
}

impl Guarded {
    /// The outcome for a version that was not written.
    fn refused(version: i64, current: Option<i64>, versions: Versions) -> Self {
        let current = match (current, versions) {
            (Some(current), _) => current,
            (None, Versions::Contiguous { first }) => first.saturating_sub(1),
            // Written by nobody and refused by nobody: somebody removed it between.
            (None, Versions::Ascending) => return Self::Stale { current: version },
        };
        if version == current {
            Self::Duplicate
        } else if version < current {
            Self::Stale { current }
        } else {
            Self::Gap { expected: current.saturating_add(1) }
        }
    }

    fn counted(self) -> Self {
        let outcome = match self {
            Self::Applied => "applied",
            Self::Duplicate => "duplicate",
            Self::Stale { .. } => "stale",
            Self::Gap { .. } => "gap",
        };
        metrics::counter!("carrick_inbox_versions_total", "outcome" => outcome).increment(1);
        self
    }
}

fn count(first: usize, duplicates: usize) {
    metrics::counter!("carrick_inbox_first_total").increment(first as u64);
    metrics::counter!("carrick_inbox_duplicates_total").increment(duplicates as u64);
}

fn check_handler(handler: &str) -> Result<(), InboxError> {
    if (1..=200).contains(&handler.len()) {
        return Ok(());
    }
    let value = format!("{} bytes", handler.len());
    Err(InboxError::Invalid { what: "handler", range: "1 to 200 bytes", value })
}

fn check_batch(count: usize) -> Result<(), InboxError> {
    if count <= MAX_BATCH {
        return Ok(());
    }
    Err(InboxError::Invalid { what: "events", range: "at most 1000", value: count.to_string() })
}
