//! Checkpoints: folding the write-ahead log into the file, beside the writer.
//!
//! A checkpoint copies and flushes; done by the writer, it makes a commit wait for it. Here another
//! thread does it, passively, while the writer goes on. What was written meanwhile is left over, so
//! the log would never be empty and grow for ever: the writer does that small rest itself.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering, mpsc},
    thread::JoinHandle,
};

use rusqlite::Connection;

use super::writer::{Flag, take};
use crate::StoreError;

/// The way to the thread that checkpoints.
#[derive(Debug)]
pub(super) struct Checkpointer {
    /// One wish at a time: a second one while the first waits asks for nothing more.
    wishes: Option<mpsc::SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    rest: Flag,
    every: u64,
    written: u64,
}

impl Checkpointer {
    pub(super) fn start(path: &Path, every: u64) -> Result<Self, StoreError> {
        let conn = super::connect(path).map_err(super::failed)?;
        let (wishes, wished) = mpsc::sync_channel(1);
        let rest = Flag::default();
        let left = Arc::clone(&rest);
        let work = move || {
            while wished.recv().is_ok() {
                match passive(&conn) {
                    Ok((log, done)) => {
                        metrics::gauge!("carrick_store_wal_pages").set(log as f64);
                        left.store(done < log, Ordering::Release);
                    }
                    Err(error) => tracing::debug!(%error, "a checkpoint failed"),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("carrick-checkpoint".to_owned())
            .spawn(work)
            .map_err(|error| StoreError::Engine(error.into()))?;
        Ok(Self { wishes: Some(wishes), thread: Some(thread), rest, every, written: 0 })
    }

    /// Notes what was written; tells whether a rest is left for the writer.
    pub(super) fn wrote(&mut self, bytes: u64) -> bool {
        self.written += bytes;
        if self.written >= self.every
            && let Some(wishes) = &self.wishes
        {
            self.written = 0;
            // Full means that one is asked for already.
            wishes.try_send(()).ok();
        }
        take(&self.rest)
    }

    pub(super) fn stop(&mut self) {
        self.wishes = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the checkpointer of the store ended by a panic");
        }
    }
}

/// Folds what can be folded without waiting for anybody; pages in the log, and how many are folded.
pub(super) fn passive(conn: &Connection) -> rusqlite::Result<(i64, i64)> {
    conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| Ok((row.get(1)?, row.get(2)?)))
}

/// Folds everything and empties the log.
pub(super) fn truncate(conn: &Connection) -> rusqlite::Result<()> {
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
}
