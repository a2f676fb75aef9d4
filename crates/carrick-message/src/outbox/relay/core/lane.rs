//! A lane: the unpublished rows of one key, in order.

use std::collections::VecDeque;

use carrick_core::{event::Event, name::Topic};
use tokio::time::Instant;

use super::{Bucket, Seq};

/// Whose order is kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LaneKey {
    /// All rows of a key in a topic.
    Keyed {
        /// As written in the row.
        topic: Box<str>,
        /// As written in the row.
        key: Box<str>,
    },
    /// A row without a key is alone.
    Single(Seq),
}

/// What is to be published, or why it cannot be.
pub(crate) type Content = Result<(Topic, Event), String>;

/// An unpublished row in memory.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) seq: Seq,
    pub(crate) bucket: Bucket,
    pub(crate) attempts: u32,
    pub(crate) content: Content,
}

impl Row {
    pub(crate) fn bytes(&self) -> usize {
        self.content.as_ref().map_or(0, |(_, event)| event.as_json().len())
    }
}

/// A row that failed, and keeps the later ones of its key waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub(crate) first: Seq,
    /// When it is tried again.
    pub(crate) until: Instant,
}

/// The state of one key.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) bucket: Bucket,
    /// Rows that may go, in order.
    pub(crate) queue: VecDeque<Row>,
    /// Some of its rows are being published: the next ones wait, for two calls have no order.
    pub(crate) in_flight: bool,
    /// Rows from this number on were seen and not kept.
    pub(crate) behind: Option<Seq>,
    /// Its first row failed.
    pub(crate) blocked: Option<Blocked>,
    /// It is in a queue of lanes that may go.
    pub(crate) listed: bool,
}

impl Lane {
    pub(crate) fn new(bucket: Bucket) -> Self {
        Self {
            bucket,
            queue: VecDeque::new(),
            in_flight: false,
            behind: None,
            blocked: None,
            listed: false,
        }
    }

    /// Whether its rows are to be fetched from the table.
    pub(crate) fn is_hungry(&self) -> bool {
        self.behind.is_some() && self.queue.is_empty() && !self.in_flight
    }

    pub(crate) fn leave_behind(&mut self, seq: Seq) {
        self.behind = Some(self.behind.map_or(seq, |behind| behind.min(seq)));
    }

    pub(crate) fn insert(&mut self, row: Row) {
        // Nearly always at the end: writers of a key wait for each other.
        let at = self.queue.iter().rposition(|queued| queued.seq < row.seq).map_or(0, |at| at + 1);
        self.queue.insert(at, row);
    }
}
