//! The inbox inside a transaction of `sqlx` on SQLite.

use std::time::Duration;

use sqlx::SqliteConnection;

use super::{
    EventId, Guarded, InboxError, ReservationToken, Reserved, Seen, Versions, check_batch,
    check_handler, count,
};

/// Asks whether a handler sees an event for the first time, and remembers it if so. Commit it
/// together with the effect.
///
/// Begin the transaction with `BEGIN IMMEDIATE` if it reads before this.
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn once(
    conn: &mut SqliteConnection,
    handler: &str,
    event: &EventId<'_>,
) -> Result<Seen, InboxError> {
    check_handler(handler)?;
    let seen = first(conn, handler, event).await?;
    count(usize::from(seen == Seen::First), usize::from(seen == Seen::Duplicate));
    Ok(seen)
}

async fn first(
    conn: &mut SqliteConnection,
    handler: &str,
    event: &EventId<'_>,
) -> Result<Seen, InboxError> {
    let inserted = sqlx::query(
        "INSERT INTO carrick_inbox (handler, source, id) VALUES (?1, ?2, ?3)
         ON CONFLICT DO NOTHING",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .execute(&mut *conn)
    .await
    .map_err(InboxError::database)?;
    if inserted.rows_affected() == 1 {
        return Ok(Seen::First);
    }
    let reserved: Option<bool> = sqlx::query_scalar(
        "SELECT held_until IS NOT NULL FROM carrick_inbox
         WHERE handler = ?1 AND source = ?2 AND id = ?3",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .fetch_optional(conn)
    .await
    .map_err(InboxError::database)?;
    if reserved == Some(true) { Err(InboxError::Reserved) } else { Ok(Seen::Duplicate) }
}

/// Asks the same for a batch; one answer for each, in order. Of the same event twice in a batch,
/// the later one is a duplicate.
///
/// If one effect must be able to fail by itself, give it a savepoint (`tx.begin()`), and [`forget`]
/// its event when it is rolled back, and later ones of its key.
///
/// # Errors
/// [`InboxError`]: roll the transaction back.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn once_each(
    conn: &mut SqliteConnection,
    handler: &str,
    events: &[EventId<'_>],
) -> Result<Vec<Seen>, InboxError> {
    check_handler(handler)?;
    check_batch(events.len())?;
    let mut seen = Vec::with_capacity(events.len());
    for event in events {
        seen.push(first(conn, handler, event).await?);
    }
    let firsts = seen.iter().filter(|seen| **seen == Seen::First).count();
    count(firsts, seen.len() - firsts);
    Ok(seen)
}

/// Takes events back that this transaction remembered, at most 1000, because their effects were
/// rolled back to a savepoint: they come again. Returns how many.
///
/// # Errors
/// [`InboxError`]: roll the transaction back.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn forget(
    conn: &mut SqliteConnection,
    handler: &str,
    events: &[EventId<'_>],
) -> Result<u64, InboxError> {
    check_batch(events.len())?;
    let mut forgotten = 0;
    for event in events {
        let deleted =
            sqlx::query("DELETE FROM carrick_inbox WHERE handler = ?1 AND source = ?2 AND id = ?3")
                .bind(handler)
                .bind(&*event.source)
                .bind(&*event.id)
                .execute(&mut *conn)
                .await
                .map_err(InboxError::database)?;
        forgotten += deleted.rows_affected();
    }
    Ok(forgotten)
}

/// Lets an entity's version pass if it follows the present one, and remembers it. Commit it together
/// with the effect.
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn guard(
    conn: &mut SqliteConnection,
    handler: &str,
    key: &str,
    version: i64,
    versions: Versions,
) -> Result<Guarded, InboxError> {
    check_handler(handler)?;
    let upsert = match versions {
        Versions::Ascending => sqlx::query(
            "INSERT INTO carrick_inbox_version AS v (handler, key, version) VALUES (?1, ?2, ?3)
             ON CONFLICT (handler, key) DO UPDATE
             SET version = excluded.version WHERE v.version < excluded.version",
        )
        .bind(handler)
        .bind(key)
        .bind(version),
        Versions::Contiguous { first } => sqlx::query(
            "INSERT INTO carrick_inbox_version AS v (handler, key, version)
             SELECT ?1, ?2, ?3 WHERE ?3 = ?4 OR EXISTS (
                 SELECT 1 FROM carrick_inbox_version WHERE handler = ?1 AND key = ?2)
             ON CONFLICT (handler, key) DO UPDATE
             SET version = excluded.version WHERE v.version + 1 = excluded.version",
        )
        .bind(handler)
        .bind(key)
        .bind(version)
        .bind(first),
    };
    let written = upsert.execute(&mut *conn).await.map_err(InboxError::database)?;
    if written.rows_affected() == 1 {
        return Ok(Guarded::Applied.counted());
    }
    let current = sqlx::query_scalar(
        "SELECT version FROM carrick_inbox_version WHERE handler = ?1 AND key = ?2",
    )
    .bind(handler)
    .bind(key)
    .fetch_optional(conn)
    .await
    .map_err(InboxError::database)?;
    Ok(Guarded::refused(version, current, versions).counted())
}

/// Reserves an event for `hold`, in a transaction of its own: commit before the work begins.
///
/// # Errors
/// [`InboxError`]; nothing is reserved then.
///
/// # Cancel safety
/// The event may be reserved; the reservation ends by itself.
pub async fn reserve(
    conn: &mut SqliteConnection,
    handler: &str,
    event: &EventId<'_>,
    hold: Duration,
) -> Result<Reserved, InboxError> {
    check_handler(handler)?;
    let token: Option<i64> = sqlx::query_scalar(
        "INSERT INTO carrick_inbox AS i (handler, source, id, token, held_until)
         VALUES (?1, ?2, ?3, 1, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?4))
         ON CONFLICT DO UPDATE SET token = i.token + 1, held_until = excluded.held_until
         WHERE i.held_until <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
         RETURNING token",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .bind(format!("+{:.3} seconds", hold.as_secs_f64()))
    .fetch_optional(&mut *conn)
    .await
    .map_err(InboxError::database)?;
    if let Some(token) = token {
        count(1, 0);
        return Ok(Reserved::New(ReservationToken(token)));
    }
    let left: Option<Option<f64>> = sqlx::query_scalar(
        "SELECT (julianday(held_until) - julianday('now')) * 86400 FROM carrick_inbox
         WHERE handler = ?1 AND source = ?2 AND id = ?3",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .fetch_optional(conn)
    .await
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
///
/// # Cancel safety
/// It may have been said.
pub async fn complete(
    conn: &mut SqliteConnection,
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
    .await
}

/// Gives a reservation back: the work was not done. `false` if somebody else has it by now.
///
/// # Errors
/// [`InboxError`]; the reservation is as it was.
///
/// # Cancel safety
/// It may have been given back.
pub async fn release(
    conn: &mut SqliteConnection,
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
    .await
}

async fn settle(
    conn: &mut SqliteConnection,
    sql: &'static str,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    let settled = sqlx::query(sql)
        .bind(handler)
        .bind(&*event.source)
        .bind(&*event.id)
        .bind(token.0)
        .execute(conn)
        .await
        .map_err(InboxError::database)?;
    Ok(settled.rows_affected() == 1)
}

/// Forgets events seen longer ago than `window`, at most `limit`, the oldest first; returns how
/// many. Reservations that hold are kept.
///
/// # Errors
/// [`InboxError`]; nothing is forgotten then.
///
/// # Cancel safety
/// They may be forgotten.
pub async fn prune(
    conn: &mut SqliteConnection,
    window: Duration,
    limit: usize,
) -> Result<u64, InboxError> {
    let pruned = sqlx::query(
        "DELETE FROM carrick_inbox
         WHERE rowid IN (SELECT rowid FROM carrick_inbox ORDER BY rowid LIMIT ?2)
           AND seen_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?1)
           AND (held_until IS NULL OR held_until <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
    )
    .bind(format!("-{:.3} seconds", window.as_secs_f64()))
    .bind(i64::try_from(limit).unwrap_or(i64::MAX))
    .execute(conn)
    .await
    .map_err(InboxError::database)?;
    Ok(pruned.rows_affected())
}
