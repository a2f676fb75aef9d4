//! Long poll: a request that waits until there is something, or until its time is over.
//!
//! The simplest door, which passes everything that HTTP passes. It answers events with the position
//! after them, or the position alone when time is over, and never an empty answer before that.
//!
//! Source: pattern document, long-poll listing. Differs: defects.md E1, E2.

use carrick_core::name::Topic;
use carrick_store::StoreError;
use tokio::time::Instant;

use crate::feed::{Batch, Item, Limit, Place, Subscription};

/// What a poll found. The position to go on from is the subscription's.
#[derive(Debug)]
pub enum Polled {
    /// Events, at least one.
    Events(Vec<Item>),
    /// Nothing until its time was over, or until the hub drains.
    Nothing,
    /// There is a gap in this topic before the subscription's position.
    Reset(Topic),
}

/// Why a poll has no answer.
#[derive(Debug, thiserror::Error)]
pub enum PollError<E> {
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It may not wait.
    #[error("no place to wait")]
    Refused(E),
}

/// Reads, or waits until a time for something to read. A place is taken only if it must wait.
///
/// # Errors
/// [`PollError`].
///
/// # Cancel safety
/// Safe to drop: the place is given back, and the subscription stays where it was.
pub async fn poll<E>(
    subscription: &mut Subscription,
    limit: Limit,
    until: Instant,
    place: impl FnOnce() -> Result<Place, E>,
) -> Result<Polled, PollError<E>> {
    let (mut place, mut held) = (Some(place), None::<Place>);
    let mut until = until;
    let mut leaving = false;
    let answer = loop {
        match subscription.read(limit).await? {
            Batch::Events(items) if !items.is_empty() => break Polled::Events(items),
            Batch::Reset(topic) => break Polled::Reset(topic),
            // A filter let nothing through: there may be more, and there may be a million of them.
            Batch::Events(_) if Instant::now() < until => continue,
            Batch::Events(_) | Batch::UpToDate => {}
        }
        if !leaving && let Some(within) = subscription.leave_within() {
            leaving = true;
            let leave = Instant::now() + within.mul_f64(rand::random_range(0.0..=1.0));
            until = until.min(leave);
        }
        if Instant::now() >= until {
            break Polled::Nothing;
        }
        // Who comes while the hub drains waits for its time to leave: it needs no place.
        if !leaving && let Some(place) = place.take() {
            held = Some(place().map_err(PollError::Refused)?);
        }
        tokio::time::timeout_at(until, subscription.changed()).await.ok();
    };
    drop(held);
    Ok(answer)
}
