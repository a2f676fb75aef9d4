//! What goes into the core and comes out of it.

use std::{sync::Arc, time::Duration};

use carrick_core::name::Topic;
use carrick_store::fence::FenceToken;
use tokio::time::Instant;

use super::{
    horizon::{Pending, Snapshot},
    lane::{LaneKey, Row},
};
use crate::broker::Outgoing;

/// A row's number.
pub(crate) type Seq = u64;
/// A bucket's number.
pub(crate) type Bucket = u16;
/// A lane's name, cheap to clone.
pub(crate) type Key = Arc<LaneKey>;

/// A lease on a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) token: FenceToken,
    /// No batch starts from here on, by the local clock.
    pub(crate) until: Instant,
    /// To be given to another relay: no batch starts, and what is under way is finished.
    pub(crate) leaving: bool,
}

/// A row as a read found it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) row: Row,
    pub(crate) lane: LaneKey,
    /// Not to be tried before; by the database's clock, counted from the read.
    pub(crate) wait: Option<Duration>,
}

/// Where an unpublished row is, without what is in it.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    pub(crate) seq: Seq,
    pub(crate) bucket: Bucket,
    pub(crate) lane: LaneKey,
    pub(crate) wait: Option<Duration>,
}

/// What to read.
#[derive(Clone, Debug)]
pub(crate) enum Read {
    /// The next rows of all keys.
    Scan(Scan),
    /// Rows of some keys.
    Lanes(Fetch),
    /// Headings after a number, up to another.
    Sweep(Sweep),
}

/// The next rows of all keys.
#[derive(Clone, Debug)]
pub(crate) struct Scan {
    /// Whose rows; an engine with one bucket need not ask.
    #[cfg_attr(not(feature = "sqlx-postgres"), expect(dead_code, reason = "of several buckets"))]
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) after: Seq,
    /// See [`Horizon`](super::horizon).
    #[cfg_attr(not(feature = "sqlx-postgres"), expect(dead_code, reason = "of several writers"))]
    pub(crate) pending: Vec<Pending>,
    /// In memory already: need not be sent again.
    pub(crate) known: Vec<Seq>,
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
}

/// Headings of rows `after..=upto`.
#[derive(Clone, Debug)]
pub(crate) struct Sweep {
    pub(crate) after: Seq,
    pub(crate) upto: Seq,
    pub(crate) rows: usize,
}

/// Rows of some keys, in the order of `wanted`, and of each in order.
#[derive(Clone, Debug)]
pub(crate) struct Fetch {
    pub(crate) wanted: Vec<Wanted>,
    /// Rows of each key.
    pub(crate) rows: usize,
    /// Bytes of all; one row may be larger.
    pub(crate) bytes: usize,
}

/// Rows of one key, from a number on.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) lane: Key,
    pub(crate) from: Seq,
}

/// What a scan found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    /// In order of their numbers.
    pub(crate) rows: Vec<Found>,
    /// The last row, or a number up to which there is nothing more.
    pub(crate) last: Option<Seq>,
    /// It stopped at its bounds; there may be more.
    pub(crate) full: bool,
    pub(crate) snapshot: Option<Snapshot>,
}

/// What a fetch found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fetched {
    pub(crate) rows: Vec<Found>,
    /// It stopped at its bytes; there may be more after the last row.
    pub(crate) full: bool,
}

/// A publish to make.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) id: u64,
    pub(crate) topic: Topic,
    pub(crate) events: Vec<Outgoing>,
}

/// Why a publish failed.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) error: String,
    pub(crate) kind: RefusalKind,
}

/// What may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalKind {
    /// The broker has too much to do, and said how long to leave it alone.
    Overload(Duration),
    /// The broker may take it later.
    Transient,
    /// The broker will not take it.
    Permanent,
}

/// A row whose event the broker has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub(crate) seq: Seq,
    pub(crate) bucket: Bucket,
    pub(crate) token: FenceToken,
}

/// A row that could not be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) seq: Seq,
    pub(crate) bucket: Bucket,
    pub(crate) token: FenceToken,
    pub(crate) error: String,
    pub(crate) delay: Duration,
}

/// Rows to mark, in one short transaction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    pub(crate) accepted: Vec<Accepted>,
    pub(crate) failed: Vec<Failed>,
}

impl Marks {
    pub(super) fn is_empty(&self) -> bool {
        self.accepted.is_empty() && self.failed.is_empty()
    }

    pub(super) fn seqs(&self) -> impl Iterator<Item = Seq> {
        let accepted = self.accepted.iter().map(|row| row.seq);
        accepted.chain(self.failed.iter().map(|row| row.seq))
    }
}
