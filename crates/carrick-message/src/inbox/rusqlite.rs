//! The inbox inside a transaction of `rusqlite`.

use std::time::Duration;

use ::rusqlite::{Connection, OptionalExtension, params};
use carrick_core::event::Event;
use hashbrown::HashSet;

use super::{
    EventId, Guarded, InboxError, ReservationToken, Reserved, Seen, Versions, check_batch,
    check_handler, count,
};

const ONCE: &str = "INSERT INTO carrick_inbox (handler, source, id) VALUES (?1, ?2, ?3)
    ON CONFLICT DO NOTHING";

/// Asks whether a handler sees an event for the first time, and remembers it if so. Commit it
/// together with the effect.
///
/// ```
/// # use carrick_message::inbox::{self, EventId, Seen};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut conn = rusqlite::Connection::open_in_memory()?;
/// carrick_store::schema::sqlite::migrate(&mut conn, &inbox::COMPONENT)?;
/// conn.execute_batch("CREATE TABLE ledger (total INTEGER); INSERT INTO ledger VALUES (0)")?;
///
/// for _ in 0..3 {
///     let tx = conn.transaction()?;
///     if inbox::rusqlite::once(&tx, "ledger", &EventId::new("/shop", "4471"))? == Seen::First {
///         tx.execute("UPDATE ledger SET total = total + 10", ())?;
///     }
///     tx.commit()?;
/// }
/// let total: i64 = conn.query_row("SELECT total FROM ledger", (), |row| row.get(0))?;
/// assert_eq!(total, 10);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
pub fn once(conn: &Connection, handler: &str, event: &EventId<'_>) -> Result<Seen, InboxError> {
    check_handler(handler)?;
    let seen = first(conn, handler, event)?;
    count(usize::from(seen == Seen::First), usize::from(seen == Seen::Duplicate));
    Ok(seen)
}

fn first(conn: &Connection, handler: &str, event: &EventId<'_>) -> Result<Seen, InboxError> {
    let mut insert = conn.prepare_cached(ONCE).map_err(InboxError::database)?;
    let inserted = insert.execute(params![handler, event.source, event.id]);
    if inserted.map_err(InboxError::database)? == 1 {
        return Ok(Seen::First);
    }
    let mut select = conn
        .prepare_cached(
            "SELECT held_until IS NOT NULL FROM carrick_inbox
             WHERE handler = ?1 AND source = ?2 AND id = ?3",
        )
        .map_err(InboxError::database)?;
    let reserved: Option<bool> = select
        .query_row(params![handler, event.source, event.id], |row| row.get(0))
        .optional()
        .map_err(InboxError::database)?;
    if reserved == Some(true) { Err(InboxError::Reserved) } else { Ok(Seen::Duplicate) }
}

/// What became of one event of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handled<T, E> {
    /// The effect happened, and will stay if the transaction commits.
    Done(T),
    /// It had happened before.
    Duplicate,
    /// The effect failed and left nothing behind: let the event come again.
    Failed(E),
    /// An earlier event of the same key failed, so this one was not tried: let it come again.
    Held,
}

/// Runs the effects of a batch of events in the caller's transaction, each with its dedupe row in a
/// savepoint of its own: one that fails takes neither the others nor the transaction with it.
///
/// Many effects in one commit are what makes a consumer on SQLite fast: a commit is a disk write.
///
/// ```
/// # use carrick_core::event::Event;
/// # use carrick_message::inbox::{self, rusqlite::Handled};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut conn = rusqlite::Connection::open_in_memory()?;
/// # carrick_store::schema::sqlite::migrate(&mut conn, &inbox::COMPONENT)?;
/// # conn.execute_batch("CREATE TABLE ledger (id TEXT)")?;
/// let events = [Event::builder("order.placed.v1").source("/shop").id("4471").build()?];
/// let tx = conn.transaction()?;
/// let handled = inbox::rusqlite::each(&tx, "ledger", &events, |conn, event| {
///     conn.execute("INSERT INTO ledger VALUES (?1)", [event.id()])
/// })?;
/// tx.commit()?;
/// assert_eq!(handled, [Handled::Done(1)]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InboxError`]: roll the transaction back.
pub fn each<T, E>(
    conn: &Connection,
    handler: &str,
    events: &[Event],
    mut effect: impl FnMut(&Connection, &Event) -> Result<T, E>,
) -> Result<Vec<Handled<T, E>>, InboxError> {
    check_handler(handler)?;
    check_batch(events.len())?;
    let savepoint = |sql| {
        let done = conn.prepare_cached(sql).and_then(|mut statement| statement.execute(()));
        done.map(drop).map_err(InboxError::database)
    };
    let mut failed_keys = HashSet::new();
    let mut handled = Vec::with_capacity(events.len());
    let mut firsts = 0;
    let mut duplicates = 0;
    for event in events {
        let key = event.partition_key();
        if key.as_ref().is_some_and(|key| failed_keys.contains(&**key)) {
            handled.push(Handled::Held);
            continue;
        }
        savepoint("SAVEPOINT carrick_inbox")?;
        handled.push(match first(conn, handler, &event.into())? {
            Seen::Duplicate => {
                duplicates += 1;
                Handled::Duplicate
            }
            Seen::First => match effect(conn, event) {
                Ok(done) => {
                    firsts += 1;
                    Handled::Done(done)
                }
                Err(error) => {
                    savepoint("ROLLBACK TO carrick_inbox")?;
                    failed_keys.extend(key.map(|key| key.to_string()));
                    Handled::Failed(error)
                }
            },
        });
        savepoint("RELEASE carrick_inbox")?;
    }
    count(firsts, duplicates);
    Ok(handled)
}

/// Lets an entity's version pass if it follows the present one, and remembers it. Commit it together
/// with the effect.
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
pub fn guard(
    conn: &Connection,
    handler: &str,
    key: &str,
    version: i64,
    versions: Versions,
) -> Result<Guarded, InboxError> {
    check_handler(handler)?;
    let written = match versions {
        Versions::Ascending => conn
            .prepare_cached(
                "INSERT INTO carrick_inbox_version AS v (handler, key, version)
                 VALUES (?1, ?2, ?3) ON CONFLICT (handler, key) DO UPDATE
                 SET version = excluded.version WHERE v.version < excluded.version",
            )
            .and_then(|mut upsert| upsert.execute(params![handler, key, version])),
        Versions::Contiguous { first } => conn
            .prepare_cached(
                "INSERT INTO carrick_inbox_version AS v (handler, key, version)
                 SELECT ?1, ?2, ?3 WHERE ?3 = ?4 OR EXISTS (
                     SELECT 1 FROM carrick_inbox_version WHERE handler = ?1 AND key = ?2)
                 ON CONFLICT (handler, key) DO UPDATE
                 SET version = excluded.version WHERE v.version + 1 = excluded.version",
            )
            .and_then(|mut upsert| upsert.execute(params![handler, key, version, first])),
    };
    if written.map_err(InboxError::database)? == 1 {
        return Ok(Guarded::Applied.counted());
    }
    let current = conn
        .prepare_cached("SELECT version FROM carrick_inbox_version WHERE handler = ?1 AND key = ?2")
        .and_then(|mut select| select.query_row([handler, key], |row| row.get(0)).optional())
        .map_err(InboxError::database)?;
    Ok(Guarded::refused(version, current, versions).counted())
}

/// Reserves an event for `hold`, in a transaction of its own: commit before the work begins.
///
/// # Errors
/// [`InboxError`]; nothing is reserved then.
pub fn reserve(
    conn: &Connection,
    handler: &str,
    event: &EventId<'_>,
    hold: Duration,
) -> Result<Reserved, InboxError> {
    check_handler(handler)?;
    let hold = format!("+{:.3} seconds", hold.as_secs_f64());
    let token: Option<i64> = conn
        .query_row(
            "INSERT INTO carrick_inbox AS i (handler, source, id, token, held_until)
             VALUES (?1, ?2, ?3, 1, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?4))
             ON CONFLICT DO UPDATE SET token = i.token + 1, held_until = excluded.held_until
             WHERE i.held_until <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
             RETURNING token",
            params![handler, event.source, event.id, hold],
            |row| row.get(0),
        )
        .optional()
        .map_err(InboxError::database)?;
    if let Some(token) = token {
        count(1, 0);
        return Ok(Reserved::New(ReservationToken(token)));
    }
    let left: Option<Option<f64>> = conn
        .query_row(
            "SELECT (julianday(held_until) - julianday('now')) * 86400 FROM carrick_inbox
             WHERE handler = ?1 AND source = ?2 AND id = ?3",
            params![handler, event.source, event.id],
            |row| row.get(0),
        )
        .optional()
        .map_err(InboxError::database)?;
    Ok(match left {
        Some(None) => {
            count(0, 1);
            Reserved::Done
        }
        Some(Some(left)) => Reserved::Busy(Duration::try_from_secs_f64(left).unwrap_or_default()),
        None => Reserved::Busy(Duration::ZERO),
    })
}

/// Says that the work under a reservation is done; `false` if somebody else has it by now.
///
/// # Errors
/// [`InboxError`]; the reservation is as it was.
pub fn complete(
    conn: &Connection,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    settle(
        conn,
        "UPDATE carrick_inbox
         SET held_until = NULL, seen_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
         WHERE handler = ?1 AND source = ?2 AND id = ?3 AND token = ?4 AND held_until IS NOT NULL",
        handler,
        event,
        token,
    )
}

/// Gives a reservation back: the work was not done. `false` if somebody else has it by now.
///
/// # Errors
/// [`InboxError`]; the reservation is as it was.
pub fn release(
    conn: &Connection,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    // The row stays, so that the next token is a higher one.
    settle(
        conn,
        "UPDATE carrick_inbox SET held_until = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
         WHERE handler = ?1 AND source = ?2 AND id = ?3 AND token = ?4 AND held_until IS NOT NULL",
        handler,
        event,
        token,
    )
}

fn settle(
    conn: &Connection,
    sql: &str,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    let settled = conn.execute(sql, params![handler, event.source, event.id, token.0]);
    Ok(settled.map_err(InboxError::database)? == 1)
}

/// Forgets events seen longer ago than `window`, at most `limit`, the oldest first; returns how
/// many. Reservations that hold are kept.
///
/// # Errors
/// [`InboxError`]; nothing is forgotten then.
pub fn prune(conn: &Connection, window: Duration, limit: usize) -> Result<u64, InboxError> {
    let age = format!("-{:.3} seconds", window.as_secs_f64());
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let pruned = conn.execute(
        "DELETE FROM carrick_inbox
         WHERE rowid IN (SELECT rowid FROM carrick_inbox ORDER BY rowid LIMIT ?2)
           AND seen_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?1)
           AND (held_until IS NULL OR held_until <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
        params![age, limit],
    );
    Ok(pruned.map_err(InboxError::database)? as u64)
}
