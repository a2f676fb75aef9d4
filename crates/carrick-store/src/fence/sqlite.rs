//! Named leases in an SQLite database, for whoever has a connection to it: the engine, and a relay in
//! somebody else's file. Call these within a transaction that writes, or alone.
//!
//! SQLite has no clock but the machine's, which is why leases in one file are for programs of one
//! machine. Rows are never removed: a name's next token must be higher than its last.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};

use super::{Acquired, FenceToken};
use crate::{StoreError, micros};

/// The table, for the component's migration. Times are microseconds since 1970. Not STRICT: see
/// [`crate::schema::sqlite`].
pub(super) const CREATE: &str = "CREATE TABLE carrick_fence (
    name    TEXT    PRIMARY KEY,
    token   INTEGER NOT NULL,
    ends_at INTEGER NOT NULL
) WITHOUT ROWID";

/// Grants a lease for `ttl` from `now` (microseconds since 1970), or tells how long its holder has.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn acquire_at(
    conn: &Connection,
    name: &str,
    ttl: Duration,
    now: i64,
) -> Result<Acquired, StoreError> {
    let end = now.saturating_add(micros::of(ttl));
    let granted: Option<i64> = conn
        .prepare_cached(
            "INSERT INTO carrick_fence AS held (name, token, ends_at) VALUES (?1, 1, ?2)
             ON CONFLICT (name) DO UPDATE SET token = held.token + 1, ends_at = ?2
             WHERE held.ends_at <= ?3 RETURNING token",
        )
        .and_then(|mut statement| {
            statement.query_row(params![name, end, now], |row| row.get(0)).optional()
        })
        .map_err(failed)?;
    if let Some(token) = granted {
        return Ok(Acquired::Held(token.cast_unsigned()));
    }
    let ends_at: Option<i64> = conn
        .prepare_cached("SELECT ends_at FROM carrick_fence WHERE name = ?1")
        .and_then(|mut statement| statement.query_row([name], |row| row.get(0)).optional())
        .map_err(failed)?;
    let left = u64::try_from(ends_at.unwrap_or(now).saturating_sub(now)).unwrap_or(0);
    Ok(Acquired::Busy(Duration::from_micros(left)))
}

/// Sets the end of a lease to `ttl` from `now`; `false` if the token is not the current one, or the
/// lease has ended.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn renew_at(
    conn: &Connection,
    name: &str,
    token: FenceToken,
    ttl: Duration,
    now: i64,
) -> Result<bool, StoreError> {
    set_end(conn, name, token, now.saturating_add(micros::of(ttl)), now)
}

/// Ends a lease early; `false` if the token is not the current one, or the lease has ended.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn release_at(
    conn: &Connection,
    name: &str,
    token: FenceToken,
    now: i64,
) -> Result<bool, StoreError> {
    set_end(conn, name, token, 0, now)
}

/// [`acquire_at`] by the machine's clock.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn acquire(conn: &Connection, name: &str, ttl: Duration) -> Result<Acquired, StoreError> {
    acquire_at(conn, name, ttl, now())
}

/// [`renew_at`] by the machine's clock.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn renew(
    conn: &Connection,
    name: &str,
    token: FenceToken,
    ttl: Duration,
) -> Result<bool, StoreError> {
    renew_at(conn, name, token, ttl, now())
}

/// [`release_at`] by the machine's clock.
///
/// # Errors
/// [`StoreError::Engine`] if the database fails.
pub fn release(conn: &Connection, name: &str, token: FenceToken) -> Result<bool, StoreError> {
    release_at(conn, name, token, now())
}

fn set_end(
    conn: &Connection,
    name: &str,
    token: FenceToken,
    end: i64,
    now: i64,
) -> Result<bool, StoreError> {
    conn.prepare_cached(
        "UPDATE carrick_fence SET ends_at = ?3 WHERE name = ?1 AND token = ?2 AND ends_at > ?4",
    )
    .and_then(|mut statement| statement.execute(params![name, token.cast_signed(), end, now]))
    .map(|rows| rows == 1)
    .map_err(failed)
}

fn now() -> i64 {
    use carrick_core::clock::{Clock, SystemClock};
    SystemClock.wall().as_microsecond()
}

fn failed(error: rusqlite::Error) -> StoreError {
    StoreError::Engine(error.into())
}
