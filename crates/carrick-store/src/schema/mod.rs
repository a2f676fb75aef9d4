//! Schema: versioned, forward-only migrations.
//!
//! Tables belong to components (the engine, the fence, the outbox), each with its own versions, noted
//! in table `carrick_schema`. A program brings the components it uses up to date when it starts, under
//! a lock, and refuses a database that a newer Carrick has been at.

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

/// One step of a component's schema; once released it never changes.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// From 1, without gaps.
    pub version: i64,
    /// What it does, in a few words.
    pub name: &'static str,
    /// Its statements on SQLite.
    pub sqlite: &'static str,
    /// Its statements on Postgres.
    pub postgres: &'static str,
}

/// Tables that are migrated together.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// Its name in `carrick_schema`.
    pub name: &'static str,
    /// Its steps, ascending.
    pub migrations: &'static [Migration],
}
