//! Wake-ups across processes on Postgres, without `NOTIFY` in anybody's transaction.
//!
//! A `NOTIFY` takes a lock that all commits of the cluster share, and costs more than half of the
//! throughput when it is in every transaction (field report 31). So the commit comes first, and a
//! task of this process sends at most one notification in a while, on a connection of its own.

use std::{sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{sync::Notify, task::JoinHandle, time::sleep};
use tracing::debug;

/// The channel that relays listen on.
pub(crate) const CHANNEL: &str = "carrick_outbox";

/// At most one notification in this time, however many commits there are.
const PAUSE: Duration = Duration::from_millis(10);

/// Tells relays of other processes that rows were committed.
///
/// A clone shares the one task, which ends with the last clone.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pending: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Notifier {
    /// Starts the task, which borrows a connection of `pool` for a moment now and then.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn spawn(pool: PgPool) -> Self {
        let pending = Arc::new(Notify::new());
        let task = tokio::spawn(send(pool, Arc::clone(&pending)));
        Self(Arc::new(Inner { pending, task }))
    }

    /// Notifies relays soon; call it after the commit. Returns at once.
    pub fn notify(&self) {
        self.0.pending.notify_one();
    }
}

async fn send(pool: PgPool, pending: Arc<Notify>) {
    loop {
        pending.notified().await;
        let sent = sqlx::query("SELECT pg_notify($1, '')")
            .bind(CHANNEL)
            .persistent(false)
            .execute(&pool)
            .await;
        if let Err(error) = sent {
            debug!(%error, "relays were not notified and will look by themselves");
        }
        sleep(PAUSE).await;
    }
}
