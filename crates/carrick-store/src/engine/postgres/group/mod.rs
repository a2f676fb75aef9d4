//! Groups: the state of each is decided in memory (`lease::core`) and kept in a [`journal`].
//!
//! Transactions of one group take turns, over all processes, on a lock that ends with them; within
//! a process its commands gather in a lane, and one transaction does all that are there. It brings
//! the state up to date, lets each command decide on it, writes down what changed, and only after
//! the commit is anybody answered. If it fails, the state is thrown away and read again.
//!
//! The usual way keeps a row for each delivery and looks for ready ones with `SKIP LOCKED`. While
//! somebody holds a snapshot, every row that was ever acknowledged lies in that look's way: claims
//! slow down until the queue collapses. Here a claim reads the end of a journal and the end of a
//! log. It also gives each group's order to one decision-maker at a time, which order per key asks
//! for anyway.

mod codec;
mod fill;
mod journal;

use std::{mem, sync::Arc};

use carrick_core::name::Group;
use tokio::sync::oneshot;

use self::{fill::Ahead, journal::Known};
use super::{
    PostgresStore, count,
    lanes::Lane,
    log::text,
    notices::Notices,
    session::{Db, Failure, Tries, Tx},
};
use crate::{
    StoreError, Stream,
    lease::core::{self, Buried, New, State},
    lease::{BlockedKey, Claim, Claims, GroupStats, LeaseToken, Select, Settle, Settled, Start},
    log::Seq,
    micros,
};

/// Commands in one transaction: bounds how long the lock is held. As many claims of a hundred
/// records are some tens of milliseconds.
const COMMANDS: usize = 64;

/// A group, as found in the database.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupRef {
    pub(super) id: i64,
    pub(super) stream_id: i64,
    pub(super) stream: Stream,
    pub(super) group: Group,
}

/// A command on its way.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) what: What,
    pub(super) answer: oneshot::Sender<Result<Outcome, StoreError>>,
}

/// What a group is asked to do.
#[derive(Debug)]
pub(super) enum What {
    Claim(Claim),
    Settle(Vec<(LeaseToken, Settle)>),
    Redrive(Select, usize),
    Purge(Select, usize),
    Skip(Select, String),
    Blocked(Seq, usize),
    Stats,
}

/// What came of it.
#[derive(Debug)]
pub(super) enum Outcome {
    Claims(Claims),
    Settled(Vec<Settled>),
    Count(usize),
    Blocked(Vec<BlockedKey>),
    Stats(GroupStats),
}

/// Works off the commands of a group.
pub(super) async fn work(
    mut lane: Lane<Arc<GroupRef>, Command>,
    db: Arc<Db>,
    notices: Arc<Notices>,
) {
    let group = Arc::clone(lane.key());
    let mut known = None;
    while let Some(first) = lane.next().await {
        let mut batch = vec![first];
        while batch.len() < COMMANDS
            && let Some(command) = lane.more()
        {
            batch.push(command);
        }
        // Whoever left would only leave a lease behind that has to run out.
        batch.retain(|command| {
            !matches!(command.what, What::Claim(_)) || !command.answer.is_closed()
        });
        match transact(&db, &group, &mut known, &batch).await {
            Ok((outcomes, freed)) => {
                if freed {
                    notices.moved(&group.stream);
                }
                for (command, outcome) in batch.into_iter().zip(outcomes) {
                    command.answer.send(Ok(outcome)).ok();
                }
            }
            Err(failure) => {
                for command in batch {
                    command.answer.send(Err(failure.told())).ok();
                }
            }
        }
    }
}

async fn transact(
    db: &Db,
    group: &GroupRef,
    known: &mut Option<Known>,
    batch: &[Command],
) -> Result<(Vec<Outcome>, bool), Failure> {
    // Those who wait for something look again and again. The usual answer needs no transaction.
    let only_claims = batch.iter().all(|command| matches!(command.what, What::Claim(_)));
    if let Some(known) = known
        && known.idle
        && only_claims
        && db.within(journal::is_quiet(db, group, known)).await.unwrap_or(false)
    {
        let next_ready = known.state.next_timer().map(micros::time);
        let nothing = || Outcome::Claims(Claims { next_ready, ..Claims::default() });
        return Ok((batch.iter().map(|_| nothing()).collect(), false));
    }
    let mut tries = Tries::default();
    loop {
        match db.within(try_transact(db, group, known.take(), batch)).await {
            Ok((outcomes, freed, after)) => {
                *known = Some(after);
                return Ok((outcomes, freed));
            }
            Err(failure) if tries.again(&failure).await => {}
            Err(failure) => return Err(failure),
        }
    }
}

/// One transaction. Tells also whether something may be claimed now that could not be before.
async fn try_transact(
    db: &Db,
    group: &GroupRef,
    known: Option<Known>,
    batch: &[Command],
) -> Result<(Vec<Outcome>, bool, Known), Failure> {
    let mut tx = db.begin(Some(db.lock("group", group.id))).await?;
    let mut known = journal::catch_up(db, &mut tx, group.id, known).await?;
    let claims = batch.iter().filter_map(|command| match command.what {
        What::Claim(claim) => Some(claim),
        _ => None,
    });
    let mut work = Work {
        db,
        group,
        tx: &mut tx,
        state: &mut known.state,
        ahead: Ahead::for_claims(claims),
        buried: Vec::new(),
    };
    let mut outcomes = Vec::with_capacity(batch.len());
    for command in batch {
        outcomes.push(work.run(&command.what).await?);
    }
    let buried = mem::take(&mut work.buried);
    let frees = |command: &Command| !matches!(command.what, What::Claim(_) | What::Stats);
    let freed = batch.iter().any(frees) && known.state.has_ready();
    let changed = journal::write(db, &mut tx, group.id, &mut known, &buried).await?;
    tx.commit().await?;
    known.idle = !changed;
    Ok((outcomes, freed, known))
}

/// A transaction at work.
#[derive(Debug)]
struct Work<'a> {
    db: &'a Db,
    group: &'a GroupRef,
    tx: &'a mut Tx,
    state: &'a mut State,
    ahead: Ahead,
    buried: Vec<Buried>,
}

impl Work<'_> {
    async fn run(&mut self, what: &What) -> Result<Outcome, Failure> {
        Ok(match what {
            What::Claim(claim) => Outcome::Claims(self.claim(*claim).await?),
            What::Settle(settlements) => Outcome::Settled(self.settle(settlements)),
            What::Redrive(select, limit) => Outcome::Count(self.redrive(select, *limit).await?),
            What::Purge(select, limit) => Outcome::Count(self.purge(select, *limit).await?),
            What::Skip(select, cause) => Outcome::Count(self.skip(select, cause)),
            What::Blocked(after, limit) => {
                Outcome::Blocked(self.state.blocked_keys(*after, *limit))
            }
            What::Stats => Outcome::Stats(self.stats().await?),
        })
    }

    fn settle(&mut self, settlements: &[(LeaseToken, Settle)]) -> Vec<Settled> {
        let settle = |(token, settle): &(LeaseToken, Settle)| match self.state.settle(
            token.seq,
            token.fence,
            settle,
        ) {
            Some(buried) => {
                self.buried.extend(buried);
                Settled::Done
            }
            None => Settled::Stale,
        };
        settlements.iter().map(settle).collect()
    }

    async fn redrive(&mut self, select: &Select, limit: usize) -> Result<usize, Failure> {
        // No more than may wait: the rest is redriven when these have been worked on.
        let limit = limit.min(core::WAITING.saturating_sub(self.state.waiting()));
        let Filter { seqs, key, cause } = Filter::new(select);
        type Row = (i64, i64, Option<i64>, Option<Vec<u8>>, i32);
        let rows: Vec<Row> = self
            .db
            .query_as(
                "WITH chosen AS MATERIALIZED (
                     SELECT log.seq, log.stored_at, log.expires, log.key, octet_length(log.body)
                     FROM carrick_dead AS dead
                     JOIN carrick_log AS log ON log.stream_id = $2 AND log.seq = dead.seq
                     WHERE dead.group_id = $1 AND ($3::bigint[] IS NULL OR dead.seq = ANY ($3))
                         AND ($4::bytea IS NULL OR log.key = $4)
                         AND ($5::bytea IS NULL OR position($5 IN dead.cause) > 0)
                     ORDER BY dead.seq LIMIT $6
                 ), gone AS (
                     DELETE FROM carrick_dead AS dead USING chosen
                     WHERE dead.group_id = $1 AND dead.seq = chosen.seq
                 )
                 SELECT * FROM chosen",
            )
            .bind(self.group.id)
            .bind(self.group.stream_id)
            .bind(seqs)
            .bind(key)
            .bind(cause)
            .bind(count(limit))
            .fetch_all(self.tx.conn())
            .await?;
        let redriven = rows.len();
        for (seq, stored, expires, key, size) in rows {
            self.state.redrive(New {
                seq: seq.cast_unsigned(),
                key: key.map(|key| text(key).into()),
                due: None,
                expires,
                stored,
                size: u32::try_from(size).unwrap_or(0),
            });
        }
        Ok(redriven)
    }

    async fn purge(&mut self, select: &Select, limit: usize) -> Result<usize, Failure> {
        let Filter { seqs, key, cause } = Filter::new(select);
        let purged = self
            .db
            .query(
                "WITH chosen AS MATERIALIZED (
                     SELECT dead.seq FROM carrick_dead AS dead
                     LEFT JOIN carrick_log AS log ON log.stream_id = $2 AND log.seq = dead.seq
                     WHERE dead.group_id = $1 AND ($3::bigint[] IS NULL OR dead.seq = ANY ($3))
                         AND ($4::bytea IS NULL OR log.key = $4)
                         AND ($5::bytea IS NULL OR position($5 IN dead.cause) > 0)
                     ORDER BY dead.seq LIMIT $6
                 )
                 DELETE FROM carrick_dead AS dead USING chosen
                 WHERE dead.group_id = $1 AND dead.seq = chosen.seq",
            )
            .bind(self.group.id)
            .bind(self.group.stream_id)
            .bind(seqs)
            .bind(key)
            .bind(cause)
            .bind(count(limit))
            .execute(self.tx.conn())
            .await?
            .rows_affected();
        Ok(usize::try_from(purged).unwrap_or(usize::MAX))
    }

    fn skip(&mut self, select: &Select, cause: &str) -> usize {
        let skipped = self.state.skip(select, cause);
        let count = skipped.len();
        self.buried.extend(skipped);
        count
    }

    async fn stats(&mut self) -> Result<GroupStats, Failure> {
        let (last, dead, next): (i64, i64, Option<i64>) = self
            .db
            .query_as(
                "SELECT
                     coalesce((SELECT seq FROM carrick_log
                               WHERE stream_id = $2 ORDER BY seq DESC LIMIT 1), 0),
                     (SELECT count(*) FROM carrick_dead WHERE group_id = $1),
                     (SELECT stored_at FROM carrick_log
                      WHERE stream_id = $2 AND seq > $3 ORDER BY seq LIMIT 1)",
            )
            .bind(self.group.id)
            .bind(self.group.stream_id)
            .bind(self.state.cursor().cast_signed())
            .fetch_one(self.tx.conn())
            .await?;
        Ok(self.state.stats(last.cast_unsigned(), next, dead.cast_unsigned()))
    }
}

/// A selection as arguments of a statement: what is `None` restricts nothing.
#[derive(Debug, Default)]
struct Filter<'a> {
    seqs: Option<Vec<i64>>,
    key: Option<&'a [u8]>,
    cause: Option<&'a [u8]>,
}

impl<'a> Filter<'a> {
    fn new(select: &'a Select) -> Self {
        let mut filter = Self::default();
        match select {
            Select::Seqs(seqs) => filter.seqs = Some(seqs.iter().map(|&seq| count(seq)).collect()),
            Select::Key(key) => filter.key = Some(key.as_bytes()),
            Select::Cause(cause) => filter.cause = Some(cause.as_bytes()),
            Select::All => {}
        }
        filter
    }
}

impl PostgresStore {
    /// Has a group do something, after what it is asked already.
    pub(super) async fn ask(
        &self,
        group: Arc<GroupRef>,
        what: What,
    ) -> Result<Outcome, StoreError> {
        let (answer, answered) = oneshot::channel();
        let (db, notices) = (self.0.db.clone(), self.0.notices.clone());
        let command = Command { what, answer };
        self.0.groups.submit(group, command, |lane| work(lane, db, notices))?;
        answered.await.map_err(|_gone| super::unanswered())?
    }

    /// Makes a group where there is none; tells whether it did.
    pub(super) async fn make_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, Failure> {
        let mut tries = Tries::default();
        loop {
            match self.db().within(try_make_group(self.db(), stream, group, start)).await {
                Err(failure) if tries.again(&failure).await => {}
                made => return made,
            }
        }
    }
}

async fn try_make_group(
    db: &Db,
    stream: &Stream,
    group: &Group,
    start: Start,
) -> Result<bool, Failure> {
    let stream_id = db.stream(stream).await?;
    let mut tx = db.begin(None).await?;
    // The row is held so that no trim cuts in between: see there.
    let (first, last): (i64, i64) = db
        .query_as(
            "SELECT first, coalesce(
                 (SELECT log.seq FROM carrick_log AS log
                  WHERE log.stream_id = stream.id AND log.seq >= stream.first
                  ORDER BY log.seq DESC LIMIT 1),
                 first - 1)
             FROM carrick_stream AS stream WHERE id = $1 FOR SHARE",
        )
        .bind(stream_id)
        .fetch_one(tx.conn())
        .await?;
    let made: Option<(i64,)> = db
        .query_as(
            "INSERT INTO carrick_group (stream_id, name) VALUES ($1, $2)
             ON CONFLICT DO NOTHING RETURNING id",
        )
        .bind(stream_id)
        .bind(group.as_str())
        .fetch_optional(tx.conn())
        .await?;
    let Some((id,)) = made else { return Ok(false) };
    let cursor = match start {
        Start::Earliest => first - 1,
        Start::Latest => last,
    };
    journal::begin(db, &mut tx, id, &State::at(cursor.cast_unsigned())).await?;
    tx.commit().await?;
    Ok(true)
}
