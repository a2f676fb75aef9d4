//! A server: workers, and a line before them.

use std::{collections::VecDeque, fmt, time::Duration};

use carrick_call::bulkhead::{Bulkhead, BulkheadConfig, Priority, Ticket};
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
    /// Where calls wait for a worker.
    pub line: Line,
    /// A bulkhead on the way in, with places for calls in line and in work. Default none.
    pub bulkhead: Option<BulkheadConfig>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let service = Duration::from_millis(50);
        Self { workers: 4, service, line: Line::endless(), bulkhead: None }
    }
}

/// Where calls wait for a worker: first come, first served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Calls that may wait; more are refused.
    pub most: usize,
    /// With less left than this, a call is dropped when its turn comes; `None` works on it even if
    /// nobody waits for the answer any more. Needs clients that tell their deadline.
    pub drop_below: Option<Duration>,
}

impl Line {
    /// What a server has that nobody thought of: whatever comes waits, however long. (A million is
    /// where a real one would run out of memory.)
    pub fn endless() -> Self {
        Self { most: 1_000_000, drop_below: None }
    }

    /// A line of so many that drops what is due within `drop_below`.
    pub fn bounded(most: usize, drop_below: Duration) -> Self {
        Self { most, drop_below: Some(drop_below) }
    }
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

/// What a free worker finds in line.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    Work(Taken),
    /// Its time is over; the worker is still free.
    TooLate(Job),
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

#[derive(Debug)]
pub(super) struct Server {
    workers: usize,
    service: Duration,
    line: Line,
    bulkhead: Option<Bulkhead>,
    busy: usize,
    waiting: VecDeque<Taken>,
}

impl Server {
    pub(super) fn new(options: &ServerOptions) -> Self {
        let ServerOptions { workers, service, line, ref bulkhead } = *options;
        let bulkhead = bulkhead.clone().map(|config| Bulkhead::new("fleet", config));
        let workers = workers.max(1);
        Self { workers, service, line, bulkhead, busy: 0, waiting: VecDeque::new() }
    }

    /// Puts a job in line, or refuses it with the time after which there may be room.
    pub(super) fn arrive(&mut self, job: Job, now: Instant) -> Result<(), Duration> {
        if self.waiting.len() >= self.line.most {
            return Err(self.drains_in());
        }
        let enter = |bulkhead: &Bulkhead| bulkhead.enter(Priority::Default);
        let ticket = self.bulkhead.as_ref().map(enter).transpose().map_err(|_| self.drains_in())?;
        self.waiting.push_back(Taken { job, since: now, ticket });
        Ok(())
    }

    /// What a free worker does next; `None` if none is free or nobody waits.
    pub(super) fn turn(&mut self, now: Instant) -> Option<Turn> {
        if self.busy >= self.workers {
            return None;
        }
        let taken = self.waiting.pop_front()?;
        let left = taken.job.deadline.map(|deadline| deadline.saturating_duration_since(now));
        if self.line.drop_below.zip(left).is_some_and(|(least, left)| left < least) {
            self.give_back(taken, Outcome::Expired, now);
            return Some(Turn::TooLate(taken.job));
        }
        self.busy += 1;
        Some(Turn::Work(taken))
    }

    /// Ends work that [`Server::turn`] began.
    pub(super) fn done(&mut self, taken: Taken, now: Instant) {
        self.busy -= 1;
        self.give_back(taken, Outcome::Success, now);
    }

    fn give_back(&self, taken: Taken, outcome: Outcome, now: Instant) {
        if let Some((bulkhead, ticket)) = self.bulkhead.as_ref().zip(taken.ticket) {
            let elapsed = now.saturating_duration_since(taken.since);
            bulkhead.leave(ticket, Some((outcome, elapsed)), now);
        }
    }

    /// How long a job takes if it begins now.
    pub(super) fn takes(&self, factor: f64, dice: &mut Dice) -> Duration {
        let draw = 0.5 + 0.5 * exponential(dice);
        Duration::try_from_secs_f64(self.service.as_secs_f64() * factor * draw)
            .unwrap_or(Duration::MAX)
    }

    fn drains_in(&self) -> Duration {
        let jobs = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
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
        let line = Line::bounded(2, Duration::ZERO);
        let options = ServerOptions { workers: 1, service: SECOND, line, bulkhead: None };
        let (mut server, now) = (Server::new(&options), Instant::now());
        assert!(server.arrive(job(0, None), now).is_ok());
        assert!(matches!(server.turn(now), Some(Turn::Work(_))));
        assert!(
            server.arrive(job(1, None), now).is_ok() && server.arrive(job(2, None), now).is_ok()
        );
        assert_eq!(server.arrive(job(3, None), now), Err(2 * SECOND));
        assert!(server.turn(now).is_none(), "its only worker is busy");
    }

    #[test]
    fn work_that_nobody_waits_for_is_dropped_only_by_a_line_that_minds() {
        let (now, later) = (Instant::now(), Instant::now() + SECOND);
        for (line, drops) in [(Line::bounded(9, SECOND / 10), true), (Line::endless(), false)] {
            let options = ServerOptions { line, ..ServerOptions::default() };
            let mut server = Server::new(&options);
            server.arrive(job(0, Some(now + SECOND)), now).unwrap();
            let turn = server.turn(later).unwrap();
            assert_eq!(matches!(turn, Turn::TooLate(_)), drops, "{turn:?}");
        }
    }

    #[test]
    fn a_bulkhead_has_places_for_line_and_work_and_all_come_back() {
        let options = carrick_call::bulkhead::BulkheadOptions { max: 2, ..Default::default() };
        let bulkhead = Some(options.try_into().unwrap());
        let options = ServerOptions { workers: 1, bulkhead, ..ServerOptions::default() };
        let (mut server, now) = (Server::new(&options), Instant::now());
        server.arrive(job(0, None), now).unwrap();
        server.arrive(job(1, None), now).unwrap();
        assert!(server.arrive(job(2, None), now).is_err());
        while let Some(Turn::Work(taken)) = server.turn(now) {
            server.done(taken, now);
        }
        assert_eq!(server.bulkhead.unwrap().in_flight(), 0);
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
