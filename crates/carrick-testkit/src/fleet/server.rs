//! A server: workers, and a line before them.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    time::Duration,
};

use carrick_call::{
    bulkhead::{Bulkhead, BulkheadConfig, Priority, Ticket},
    queue::{self, QueueConfig},
};
use carrick_core::outcome::Outcome;
use rand::RngExt;
use tokio::time::Instant;

use super::Dice;

/// What a server is like.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerOptions {
    /// Calls it works on at a time, at least 1. Default 4.
    pub workers: usize,
    /// Mean time that a call takes. Half is always needed, the other half is exponential. Default
    /// 50 ms.
    pub service: Duration,
    /// Where calls wait for a worker. Default endless.
    pub line: Line,
    /// A bulkhead on the way in, with places for calls in line and in work. Default none.
    pub bulkhead: Option<BulkheadConfig>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { workers: 4, service: Duration::from_millis(50), line: Line::Endless, bulkhead: None }
    }
}

/// Where calls wait for a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// What a server has that nobody thought of: whatever comes waits, and has its turn, however late.
    /// (A million is where a real one would run out of memory.)
    Endless,
    /// So many wait and more are refused; first come, first served, however late.
    Short(usize),
    /// The line of [`carrick_call::queue`]. Needs clients that tell their deadline.
    Queue(QueueConfig),
}

/// An attempt, as a server sees it.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) call: u32,
    pub(super) n: u32,
    /// What the client told.
    pub(super) deadline: Option<Instant>,
}

/// A job that was let in.
#[derive(Clone, Copy)]
pub(super) struct Taken {
    pub(super) job: Job,
    since: Instant,
    ticket: Option<Ticket>,
}

/// By its number alone: moments differ from run to run, and a trace must not.
impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.call, self.n)
    }
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.job.fmt(f)
    }
}

/// A place in a line that somebody leaves at a time, unless it was their turn before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) number: u64,
    pub(super) until: Instant,
}

#[derive(Debug)]
pub(super) struct Server {
    workers: usize,
    service: Duration,
    line: Waiting,
    bulkhead: Option<Bulkhead>,
    busy: usize,
}

#[derive(Debug)]
enum Waiting {
    Plain {
        most: usize,
        jobs: VecDeque<Taken>,
    },
    /// The line holds numbers of its own; who is not in `jobs` any more has left.
    Queue {
        line: queue::Line<u64>,
        longest: Duration,
        jobs: BTreeMap<u64, Taken>,
        next: u64,
    },
}

impl Server {
    pub(super) fn new(options: &ServerOptions) -> Self {
        let ServerOptions { workers, service, ref line, ref bulkhead } = *options;
        let plain = |most| Waiting::Plain { most, jobs: VecDeque::new() };
        let line = match line {
            Line::Endless => plain(1_000_000),
            Line::Short(most) => plain(*most),
            Line::Queue(config) => Waiting::Queue {
                line: queue::Line::new(config),
                longest: config.options().max_wait,
                jobs: BTreeMap::new(),
                next: 0,
            },
        };
        let bulkhead = bulkhead.clone().map(|config| Bulkhead::new("fleet", config));
        Self { workers: workers.max(1), service, line, bulkhead, busy: 0 }
    }

    /// Puts a job in line, with the place that it leaves by itself, if it does; or refuses it with the
    /// time after which there may be room.
    pub(super) fn arrive(&mut self, job: Job, now: Instant) -> Result<Option<Place>, Duration> {
        let enter = |bulkhead: &Bulkhead| bulkhead.enter(Priority::Default);
        let Ok(ticket) = self.bulkhead.as_ref().map(enter).transpose() else {
            return Err(self.drains_in());
        };
        let taken = Taken { job, since: now, ticket };
        match &mut self.line {
            Waiting::Plain { most, jobs } if jobs.len() < *most => {
                jobs.push_back(taken);
                Ok(None)
            }
            Waiting::Plain { .. } => {
                self.give_back(taken, None, now);
                Err(self.drains_in())
            }
            Waiting::Queue { line, longest, jobs, next } => {
                let until = now + *longest;
                let until = job.deadline.map_or(until, |deadline| deadline.min(until));
                match line.join(Priority::Default, until, now, *next) {
                    // All are as important as each other, so that nobody is displaced.
                    Ok(_) => {
                        jobs.insert(*next, taken);
                        *next += 1;
                        Ok(Some(Place { number: *next - 1, until }))
                    }
                    Err(_) => {
                        let after = line.time_to_come_back(1.0);
                        self.give_back(taken, None, now);
                        Err(after)
                    }
                }
            }
        }
    }

    /// What a free worker begins now; `None` if none is free or nobody waits.
    pub(super) fn turn(&mut self, now: Instant) -> Option<Taken> {
        if self.busy >= self.workers {
            return None;
        }
        let taken = match &mut self.line {
            Waiting::Plain { jobs, .. } => jobs.pop_front()?,
            Waiting::Queue { line, jobs, .. } => {
                line.next_priority(now)?;
                let number = line.take(now)?;
                jobs.remove(&number)?
            }
        };
        self.busy += 1;
        Some(taken)
    }

    /// The time of a place is over: returns who still had it, and when to come back.
    pub(super) fn leave(&mut self, number: u64, now: Instant) -> Option<(Job, Duration)> {
        let Waiting::Queue { line, jobs, .. } = &mut self.line else { return None };
        let taken = jobs.remove(&number)?;
        line.next_priority(now); // lets go of those whose time is over
        let after = line.time_to_come_back(1.0);
        self.give_back(taken, Some(Outcome::Expired), now);
        Some((taken.job, after))
    }

    /// Ends work that [`Server::turn`] began.
    pub(super) fn done(&mut self, taken: Taken, now: Instant) {
        self.busy -= 1;
        self.give_back(taken, Some(Outcome::Success), now);
    }

    fn give_back(&self, taken: Taken, outcome: Option<Outcome>, now: Instant) {
        if let Some((bulkhead, ticket)) = self.bulkhead.as_ref().zip(taken.ticket) {
            let elapsed = now.saturating_duration_since(taken.since);
            bulkhead.leave(ticket, outcome.map(|outcome| (outcome, elapsed)), now);
        }
    }

    /// How long a job takes if it begins now.
    pub(super) fn takes(&self, factor: f64, dice: &mut Dice) -> Duration {
        let draw = 0.5 + 0.5 * exponential(dice);
        Duration::try_from_secs_f64(self.service.as_secs_f64() * factor * draw)
            .unwrap_or(Duration::MAX)
    }

    fn drains_in(&self) -> Duration {
        let jobs = match &self.line {
            Waiting::Plain { jobs, .. } => jobs.len(),
            Waiting::Queue { line, .. } => return line.time_to_come_back(1.0),
        };
        let jobs = u32::try_from(jobs).unwrap_or(u32::MAX);
        let workers = u32::try_from(self.workers).unwrap_or(u32::MAX);
        self.service.saturating_mul(jobs) / workers
    }
}

/// A draw from the exponential distribution with mean 1.
pub(super) fn exponential(dice: &mut Dice) -> f64 {
    // From (0, 1]: the logarithm of zero is infinite.
    -(1.0 - dice.random::<f64>()).ln()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn job(call: u32, deadline: Option<Instant>) -> Job {
        Job { call, n: 1, deadline }
    }

    #[test]
    fn a_full_line_refuses_and_says_when_there_may_be_room() {
        let line = Line::Short(2);
        let options = ServerOptions { workers: 1, service: SECOND, line, bulkhead: None };
        let (mut server, now) = (Server::new(&options), Instant::now());
        assert!(server.arrive(job(0, None), now).is_ok());
        assert!(server.turn(now).is_some());
        assert!(server.arrive(job(1, None), now).is_ok());
        assert!(server.arrive(job(2, None), now).is_ok());
        assert_eq!(server.arrive(job(3, None), now).unwrap_err(), 2 * SECOND);
        assert!(server.turn(now).is_none(), "its only worker is busy");
    }

    #[test]
    fn work_that_nobody_waits_for_is_dropped_only_by_a_line_that_minds() {
        let (now, later) = (Instant::now(), Instant::now() + SECOND);
        let queue = || Line::Queue(QueueConfig::default());
        for (line, drops) in [(queue(), true), (Line::Endless, false), (Line::Short(9), false)] {
            let options = ServerOptions { line, ..ServerOptions::default() };
            let mut server = Server::new(&options);
            let place = server.arrive(job(0, Some(now + SECOND / 9)), now).unwrap();
            assert_eq!(place.map(|place| place.until), drops.then_some(now + SECOND / 9));
            assert_eq!(server.turn(later).is_none(), drops);
            let left = place.and_then(|place| server.leave(place.number, later));
            assert_eq!(left.is_some(), drops, "it is told once, and only if it waits");
        }
    }

    #[test]
    fn a_bulkhead_has_places_for_line_and_work_and_all_come_back() {
        let options = carrick_call::bulkhead::BulkheadOptions { max: 2, ..Default::default() };
        let bulkhead = Some(options.try_into().unwrap());
        for line in [Line::Short(1), Line::Endless, Line::Queue(QueueConfig::default())] {
            let bulkhead = bulkhead.clone();
            let options = ServerOptions { workers: 1, line, bulkhead, ..ServerOptions::default() };
            let (mut server, now) = (Server::new(&options), Instant::now());
            let room = |server: &mut Server| server.arrive(job(0, None), now).is_ok();
            let let_in = (0..9).filter(|_| room(&mut server)).count();
            assert_eq!(let_in, if options.line == Line::Short(1) { 1 } else { 2 });
            while let Some(taken) = server.turn(now) {
                server.done(taken, now);
            }
            assert_eq!(server.bulkhead.unwrap().in_flight(), 0);
        }
    }

    #[test]
    fn service_times_have_the_mean_that_was_asked_for_and_a_least() {
        let server = Server::new(&ServerOptions { service: SECOND, ..ServerOptions::default() });
        let mut dice = Dice::seed_from_u64(1);
        let times: Vec<_> = (0..20_000).map(|_| server.takes(2.0, &mut dice)).collect();
        let mean = times.iter().sum::<Duration>() / 20_000;
        assert!(mean.abs_diff(2 * SECOND) < SECOND / 20, "{mean:?}");
        assert!(times.iter().all(|time| *time >= SECOND));
    }
}
