//! A group's state in the database: what each transaction changed, in order, and now and then all.
//!
//! Whoever has the group's lock reads what came since its own last transaction, which in most cases
//! is nothing, and adds its change at the end. Nothing is updated and nothing that is read was ever
//! deleted, so an open snapshot, however old, is in nobody's way.

use super::{
    super::session::{Db, Failure, Refusal, Tx, now},
    GroupRef, codec,
};
use crate::lease::core::{Buried, Change, Micros, State};

/// After so many changes the whole state is written, and those before the last whole one are
/// removed. Whoever starts reads at most so many; one that fell behind further starts anew.
const WHOLE_EVERY: i64 = 256;

/// A state, and how far in the journal it is.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) state: State,
    version: i64,
    /// Its last transaction changed nothing, so the next one may not either.
    pub(super) idle: bool,
}

type Row = (i64, Option<i64>, Option<bool>, Option<i64>, Option<Vec<u8>>);

/// Whether a state is as it was, the log too, and nothing has come due: then a claim would find
/// nothing. Takes no lock and writes nothing, for it is asked by everybody who waits.
pub(super) async fn is_quiet(db: &Db, group: &GroupRef, known: &Known) -> Result<bool, Failure> {
    let mut session = db.single().await?;
    let (now, version, last): (i64, Option<i64>, Option<i64>) = db
        .query_as(concat!(
            "SELECT ",
            now!(),
            ", (SELECT version FROM carrick_journal WHERE group_id = $1
                ORDER BY version DESC LIMIT 1),
               (SELECT seq FROM carrick_log WHERE stream_id = $2 ORDER BY seq DESC LIMIT 1)",
        ))
        .bind(group.id)
        .bind(group.stream_id)
        .fetch_one(session.conn())
        .await?;
    session.finish().await?;
    let state = &known.state;
    let nothing_new = last.is_none_or(|last| last.cast_unsigned() <= state.cursor());
    let nothing_due = state.next_timer().is_none_or(|at| at > now);
    Ok(version == Some(known.version) && nothing_new && nothing_due && !state.has_ready())
}

/// Brings a state up to date under the group's lock.
pub(super) async fn catch_up(
    db: &Db,
    tx: &mut Tx,
    group: i64,
    known: Option<Known>,
) -> Result<Known, Failure> {
    if let Some(known) = known
        && let Some(known) = follow(db, tx, group, known).await?
    {
        return Ok(known);
    }
    load(db, tx, group).await
}

/// Applies what others did since; `None` if that is not all there any more.
async fn follow(
    db: &Db,
    tx: &mut Tx,
    group: i64,
    mut known: Known,
) -> Result<Option<Known>, Failure> {
    let rows: Vec<Row> = db
        .query_as(concat!(
            "SELECT clock.now, version, whole, at, change FROM (SELECT ",
            now!(),
            " AS now) AS clock LEFT JOIN carrick_journal ON group_id = $1 AND version > $2
             ORDER BY version",
        ))
        .bind(group)
        .bind(known.version)
        .fetch_all(tx.conn())
        .await?;
    let clock = rows.first().map_or(0, |row| row.0);
    for (_, version, whole, at, change) in rows {
        let (Some(version), Some(whole), Some(at), Some(change)) = (version, whole, at, change)
        else {
            break; // the clock alone
        };
        if version != known.version + 1 {
            return Ok(None);
        }
        // A whole one holds what we have, and what that transaction changed.
        let change = codec::decode(&change).ok_or(Refusal::Corrupt("a change of a group"))?;
        if whole {
            known.state = State::default();
        }
        known.state.apply(change, at);
        known.version = version;
    }
    known.state.advance(clock);
    Ok(Some(known))
}

/// Makes the state from the last whole one and the changes after it.
async fn load(db: &Db, tx: &mut Tx, group: i64) -> Result<Known, Failure> {
    let rows: Vec<(i64, i64, i64, Vec<u8>)> = db
        .query_as(concat!(
            "SELECT ",
            now!(),
            ", version, at, change FROM carrick_journal WHERE group_id = $1 AND version >= (
                 SELECT version FROM carrick_journal WHERE group_id = $1 AND whole
                 ORDER BY version DESC LIMIT 1)
             ORDER BY version",
        ))
        .bind(group)
        .fetch_all(tx.conn())
        .await?;
    let clock = rows.first().ok_or(Refusal::Corrupt("a group without a state"))?.0;
    let mut known = Known { state: State::default(), version: 0, idle: false };
    for (_, version, at, change) in rows {
        let change = codec::decode(&change).ok_or(Refusal::Corrupt("a change of a group"))?;
        known.state.apply(change, at);
        known.version = version;
    }
    known.state.advance(clock);
    Ok(known)
}

/// Writes down what changed, if anything did, together with what was buried.
pub(super) async fn write(
    db: &Db,
    tx: &mut Tx,
    group: i64,
    known: &mut Known,
    buried: &[Buried],
) -> Result<bool, Failure> {
    let Some(change) = known.state.take_change() else { return Ok(false) };
    known.version += 1;
    let whole = known.version % WHOLE_EVERY == 0;
    insert(db, tx, group, known, whole, if whole { known.state.whole() } else { change }).await?;
    if whole {
        // The range begins where the last removal ended, so that it does not walk over what that
        // left behind.
        db.query(
            "DELETE FROM carrick_journal WHERE group_id = $1 AND version >= $2 AND version < $3",
        )
        .bind(group)
        .bind(known.version - 2 * WHOLE_EVERY)
        .bind(known.version - WHOLE_EVERY)
        .execute(tx.conn())
        .await?;
    }
    if !buried.is_empty() {
        bury(db, tx, group, buried).await?;
    }
    Ok(true)
}

/// Writes the state of a group that was just made.
pub(super) async fn begin(db: &Db, tx: &mut Tx, group: i64, state: &State) -> Result<(), Failure> {
    let known = Known { state: State::at(state.cursor()), version: 0, idle: false };
    insert(db, tx, group, &known, true, state.whole()).await
}

async fn insert(
    db: &Db,
    tx: &mut Tx,
    group: i64,
    known: &Known,
    whole: bool,
    change: Change,
) -> Result<(), Failure> {
    let at: Micros = known.state.now();
    db.query(
        "INSERT INTO carrick_journal (group_id, version, at, whole, floor, change)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(group)
    .bind(known.version)
    .bind(at)
    .bind(whole)
    .bind(known.state.floor().cast_signed())
    .bind(codec::encode(&change))
    .execute(tx.conn())
    .await?;
    Ok(())
}

async fn bury(db: &Db, tx: &mut Tx, group: i64, buried: &[Buried]) -> Result<(), Failure> {
    let column = |of: fn(&Buried) -> i64| buried.iter().map(of).collect::<Vec<_>>();
    let causes: Vec<&[u8]> = buried.iter().map(|one| one.cause.as_bytes()).collect();
    db.query(
        "INSERT INTO carrick_dead
             (group_id, seq, attempts, cause, fence, first_claimed_at, buried_at)
         SELECT $1, one.* FROM unnest(
             $2::bigint[], $3::bigint[], $4::bytea[], $5::bigint[], $6::bigint[], $7::bigint[]
         ) AS one",
    )
    .bind(group)
    .bind(column(|one| one.seq.cast_signed()))
    .bind(column(|one| i64::from(one.attempts)))
    .bind(causes)
    .bind(column(|one| one.fence.cast_signed()))
    .bind(column(|one| one.first_claimed))
    .bind(column(|one| one.at))
    .execute(tx.conn())
    .await?;
    Ok(())
}
