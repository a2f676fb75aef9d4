//! Replay: publishes again what was published in a time range.
//!
//! For a broker that lost what it had acknowledged, or a consumer that has to be built anew. Ids
//! stay the same, so whoever has an event already recognises it; that is also why a broker drops
//! what it still remembers (its dedupe window), and why a replay is worth its while only after that.

use std::{sync::Arc, time::Duration};

use carrick_core::name::Topic;
use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use super::{
    Outbox, OutboxError,
    store::{Range, Sent},
};
use crate::broker::{Broker, BrokerError, Outgoing};

/// Rows that one read looks at, published in that time or not: bounds a statement.
const LOOK: u64 = 50_000;
/// Events of one publish.
const BATCH: usize = 100;

/// What to publish again.
#[derive(Clone, Debug)]
pub struct Replay {
    /// Published at or after this time, by the database's clock.
    pub from: Timestamp,
    /// Published before this time.
    pub to: Timestamp,
    /// Of this topic only.
    pub topic: Option<Topic>,
    /// Events a second at most, from 1: live events go on beside it.
    pub per_second: u32,
    /// Rows above this number only: [`Replayed::last`] of a replay that was broken off, or 0.
    pub after: u64,
}

/// What was published again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Events that the broker took.
    pub published: u64,
    /// Events that the broker still remembered and dropped.
    pub remembered: u64,
    /// Rows that are no events.
    pub unreadable: u64,
    /// The last row that is done with.
    pub last: u64,
}

/// Why a replay was broken off, and how far it came.
#[derive(Debug, thiserror::Error)]
#[error("the replay was broken off after row {}", so_far.last)]
pub struct ReplayError {
    /// What was done; go on after its `last`.
    pub so_far: Replayed,
    /// Why.
    #[source]
    pub cause: ReplayCause,
}

/// What broke a replay off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayCause {
    /// Rows could not be read.
    #[error("published rows cannot be read")]
    Outbox(#[source] OutboxError),
    /// Events could not be published.
    #[error("events cannot be published")]
    Broker(#[source] BrokerError),
}

impl Outbox {
    /// Publishes again what was published in a time range and is kept still, in the order of its
    /// numbers, and returns how much that was.
    ///
    /// Nothing is changed in the outbox. A replay keeps its own order per key; live events of a key
    /// may arrive between.
    ///
    /// # Errors
    /// [`ReplayError`], which says where to go on.
    ///
    /// # Cancel safety
    /// Safe to drop; what was published so far stays published.
    pub async fn replay(
        &self,
        broker: Arc<dyn Broker>,
        replay: &Replay,
    ) -> Result<Replayed, ReplayError> {
        let mut done = Replayed { last: replay.after, ..Replayed::default() };
        match self.replay_into(&broker, replay, &mut done).await {
            Ok(()) => Ok(done),
            Err(cause) => Err(ReplayError { so_far: done, cause }),
        }
    }

    async fn replay_into(
        &self,
        broker: &Arc<dyn Broker>,
        replay: &Replay,
        done: &mut Replayed,
    ) -> Result<(), ReplayCause> {
        let end = self.store.last().await.map_err(ReplayCause::Outbox)?;
        let pause = Duration::from_secs(1) / replay.per_second.max(1);
        let mut next = Instant::now();
        while done.last < end {
            let upto = end.min(done.last.saturating_add(LOOK));
            let range = Range {
                after: done.last,
                upto,
                from: replay.from,
                to: replay.to,
                topic: replay.topic.clone(),
                rows: BATCH,
            };
            let rows = self.store.published(&range).await.map_err(ReplayCause::Outbox)?;
            let last = if rows.len() < BATCH { upto } else { rows.last().map_or(upto, |r| r.seq) };
            sleep_until(next).await;
            next = Instant::now() + pause * u32::try_from(rows.len()).unwrap_or(u32::MAX);
            publish(broker, rows, done).await.map_err(ReplayCause::Broker)?;
            done.last = last;
        }
        Ok(())
    }
}

/// Publishes runs of one topic, so that the order of the rows is kept.
async fn publish(
    broker: &Arc<dyn Broker>,
    rows: Vec<Sent>,
    done: &mut Replayed,
) -> Result<(), BrokerError> {
    let mut runs: Vec<(Topic, u64, Vec<Outgoing>)> = Vec::new();
    for Sent { seq, content } in rows {
        let Ok((topic, event)) = content else {
            done.unreadable += 1;
            continue;
        };
        match runs.last_mut() {
            Some((current, last, run)) if *current == topic => {
                run.push(event.into());
                *last = seq;
            }
            _ => runs.push((topic, seq, vec![event.into()])),
        }
    }
    for (topic, last, run) in runs {
        let published = broker.publish(&topic, run).await?;
        let fresh = published.fresh.iter().filter(|fresh| **fresh).count() as u64;
        done.published += fresh;
        done.remembered += published.fresh.len() as u64 - fresh;
        done.last = last;
        metrics::counter!("carrick_outbox_replayed_total").increment(fresh);
    }
    Ok(())
}
