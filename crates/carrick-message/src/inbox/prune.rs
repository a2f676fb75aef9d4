//! Forgets what was remembered long enough: a bounded number of bounded statements, each by itself,
//! on its own timer (defects.md M8), and nothing for a while after the start: whatever was down
//! together comes back together, and redelivers first (field report 14).

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::{
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::warn;

use super::{InboxError, Retention};
use crate::consumer::log_limit::LogLimit;

/// Between two statements of a prune: others may write.
const BREATH: Duration = Duration::from_millis(10);
/// Rows that one transaction on SQLite removes: it keeps other writers out for some 10 ms.
#[cfg(feature = "rusqlite")]
const SQLITE_ROWS: usize = 1000;

type Prune = Box<dyn FnMut(Duration, usize) -> BoxFuture<'static, Result<u64, InboxError>> + Send>;

/// A task that prunes an inbox; it ends when this is dropped. Several on one inbox do no harm.
#[derive(Debug)]
pub struct Pruner(JoinHandle<()>);

impl Pruner {
    /// Prunes the inbox in a Postgres database; borrows a connection for a moment now and then.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[cfg(feature = "sqlx-postgres")]
    pub fn postgres(pool: sqlx::PgPool, retention: Retention) -> Self {
        let prune: Prune = Box::new(move |window, rows| {
            let pool = pool.clone();
            Box::pin(async move {
                let mut conn = pool.acquire().await.map_err(InboxError::database)?;
                super::sqlx_postgres::prune(&mut conn, window, rows).await
            })
        });
        Self(tokio::spawn(run(prune, retention)))
    }

    /// Prunes the inbox in an SQLite file.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[cfg(feature = "rusqlite")]
    pub fn sqlite(path: &std::path::Path, retention: Retention) -> Self {
        let path = path.to_owned();
        let prune: Prune = Box::new(move |window, rows| {
            let path = path.clone();
            let prune = move || {
                let conn = rusqlite::Connection::open(path).map_err(InboxError::database)?;
                conn.busy_timeout(Duration::from_secs(5)).map_err(InboxError::database)?;
                super::rusqlite::prune(&conn, window, rows.min(SQLITE_ROWS))
            };
            Box::pin(async move {
                let pruned = tokio::task::spawn_blocking(prune).await;
                pruned.map_err(InboxError::database)?
            })
        });
        Self(tokio::spawn(run(prune, retention)))
    }
}

impl Drop for Pruner {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn run(mut prune: Prune, retention: Retention) {
    let start = Instant::now();
    let mut ticks = interval(retention.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut log = LogLimit::default();
    loop {
        ticks.tick().await;
        if !retention.may_prune(start.elapsed()) {
            continue;
        }
        for _ in 0..retention.batches {
            match prune(retention.window, retention.rows).await {
                Ok(0) => break,
                Ok(rows) => metrics::counter!("carrick_inbox_pruned_total").increment(rows),
                Err(error) => {
                    if let Some(more) = log.pass(Instant::now()) {
                        warn!(%error, more, "the inbox cannot be pruned");
                    }
                    break;
                }
            }
            sleep(BREATH).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;
    use crate::inbox::RetentionOptions;

    #[tokio::test(start_paused = true)]
    async fn m8_a_prune_is_bounded_and_waits_for_the_grace_after_the_start() {
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        let endless: Prune = Box::new(move |_, rows| {
            counted.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move { Ok(rows as u64) })
        });
        let options = RetentionOptions {
            grace: Duration::from_secs(600),
            every: Duration::from_secs(60),
            ..RetentionOptions::default()
        };
        let task = tokio::spawn(run(endless, options.try_into().unwrap()));
        tokio::time::sleep(Duration::from_secs(599)).await;
        assert_eq!(calls.load(Ordering::SeqCst), 0, "nothing is forgotten right after the start");
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(calls.load(Ordering::SeqCst), 20, "however much there is to forget");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(calls.load(Ordering::SeqCst), 40);
        task.abort();
    }
}
