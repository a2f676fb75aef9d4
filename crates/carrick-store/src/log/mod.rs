//! The log: append-only streams of records, read by sequence number.
//!
//! A stream exists from its first record. Its sequence starts at 1, grows by one a record and has no
//! gap that a reader could fall into: a number becomes visible only once every lower one is settled.
//! An append resolves when its records are durable, so an acknowledgement means disk.

pub(crate) mod dedupe;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;

use crate::{StoreError, Stream};

/// The largest body a record may have, in bytes: 1 MiB for the event and some room for a frame.
pub const MAX_BODY: usize = 1024 * 1024 + 64 * 1024;

/// The most records one append, read or claim takes: bounds a transaction and an answer.
pub const MAX_BATCH: usize = 1000;

/// A record's number in its stream, from 1.
pub type Seq = u64;

/// A record to append.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewRecord {
    /// Records of one key are delivered to a group in order, one after another.
    pub key: Option<String>,
    /// Identity of the record for deduplication within the window; `None` turns it off.
    pub dedupe: Option<u128>,
    /// Not delivered to groups before this time; readers of the log see it at once.
    pub due: Option<Timestamp>,
    /// Not delivered to groups from this time on: dropped and counted at the claim.
    pub expires: Option<Timestamp>,
    /// The record itself, at most [`MAX_BODY`] bytes.
    pub body: Bytes,
}

/// What became of an appended record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// Durable under this number.
    Stored(Seq),
    /// Already durable under this number, within the dedupe window; nothing was written.
    Duplicate(Seq),
}

impl Appended {
    /// The number under which the record is durable, whether now or before.
    pub fn seq(self) -> Seq {
        match self {
            Self::Stored(seq) | Self::Duplicate(seq) => seq,
        }
    }
}

/// A record as read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Number in the stream.
    pub seq: Seq,
    /// When the engine stored it, by the engine's clock.
    pub stored_at: Timestamp,
    /// Ordering key.
    pub key: Option<String>,
    /// The record itself.
    pub body: Bytes,
}

/// How far a stream reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Lowest number still readable; `last + 1` when there is none.
    pub first: Seq,
    /// Highest number readable now; 0 for a stream that never had a record.
    pub last: Seq,
}

impl Bounds {
    /// Checks that a stream can be read from after `after`.
    pub(crate) fn check(self, after: Seq) -> Result<(), StoreError> {
        if after > self.last {
            return Err(StoreError::Beyond { after, bounds: self });
        }
        if after.saturating_add(1) < self.first {
            return Err(StoreError::Trimmed { after, bounds: self });
        }
        Ok(())
    }
}

/// How much a read returns at most. At least one record is returned if there is one, so that a
/// record larger than `bytes` cannot block its reader.
#[derive(Clone, Copy, Debug)]
pub struct ReadLimit {
    /// Records, 1..=[`MAX_BATCH`].
    pub records: usize,
    /// Bytes of bodies.
    pub bytes: usize,
}

impl Default for ReadLimit {
    fn default() -> Self {
        Self { records: 100, bytes: 1024 * 1024 }
    }
}

/// What a trim may take away.
#[derive(Clone, Copy, Debug)]
pub struct Trim {
    /// Records stored before this time may go.
    pub stored_before: Timestamp,
    /// At most this many records go in one call: bounds the transaction.
    pub limit: usize,
}

/// Append-only streams.
///
/// # Contract
/// * An append is all or nothing, and durable before it resolves; the records of one call are
///   adjacent and in the order given.
/// * `dedupe` holds for at least the engine's window ([`Log::dedupe_window`]), within the stream,
///   across restarts, and within one call too.
/// * What a reader saw up to `last` is all that will ever be there: no record appears below.
/// * A trim never takes a record that a group has not finished with (waiting, leased, never claimed
///   or dead): those are kept until it has.
/// * Cancelling an append leaves it whole or absent.
#[async_trait]
pub trait Log {
    /// Identity of this store's sequences: changes when a store is made anew, so that a position of
    /// an earlier one is noticed.
    fn epoch(&self) -> u64;

    /// How long a dedupe identity is remembered at least.
    fn dedupe_window(&self) -> std::time::Duration;

    /// Appends records, at most [`MAX_BATCH`] of them.
    async fn append(
        &self,
        stream: &Stream,
        records: Vec<NewRecord>,
    ) -> Result<Vec<Appended>, StoreError>;

    /// Reads records with numbers above `after`, ascending.
    ///
    /// # Errors
    /// [`StoreError::Trimmed`] when records above `after` have been trimmed away,
    /// [`StoreError::Beyond`] when `after` is above the last number.
    async fn read(
        &self,
        stream: &Stream,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, StoreError>;

    /// Tells how far a stream reaches; an unknown stream is empty.
    async fn bounds(&self, stream: &Stream) -> Result<Bounds, StoreError>;

    /// Lists streams in order of their names, after `after`, at most `limit`.
    async fn streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(Stream, Bounds)>, StoreError>;

    /// Removes old records that every group has finished with; returns how many.
    async fn trim(&self, stream: &Stream, trim: Trim) -> Result<usize, StoreError>;
}
