//! Fleet: hundreds of clients and servers in virtual time, from a seed.
//!
//! What a policy does to one call says little about what it does to a fleet: retries that help one
//! caller keep a whole service down. Here the decisions of real policies meet servers that queue, in
//! minutes of virtual time that pass in a second, and the same seed gives the same run to the byte.
//!
//! * [`Fleet`] describes clients, servers and faults; [`Fleet::run`] lets it happen.
//! * [`Policy`] is a client's behaviour: [`Naive`] is what is written without thinking of others,
//!   [`Guarded`] calls the cores of `carrick-call` in the order in which its stack does.
//! * [`Report`] says second by second what was asked, sent, answered and wasted; [`picture`] draws it.
//! * [`metastable`] is the scenario to look at first.
//!
//! Time is an argument of every core, so that none is told apart from real time. Those that note when
//! they were made read tokio's clock, which stands still while a fleet runs.
//!
//! What it does not know: connections, hedges, and time that a client's own processor takes.
//!
//! Source: pattern document, retry storms; Bronson et al., *Metastable Failures in Distributed
//! Systems* (HotOS 2021) for the scenario.

mod agenda;
mod guarded;
pub mod metastable;
pub mod picture;
mod policy;
mod report;
mod server;
mod world;

use std::{ops::Range, time::Duration};

use tokio::time::Instant;

pub use self::{
    guarded::{Guarded, GuardedCall, Guards},
    policy::{Dice, Ended, Naive, Next, Policy, Sent},
    report::{Report, Second},
    server::{Line, ServerOptions},
};

/// Clients, servers, and what goes wrong.
///
/// ```
/// use std::time::Duration;
/// use carrick_testkit::fleet::{Fleet, Naive};
///
/// let fleet = Fleet { lasts: Duration::from_secs(10), ..Fleet::default() };
/// let report = fleet.run(7, |client| Naive::new(client, Duration::from_secs(1)));
/// assert!(report.goodput(0..10) > 0.99);
/// assert_eq!(report, fleet.run(7, |client| Naive::new(client, Duration::from_secs(1))));
/// ```
#[derive(Clone, Debug)]
pub struct Fleet {
    /// How many clients there are, at most 65 536. Default 100.
    pub clients: usize,
    /// Calls a second that each client makes, at random moments, whether or not earlier ones were
    /// answered. Above zero. Default 10.
    pub rate: f64,
    /// How many servers there are, at most 65 536. Default 20.
    pub servers: usize,
    /// What each server is like.
    pub server: ServerOptions,
    /// Time on the wire, each way. Default 1 ms.
    pub network: Duration,
    /// How long calls are made. Default 60 s; at most an hour, which bounds what a run remembers.
    pub lasts: Duration,
    /// What goes wrong, and when.
    pub faults: Vec<Slowdown>,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            clients: 100,
            rate: 10.0,
            servers: 20,
            server: ServerOptions::default(),
            network: Duration::from_millis(1),
            lasts: Duration::from_secs(60),
            faults: Vec::new(),
        }
    }
}

/// Servers that take longer for a while.
#[derive(Clone, Debug, PartialEq)]
pub struct Slowdown {
    /// Which servers, by number.
    pub servers: Range<usize>,
    /// How many times as long their work takes. Of faults that overlap, factors multiply.
    pub factor: f64,
    /// When, counted from the start. Work that begins within it is slow to its end.
    pub during: Range<Duration>,
}

/// The client that a policy is made for.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Its number.
    pub id: usize,
    /// How many servers it may call; hosts are numbered from 0.
    pub hosts: usize,
    /// A seed of its own.
    pub seed: u64,
    /// When the run begins.
    pub start: Instant,
}

impl Fleet {
    /// Lets it happen.
    ///
    /// * `seed`: all chance comes from it. When calls are made depends on nothing else, so that two
    ///   policies can be compared call by call.
    /// * `make`: makes a client's policy.
    pub fn run<P: Policy>(&self, seed: u64, make: impl FnMut(Client) -> P) -> Report {
        world::run(self, seed, make, |_, _| {})
    }

    /// The same, with a line for each event: nanoseconds since the start, and what happened.
    pub fn traced<P: Policy>(&self, seed: u64, make: impl FnMut(Client) -> P) -> (Report, String) {
        let mut lines = String::new();
        let report = world::run(self, seed, make, |at, event| {
            use std::fmt::Write;
            // Writing to a string does not fail.
            writeln!(lines, "{at} {event:?}").ok();
        });
        (report, lines)
    }
}
