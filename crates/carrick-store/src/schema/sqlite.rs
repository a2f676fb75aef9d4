//! Migrations on SQLite.
//!
//! What is made in somebody else's file must leave out STRICT, this module's own table included: a
//! program with an SQLite before 3.37 could not open a file that has one such table.

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::Component;
use crate::StoreError;

const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS carrick_schema (
    component  TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    name       TEXT    NOT NULL,
    applied_at TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (component, version)
) WITHOUT ROWID";

/// Brings a component's tables up to date, in one transaction that holds the database's write lock.
///
/// # Errors
/// [`StoreError::NewerSchema`] if a newer Carrick has been here; [`StoreError::Engine`] if the file
/// is no database or cannot be written. Nothing is changed then.
pub fn migrate(conn: &mut Connection, component: &Component) -> Result<(), StoreError> {
    // A current schema is found without writing, so that a start does not wait for a writer.
    if found(conn, component)? == known(component) {
        return Ok(());
    }
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    tx.execute_batch(VERSIONS).map_err(failed)?;
    let found = found(&tx, component)?;
    for migration in component.migrations.iter().filter(|one| one.version > found) {
        tx.execute_batch(migration.sqlite).map_err(failed)?;
        tx.execute(
            "INSERT INTO carrick_schema (component, version, name) VALUES (?1, ?2, ?3)",
            params![component.name, migration.version, migration.name],
        )
        .map_err(failed)?;
        let (version, name) = (migration.version, migration.name);
        tracing::info!(component = component.name, version, name, "migrated");
    }
    tx.commit().map_err(failed)
}

/// The version in the database; 0 if the component was never here.
fn found(conn: &Connection, component: &Component) -> Result<i64, StoreError> {
    let there = conn
        .query_row("SELECT 1 FROM sqlite_schema WHERE name = 'carrick_schema'", [], |_| Ok(()))
        .optional()
        .map_err(failed)?;
    if there.is_none() {
        return Ok(0);
    }
    let found: i64 = conn
        .query_row(
            "SELECT coalesce(max(version), 0) FROM carrick_schema WHERE component = ?1",
            [component.name],
            |row| row.get(0),
        )
        .map_err(failed)?;
    let known = known(component);
    if found > known {
        return Err(StoreError::NewerSchema { found, known });
    }
    Ok(found)
}

fn known(component: &Component) -> i64 {
    component.migrations.iter().map(|one| one.version).max().unwrap_or(0)
}

fn failed(error: rusqlite::Error) -> StoreError {
    StoreError::Engine(error.into())
}
