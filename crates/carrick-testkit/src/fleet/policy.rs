//! How a client behaves.

use std::time::Duration;

use carrick_call::Refusal;
use carrick_core::outcome::Outcome;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use tokio::time::Instant;

use super::Client;

/// Where chance comes from: the same numbers on each machine.
pub type Dice = Xoshiro256PlusPlus;

/// A client's behaviour. There is one value for each client, and it sees all of that client's calls.
pub trait Policy {
    /// What is kept for a call: a deadline, permits, the host that failed. Dropped when it is over.
    type Call;

    /// A call begins.
    fn begin(&mut self, now: Instant) -> Self::Call;

    /// Chooses the host of an attempt, and how long to wait for it.
    ///
    /// # Errors
    /// A refusal: nothing is sent, and the call has failed.
    fn send(
        &mut self,
        call: &mut Self::Call,
        now: Instant,
        dice: &mut Dice,
    ) -> Result<Sent, Refusal>;

    /// An attempt ended: says what becomes of the call. Not asked to go on after a success.
    fn ended(&mut self, call: &mut Self::Call, ended: Ended, now: Instant, dice: &mut Dice)
    -> Next;
}

/// Where an attempt goes.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// The host's number.
    pub host: usize,
    /// How long an answer is awaited.
    pub patience: Duration,
    /// What the server is told of it.
    pub deadline: Option<Instant>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// What became of it; [`Outcome::Expired`] if the client's patience ran out.
    pub outcome: Outcome,
    /// Whether it was the client that ended it.
    pub timed_out: bool,
    /// How long it took.
    pub elapsed: Duration,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another attempt after a wait.
    Retry(Duration),
    /// It is over.
    Stop,
}

/// Waits so long, tries so often, host after host, and thinks of nobody else.
#[derive(Clone, Debug)]
pub struct Naive {
    hosts: usize,
    next: usize,
    timeout: Duration,
    attempts: u32,
    wait: Duration,
}

impl Naive {
    /// Three attempts, each with this timeout, 100 ms after one another.
    pub fn new(client: Client, timeout: Duration) -> Self {
        let wait = Duration::from_millis(100);
        Self { hosts: client.hosts, next: client.id, timeout, attempts: 3, wait }
    }

    /// The same with so many attempts, and so long a wait between them.
    #[must_use]
    pub fn with_attempts(self, attempts: u32, wait: Duration) -> Self {
        Self { attempts, wait, ..self }
    }
}

impl Policy for Naive {
    /// Attempts made.
    type Call = u32;

    fn begin(&mut self, _now: Instant) -> u32 {
        0
    }

    fn send(&mut self, made: &mut u32, _now: Instant, _dice: &mut Dice) -> Result<Sent, Refusal> {
        *made += 1;
        let host = self.next % self.hosts;
        self.next = host + 1;
        Ok(Sent { host, patience: self.timeout, deadline: None })
    }

    fn ended(&mut self, made: &mut u32, _ended: Ended, _now: Instant, dice: &mut Dice) -> Next {
        if *made >= self.attempts {
            return Next::Stop;
        }
        // Up to a tenth more: what passes for jitter.
        Next::Retry(self.wait.mul_f64(1.0 + 0.1 * dice.random::<f64>()))
    }
}
