//! Crash-point explorer: what if the process had died right there?
//!
//! A two-step protocol is right when it survives a crash between its steps, and there are more
//! places between steps than anybody thinks of. A [`Scenario`] calls [`Steps::done`] after each
//! durable step. [`Explorer`] runs it once to count the steps, then once for each of them with a
//! crash right after it: the run's future is dropped, so that everything in memory is gone, and a new
//! run starts on what had been made durable. At the end the invariants must hold.
//!
//! With [`Explorer::with_crashes`] a recovery is crashed as well, at each of its own steps.

use std::{fmt, future::pending, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Something that must survive a crash anywhere.
#[async_trait]
pub trait Scenario: Sync {
    /// What survives a crash: databases, files, stubs of other systems.
    type World: Send + Sync;

    /// A new world, in which nothing has happened.
    async fn world(&self) -> Self::World;

    /// Starts the program in this world and works until there is nothing left to do. It is called
    /// again after each crash, on the same world: whatever it keeps in memory, and every task that it
    /// spawned, must end when the future is dropped.
    ///
    /// # Errors
    /// Why the work cannot be finished; it counts as a failed exploration.
    async fn run(&self, world: &Self::World, steps: &Steps) -> Result<(), String>;

    /// Whether everything that must hold in the end does.
    ///
    /// # Errors
    /// What does not, for people to read.
    async fn check(&self, world: &Self::World) -> Result<(), String>;
}

/// Told of each durable step; crashes the run when its time has come. Clones count together.
#[derive(Clone, Debug)]
pub struct Steps(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Which step to crash after, from 1; 0 for none.
    crash_after: usize,
    done: Mutex<Vec<String>>,
    crashed: Notify,
}

impl Steps {
    fn new(crash_after: usize) -> Self {
        let done = Mutex::default();
        Self(Arc::new(Inner { crash_after, done, crashed: Notify::new() }))
    }

    /// Steps that nobody counts, to run a scenario as a plain test.
    pub fn uncounted() -> Self {
        Self::new(0)
    }

    /// A step is durable. Does not return if the run crashes here.
    ///
    /// # Cancel safety
    /// Safe to drop; the step stays counted.
    pub async fn done(&self, step: impl Into<String>) {
        let crash_after = self.0.crash_after;
        let count = {
            let mut done = self.0.done.lock();
            done.push(step.into());
            done.len()
        };
        // Past the crash nothing may go on either: other tasks of the run stop at their next step.
        if crash_after != 0 && count >= crash_after {
            self.0.crashed.notify_one();
            pending().await
        }
    }

    fn names(&self) -> Vec<String> {
        self.0.done.lock().clone()
    }
}

/// Runs scenarios with crashes.
#[derive(Clone, Debug)]
pub struct Explorer {
    crashes: usize,
    patience: Duration,
    max_runs: usize,
}

impl Default for Explorer {
    fn default() -> Self {
        Self::new()
    }
}

impl Explorer {
    /// One crash a run; a run may take a minute, and there may be ten thousand.
    pub fn new() -> Self {
        Self { crashes: 1, patience: Duration::from_secs(60), max_runs: 10_000 }
    }

    /// Crashes up to so many times in a row. The number of runs is about the number of steps to this
    /// power.
    #[must_use]
    pub fn with_crashes(mut self, crashes: usize) -> Self {
        self.crashes = crashes;
        self
    }

    /// How long one run may take, by tokio's clock, before it counts as hanging.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Runs the scenario with a crash after each durable step.
    ///
    /// # Errors
    /// [`CrashFailure`]: the first sequence of crashes after which something does not hold.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn explore<S: Scenario>(&self, scenario: &S) -> Result<Explored, CrashFailure> {
        let mut explored = Explored { steps: Vec::new(), runs: 0 };
        // Depth first: each entry is a sequence of crashes that is still to be tried.
        let mut waiting: Vec<Vec<usize>> = vec![Vec::new()];
        while let Some(crashes) = waiting.pop() {
            explored.runs += 1;
            if explored.runs > self.max_runs {
                let cause = format!("more than {} runs: make the scenario smaller", self.max_runs);
                return Err(CrashFailure { crashes: Vec::new(), cause });
            }
            let last_run = self.one(scenario, &crashes).await?;
            if crashes.len() < self.crashes {
                let more = (1..=last_run.len()).rev();
                waiting.extend(more.map(|step| [crashes.as_slice(), &[step]].concat()));
            }
            if crashes.is_empty() {
                explored.steps = last_run;
            }
        }
        if explored.steps.is_empty() {
            let cause = "the scenario told of no durable step, so nothing was explored".to_owned();
            return Err(CrashFailure { crashes: Vec::new(), cause });
        }
        Ok(explored)
    }

    /// Crashes as told, then runs to the end; returns the steps of the last run.
    async fn one<S: Scenario>(
        &self,
        scenario: &S,
        crashes: &[usize],
    ) -> Result<Vec<String>, CrashFailure> {
        let world = scenario.world().await;
        let mut reached = Vec::new();
        for crash_after in crashes.iter().copied().chain([0]) {
            let steps = Steps::new(crash_after);
            let end = {
                let run = tokio::time::timeout(self.patience, scenario.run(&world, &steps));
                tokio::select! {
                    biased;
                    () = steps.0.crashed.notified() => End::Crashed,
                    end = run => match end {
                        Ok(Ok(())) => End::Finished,
                        Ok(Err(cause)) => End::Failed(cause),
                        Err(_) => End::Failed(format!("not finished after {:?}", self.patience)),
                    },
                }
            };
            let mut names = steps.names();
            match end {
                End::Failed(cause) => return Err(CrashFailure { crashes: reached, cause }),
                End::Crashed => {
                    names.truncate(crash_after);
                    let step = names.pop().expect("a crash follows a step");
                    reached.push((crash_after, step));
                }
                // A run that takes another way may have fewer steps; it ends without the crash.
                End::Finished if crash_after != 0 => {}
                End::Finished => {
                    return match scenario.check(&world).await {
                        Ok(()) => Ok(names),
                        Err(cause) => Err(CrashFailure { crashes: reached, cause }),
                    };
                }
            }
        }
        unreachable!("the last run has no crash and returns")
    }
}

enum End {
    Finished,
    Crashed,
    Failed(String),
}

/// What was explored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored {
    /// The durable steps of a run without a crash, in order.
    pub steps: Vec<String>,
    /// Runs that were made.
    pub runs: usize,
}

/// A sequence of crashes after which something does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashFailure {
    /// The crashes: after which step of the run, and what that step was. Empty if it fails without.
    pub crashes: Vec<(usize, String)>,
    /// What does not hold.
    pub cause: String,
}

impl fmt::Display for CrashFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.crashes.is_empty() {
            write!(f, "without any crash: ")?;
        }
        for (n, (step, name)) in self.crashes.iter().enumerate() {
            let again = if n == 0 { "" } else { "again " };
            write!(f, "crashed {again}after step {step} ({name}), ")?;
        }
        f.write_str(&self.cause)
    }
}

impl std::error::Error for CrashFailure {}
