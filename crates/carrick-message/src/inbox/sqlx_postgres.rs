//! The inbox inside a transaction of `sqlx` on Postgres.

use std::time::Duration;

use hashbrown::HashSet;
use sqlx::PgConnection;

use super::{
    EventId, Guarded, InboxError, ReservationToken, Reserved, Seen, Versions, check_batch,
    check_handler, count,
};

/// Asks whether a handler sees an event for the first time, and remembers it if so. Commit it
/// together with the effect.
///
/// If another transaction is just doing the same, this one waits for its end.
///
/// ```no_run
/// # use carrick_message::inbox::{self, EventId, Seen};
/// # async fn example(pool: sqlx::PgPool, event: carrick_core::event::Event) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// if inbox::sqlx_postgres::once(&mut tx, "ledger", &EventId::from(&event)).await? == Seen::First {
///     sqlx::query("UPDATE ledger SET total = total + 10").execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn once(
    conn: &mut PgConnection,
    handler: &str,
    event: &EventId<'_>,
) -> Result<Seen, InboxError> {
    check_handler(handler)?;
    let inserted = sqlx::query(
        "INSERT INTO carrick_inbox (handler, source, id) VALUES ($1, $2, $3)
         ON CONFLICT DO NOTHING",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .execute(&mut *conn)
    .await
    .map_err(InboxError::database)?;
    if inserted.rows_affected() == 1 {
        count(1, 0);
        return Ok(Seen::First);
    }
    refuse_reserved(conn, handler, &[&event.source], &[&event.id]).await?;
    count(0, 1);
    Ok(Seen::Duplicate)
}

async fn refuse_reserved(
    conn: &mut PgConnection,
    handler: &str,
    sources: &[&str],
    ids: &[&str],
) -> Result<(), InboxError> {
    let reserved: bool = sqlx::query_scalar(
        "SELECT EXISTS (
             SELECT FROM unnest($2::text[], $3::text[]) AS one (source, id)
             JOIN carrick_inbox AS seen USING (source, id)
             WHERE seen.handler = $1 AND seen.held_until IS NOT NULL)",
    )
    .bind(handler)
    .bind(sources)
    .bind(ids)
    .fetch_one(conn)
    .await
    .map_err(InboxError::database)?;
    if reserved { Err(InboxError::Reserved) } else { Ok(()) }
}

/// Asks the same for a batch, in one statement; one answer for each, in order. Of the same event
/// twice in a batch, the later one is a duplicate.
///
/// Do the effects of the first ones in the same transaction, set-based if possible. If one must be
/// able to fail by itself, give it a savepoint (`tx.begin()`), and [`forget`] its event when it is
/// rolled back, and later ones of its key.
///
/// # Errors
/// [`InboxError`]; nothing is remembered then.
///
/// # Cancel safety
/// Roll the transaction back.
pub async fn once_each(
    conn: &mut PgConnection,
    handler: &str,
    events: &[EventId<'_>],
) -> Result<Vec<Seen>, InboxError> {
    check_handler(handler)?;
    check_batch(events.len())?;
    let sources: Vec<&str> = events.iter().map(|event| &*event.source).collect();
    let ids: Vec<&str> = events.iter().map(|event| &*event.id).collect();
    // In one order for all, so that two batches with the same events cannot wait for each other.
    let inserted: Vec<(String, String)> = sqlx::query_as(
        "INSERT INTO carrick_inbox (handler, source, id)
         SELECT $1, source, id FROM unnest($2::text[], $3::text[]) AS one (source, id)
         ORDER BY source, id
         ON CONFLICT DO NOTHING RETURNING source, id",
    )
    .bind(handler)
    .bind(&sources)
    .bind(&ids)
    .fetch_all(&mut *conn)
    .await
    .map_err(InboxError::database)?;
    if inserted.len() < events.len() {
        refuse_reserved(conn, handler, &sources, &ids).await?;
    }
    count(inserted.len(), events.len() - inserted.len());
    let mut first: HashSet<EventId<'_>> =
        inserted.into_iter().map(|(source, id)| EventId::new(source, id)).collect();
    let answer = |event| if first.remove(event) { Seen::First } else { Seen::Duplicate };
    Ok(events.iter().map(answer).collect())
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
    conn: &mut PgConnection,
    handler: &str,
    events: &[EventId<'_>],
) -> Result<u64, InboxError> {
    check_batch(events.len())?;
    let sources: Vec<&str> = events.iter().map(|event| &*event.source).collect();
    let ids: Vec<&str> = events.iter().map(|event| &*event.id).collect();
    let forgotten = sqlx::query(
        "DELETE FROM carrick_inbox AS seen USING unnest($2::text[], $3::text[]) AS one (source, id)
         WHERE seen.handler = $1 AND seen.source = one.source AND seen.id = one.id",
    )
    .bind(handler)
    .bind(sources)
    .bind(ids)
    .execute(conn)
    .await
    .map_err(InboxError::database)?;
    Ok(forgotten.rows_affected())
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
    conn: &mut PgConnection,
    handler: &str,
    key: &str,
    version: i64,
    versions: Versions,
) -> Result<Guarded, InboxError> {
    check_handler(handler)?;
    let upsert = match versions {
        Versions::Ascending => sqlx::query(
            "INSERT INTO carrick_inbox_version AS v (handler, key, version) VALUES ($1, $2, $3)
             ON CONFLICT (handler, key) DO UPDATE
             SET version = excluded.version WHERE v.version < excluded.version",
        )
        .bind(handler)
        .bind(key)
        .bind(version),
        Versions::Contiguous { first } => sqlx::query(
            "INSERT INTO carrick_inbox_version AS v (handler, key, version)
             SELECT $1, $2, $3 WHERE $3 = $4 OR EXISTS (
                 SELECT FROM carrick_inbox_version WHERE handler = $1 AND key = $2)
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
        "SELECT version FROM carrick_inbox_version WHERE handler = $1 AND key = $2",
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
    conn: &mut PgConnection,
    handler: &str,
    event: &EventId<'_>,
    hold: Duration,
) -> Result<Reserved, InboxError> {
    check_handler(handler)?;
    let token: Option<i64> = sqlx::query_scalar(
        "INSERT INTO carrick_inbox AS i (handler, source, id, token, held_until)
         VALUES ($1, $2, $3, 1, clock_timestamp() + $4::bigint * interval '1 microsecond')
         ON CONFLICT (handler, source, id) DO UPDATE
         SET token = i.token + 1, held_until = excluded.held_until
         WHERE i.held_until <= clock_timestamp()
         RETURNING token",
    )
    .bind(handler)
    .bind(&*event.source)
    .bind(&*event.id)
    .bind(micros(hold))
    .fetch_optional(&mut *conn)
    .await
    .map_err(InboxError::database)?;
    if let Some(token) = token {
        count(1, 0);
        return Ok(Reserved::New(ReservationToken(token)));
    }
    let left: Option<Option<i64>> = sqlx::query_scalar(
        "SELECT (extract(epoch FROM held_until - clock_timestamp()) * 1000000)::bigint
         FROM carrick_inbox WHERE handler = $1 AND source = $2 AND id = $3",
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
        Some(Some(left)) => Reserved::Busy(Duration::from_micros(u64::try_from(left).unwrap_or(0))),
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
    conn: &mut PgConnection,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    settle(
        conn,
        "UPDATE carrick_inbox SET held_until = NULL, seen_at = clock_timestamp()
         WHERE handler = $1 AND source = $2 AND id = $3 AND token = $4 AND held_until IS NOT NULL",
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
    conn: &mut PgConnection,
    handler: &str,
    event: &EventId<'_>,
    token: ReservationToken,
) -> Result<bool, InboxError> {
    // The row stays, so that the next token is a higher one.
    settle(
        conn,
        "UPDATE carrick_inbox SET held_until = clock_timestamp()
         WHERE handler = $1 AND source = $2 AND id = $3 AND token = $4 AND held_until IS NOT NULL",
        handler,
        event,
        token,
    )
    .await
}

async fn settle(
    conn: &mut PgConnection,
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
/// many. Reservations that hold and rows that somebody is at are kept.
///
/// # Errors
/// [`InboxError`]; nothing is forgotten then.
///
/// # Cancel safety
/// They may be forgotten.
pub async fn prune(
    conn: &mut PgConnection,
    window: Duration,
    limit: usize,
) -> Result<u64, InboxError> {
    let pruned = sqlx::query(
        "DELETE FROM carrick_inbox WHERE ctid = ANY (ARRAY(
             SELECT ctid FROM carrick_inbox
             WHERE seen_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
               AND (held_until IS NULL OR held_until <= clock_timestamp())
             ORDER BY seen_at LIMIT $2 FOR UPDATE SKIP LOCKED))",
    )
    .bind(micros(window))
    .bind(i64::try_from(limit).unwrap_or(i64::MAX))
    .execute(conn)
    .await
    .map_err(InboxError::database)?;
    Ok(pruned.rows_affected())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX).min(100 * 366 * 86_400 * 1_000_000)
}
