//! Once: remembers that something was done, and what it answered.
//!
//! A key is reserved before the work and completed after it. Whoever comes second learns whether
//! the work is done (and its answer), still going on, or was asked for with another payload.
//!
//! Source: pattern document, idempotency keys; defects.md E14 for scope and fingerprint.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::StoreError;

/// What a reservation found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// Nobody did it: do it, then complete or release with this token.
    New(OnceToken),
    /// Somebody is at it; its reservation ends by itself in this time.
    Busy(Duration),
    /// It was done, and this was the answer.
    Done(Bytes),
    /// The key was used with another fingerprint.
    Mismatch,
}

/// Proves a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnceToken(pub u64);

/// Identity of a piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnceKey {
    /// Who keys belong to, such as `tenant/operation`; 1..=200 bytes.
    pub scope: String,
    /// The key within the scope; 1..=200 bytes.
    pub key: String,
    /// Fingerprint of the payload: the same key with another one is a mismatch.
    pub fingerprint: u128,
}

/// A dedupe table with answers.
///
/// # Contract
/// * Of any number of simultaneous reservations of one key, one is [`Reserved::New`].
/// * A reservation that is neither completed nor released ends after its `hold`; its token then
///   completes nothing.
/// * A completed key is remembered for its `keep`.
#[async_trait]
pub trait Once {
    /// Reserves a key for `hold`.
    async fn reserve(&self, key: &OnceKey, hold: Duration) -> Result<Reserved, StoreError>;

    /// Completes a reservation with an answer, kept for `keep`; `false` if it is not held any more.
    async fn complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: Bytes,
        keep: Duration,
    ) -> Result<bool, StoreError>;

    /// Gives a reservation back; a token that is not the current one is ignored.
    async fn release(&self, key: &OnceKey, token: OnceToken) -> Result<(), StoreError>;

    /// Forgets keys whose time is over, at most `limit`; returns how many.
    async fn sweep(&self, limit: usize) -> Result<usize, StoreError>;
}
