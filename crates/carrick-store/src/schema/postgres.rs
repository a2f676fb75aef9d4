//! Migrations on Postgres.
//!
//! A component's migrations run in one transaction, under an advisory lock that ends with it: two
//! programs that start together migrate once, one that dies half-way leaves nothing, and nothing is
//! left locked behind a transaction pooler. Tables are made in the first schema of the search path.

use sqlx::{PgConnection, PgPool};
use xxhash_rust::xxh3::xxh3_64;

use super::Component;
use crate::StoreError;

const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS carrick_schema (
    component  text        NOT NULL,
    version    bigint      NOT NULL,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (component, version)
)";

/// Brings a component's tables up to date.
///
/// # Errors
/// [`StoreError::NewerSchema`] if a newer Carrick has been here; [`StoreError::Engine`] if the
/// database fails or the role may not make tables. Nothing is changed then.
///
/// # Cancel safety
/// Safe to drop: all of the migrations are there, or none.
pub async fn migrate(pool: &PgPool, component: &Component) -> Result<(), StoreError> {
    let mut tx = pool.begin().await.map_err(failed)?;
    migrate_in(&mut tx, component).await?;
    tx.commit().await.map_err(failed)
}

/// Brings a component's tables up to date within the caller's transaction, which is to be given up
/// on an error.
///
/// # Errors
/// As [`migrate`].
///
/// # Cancel safety
/// Safe to drop together with the transaction.
pub async fn migrate_in(conn: &mut PgConnection, component: &Component) -> Result<(), StoreError> {
    // A current schema is found without the lock and without writing: most starts end here, also
    // those of a role that may not make tables.
    if current(conn, component).await? {
        return Ok(());
    }
    sqlx::query(
        "SELECT pg_advisory_xact_lock($1 # hashtextextended(coalesce(current_schema(), ''), 0))",
    )
    .bind(xxh3_64(b"carrick/schema").cast_signed())
    .persistent(false)
    .execute(&mut *conn)
    .await
    .map_err(failed)?;
    sqlx::raw_sql(VERSIONS).execute(&mut *conn).await.map_err(failed)?;
    let found = found(conn, component).await?;
    for migration in component.migrations.iter().filter(|one| one.version > found) {
        // The texts are constants of the component; they hold several statements each.
        sqlx::raw_sql(migration.postgres).execute(&mut *conn).await.map_err(failed)?;
        sqlx::query("INSERT INTO carrick_schema (component, version, name) VALUES ($1, $2, $3)")
            .bind(component.name)
            .bind(migration.version)
            .bind(migration.name)
            .persistent(false)
            .execute(&mut *conn)
            .await
            .map_err(failed)?;
        tracing::info!(
            component = component.name,
            version = migration.version,
            name = migration.name,
            "migrated"
        );
    }
    Ok(())
}

async fn current(conn: &mut PgConnection, component: &Component) -> Result<bool, StoreError> {
    let there: bool = sqlx::query_scalar("SELECT to_regclass('carrick_schema') IS NOT NULL")
        .persistent(false)
        .fetch_one(&mut *conn)
        .await
        .map_err(failed)?;
    Ok(there && found(conn, component).await? == known(component))
}

/// The version in the database; 0 if the component was never here.
async fn found(conn: &mut PgConnection, component: &Component) -> Result<i64, StoreError> {
    let found: i64 = sqlx::query_scalar(
        "SELECT coalesce(max(version), 0) FROM carrick_schema WHERE component = $1",
    )
    .bind(component.name)
    .persistent(false)
    .fetch_one(conn)
    .await
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

fn failed(error: sqlx::Error) -> StoreError {
    StoreError::Engine(error.into())
}
