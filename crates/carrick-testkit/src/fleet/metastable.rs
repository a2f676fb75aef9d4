//! A slowdown of thirty seconds that a fleet does not get over by itself.
//!
//! Servers are busy to seven tenths. For half a minute they take five times as long, so that callers
//! give up and try again, and every try is one more call. Then the servers are as fast as before; but
//! what is asked of them is by now three times as much, most of it by callers that have gone, and their
//! going is what keeps it so. Nothing that is broken is left, and it does not end.
//!
//! [`Stage`] holds one cast: what clients do, and what servers do with a line that grows.

use std::{sync::Arc, time::Duration};

use carrick_call::{
    breaker::{BreakerConfig, BreakerOptions},
    budget::{BudgetConfig, BudgetOptions},
    queue::QueueConfig,
};

use super::{Fleet, Guarded, Guards, Line, Naive, Report, ServerOptions, Slowdown};

/// The second in which the slowdown begins.
pub const BEGINS: usize = 20;
/// The second in which it is over.
pub const ENDS: usize = 50;
/// How many seconds there are.
pub const LASTS: usize = 120;
/// How many times as long servers take meanwhile.
pub const FACTOR: f64 = 5.0;

/// What clients and servers do in the scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Three attempts of a second each, a tenth of a second apart; servers work on whatever comes.
    Naive,
    /// The same clients; servers with a short line. These cannot know what nobody waits for.
    NaiveWithLine,
    /// Retries by the clock: a deadline for the whole call, and full jitter. Servers as with `Naive`.
    Deadline,
    /// The same, and retries are paid for.
    Budget,
    /// The same, and a breaker.
    Breaker,
    /// The same, and servers with a queue that minds the time: all of it.
    Carrick,
}

impl Stage {
    /// All of them, in the order in which they are told.
    pub const ALL: [Self; 6] = [
        Self::Naive,
        Self::NaiveWithLine,
        Self::Deadline,
        Self::Budget,
        Self::Breaker,
        Self::Carrick,
    ];

    /// What it is, in a few words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive retries",
            Self::NaiveWithLine => "naive retries, short line",
            Self::Deadline => "deadline, jitter",
            Self::Budget => "deadline, jitter, budget",
            Self::Breaker => "deadline, jitter, budget, breaker",
            Self::Carrick => "deadline, jitter, budget, breaker, queue",
        }
    }

    /// Runs the scenario.
    ///
    /// ```no_run
    /// use carrick_testkit::fleet::metastable::{ENDS, LASTS, Stage};
    ///
    /// let (naive, carrick) = (Stage::Naive.run(1), Stage::Carrick.run(1));
    /// assert!(naive.goodput(LASTS - 60..LASTS) < 0.5);
    /// assert!(carrick.recovers(ENDS, 0.95).is_some_and(|second| second <= ENDS + 10));
    /// ```
    pub fn run(self, seed: u64) -> Report {
        let fleet = self.fleet();
        match self.guards() {
            Some(guards) => {
                let guards = Arc::new(guards);
                fleet.run(seed, |client| Guarded::new(client, &guards))
            }
            None => fleet.run(seed, |client| Naive::new(client, Duration::from_secs(1))),
        }
    }

    /// The clients and servers: 1400 calls a second, and servers for 2000.
    pub fn fleet(self) -> Fleet {
        let secs = |second: usize| Duration::from_secs(second as u64);
        let line = match self {
            Self::Naive | Self::Deadline | Self::Budget | Self::Breaker => Line::Endless,
            // One for each worker: even while work takes 400 ms, nobody waits for longer than that.
            Self::NaiveWithLine => Line::Short(4),
            Self::Carrick => Line::Queue(QueueConfig::default()),
        };
        let servers = 40;
        Fleet {
            clients: 200,
            rate: 7.0,
            servers,
            server: ServerOptions {
                workers: 4,
                service: Duration::from_millis(80),
                line,
                bulkhead: None,
            },
            network: Duration::from_millis(1),
            lasts: secs(LASTS),
            faults: vec![Slowdown {
                servers: 0..servers,
                factor: FACTOR,
                during: secs(BEGINS)..secs(ENDS),
            }],
        }
    }

    /// The clients' policies; `None` if they have none.
    pub fn guards(self) -> Option<Guards> {
        // The default floor of ten a second is more than a client's own seven calls a second: such a
        // floor would pay for every retry.
        let budget = BudgetOptions { floor: 1, ..BudgetOptions::default() };
        let budget = BudgetConfig::try_from(budget).expect("in range");
        // Seven calls a second fill a window of a hundred in a quarter of a minute, and a cool-down of
        // thirty seconds is as long as the whole slowdown.
        let breaker = BreakerOptions {
            cool_down: Duration::from_secs(1),
            cool_down_cap: Duration::from_secs(5),
            ..BreakerOptions::default()
        };
        let breaker = BreakerConfig::try_from(breaker).expect("in range");
        let all = Guards { budget: Some(budget), breaker: Some(breaker), ..Guards::default() };
        match self {
            Self::Naive | Self::NaiveWithLine => None,
            Self::Deadline => Some(Guards { budget: None, breaker: None, ..all }),
            Self::Budget => Some(Guards { breaker: None, ..all }),
            Self::Breaker | Self::Carrick => Some(all),
        }
    }
}
