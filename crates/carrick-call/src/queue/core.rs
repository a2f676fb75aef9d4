//! Who is next.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::{QueueConfig, config::QueueOptions};
use crate::bulkhead::Priority;

const PRIORITIES: [Priority; 3] = [Priority::Critical, Priority::Default, Priority::Sheddable];

/// How much the newest departure counts in how fast the line moves.
const WEIGHT: f64 = 0.1;

/// The longest that anybody is asked to stay away.
const LONGEST: Duration = Duration::from_secs(30);

/// The line alone, without places: for whoever has places of their own, and time as an argument.
///
/// ```
/// use std::time::Duration;
/// use carrick_call::{bulkhead::Priority, queue::{Line, QueueConfig}};
/// use tokio::time::Instant;
///
/// let (mut line, now) = (Line::new(&QueueConfig::default()), Instant::now());
/// line.join(Priority::Default, now + Duration::from_secs(1), now, "a call").ok();
/// assert_eq!(line.next_priority(now), Some(Priority::Default));
/// assert_eq!(line.take(now), Some("a call"));
/// ```
#[derive(Debug)]
pub struct Line<T> {
    length: usize,
    target: Duration,
    interval: Duration,
    waiting: [VecDeque<Waiting<T>>; 3],
    next_number: u64,
    /// Since when everybody who left had waited for too long.
    slow_since: Option<Instant>,
    last_left: Option<Instant>,
    /// Seconds between two who leave.
    pace: Option<f64>,
}

#[derive(Debug)]
struct Waiting<T> {
    number: u64,
    since: Instant,
    until: Instant,
    item: T,
}

fn rank(priority: Priority) -> usize {
    match priority {
        Priority::Critical => 0,
        Priority::Default => 1,
        Priority::Sheddable => 2,
    }
}

impl<T> Line<T> {
    /// An empty line.
    pub fn new(config: &QueueConfig) -> Self {
        let options: &QueueOptions = &config.options;
        Self {
            length: options.length,
            target: options.target,
            interval: options.interval,
            waiting: std::array::from_fn(|_| VecDeque::new()),
            next_number: 0,
            slow_since: None,
            last_left: None,
            pace: None,
        }
    }

    /// How many wait, those among them whose time is over and who were not let go of yet.
    pub fn len(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.iter().all(VecDeque::is_empty)
    }

    /// Joins the line, until a time; returns a number to leave by, and whom this pushed out.
    ///
    /// # Errors
    /// The item, if the line is full of others that are as important.
    pub fn join(
        &mut self,
        priority: Priority,
        until: Instant,
        now: Instant,
        item: T,
    ) -> Result<(u64, Option<T>), T> {
        let mut displaced = None;
        if self.len() >= self.length {
            self.expire(now);
        }
        if self.len() >= self.length {
            let lesser = (rank(priority) + 1..3).rev().find(|rank| !self.waiting[*rank].is_empty());
            let Some(gone) = lesser.and_then(|rank| self.waiting[rank].pop_back()) else {
                return Err(item);
            };
            displaced = Some(gone.item);
        }
        let number = self.next_number;
        self.next_number += 1;
        self.waiting[rank(priority)].push_back(Waiting { number, since: now, until, item });
        Ok((number, displaced))
    }

    /// Leaves the line; who is not in it any more has left.
    pub fn leave(&mut self, number: u64) {
        for line in &mut self.waiting {
            if let Some(place) = line.iter().position(|one| one.number == number) {
                line.remove(place);
                return;
            }
        }
    }

    /// Lets go of those whose time is over.
    fn expire(&mut self, now: Instant) {
        for line in &mut self.waiting {
            line.retain(|one| one.until > now);
        }
    }

    /// Lets go of those whose time is over; says how important the next one is, if there is one.
    pub fn next_priority(&mut self, now: Instant) -> Option<Priority> {
        self.expire(now);
        let first = self.waiting.iter().position(|line| !line.is_empty())?;
        if self.is_empty() {
            self.slow_since = None;
        }
        Some(PRIORITIES[first])
    }

    /// The next one: the first to come, or while the line is slow the last. Ask for its
    /// [priority](Self::next_priority) first.
    pub fn take(&mut self, now: Instant) -> Option<T> {
        let is_slow = self
            .slow_since
            .is_some_and(|since| now.saturating_duration_since(since) >= self.interval);
        let line = self.waiting.iter_mut().find(|line| !line.is_empty())?;
        // Whether the line is slow shows in who has waited longest, also while others go first.
        let longest = line.front().map(|one| now.saturating_duration_since(one.since));
        let next = if is_slow { line.pop_back() } else { line.pop_front() }?;
        if longest.is_some_and(|waited| waited > self.target) {
            self.slow_since.get_or_insert(now);
        } else {
            self.slow_since = None;
        }
        if let Some(last) = self.last_left.replace(now) {
            let gap = now.saturating_duration_since(last).as_secs_f64();
            let pace = self.pace.get_or_insert(gap);
            *pace += WEIGHT * (gap - *pace);
        }
        Some(next.item)
    }

    /// How long the line takes to empty, times `factor`.
    pub fn time_to_come_back(&self, factor: f64) -> Duration {
        let pace = self.pace.unwrap_or(0.1).clamp(0.0001, 10.0);
        let seconds = pace * (self.len() + 1) as f64 * factor;
        Duration::from_secs_f64(seconds).min(LONGEST)
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain list.
        #[test]
        fn nobody_is_lost_doubled_or_served_late(
            steps in prop::collection::vec((0..4_u8, 0..3_usize, 1..300_u64), 1..200),
        ) {
            let options = QueueOptions { length: 8, ..QueueOptions::default() };
            let mut line = Line::new(&options.try_into().unwrap());
            let mut model: Vec<(u64, usize, Instant)> = Vec::new();
            let mut now = Instant::now();
            let mut item = 0_u64;
            for (what, rank, millis) in steps {
                let span = Duration::from_millis(millis);
                match what {
                    0 | 1 => {
                        let joined = line.join(PRIORITIES[rank], now + span, now, item);
                        if model.len() >= 8 {
                            model.retain(|one| one.2 > now);
                        }
                        let is_full = model.len() >= 8;
                        let lesser = model.iter().map(|one| one.1).max().filter(|worst| *worst > rank);
                        prop_assert_eq!(joined.is_ok(), !is_full || lesser.is_some());
                        if let Ok((_, displaced)) = joined {
                            prop_assert_eq!(displaced.is_some(), is_full);
                            if let Some(gone) = displaced {
                                let place = model.iter().position(|one| one.0 == gone).unwrap();
                                prop_assert_eq!(model.remove(place).1, lesser.unwrap());
                            }
                            model.push((item, rank, now + span));
                        }
                        item += 1;
                    }
                    2 => now += span,
                    _ => {
                        model.retain(|one| one.2 > now);
                        let best = model.iter().map(|one| one.1).min();
                        prop_assert_eq!(line.next_priority(now), best.map(|rank| PRIORITIES[rank]));
                        let taken = line.take(now);
                        prop_assert_eq!(taken.is_some(), best.is_some());
                        if let Some(taken) = taken {
                            let place = model.iter().position(|one| one.0 == taken).unwrap();
                            prop_assert_eq!(Some(model.remove(place).1), best);
                        }
                    }
                }
                prop_assert_eq!(line.len(), model.len());
            }
        }
    }

    #[test]
    fn how_long_to_stay_away_follows_how_fast_the_line_moves() {
        let options = QueueOptions { length: 100, ..QueueOptions::default() };
        let mut line = Line::new(&options.try_into().unwrap());
        let mut now = Instant::now();
        for n in 0..100 {
            line.join(Priority::Default, now + LONGEST, now, n).unwrap();
        }
        for _ in 0..50 {
            now += Duration::from_millis(10);
            line.take(now);
        }
        let told = line.time_to_come_back(1.0).as_millis();
        assert!((500..=520).contains(&told), "fifty times ten milliseconds: {told}");
    }
}
