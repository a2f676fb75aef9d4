//! The leased queue: each consumer group's progress through a stream.
//!
//! A claim hands out records under a lease; a record that is not acknowledged before its lease ends
//! is handed out again. Every claim of a record gets a new token, and whatever is done with the
//! record afterwards must show it: a holder whose lease was lost is told so, and changes nothing.
//! A delivery is counted when it is claimed, so a crash loop is counted too.
//!
//! Order per key: while a record of a key is leased or waits for a retry, no later record of that
//! key is handed out by another claim. One claim may return several records of a key, ascending;
//! the holder works them in order. When it releases or buries one of them, the leases of the later
//! ones of that key in the same claim end with it, uncounted ([`Settled::Stale`] if it tries).
//! A failed head so blocks its own key and no other.
//!
//! Source: SQS FIFO groups for the claim rule, awa ADR-013 for the token, pattern document.

pub(crate) mod claim;
pub(crate) mod core;
#[cfg(test)]
mod model;
mod token;

pub use self::token::InvalidToken;

use std::{num::NonZeroU64, time::Duration};

use async_trait::async_trait;
use jiff::Timestamp;

use carrick_core::name::Group;

use crate::{
    StoreError, Stream,
    log::{Record, Seq},
};

/// How much a claim takes at most, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Records, 1..=[`MAX_BATCH`](crate::log::MAX_BATCH).
    pub records: usize,
    /// Bytes of bodies; at least one record is returned if one is ready.
    pub bytes: usize,
    /// How long the lease holds, 1 s to 12 h.
    pub lease: Duration,
}

/// Where a group starts in a stream that it has not yet read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At the oldest record that is still there.
    #[default]
    Earliest,
    /// After the newest record.
    Latest,
}

/// Names one lease of one record; shown to the store, it proves that the lease is still held.
///
/// `Display` and `FromStr` give its text form (`"3.17.42"`), which is not secret: whoever takes
/// tokens from outside seals them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseToken {
    /// The engine's number for the group in its stream.
    pub group: NonZeroU64,
    /// The record.
    pub seq: Seq,
    /// Grows with every claim in the group, across restarts: usable as a fence.
    pub fence: u64,
}

/// A record under lease.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// To settle it with.
    pub token: LeaseToken,
    /// How often it has been claimed, this time included; from 1. A release that does not count
    /// gives its attempt back.
    pub attempt: u32,
    /// When the record was first claimed by this group, by the engine's clock.
    pub first_claimed_at: Timestamp,
    /// The record.
    pub record: Record,
}

/// What came of a claim.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    /// The records under lease, ascending by number within a key.
    pub claimed: Vec<Claimed>,
    /// Records dropped because they had expired; they count as finished.
    pub expired: usize,
    /// When the next record of this group becomes ready without an append: a retry that is due, a
    /// lease that ends. `None` when only an append can help. A hint, never later than the truth.
    pub next_ready: Option<Timestamp>,
}

/// What a holder asks for a record it has under lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settle {
    /// Finished: never delivered to this group again.
    Ack,
    /// Given back: ready again after `delay`. `counted: false` gives the attempt back (drain,
    /// overload, hand-over); `true` keeps it (the handler failed).
    Release {
        /// How long it waits, at most 30 days.
        delay: Duration,
        /// Whether this delivery counts as an attempt.
        counted: bool,
    },
    /// Held longer: the lease now ends `lease` from now, whatever it was before.
    Extend {
        /// 1 s to 12 h from now.
        lease: Duration,
    },
    /// Put aside as a dead letter; its key moves on.
    Bury {
        /// Why; cut to 4 KiB.
        cause: String,
    },
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Done, and durable.
    Done,
    /// The lease is not held any more (ended, settled before, or its key's head failed): nothing
    /// was changed.
    Stale,
}

/// A dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The record, which the log keeps for as long as it is dead.
    pub record: Record,
    /// How often it was delivered.
    pub attempts: u32,
    /// Why it was buried.
    pub cause: String,
    /// The fence of the lease under which it was buried.
    pub fence: u64,
    /// When it was first claimed.
    pub first_claimed_at: Timestamp,
    /// When it was buried.
    pub buried_at: Timestamp,
}

/// Which dead letters an operator's action is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Select {
    /// These records.
    Seqs(Vec<Seq>),
    /// Those of this key.
    Key(String),
    /// Those whose cause contains this text.
    Cause(String),
    /// All of them.
    All,
}

/// A key whose head has not been finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedKey {
    /// The key.
    pub key: String,
    /// Its first unfinished record.
    pub head: Seq,
    /// How often the head was delivered.
    pub attempts: u32,
    /// When the head is ready again; `None` while it is under lease.
    pub ready_at: Option<Timestamp>,
    /// How many records are known to wait behind it.
    pub behind: usize,
}

/// How a group stands in its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Records not yet finished and not dead.
    pub backlog: u64,
    /// Of those, under lease now.
    pub leased: u64,
    /// Of those, waiting for a retry or behind their key.
    pub waiting: u64,
    /// Dead letters.
    pub dead: u64,
    /// When the oldest unfinished record was stored.
    pub oldest: Option<Timestamp>,
}

/// A queue for each `(stream, group)`.
///
/// # Contract
/// * A group exists from its first claim or [`Queue::create_group`]; from then on every record is
///   delivered to it until it is acknowledged or buried.
/// * A record is under at most one live lease in a group. A token that is not the current one
///   changes nothing and answers [`Settled::Stale`].
/// * Order per key as the module says, across claims, retries, restarts and processes.
/// * Claims and settlements are durable when they resolve; a cancelled call is whole or absent
///   (a claim whose future was dropped may leave leases that run out).
/// * At most 10 000 records of a group wait behind blocked keys or for retries; beyond that a claim
///   hands out only those, so that a stuck group cannot grow without bound.
#[async_trait]
pub trait Queue {
    /// Makes a group if it does not exist; returns whether it was made.
    async fn create_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, StoreError>;

    /// Claims what is ready, at once; an empty answer means that nothing is.
    async fn claim(
        &self,
        stream: &Stream,
        group: &Group,
        claim: Claim,
    ) -> Result<Claims, StoreError>;

    /// Settles records under lease; the answer has one entry for each, in order.
    async fn settle(
        &self,
        settlements: Vec<(LeaseToken, Settle)>,
    ) -> Result<Vec<Settled>, StoreError>;

    /// Tells to which stream and group the leases of a group number belong.
    async fn group_of(&self, token: LeaseToken) -> Result<Option<(Stream, Group)>, StoreError>;

    /// Lists the groups of a stream, by name.
    async fn groups(&self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>, StoreError>;

    /// Lists dead letters with numbers above `after`, ascending, at most `limit`.
    async fn dead_letters(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// Makes dead letters ready again with their attempts reset, at most `limit`, oldest first; they
    /// re-enter their key's order at their own number. Returns how many.
    async fn redrive(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError>;

    /// Forgets dead letters, at most `limit`, oldest first; returns how many.
    async fn purge(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError>;

    /// Buries the unfinished heads of blocked keys that wait for a retry, so that their keys move
    /// on; `select` names keys or numbers. Returns how many.
    async fn skip(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, StoreError>;

    /// Lists keys that cannot move on because their head failed or is under lease, in order of
    /// their heads, with heads above `after`, at most `limit`.
    async fn blocked_keys(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, StoreError>;
}
