//! The messaging patterns on real engines.

mod broker;
mod consumer;
mod inbox_postgres;
mod inbox_sqlite;
mod outbox_kit;
mod outbox_postgres;
mod outbox_sqlite;
mod paused;
mod watched;
