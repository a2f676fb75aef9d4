//! Makes the inbox's tables for a handler that is not ours: it then needs nothing but plain SQL.

use carrick_store::schema;

use super::{COMPONENT, InboxError};

/// Makes the inbox's tables in the database at a URL (`sqlite://path` or `postgres://…`), or brings
/// them up to date.
///
/// A program in Rust calls [`carrick_store::schema`] on the connection that it has.
///
/// # Errors
/// [`InboxError::Invalid`] for another kind of URL; [`InboxError::Database`] if the database cannot
/// be reached, or a newer Carrick has been there.
///
/// # Cancel safety
/// Safe to drop: all of the tables are there, or none.
///
/// ```
/// # #[cfg(feature = "rusqlite")]
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let folder = tempfile::tempdir().unwrap();
/// # let url = format!("sqlite://{}/ledger.db", folder.path().display());
/// carrick_message::inbox::make_tables(&url).await?;
/// # Ok::<(), carrick_message::inbox::InboxError>(())
/// # }).unwrap();
/// ```
pub async fn make_tables(url: &str) -> Result<(), InboxError> {
    #[cfg(feature = "rusqlite")]
    if let Some(path) = url.strip_prefix("sqlite:") {
        let path = std::path::PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        let made = tokio::task::spawn_blocking(move || {
            let mut conn = rusqlite::Connection::open(path).map_err(InboxError::database)?;
            schema::sqlite::migrate(&mut conn, &COMPONENT).map_err(InboxError::database)
        });
        return made.await.map_err(InboxError::database)?;
    }
    #[cfg(feature = "sqlx-postgres")]
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1);
        let pool = pool.connect(url).await.map_err(InboxError::database)?;
        let made = schema::postgres::migrate(&pool, &COMPONENT).await;
        pool.close().await;
        return made.map_err(InboxError::database);
    }
    let scheme = url.split(':').next().unwrap_or_default().chars().take(20).collect();
    Err(InboxError::Invalid {
        what: "database",
        range: "sqlite://path or postgres://…",
        value: scheme,
    })
}
