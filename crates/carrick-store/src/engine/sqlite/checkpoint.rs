//! Checkpoints: folding the write-ahead log into the file, beside the writer.
//!
//! A checkpoint copies and flushes; done by the writer, it makes a commit wait for it. Here another
//! thread does it, passively, while the writer goes on. What was written meanwhile is left over, so
//! the log would never be empty and grow for ever: the writer does that small rest itself. Where
//! readers come so thick that the log is never free of them, the writer waits for them once in a
//! while; for somebody else's reader that does not end it does not wait, and says so.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use rusqlite::Connection;
use tokio::time::Instant;

use crate::StoreError;

/// The writer folds the rest when the log has grown to this many times what it is folded at. The rest
/// is small, but it costs the writer two flushes of the disk.
const FAR: u64 = 8;

/// The log has grown too far at this many times what it is folded at: readers are in the way.
pub(super) const TOO_FAR: u64 = 16;

/// How long the writer waits for readers then. It is a stall, so it is short, and rare.
const PATIENCE: Duration = Duration::from_millis(15);

/// How long it does not try again after it waited in vain.
const PAUSE: Duration = Duration::from_secs(1);

/// At most one log line in this time about a reader that is in the way.
const QUIET: Duration = Duration::from_secs(60);

/// What is left for the writer to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Fold the rest, without waiting.
    Rest,
    /// Fold everything, and wait for readers a little.
    All,
}

/// The way to the thread that checkpoints.
#[derive(Debug)]
pub(super) struct Checkpointer {
    wishes: Option<mpsc::SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    folded: Arc<Folded>,
    every: u64,
    written: u64,
    /// The thread is at it, or what it left is not yet done: two at a time are in each other's way.
    asked: bool,
    not_before: Instant,
    told: Option<Instant>,
}

/// What the thread has done.
#[derive(Debug, Default)]
struct Folded {
    done: AtomicBool,
    /// Bytes of the log, folded or not.
    log: AtomicU64,
}

impl Checkpointer {
    pub(super) fn start(path: &Path, every: u64) -> Result<Self, StoreError> {
        let conn = super::connect(path).map_err(super::failed)?;
        let page: i64 =
            conn.query_row("PRAGMA page_size", [], |row| row.get(0)).map_err(super::failed)?;
        let (wishes, wished) = mpsc::sync_channel(1);
        let folded = Arc::<Folded>::default();
        let tells = Arc::clone(&folded);
        let work = move || {
            while wished.recv().is_ok() {
                match passive(&conn) {
                    Ok(pages) => {
                        let bytes = pages * page.cast_unsigned();
                        metrics::gauge!("carrick_store_wal_bytes").set(bytes as f64);
                        tells.log.store(bytes, Ordering::Relaxed);
                    }
                    Err(error) => tracing::debug!(%error, "a checkpoint failed"),
                }
                tells.done.store(true, Ordering::Release);
            }
        };
        let thread = std::thread::Builder::new()
            .name("carrick-checkpoint".to_owned())
            .spawn(work)
            .map_err(|error| StoreError::Engine(error.into()))?;
        Ok(Self {
            wishes: Some(wishes),
            thread: Some(thread),
            folded,
            every,
            written: 0,
            asked: false,
            not_before: Instant::now(),
            told: None,
        })
    }

    /// Notes what was written; tells what is left for the writer.
    pub(super) fn wrote(&mut self, bytes: u64) -> Due {
        self.written += bytes;
        if !self.asked && self.written >= self.every {
            self.written = 0;
            let asked = self.wishes.as_ref().map(|wishes| wishes.try_send(()));
            self.asked = matches!(asked, Some(Ok(())));
        }
        if !self.asked || !self.folded.done.swap(false, Ordering::Acquire) {
            return Due::Nothing;
        }
        self.asked = false;
        let log = self.folded.log.load(Ordering::Relaxed);
        if log > self.every * TOO_FAR && Instant::now() >= self.not_before {
            Due::All
        } else if log > self.every * FAR {
            Due::Rest
        } else {
            Due::Nothing
        }
    }

    /// Folds everything and empties the log, for which the writer waits for readers a little.
    pub(super) fn force(&mut self, conn: &Connection, busy: Duration) {
        let now = Instant::now();
        let folded = conn.busy_timeout(PATIENCE).and_then(|()| truncate(conn));
        match folded.and_then(|free| conn.busy_timeout(busy).map(|()| free)) {
            Ok(true) => {}
            Ok(false) => {
                self.not_before = now + PAUSE;
                if self.told.is_none_or(|told| now.duration_since(told) >= QUIET) {
                    self.told = Some(now);
                    let bytes = self.folded.log.load(Ordering::Relaxed);
                    tracing::warn!(
                        bytes,
                        "a reader of the store's file keeps its write-ahead log from being emptied"
                    );
                }
            }
            Err(error) => tracing::debug!(%error, "a checkpoint failed"),
        }
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

/// Folds what can be folded without waiting for anybody; tells how many pages are in the log.
fn passive(conn: &Connection) -> rusqlite::Result<u64> {
    let pages: i64 = conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(1))?;
    Ok(u64::try_from(pages).unwrap_or(0))
}

/// Folds the rest.
pub(super) fn rest(conn: &Connection) {
    if let Err(error) = passive(conn) {
        tracing::debug!(%error, "a checkpoint failed");
    }
}

/// Folds everything and empties the log; `false` if a reader or another writer was in the way for
/// as long as the connection waits for such.
pub(super) fn truncate(conn: &Connection) -> rusqlite::Result<bool> {
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| Ok(row.get::<_, i64>(0)? == 0))
}
