//! The writer: one thread, one connection, and a transaction for whatever is waiting.
//!
//! A commit and its flush cost as much as writing dozens of records; so what callers ask for at the
//! same time goes into one. Callers that come back together after a commit need some microseconds
//! to do so: when several were in the last commit, the next one waits for as many, for a part of
//! what the last one took. A caller that is alone never waits.
//!
//! With so many callers that writing for all takes longer than half a flush, they come in thirds: one
//! is written, one is flushed ([`Flusher`]), and one was answered and is on its way back.
//!
//! What fails for a reason of its own fails alone: the others of its transaction are done again
//! without it. What fails because of the disk or of another program fails for all.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    checkpoint::{self, Checkpointer, Due},
    config::SqliteOptions,
    flusher::{Answer, Asker, Commit, Flusher},
    tables::Tables,
};
use crate::StoreError;

/// Jobs that wait for the writer: above this, callers wait in line for a place. More would add
/// nothing to a commit, only memory.
const WAITING: usize = 4096;

type Work = Box<dyn FnMut(&mut Tables) -> Result<Answer, rusqlite::Error> + Send>;

/// Jobs that may fail on their own before their whole transaction is given up: each costs doing the
/// others again.
const SPARED: usize = 8;

/// What a caller wants done, in a transaction with what others want.
pub(super) struct Job {
    work: Work,
    answer: Asker,
    /// How much it writes, roughly.
    records: usize,
    bytes: usize,
    /// Whether it is of no use to a caller that has left.
    revocable: bool,
}

enum Message {
    Job(Job),
    Stop,
}

/// The way to the writer.
#[derive(Debug)]
pub(super) struct Writer {
    jobs: mpsc::Sender<Message>,
    thread: parking_lot::Mutex<Option<JoinHandle<()>>>,
}

impl Writer {
    pub(super) fn start(
        tables: Tables,
        options: &SqliteOptions,
        flusher: Flusher,
        checkpointer: Checkpointer,
    ) -> Result<Self, StoreError> {
        let (jobs, waiting) = mpsc::channel(WAITING);
        let options = options.clone();
        let work = Loop { tables, options, flusher, checkpointer, last: Last::default() };
        let thread = std::thread::Builder::new()
            .name("carrick-writer".to_owned())
            .spawn(move || work.run(waiting))
            .map_err(|error| StoreError::Engine(error.into()))?;
        Ok(Self { jobs, thread: parking_lot::Mutex::new(Some(thread)) })
    }

    /// Has something done, and resolves when it is on disk. It is done more than once if what is
    /// done in the same transaction fails.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        size: (usize, usize),
        revocable: bool,
        mut work: impl FnMut(&mut Tables) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let work = Box::new(move |tables: &mut Tables| Ok(Box::new(work(tables)?) as Answer));
        let (records, bytes) = size;
        let job = Job { work, answer, records, bytes, revocable };
        self.jobs.send(Message::Job(job)).await.map_err(|_| StoreError::Closed)?;
        let answer = answered.await.map_err(|_| StoreError::Closed)??;
        Ok(*answer.downcast().expect("a job answers with what its caller waits for"))
    }

    /// Finishes what is waiting, and ends the thread; also if the caller does not wait for it.
    pub(super) async fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        let jobs = self.jobs.clone();
        let stopped = tokio::task::spawn_blocking(move || {
            // If it has stopped already there is nothing to tell it.
            jobs.blocking_send(Message::Stop).ok();
            thread.join()
        });
        if !matches!(stopped.await, Ok(Ok(()))) {
            tracing::error!("the writer of the store ended by a panic");
        }
    }
}

/// What was lately.
#[derive(Default)]
struct Last {
    /// How many callers there were at a time.
    callers: usize,
    /// What writing the last transaction took, and for how many jobs.
    wrote: Duration,
    jobs: usize,
}

struct Loop {
    tables: Tables,
    options: SqliteOptions,
    flusher: Flusher,
    checkpointer: Checkpointer,
    last: Last,
}

impl Loop {
    fn run(mut self, mut waiting: mpsc::Receiver<Message>) {
        let mut batch = Vec::new();
        while let Some(first) = waiting.blocking_recv() {
            let bytes = self.gather(first, &mut waiting, &mut batch);
            self.commit(&mut batch, bytes);
        }
        self.checkpointer.stop();
        self.flusher.stop();
        // So that the next start finds no log to recover; if it fails, the next start does it.
        if let Err(error) = checkpoint::truncate(self.tables.conn()) {
            tracing::debug!(%error, "the write-ahead log is left for the next start");
        }
    }

    /// Takes what goes into the next transaction; tells how many bytes it writes.
    fn gather(
        &mut self,
        first: Message,
        waiting: &mut mpsc::Receiver<Message>,
        batch: &mut Vec<Job>,
    ) -> usize {
        let flushing = self.flusher.callers();
        let known = flushing + waiting.len() + 1;
        // It falls slowly: callers that are on their way back are seen nowhere.
        self.last.callers = known.max(self.last.callers - self.last.callers.div_ceil(16));
        let wanted = self.last.wanted(self.flusher.took());
        // All came at once, as at the start: a part of them sets off, the others follow.
        let most = if flushing == 0 && wanted < self.last.callers { wanted } else { usize::MAX };
        let (mut records, mut bytes) = (0, 0);
        let mut next = Some(first);
        let mut patience = None;
        loop {
            match next.take() {
                Some(Message::Job(job)) => {
                    (records, bytes) = (records + job.records, bytes + job.bytes);
                    batch.push(job);
                    let is_full = records >= self.options.commit_records || bytes >= MAX_BYTES;
                    if is_full || batch.len() >= most {
                        return bytes;
                    }
                }
                Some(Message::Stop) => {
                    waiting.close();
                    return bytes;
                }
                // Those who were answered are about to ask again: let them run.
                None => std::thread::yield_now(),
            }
            next = waiting.try_recv().ok();
            if next.is_none() {
                if batch.len() >= wanted {
                    return bytes;
                }
                let now = Instant::now();
                let longest = || now + self.last.patience(self.flusher.took(), &self.options);
                if now >= *patience.get_or_insert_with(longest) {
                    return bytes;
                }
            }
        }
    }

    fn commit(&mut self, batch: &mut Vec<Job>, bytes: usize) {
        batch.retain(|job| !job.revocable || !job.answer.is_closed());
        if batch.is_empty() {
            return;
        }
        while let Some(error) = self.flusher.error() {
            match batch.pop() {
                Some(job) => job.answer.send(Err(error)).ok(),
                None => return,
            };
        }
        let start = Instant::now();
        let jobs = batch.len();
        let mut spared = SPARED;
        while !batch.is_empty() {
            let number = self.flusher.horizon().begin();
            match self.transact(batch) {
                Ok(answers) => {
                    self.last.wrote = start.elapsed();
                    self.last.jobs = jobs;
                    let answers = batch.drain(..).map(|job| job.answer).zip(answers).collect();
                    let woken = self.tables.take_woken();
                    let commit = Commit { number, answers, woken };
                    // With others about to ask, the next transaction is written meanwhile.
                    if jobs < self.last.callers {
                        self.flusher.hand(commit);
                    } else {
                        self.flusher.finish(commit);
                    }
                }
                Err(Failure { error, job }) => {
                    self.tables.give_up();
                    // Readers may wait for this number: after a flush there is nothing to wait for.
                    self.flusher.finish(Commit { number, answers: Vec::new(), woken: Vec::new() });
                    metrics::counter!("carrick_store_failed_commits_total").increment(1);
                    if self.tables.may_log() {
                        tracing::error!(%error, jobs, "a commit of the store failed");
                    }
                    let told = Told::new(&error);
                    match job.filter(|_| spared > 0 && !told.concerns_all) {
                        Some(index) => {
                            spared -= 1;
                            batch.remove(index).answer.send(Err(told.error())).ok();
                        }
                        None => {
                            for job in batch.drain(..) {
                                job.answer.send(Err(told.error())).ok();
                            }
                        }
                    }
                }
            }
        }
        metrics::histogram!("carrick_store_commit_seconds").record(start.elapsed().as_secs_f64());
        // What a commit writes beside its records: their pages' other halves, and the groups'.
        let written = bytes + bytes / 2 + 4096 * (2 + jobs);
        match self.checkpointer.wrote(written as u64) {
            Due::Nothing => {}
            Due::Rest => checkpoint::rest(self.tables.conn()),
            Due::All => self.checkpointer.force(self.tables.conn(), self.options.busy),
        }
    }

    fn transact(&mut self, batch: &mut [Job]) -> Result<Vec<Answer>, Failure> {
        let all = |error| Failure { error, job: None };
        self.tables.begin().map_err(all)?;
        let mut answers = Vec::with_capacity(batch.len());
        for (index, job) in batch.iter_mut().enumerate() {
            // A defect of ours that one record brings to light must not end the writer for all.
            let done = catch_unwind(AssertUnwindSafe(|| (job.work)(&mut self.tables)));
            let done = done.unwrap_or_else(|_| Err(rusqlite::Error::UnwindingPanic));
            answers.push(done.map_err(|error| Failure { error, job: Some(index) })?);
        }
        self.tables.commit().map_err(all)?;
        Ok(answers)
    }
}

/// Why a transaction was given up.
struct Failure {
    error: rusqlite::Error,
    /// Which job failed, if one did.
    job: Option<usize>,
}

impl Last {
    /// How many callers to write for at once: all of them, or a third if there is enough to do for
    /// writing and flushing beside each other.
    fn wanted(&self, flush: Duration) -> usize {
        let jobs = u32::try_from(self.jobs.max(1)).unwrap_or(u32::MAX);
        let callers = u32::try_from(self.callers).unwrap_or(u32::MAX);
        let all = (self.wrote / jobs).saturating_mul(callers);
        if all * 2 > flush { self.callers.div_ceil(3) } else { self.callers }
    }

    /// How long to wait for as many.
    fn patience(&self, flush: Duration, options: &SqliteOptions) -> Duration {
        if self.callers < 2 {
            return Duration::ZERO;
        }
        // Half of what a commit takes is less than what another commit for the late ones costs.
        ((self.wrote + flush) / 2).clamp(Duration::from_micros(50), options.commit_wait)
    }
}

/// Bytes of bodies in one commit: bounds the memory of a transaction, and how long it takes.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// A failure as it is told, if need be to everybody who was in the transaction.
struct Told {
    text: String,
    read_only: bool,
    concerns_all: bool,
}

impl Told {
    fn new(error: &rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::{
            DatabaseBusy, DatabaseLocked, DiskFull, OutOfMemory, ReadOnly, SystemIoFailure,
        };
        let code = error.sqlite_error_code();
        let read_only = matches!(code, Some(DiskFull | ReadOnly | SystemIoFailure));
        let busy = matches!(code, Some(DatabaseBusy | DatabaseLocked | OutOfMemory));
        Self { text: error.to_string(), read_only, concerns_all: read_only || busy }
    }

    fn error(&self) -> StoreError {
        let source = self.text.clone().into();
        if self.read_only { StoreError::ReadOnly(source) } else { StoreError::Engine(source) }
    }
}
