//! Appending inside a transaction of `sqlx` on SQLite.

use sqlx::SqliteConnection;

use super::{AppendError, OutboxEvent};

const INSERT: &str = "INSERT INTO carrick_outbox (topic, key, version, id, type, source, event)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
    ON CONFLICT (topic, key, version) WHERE version IS NOT NULL DO NOTHING";

/// Appends an event in the caller's transaction; returns the row's number.
///
/// The event leaves with the transaction's commit, or never was. Begin the transaction with
/// `BEGIN IMMEDIATE` if it reads before it writes: SQLite refuses to turn a reader into a writer
/// while somebody else writes.
///
/// # Errors
/// [`AppendError`]; nothing was appended then.
///
/// # Cancel safety
/// The row may have been written; roll the transaction back.
pub async fn append(conn: &mut SqliteConnection, event: &OutboxEvent) -> Result<i64, AppendError> {
    let fields = event.fields()?;
    let done = sqlx::query(INSERT)
        .bind(&fields.topic)
        .bind(&fields.key)
        .bind(fields.version)
        .bind(fields.event.id().to_string())
        .bind(fields.event.ty().to_string())
        .bind(fields.event.source().to_string())
        .bind(fields.document())
        .execute(conn)
        .await
        .map_err(AppendError::database)?;
    if done.rows_affected() == 0 {
        return Err(fields.version_taken());
    }
    Ok(done.last_insert_rowid())
}
