//! Flushes: what makes a commit durable, beside the writer.
//!
//! The writer's connection commits without a flush (`synchronous=NORMAL`), and nobody is answered
//! before the write-ahead log that holds the commit is on the disk. That is the promise of
//! `synchronous=FULL`, and the writer may write the next transaction while the disk is at work. A
//! reader is answered likewise: what it may have seen is on the disk by then ([`Horizon`]).
//!
//! A flush that failed is not tried again. The system may have dropped what it could not write, and
//! would call the next one a success. So the engine refuses everything from then on, until it is
//! opened anew and has recovered what the disk holds.

use std::{
    any::Any,
    fmt, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    sync::{oneshot, watch},
    time::Instant,
};

use crate::{StoreError, Stream, wake::Wakes};

/// Commits that wait for the flusher's thread. The writer waits when there are more: it would only
/// be further ahead of the disk.
const AHEAD: usize = 4;

/// What a job answers; its caller knows the type.
pub(super) type Answer = Box<dyn Any + Send>;

/// Who waits for an answer.
pub(super) type Asker = oneshot::Sender<Result<Answer, StoreError>>;

/// Brings the write-ahead log to the disk.
pub(super) type Flush = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

/// How the log of a file is flushed.
pub(super) fn flush_of(path: &Path) -> io::Result<Flush> {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    // SQLite keeps this file for as long as a connection is open, and has no locks on it that
    // closing another handle could take away.
    let log = std::fs::File::options().write(true).open(log)?;
    Ok(Box::new(move || log.sync_data()))
}

/// A commit that is not on the disk yet.
pub(super) struct Commit {
    /// Its number on the [`Horizon`].
    pub(super) number: u64,
    pub(super) answers: Vec<(Asker, Answer)>,
    pub(super) woken: Vec<Stream>,
}

/// How far commits went, and how far the disk has them.
#[derive(Debug)]
pub(super) struct Horizon {
    begun: AtomicU64,
    flushed: watch::Sender<Flushed>,
}

#[derive(Clone, Debug)]
enum Flushed {
    To(u64),
    /// Why nothing will be flushed any more.
    Never(Arc<str>),
}

impl Default for Horizon {
    fn default() -> Self {
        Self { begun: AtomicU64::new(0), flushed: watch::Sender::new(Flushed::To(0)) }
    }
}

impl Horizon {
    /// Numbers a commit that is about to be made; before anybody can see it.
    pub(super) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The newest commit that a snapshot which was read before may hold.
    pub(super) fn seen(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// Waits until a commit is on the disk.
    pub(super) async fn wait(&self, number: u64) -> Result<(), StoreError> {
        let mut flushed = self.flushed.subscribe();
        let reached = |flushed: &Flushed| match flushed {
            Flushed::To(to) => *to >= number,
            Flushed::Never(_) => true,
        };
        let reached = flushed.wait_for(reached).await.map_err(|_| StoreError::Closed)?;
        match &*reached {
            Flushed::To(_) => Ok(()),
            Flushed::Never(error) => Err(broken(error)),
        }
    }

    fn error(&self) -> Option<Arc<str>> {
        match &*self.flushed.borrow() {
            Flushed::To(_) => None,
            Flushed::Never(error) => Some(Arc::clone(error)),
        }
    }
}

fn broken(error: &Arc<str>) -> StoreError {
    StoreError::Engine(
        format!("a flush of the write-ahead log failed ({error}): open the store anew").into(),
    )
}

/// The way to the thread that flushes.
pub(super) struct Flusher {
    commits: Option<mpsc::SyncSender<Commit>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl fmt::Debug for Flusher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flusher").field("horizon", &self.shared.horizon).finish_non_exhaustive()
    }
}

struct Shared {
    flush: Flush,
    horizon: Arc<Horizon>,
    wakes: Arc<Wakes>,
    /// Callers whose commits were handed over.
    callers: AtomicUsize,
    /// Nanoseconds that a flush took lately.
    took: AtomicU64,
}

impl Flusher {
    pub(super) fn start(
        flush: Flush,
        horizon: Arc<Horizon>,
        wakes: Arc<Wakes>,
    ) -> io::Result<Self> {
        let (callers, took) = (AtomicUsize::new(0), AtomicU64::new(0));
        let shared = Arc::new(Shared { flush, horizon, wakes, callers, took });
        let (commits, handed) = mpsc::sync_channel(AHEAD);
        let works = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("carrick-flush".to_owned())
            .spawn(move || works.run(&handed))?;
        Ok(Self { commits: Some(commits), thread: Some(thread), shared })
    }

    pub(super) fn horizon(&self) -> &Horizon {
        &self.shared.horizon
    }

    /// Callers that are answered by the flush under way, or by the next.
    pub(super) fn callers(&self) -> usize {
        self.shared.callers.load(Ordering::Acquire)
    }

    /// How long a flush took lately.
    pub(super) fn took(&self) -> Duration {
        Duration::from_nanos(self.shared.took.load(Ordering::Relaxed))
    }

    /// Why nothing can be flushed any more.
    pub(super) fn error(&self) -> Option<StoreError> {
        self.shared.horizon.error().as_ref().map(broken)
    }

    /// Flushes and answers on the thread.
    pub(super) fn hand(&self, commit: Commit) {
        self.shared.callers.fetch_add(commit.answers.len(), Ordering::AcqRel);
        let commits = self.commits.as_ref().expect("not stopped while the writer runs");
        if let Err(mpsc::SendError(commit)) = commits.send(commit) {
            // The thread ended by a panic: what it would have done is done here.
            self.shared.callers.fetch_sub(commit.answers.len(), Ordering::AcqRel);
            self.finish(commit);
        }
    }

    /// Flushes and answers here.
    pub(super) fn finish(&self, commit: Commit) {
        self.shared.finish(&mut vec![commit]);
    }

    /// Finishes what was handed over, and ends the thread.
    pub(super) fn stop(&mut self) {
        self.commits = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the flusher of the store ended by a panic");
        }
    }
}

impl Shared {
    fn run(&self, handed: &mpsc::Receiver<Commit>) {
        let mut commits = Vec::new();
        while let Ok(commit) = handed.recv() {
            commits.push(commit);
            commits.extend(handed.try_iter());
            let callers = commits.iter().map(|commit| commit.answers.len()).sum();
            self.finish(&mut commits);
            self.callers.fetch_sub(callers, Ordering::AcqRel);
        }
    }

    fn finish(&self, commits: &mut Vec<Commit>) {
        let start = Instant::now();
        let error = self.horizon.error().or_else(|| {
            let error = (self.flush)().err()?;
            tracing::error!(%error, "a flush of the store failed: it refuses everything from now on");
            Some(error.to_string().into())
        });
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let before = self.took.load(Ordering::Relaxed);
        self.took.store(before - before / 4 + took / 4, Ordering::Relaxed);
        let last = commits.iter().map(|commit| commit.number).max().unwrap_or(0);
        self.horizon.flushed.send_modify(|flushed| match (&error, &mut *flushed) {
            (Some(error), _) => *flushed = Flushed::Never(Arc::clone(error)),
            (None, Flushed::To(to)) => *to = last.max(*to),
            (None, Flushed::Never(_)) => {}
        });
        for commit in commits.drain(..) {
            for (asker, answer) in commit.answers {
                // A caller that left does not need it.
                asker.send(error.as_ref().map_or(Ok(answer), |error| Err(broken(error)))).ok();
            }
            for stream in commit.woken {
                self.wakes.wake(&stream);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn commit(number: u64) -> (Commit, oneshot::Receiver<Result<Answer, StoreError>>) {
        let (asker, answered) = oneshot::channel();
        let answers = vec![(asker, Box::new(number) as Answer)];
        (Commit { number, answers, woken: Vec::new() }, answered)
    }

    #[tokio::test]
    async fn nobody_is_answered_before_the_disk_has_it() {
        let (go, gate) = mpsc::channel::<()>();
        let gate = parking_lot::Mutex::new(gate);
        let flush: Flush = Box::new(move || {
            gate.lock().recv().expect("the test holds the other end");
            Ok(())
        });
        let horizon = Arc::<Horizon>::default();
        let mut flusher = Flusher::start(flush, Arc::clone(&horizon), Arc::default()).unwrap();
        let (first, mut answered) = commit(horizon.begin());
        flusher.hand(first);
        let reader = horizon.wait(horizon.seen());
        tokio::pin!(reader);
        assert!(futures_util::poll!(&mut reader).is_pending(), "a reader waits for the disk, too");
        assert!(answered.try_recv().is_err());
        go.send(()).unwrap();
        assert!(answered.await.unwrap().is_ok());
        reader.await.unwrap();
        flusher.stop();
    }

    #[tokio::test]
    async fn after_a_flush_that_failed_nothing_is_acknowledged_any_more() {
        let failed = AtomicBool::new(false);
        let flush: Flush = Box::new(move || {
            // As a disk does it: the second try "succeeds", for what it lost is forgotten.
            if failed.swap(true, Ordering::SeqCst) { Ok(()) } else { Err(io::Error::other("EIO")) }
        });
        let horizon = Arc::<Horizon>::default();
        let mut flusher = Flusher::start(flush, Arc::clone(&horizon), Arc::default()).unwrap();
        for _ in 0..2 {
            let (commit, answered) = commit(horizon.begin());
            flusher.hand(commit);
            assert!(matches!(answered.await.unwrap(), Err(StoreError::Engine(_))));
        }
        assert!(horizon.wait(horizon.seen()).await.is_err());
        assert!(flusher.error().is_some());
        flusher.stop();
    }
}
