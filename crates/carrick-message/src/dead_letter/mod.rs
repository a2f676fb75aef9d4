//! Dead letters: events that a group put aside, and what an operator does with them.
//!
//! A dead letter is the event itself, not a copy: the log keeps its record for as long as it is
//! dead, so id, headers, key and trace are the same bytes when it is redriven. A redrive resets the
//! attempts, returns the event to its own place in its key's order, and is paced, because what
//! failed together would otherwise come back together. Whoever means all of them says so
//! ([`Select::All`]).
//!
//! The other half of the page are *blocked keys*: keys whose head waits for a retry. They are not
//! dead yet; [`DeadLetters::skip`] puts their heads aside so that the keys move on.
//!
//! Source: pattern document, dead letters; awa ADR-020 and pg-boss for redrive, wolverine#3514.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_store::{
    lease::DeadLetter,
    log::{MAX_BATCH, Seq},
};
use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use crate::broker::{BrokerError, StoreBroker};

pub use carrick_store::lease::{BlockedKey, Select};

/// An event that was put aside.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Letter {
    /// Its number in the topic: the cursor of a page.
    pub seq: Seq,
    /// The topic it was published to.
    pub topic: Topic,
    /// The group that put it aside.
    pub group: Group,
    /// The event; `None` if the record is none, which is then why it is here.
    pub event: Option<Event>,
    /// The record, as it was published.
    pub body: Bytes,
    /// Its ordering key.
    pub key: Option<String>,
    /// Why it was put aside.
    pub cause: String,
    /// How often it was delivered.
    pub attempts: u32,
    /// The fence of its last delivery.
    pub fence: u64,
    /// When it was published, by the broker's clock.
    pub published_at: Timestamp,
    /// When it was first delivered.
    pub first_delivered_at: Timestamp,
    /// When it was put aside.
    pub buried_at: Timestamp,
}

impl Letter {
    /// The trace that the event belongs to, as its producer wrote it.
    pub fn traceparent(&self) -> Option<String> {
        self.event.as_ref()?.traceparent().map(|text| text.to_string())
    }

    fn new(topic: &Topic, group: &Group, letter: DeadLetter) -> Self {
        let DeadLetter { record, attempts, cause, fence, first_claimed_at, buried_at } = letter;
        Self {
            seq: record.seq,
            topic: topic.clone(),
            group: group.clone(),
            event: Event::parse(record.body.clone()).ok(),
            body: record.body,
            key: record.key,
            cause,
            attempts,
            fence,
            published_at: record.stored_at,
            first_delivered_at: first_claimed_at,
            buried_at,
        }
    }
}

/// Which dead letters to deliver again, and how fast.
///
/// ```
/// use carrick_message::dead_letter::{Redrive, Select};
///
/// let gently = Redrive { per_second: 5, ..Redrive::new(Select::Cause("timeout".into())) };
/// assert_eq!(Redrive::new(Select::All).per_second, 100);
/// # drop(gently);
/// ```
#[derive(Clone, Debug)]
pub struct Redrive {
    /// Which ones.
    pub select: Select,
    /// How many a second, 1..=10 000. Default 100.
    pub per_second: u32,
    /// At most this many.
    pub limit: usize,
}

impl Redrive {
    /// Redrives what is selected, 100 a second.
    pub fn new(select: Select) -> Self {
        Self { select, per_second: 100, limit: usize::MAX }
    }
}

/// What an operator does with dead letters and blocked keys.
#[async_trait]
pub trait DeadLetters: fmt::Debug + Send + Sync + 'static {
    /// Lists dead letters with numbers above `after`, ascending.
    ///
    /// * `limit`: 1..=1000; fewer than that is the last page.
    ///
    /// # Errors
    /// [`BrokerError::Invalid`] for a limit out of its range; otherwise as the broker fails.
    ///
    /// # Cancel safety
    /// Safe to drop.
    async fn letters(
        &self,
        topic: &Topic,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<Letter>, BrokerError>;

    /// Delivers dead letters again, with id, headers, key and trace as they were and their attempts
    /// reset, oldest first, each at most once in this call. Returns how many.
    ///
    /// # Errors
    /// [`BrokerError`]; what was redriven until then stays so.
    ///
    /// # Cancel safety
    /// What was redriven until then stays so.
    async fn redrive(
        &self,
        topic: &Topic,
        group: &Group,
        redrive: &Redrive,
    ) -> Result<usize, BrokerError>;

    /// Puts the heads of blocked keys aside, so that their keys move on; returns how many.
    ///
    /// * `cause`: why, for whoever finds the letter.
    ///
    /// # Errors
    /// [`BrokerError`].
    ///
    /// # Cancel safety
    /// The heads may still be put aside.
    async fn skip(
        &self,
        topic: &Topic,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, BrokerError>;

    /// Forgets dead letters, at most `limit`, oldest first; returns how many.
    ///
    /// # Errors
    /// [`BrokerError`]; what was forgotten until then stays so.
    ///
    /// # Cancel safety
    /// What was forgotten until then stays so.
    async fn purge(
        &self,
        topic: &Topic,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, BrokerError>;

    /// Lists keys that cannot move on, by their heads, with heads above `after`.
    ///
    /// * `limit`: 1..=1000.
    ///
    /// # Errors
    /// [`BrokerError::Invalid`] for a limit out of its range; otherwise as the broker fails.
    ///
    /// # Cancel safety
    /// Safe to drop.
    async fn blocked_keys(
        &self,
        topic: &Topic,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, BrokerError>;
}

/// Redriven in steps of this length, so that a pace of ten thousand a second is not ten thousand
/// transactions.
const STEP: Duration = Duration::from_millis(100);

#[async_trait]
impl DeadLetters for StoreBroker {
    async fn letters(
        &self,
        topic: &Topic,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<Letter>, BrokerError> {
        check_limit(limit)?;
        let letters = self.store().dead_letters(topic, group, after, limit).await?;
        Ok(letters.into_iter().map(|letter| Letter::new(topic, group, letter)).collect())
    }

    async fn redrive(
        &self,
        topic: &Topic,
        group: &Group,
        redrive: &Redrive,
    ) -> Result<usize, BrokerError> {
        let Redrive { select, per_second, limit } = redrive;
        if !(1..=10_000).contains(per_second) {
            return Err(BrokerError::Invalid {
                field: "per-second",
                range: "1..=10000",
                value: per_second.to_string(),
            });
        }
        // One pass by number, ending at what is there now: a letter that dies again during a slow
        // redrive is not driven in circles.
        let end = self.store().bounds(topic).await?.last;
        let step = (*per_second as usize).div_ceil(10).min(MAX_BATCH);
        let mut walk = Walk { after: 0, end, found: Vec::new(), seen_all: false };
        let mut next = Instant::now();
        let mut redriven = 0;
        while redriven < *limit {
            let chunk = walk.chunk(self, topic, group, select, step.min(limit - redriven)).await?;
            if chunk.is_empty() {
                break;
            }
            sleep_until(next).await;
            next =
                Instant::now() + STEP.mul_f64(chunk.len() as f64 * 10.0 / f64::from(*per_second));
            let count = chunk.len();
            redriven += self.store().redrive(topic, group, &Select::Seqs(chunk), count).await?;
            self.nudge(topic, group);
        }
        metrics::counter!("carrick_dead_letter_redriven_total").increment(redriven as u64);
        Ok(redriven)
    }

    async fn skip(
        &self,
        topic: &Topic,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, BrokerError> {
        let skipped = self.store().skip(topic, group, select, cause).await?;
        self.nudge(topic, group);
        metrics::counter!("carrick_dead_letter_skipped_total").increment(skipped as u64);
        Ok(skipped)
    }

    async fn purge(
        &self,
        topic: &Topic,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, BrokerError> {
        let mut purged = 0;
        // In bounded steps: one unbounded delete would hold everybody else up (defects.md M8).
        while purged < limit {
            let step = MAX_BATCH.min(limit - purged);
            let gone = self.store().purge(topic, group, select, step).await?;
            purged += gone;
            metrics::counter!("carrick_dead_letter_purged_total").increment(gone as u64);
            if gone < step {
                break;
            }
        }
        Ok(purged)
    }

    async fn blocked_keys(
        &self,
        topic: &Topic,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, BrokerError> {
        check_limit(limit)?;
        Ok(self.store().blocked_keys(topic, group, after, limit).await?)
    }
}

/// A walk over the dead letters that are selected, a page in memory at a time.
struct Walk {
    after: Seq,
    end: Seq,
    found: Vec<Seq>,
    seen_all: bool,
}

impl Walk {
    /// The next `count` numbers, or what is left.
    async fn chunk(
        &mut self,
        broker: &StoreBroker,
        topic: &Topic,
        group: &Group,
        select: &Select,
        count: usize,
    ) -> Result<Vec<Seq>, BrokerError> {
        while self.found.len() < count && !self.seen_all {
            // Bodies come along, so a page is small: at most 100 MiB even of the largest events.
            let page = broker.store().dead_letters(topic, group, self.after, PAGE).await?;
            self.seen_all =
                page.len() < PAGE || page.last().is_none_or(|l| l.record.seq >= self.end);
            self.after = page.last().map_or(self.after, |letter| letter.record.seq);
            let selected = page.iter().filter(|letter| {
                let record = &letter.record;
                select.takes(record.seq, record.key.as_deref(), &letter.cause)
            });
            let selected = selected.map(|letter| letter.record.seq).filter(|seq| *seq <= self.end);
            self.found.extend(selected);
        }
        let rest = self.found.split_off(count.min(self.found.len()));
        Ok(std::mem::replace(&mut self.found, rest))
    }
}

const PAGE: usize = 100;

fn check_limit(limit: usize) -> Result<(), BrokerError> {
    if (1..=MAX_BATCH).contains(&limit) {
        return Ok(());
    }
    let value = limit.to_string();
    Err(BrokerError::Invalid { field: "limit", range: "1..=1000", value })
}
