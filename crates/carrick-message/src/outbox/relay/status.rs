//! What a relay tells about itself.

use std::time::Duration;

use super::core::Seq;

/// How far a relay is, for its own upkeep.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub(super) floor: Seq,
    pub(super) in_memory: usize,
    pub(super) blocked: usize,
    pub(super) published: u64,
    pub(super) failed: u64,
}

/// How a relay is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RelayStatus {
    /// Buckets it works on; 0: it stands by.
    pub buckets: usize,
    /// Rows it has in memory.
    pub in_memory: usize,
    /// Keys whose first row failed and waits to be tried again.
    pub blocked_keys: usize,
    /// Rows it has published since it started.
    pub published: u64,
    /// Failures it has written into rows since it started.
    pub failed: u64,
    /// Age of the oldest unpublished row of its buckets.
    pub oldest_unpublished: Option<Duration>,
    /// Age of the oldest snapshot that somebody holds in the database, where that matters.
    pub oldest_snapshot: Option<Duration>,
}
