//! A thread that owns an SQLite connection, for callers that must not block.

use std::thread;

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use crate::outbox::OutboxError;

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

/// Calls that wait for the thread. A relay has a handful under way at most.
const QUEUE: usize = 16;

/// The thread; it ends, and closes its connection, with the last handle.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    jobs: mpsc::Sender<Job>,
}

impl Worker {
    pub(crate) fn start(mut conn: Connection) -> Self {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        thread::Builder::new()
            .name("carrick-outbox".to_owned())
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut conn);
                }
            })
            .expect("the system has a thread left");
        Self { jobs }
    }

    /// Runs a job. If the caller goes away before its turn, it is left out.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Connection) -> Result<T, OutboxError> + Send + 'static,
    ) -> Result<T, OutboxError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |conn| {
            if !answer.is_closed() {
                // Whoever asked may have gone meanwhile; what was done holds all the same.
                let _ = answer.send(job(conn));
            }
        });
        self.jobs.send(job).await.map_err(|_| OutboxError::Closed)?;
        answered.await.map_err(|_| OutboxError::Closed)?
    }
}
