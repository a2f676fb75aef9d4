//! What a relay needs of the database that holds the outbox.

#[cfg(feature = "sqlx-postgres")]
pub(crate) mod postgres;
#[cfg(feature = "rusqlite")]
pub(crate) mod sqlite;
#[cfg(feature = "rusqlite")]
mod worker;

use std::{fmt, time::Duration};

use async_trait::async_trait;
use carrick_core::{event::Event, name::Topic};
use carrick_store::fence::FenceToken;
use jiff::Timestamp;

use super::{
    OutboxError,
    compose::{Columns, compose},
    relay::core::{
        Bucket, Content, Fetch, Fetched, Heading, LaneKey, Marks, Page, Scan, Seq, Sweep,
    },
};

/// A bucket's lease by name, shared by all relays of a database.
pub(crate) fn lease_name(bucket: Bucket) -> String {
    format!("relay/{bucket}")
}

/// Lane of a row.
pub(crate) fn lane_key(seq: Seq, topic: &str, key: Option<&str>) -> LaneKey {
    match key {
        Some(key) => LaneKey::Keyed { topic: topic.into(), key: key.into() },
        None => LaneKey::Single(seq),
    }
}

/// The texts by which rows may name a topic.
pub(crate) fn spellings(topic: &Topic) -> (String, String) {
    let full = topic.as_str().to_owned();
    let is_default = topic.tenant() == carrick_core::name::DEFAULT_TENANT;
    let short = if is_default { topic.name().to_owned() } else { full.clone() };
    (full, short)
}

/// A row's content; an oversize event is a finding about the row too.
pub(crate) fn content(columns: Columns) -> Content {
    let (topic, event) = compose(columns)?;
    let size = event.as_json().len();
    if size > carrick_core::event::HARD_LIMIT {
        return Err(format!("the event has {size} bytes, and at most 1 MiB are published"));
    }
    Ok((topic, event))
}

/// What a prune did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pruned {
    pub(crate) rows: u64,
    /// Where to go on, if there may be more.
    pub(crate) next: Option<Seq>,
}

/// How the outbox is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Health {
    /// Age of the oldest unpublished row of the asked buckets.
    pub(crate) oldest: Option<Duration>,
    /// Age of the oldest snapshot that somebody holds in this database, where that matters.
    pub(crate) oldest_snapshot: Option<Duration>,
}

/// A row that could not be published, as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The row's number.
    pub seq: u64,
    /// As written in the row.
    pub topic: String,
    /// As written in the row.
    pub key: Option<String>,
    /// The event's id, as written in the row.
    pub id: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed the last time.
    pub error: String,
    /// When it is tried again; `None`: now.
    pub next_attempt_at: Option<Timestamp>,
    /// When it was written.
    pub created_at: Timestamp,
}

/// Published rows `after..=upto` of a time range.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    pub(crate) after: Seq,
    pub(crate) upto: Seq,
    pub(crate) from: Timestamp,
    pub(crate) to: Timestamp,
    pub(crate) topic: Option<Topic>,
    pub(crate) rows: usize,
}

/// A published row.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) seq: Seq,
    pub(crate) content: Result<(Topic, Event), String>,
}

/// The database that holds an outbox. Every call is one short statement or transaction.
#[async_trait]
pub(crate) trait OutboxStore: fmt::Debug + Send + Sync + 'static {
    /// How many buckets its keys are spread over.
    fn buckets(&self) -> u16;

    /// Says that a relay lives; returns how many do, this one included.
    async fn heartbeat(&self, relay: &str, ttl: Duration) -> Result<usize, OutboxError>;

    /// Says that a relay lives no more.
    async fn leave(&self, relay: &str) -> Result<(), OutboxError>;

    /// Takes at most `max` leases of those buckets, as far as they are free.
    async fn acquire(
        &self,
        buckets: &[Bucket],
        max: usize,
        ttl: Duration,
    ) -> Result<Vec<(Bucket, FenceToken)>, OutboxError>;

    /// Holds leases for `ttl` from now; returns those that are held still.
    async fn renew(
        &self,
        held: &[(Bucket, FenceToken)],
        ttl: Duration,
    ) -> Result<Vec<Bucket>, OutboxError>;

    /// Ends leases.
    async fn release(&self, held: &[(Bucket, FenceToken)]) -> Result<(), OutboxError>;

    /// Reads the next unpublished rows, in order of their numbers.
    async fn scan(&self, scan: &Scan) -> Result<Page, OutboxError>;

    /// Reads unpublished rows of some keys.
    async fn fetch(&self, fetch: &Fetch) -> Result<Fetched, OutboxError>;

    /// Reads where unpublished rows are.
    async fn sweep(&self, sweep: &Sweep) -> Result<Vec<Heading>, OutboxError>;

    /// Marks rows, where their lease is still the current one; returns how many.
    async fn mark(&self, marks: &Marks) -> Result<usize, OutboxError>;

    /// Removes rows published more than `keep` ago, of the next `limit` rows after a number.
    async fn prune(&self, after: Seq, keep: Duration, limit: usize) -> Result<Pruned, OutboxError>;

    /// Tells how the outbox is; unpublished rows are at or above `floor`.
    async fn health(&self, floor: Seq, buckets: &[Bucket]) -> Result<Health, OutboxError>;

    /// Lists rows that failed, in order of their numbers.
    async fn failures(&self, after: Seq, limit: usize) -> Result<Vec<Failure>, OutboxError>;

    /// Makes failed rows due now.
    async fn retry(&self, seqs: &[Seq]) -> Result<u64, OutboxError>;

    /// Gives failed rows up: they count as published, with `reason` beside them.
    async fn skip(&self, seqs: &[Seq], reason: &str) -> Result<u64, OutboxError>;

    /// The highest number there is.
    async fn last(&self) -> Result<Seq, OutboxError>;

    /// Reads published rows.
    async fn published(&self, range: &Range) -> Result<Vec<Sent>, OutboxError>;

    /// Waits for a hint from outside that there are new rows.
    async fn hint(&self);

    /// Ends all connections.
    async fn close(&self);
}
