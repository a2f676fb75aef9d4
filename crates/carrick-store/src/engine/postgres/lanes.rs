//! Lanes: commands for one thing (a stream, a group) are worked off by one task, in turn.
//!
//! While a transaction of a lane is under way its next commands gather, and the next transaction
//! takes all of them: sixty-four publishers of a stream cost few commits, and a lone one waits for
//! nobody. A lane starts with its first command and ends after a while without any; whoever submits
//! never waits for a place, but is told that there is none.

use std::{
    hash::Hash,
    sync::{Arc, Weak},
    time::Duration,
};

use hashbrown::{HashMap, hash_map::Entry};
use parking_lot::Mutex;
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    task::JoinSet,
};

use crate::StoreError;

/// Commands waiting in one lane. A transaction takes about as many at most, so a full lane is one
/// transaction ahead; more would only wait longer.
const WAITING: usize = 2048;

/// Lanes at one time. A lane is a task and a queue, some kilobytes: this many are some tens of
/// megabytes, and ten thousand streams written in the same half minute.
const LANES: usize = 10_000;

/// A lane without commands for so long ends.
const IDLE: Duration = Duration::from_secs(30);

type Senders<K, C> = Mutex<HashMap<K, mpsc::Sender<C>>>;

/// The lanes of one kind. Dropping them stops their tasks.
#[derive(Debug)]
pub(super) struct Lanes<K, C> {
    senders: Arc<Senders<K, C>>,
    tasks: Mutex<JoinSet<()>>,
}

impl<K: Clone + Eq + Hash + Send + 'static, C: Send + 'static> Lanes<K, C> {
    pub(super) fn new() -> Self {
        Self { senders: Arc::default(), tasks: Mutex::default() }
    }

    /// Puts a command into the lane of `key`, which `work` starts if there is none.
    pub(super) fn submit<F>(
        &self,
        key: K,
        command: C,
        work: impl FnOnce(Lane<K, C>) -> F,
    ) -> Result<(), StoreError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut senders = self.senders.lock();
        let lanes = senders.len();
        let mut command = command;
        match senders.entry(key) {
            Entry::Occupied(lane) => match lane.get().try_send(command) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(_)) => return Err(StoreError::Overloaded),
                // Its task panicked: the lane starts anew.
                Err(TrySendError::Closed(back)) => {
                    command = back;
                    let (sender, commands) = mpsc::channel(WAITING);
                    sender.try_send(command).map_err(|_| StoreError::Overloaded)?;
                    let key = lane.key().clone();
                    lane.into_mut().clone_from(&sender);
                    self.spawn(work(Lane {
                        key,
                        commands,
                        senders: Arc::downgrade(&self.senders),
                    }));
                }
            },
            Entry::Vacant(_) if lanes >= LANES => return Err(StoreError::Overloaded),
            Entry::Vacant(vacant) => {
                let (sender, commands) = mpsc::channel(WAITING);
                sender.try_send(command).map_err(|_| StoreError::Overloaded)?;
                let key = vacant.key().clone();
                vacant.insert(sender);
                self.spawn(work(Lane { key, commands, senders: Arc::downgrade(&self.senders) }));
            }
        }
        Ok(())
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        // Ended lanes are taken out as new ones come, so the set is no larger than the lanes were.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
    }

    /// Lets the lanes finish what they hold, and waits for them.
    pub(super) async fn close(&self) {
        self.senders.lock().clear();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
    }
}

/// The working end of a lane.
#[derive(Debug)]
pub(super) struct Lane<K, C> {
    key: K,
    commands: mpsc::Receiver<C>,
    senders: Weak<Senders<K, C>>,
}

impl<K: Clone + Eq + Hash, C> Lane<K, C> {
    pub(super) fn key(&self) -> &K {
        &self.key
    }

    /// The next command; `None` once the lane has been without one for a while, or is closed.
    pub(super) async fn next(&mut self) -> Option<C> {
        if let Ok(command) = tokio::time::timeout(IDLE, self.commands.recv()).await {
            return command;
        }
        let senders = self.senders.upgrade()?;
        let mut senders = senders.lock();
        // A command may have come while the time ran out. Submitting takes the same lock, so none
        // can come between this look and the end of the lane.
        let command = self.commands.try_recv().ok();
        if command.is_none() {
            senders.remove(&self.key);
        }
        command
    }

    /// A command that is there already.
    pub(super) fn more(&mut self) -> Option<C> {
        self.commands.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    type Command = (u32, oneshot::Sender<usize>);

    /// Answers each command with how many were taken together with it.
    async fn count_together(mut lane: Lane<u8, Command>) {
        while let Some(first) = lane.next().await {
            tokio::task::yield_now().await;
            let mut taken = vec![first];
            taken.extend(std::iter::from_fn(|| lane.more()));
            let together = taken.len();
            for (_, answer) in taken {
                answer.send(together).ok();
            }
        }
    }

    #[tokio::test]
    async fn what_gathers_meanwhile_is_taken_together() {
        let lanes = Lanes::new();
        let answers: Vec<_> = (0..10)
            .map(|n| {
                let (answer, answered) = oneshot::channel();
                lanes.submit(1, (n, answer), count_together).unwrap();
                answered
            })
            .collect();
        for answered in answers {
            assert_eq!(answered.await.unwrap(), 10);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_lane_ends_and_starts_again() {
        let lanes = Lanes::new();
        for _ in 0..3 {
            let (answer, answered) = oneshot::channel();
            lanes.submit(1, (0, answer), count_together).unwrap();
            assert_eq!(answered.await.unwrap(), 1);
            tokio::time::sleep(IDLE * 2).await;
            assert!(lanes.senders.lock().is_empty(), "an idle lane keeps its task");
        }
    }

    #[tokio::test]
    async fn a_full_lane_refuses_and_a_dead_one_starts_anew() {
        let lanes = Lanes::new();
        let mut kept = Vec::new();
        let refused = (0..=WAITING as u32).find(|&n| {
            let (answer, answered) = oneshot::channel();
            kept.push(answered);
            lanes
                .submit(1, (n, answer), |lane| async move {
                    let _lane = lane;
                    std::future::pending().await
                })
                .is_err()
        });
        assert_eq!(refused, Some(WAITING as u32));
        lanes.tasks.lock().abort_all();
        while lanes.tasks.lock().try_join_next().is_some() || !lanes.tasks.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let (answer, answered) = oneshot::channel();
        lanes.submit(1, (0, answer), count_together).unwrap();
        assert_eq!(answered.await.unwrap(), 1);
    }
}
