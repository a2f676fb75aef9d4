//! Named leases in a Postgres database, for whoever has a connection to it: the engine, and a relay
//! in somebody else's database.
//!
//! One statement each, so a lock lasts for one round trip, and the database's clock is the only one.
//! A renewal rewrites one row in its own page (fill factor), so that leases held for days leave no
//! trail in the index. Rows are never removed: a name's next token must be higher than its last.
//!
//! Where a call names several leases, rows are locked in the order of their names, so that two
//! callers cannot wait for each other.

use std::time::Duration;

use sqlx::PgConnection;

use super::{Acquired, FenceToken};
use crate::StoreError;

/// The table, for the component's migration, and the clock. That is a function so that it is written
/// once, and so that a test can stop it; Postgres puts its body in the place of each call. Not
/// `now()`, which stands still within a transaction that may have waited for a lock.
pub(super) const CREATE: &str = "
-- The database's clock, in microseconds since 1970.
CREATE FUNCTION carrick_now() RETURNS bigint LANGUAGE sql
    AS 'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint';

CREATE TABLE carrick_fence (
    name    text   PRIMARY KEY,
    token   bigint NOT NULL,
    ends_at bigint NOT NULL
) WITH (fillfactor = 50)";

macro_rules! now {
    () => {
        "carrick_now()"
    };
}

/// Grants a lease for `ttl`, or tells how long its holder still has.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// The lease may have been granted; it then ends by itself.
pub async fn acquire(
    conn: &mut PgConnection,
    name: &str,
    ttl: Duration,
) -> Result<Acquired, StoreError> {
    let granted: Option<i64> = sqlx::query_scalar(concat!(
        "INSERT INTO carrick_fence AS held (name, token, ends_at) VALUES ($1, 1, ",
        now!(),
        " + $2) ON CONFLICT (name) DO UPDATE SET token = held.token + 1, ends_at = ",
        now!(),
        " + $2 WHERE held.ends_at <= ",
        now!(),
        " RETURNING token",
    ))
    .bind(name)
    .bind(micros(ttl))
    .persistent(false)
    .fetch_optional(&mut *conn)
    .await
    .map_err(failed)?;
    if let Some(token) = granted {
        return Ok(Acquired::Held(token.cast_unsigned()));
    }
    let left: Option<i64> = sqlx::query_scalar(concat!(
        "SELECT ends_at - ",
        now!(),
        " FROM carrick_fence WHERE name = $1"
    ))
    .bind(name)
    .persistent(false)
    .fetch_optional(conn)
    .await
    .map_err(failed)?;
    // It may have ended since; the caller comes again at once.
    let left = u64::try_from(left.unwrap_or(0)).unwrap_or(0);
    Ok(Acquired::Busy(Duration::from_micros(left)))
}

/// Grants at most `max` of the named leases, those that nobody holds, chosen at random so that
/// several callers with the same names do not all ask for the same ones.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// Leases may have been granted; they then end by themselves.
pub async fn acquire_some(
    conn: &mut PgConnection,
    names: &[String],
    max: usize,
    ttl: Duration,
) -> Result<Vec<(String, FenceToken)>, StoreError> {
    let granted: Vec<(String, i64)> = sqlx::query_as(concat!(
        "WITH free AS (
             SELECT wanted.name FROM unnest($1::text[]) AS wanted (name)
             LEFT JOIN carrick_fence AS held USING (name)
             WHERE held.name IS NULL OR held.ends_at <= ",
        now!(),
        "    ORDER BY random() LIMIT $2
         )
         INSERT INTO carrick_fence AS held (name, token, ends_at)
         SELECT DISTINCT free.name, 1, ",
        now!(),
        " + $3 FROM free ORDER BY free.name
         ON CONFLICT (name) DO UPDATE SET token = held.token + 1, ends_at = ",
        now!(),
        " + $3 WHERE held.ends_at <= ",
        now!(),
        " RETURNING name, token",
    ))
    .bind(names)
    .bind(i64::try_from(max).unwrap_or(i64::MAX))
    .bind(micros(ttl))
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(failed)?;
    Ok(granted.into_iter().map(|(name, token)| (name, token.cast_unsigned())).collect())
}

/// Sets the end of a lease to `ttl` from now; `false` if the token is not the current one, or the
/// lease has ended.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// The lease may have been renewed.
pub async fn renew(
    conn: &mut PgConnection,
    name: &str,
    token: FenceToken,
    ttl: Duration,
) -> Result<bool, StoreError> {
    let renewed = renew_some(conn, &[(name.to_owned(), token)], ttl).await?;
    Ok(!renewed.is_empty())
}

/// Renews several leases; returns the names of those that are still held under their tokens.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// Leases may have been renewed.
pub async fn renew_some(
    conn: &mut PgConnection,
    leases: &[(String, FenceToken)],
    ttl: Duration,
) -> Result<Vec<String>, StoreError> {
    let (names, tokens) = columns(leases);
    sqlx::query_scalar(concat!(
        "WITH mine AS (
             SELECT held.name FROM carrick_fence AS held
             JOIN unnest($1::text[], $2::bigint[]) AS asked (name, token) USING (name, token)
             WHERE held.ends_at > ",
        now!(),
        "    ORDER BY held.name FOR UPDATE OF held
         )
         UPDATE carrick_fence AS held SET ends_at = ",
        now!(),
        " + $3 FROM mine WHERE held.name = mine.name RETURNING held.name",
    ))
    .bind(names)
    .bind(tokens)
    .bind(micros(ttl))
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(failed)
}

/// Ends a lease early; `false` if the token is not the current one, or the lease has ended.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// The lease may have been ended.
pub async fn release(
    conn: &mut PgConnection,
    name: &str,
    token: FenceToken,
) -> Result<bool, StoreError> {
    Ok(release_some(conn, &[(name.to_owned(), token)]).await? == 1)
}

/// Ends several leases early; returns how many were still held.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
///
/// # Cancel safety
/// Leases may have been ended.
pub async fn release_some(
    conn: &mut PgConnection,
    leases: &[(String, FenceToken)],
) -> Result<usize, StoreError> {
    let (names, tokens) = columns(leases);
    let released: Vec<String> = sqlx::query_scalar(concat!(
        "WITH mine AS (
             SELECT held.name FROM carrick_fence AS held
             JOIN unnest($1::text[], $2::bigint[]) AS asked (name, token) USING (name, token)
             WHERE held.ends_at > ",
        now!(),
        "    ORDER BY held.name FOR UPDATE OF held
         )
         UPDATE carrick_fence AS held SET ends_at = 0
         FROM mine WHERE held.name = mine.name RETURNING held.name",
    ))
    .bind(names)
    .bind(tokens)
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(failed)?;
    Ok(released.len())
}

fn columns(leases: &[(String, FenceToken)]) -> (Vec<&str>, Vec<i64>) {
    leases.iter().map(|(name, token)| (name.as_str(), token.cast_signed())).unzip()
}

fn micros(ttl: Duration) -> i64 {
    // A century is for ever, and far from overflowing a sum with the present.
    i64::try_from(ttl.as_micros()).unwrap_or(i64::MAX).min(100 * 366 * 86_400 * 1_000_000)
}

fn failed(error: sqlx::Error) -> StoreError {
    StoreError::Engine(error.into())
}
