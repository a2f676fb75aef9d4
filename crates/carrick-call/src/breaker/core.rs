//! The states of a circuit, and what moves it from one to the next.

#[cfg(carrick_loom)]
use loom::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::{fmt, time::Duration};

use carrick_core::outcome::Outcome;
use parking_lot::Mutex;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    config::BreakerOptions,
    metrics::Metrics,
    window::{Result as Ended, Sums, Window},
};
use crate::{Policy, Refusal};

/// The state of a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Calls go through and are counted.
    Closed,
    /// Calls are refused.
    Open,
    /// Probes go through, others are refused.
    HalfOpen,
    /// Forced: refuses everything.
    ForcedOpen,
    /// Forced: lets everything through and counts nothing.
    Disabled,
}

/// What an operator may force a circuit to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forced {
    /// Refuse everything.
    Open,
    /// Let everything through.
    Closed,
}

/// Leave to make one call, without a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The state word it was given in.
    word: u64,
}

const TAG_BITS: u32 = 3;
const TAG: u64 = (1 << TAG_BITS) - 1;

const CLOSED: u64 = 0;
const OPEN: u64 = 1;
const HALF_OPEN: u64 = 2;
const FORCED_OPEN: u64 = 3;
const DISABLED: u64 = 4;

/// A ticket that was given although the circuit would refuse: observe mode.
const UNCOUNTED: u64 = u64::MAX;

pub(super) struct Circuit {
    options: BreakerOptions,
    window: Window,
    /// Generation and state, so that one load tells both.
    word: AtomicU64,
    /// When the cool-down of an open circuit ends, or the ramp of a closed one; nanoseconds since
    /// `start`.
    until: AtomicU64,
    start: Instant,
    seed: u64,
    /// What only changes with the state; whoever changes the state holds it.
    slow: Mutex<Slow>,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct Slow {
    /// When the state began.
    since: u64,
    /// How often in a row it opened, which the cool-down doubles by.
    openings: u32,
    /// Probes that may still go, and that succeeded.
    places: u32,
    successes: u32,
    /// When a half-open circuit gives up on the probes it let go.
    lost_at: u64,
    /// Calls since it closed; decides who passes while it ramps up.
    ramped: u64,
}

impl Circuit {
    pub(super) fn new(name: &str, options: BreakerOptions, seed: u64, start: Instant) -> Self {
        let window = match options.window.time {
            Some(length) => Window::time(nanos(length)),
            None => Window::count(options.window.calls),
        };
        Self {
            window,
            word: AtomicU64::new(CLOSED),
            until: AtomicU64::new(0),
            start,
            seed,
            slow: Mutex::default(),
            metrics: Metrics::new(name),
            options,
        }
    }

    fn at(&self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(self.start))
    }

    pub(super) fn enter(&self, now: Instant) -> Result<Ticket, Refusal> {
        let word = self.word.load(Acquire);
        match word & TAG {
            CLOSED if self.until.load(Relaxed) == 0 => Ok(Ticket { word }),
            DISABLED => Ok(Ticket { word: UNCOUNTED }),
            _ => match self.enter_slowly(self.at(now)) {
                Ok(ticket) => Ok(ticket),
                Err(refusal) => {
                    self.metrics.refused.increment(1);
                    if self.options.mode.enforces() {
                        Err(refusal)
                    } else {
                        Ok(Ticket { word: UNCOUNTED })
                    }
                }
            },
        }
    }

    fn enter_slowly(&self, now: u64) -> Result<Ticket, Refusal> {
        let word = self.word.load(Acquire);
        let until = self.until.load(Relaxed);
        let left = Duration::from_nanos(until.saturating_sub(now));
        // An open circuit refuses without a lock: it may be asked very often.
        if word & TAG == OPEN && now < until {
            return Err(OPEN_NOW.with_retry_after(left));
        }
        let mut slow = self.slow.lock();
        let word = self.word.load(Relaxed);
        match word & TAG {
            CLOSED => {
                let until = self.until.load(Relaxed);
                if now >= until {
                    self.until.store(0, Relaxed);
                    return Ok(Ticket { word });
                }
                self.ramp(&mut slow, until, now).map(|()| Ticket { word })
            }
            OPEN => {
                let until = self.until.load(Relaxed);
                if now < until {
                    let left = Duration::from_nanos(until - now);
                    return Err(OPEN_NOW.with_retry_after(left));
                }
                Ok(self.half_open(&mut slow, now))
            }
            HALF_OPEN if slow.places > 0 => {
                slow.places -= 1;
                Ok(Ticket { word })
            }
            // Its probes never came back: others are let go, and those are not listened to.
            HALF_OPEN if now >= slow.lost_at => Ok(self.half_open(&mut slow, now)),
            HALF_OPEN => {
                let left = Duration::from_nanos(slow.lost_at.saturating_sub(now));
                Err(PROBING.with_retry_after(left.min(self.options.cool_down)))
            }
            FORCED_OPEN => Err(FORCED),
            _ => Ok(Ticket { word: UNCOUNTED }),
        }
    }

    /// Lets a growing share through for a while after the circuit closed.
    fn ramp(&self, slow: &mut Slow, until: u64, now: u64) -> Result<(), Refusal> {
        let Some(length) = self.options.ramp else { return Ok(()) };
        let left = Duration::from_nanos(until.saturating_sub(now));
        let done = 1.0 - left.as_secs_f64() / length.as_secs_f64();
        let share = 0.1 + 0.9 * done.clamp(0.0, 1.0);
        // Of n calls, as many have passed as whole shares fit: evenly, and without drawing.
        let before = (slow.ramped as f64 * share) as u64;
        slow.ramped += 1;
        let after = (slow.ramped as f64 * share) as u64;
        if after > before { Ok(()) } else { Err(RAMPING.with_retry_after(left)) }
    }

    /// Begins a round of probes, of which the caller is the first.
    fn half_open(&self, slow: &mut Slow, now: u64) -> Ticket {
        slow.places = self.options.probes - 1;
        slow.successes = 0;
        slow.lost_at = now.saturating_add(nanos(self.options.probe_age));
        Ticket { word: self.turn(slow, HALF_OPEN, 0, now) }
    }

    pub(super) fn leave(&self, ticket: Ticket, ended: Option<(Outcome, Duration)>, now: Instant) {
        let Some(ended) = ended.and_then(|(outcome, elapsed)| self.counts(outcome, elapsed)) else {
            return self.abandon(ticket);
        };
        let word = self.word.load(Acquire);
        if ticket.word != word {
            self.metrics.late.increment(u64::from(ticket.word != UNCOUNTED));
            return;
        }
        match word & TAG {
            CLOSED => {
                // A window of calls does not ask for the time.
                let at = if self.options.window.time.is_some() { self.at(now) } else { 0 };
                if let Some(sums) = self.window.record(ended, at)
                    && self.is_too_much(sums)
                {
                    self.open(word, self.at(now));
                }
            }
            HALF_OPEN => self.probed(word, ended, self.at(now)),
            _ => {}
        }
    }

    /// How an outcome counts; `None` if it says nothing about the dependency.
    fn counts(&self, outcome: Outcome, elapsed: Duration) -> Option<Ended> {
        let failed = match outcome {
            Outcome::Success | Outcome::Permanent => false,
            Outcome::Transient | Outcome::Expired => true,
            Outcome::Overload { .. } if self.options.ignore_overload => return None,
            Outcome::Overload { .. } => true,
            Outcome::Rejected | Outcome::Cancelled => return None,
        };
        let slow = self.options.slow_rate.is_some() && elapsed >= self.options.slow_call;
        Some(Ended { failed, slow })
    }

    fn is_too_much(&self, sums: Sums) -> bool {
        let Sums { calls, failed, slow } = sums;
        if calls < self.options.min_calls {
            return false;
        }
        let calls = f64::from(calls);
        let reaches = |part: u32, rate: f64| f64::from(part) >= rate * calls;
        reaches(failed, self.options.failure_rate)
            || self.options.slow_rate.is_some_and(|rate| reaches(slow, rate))
    }

    /// Opens a circuit that is still in the state that a verdict was about.
    fn open(&self, word: u64, now: u64) {
        let mut slow = self.slow.lock();
        if self.word.load(Relaxed) == word {
            self.open_locked(&mut slow, now);
        }
    }

    fn open_locked(&self, slow: &mut Slow, now: u64) {
        let is_closed = self.word.load(Relaxed) & TAG == CLOSED;
        let healthy = now.saturating_sub(slow.since) >= nanos(self.options.healthy_after);
        if is_closed && healthy {
            slow.openings = 0;
        }
        let factor = 1_u32.checked_shl(slow.openings).unwrap_or(u32::MAX);
        let options = &self.options;
        let cool_down = options.cool_down.saturating_mul(factor).min(options.cool_down_cap);
        slow.openings = slow.openings.saturating_add(1);
        // Up to a fifth more, so that the clients of one dependency do not probe it in step.
        let draw = xxh3_64_with_seed(&now.to_le_bytes(), self.seed) >> 40;
        let jitter = cool_down.mul_f64(0.2 * draw as f64 / (1_u64 << 24) as f64);
        let until = now.saturating_add(nanos(cool_down.saturating_add(jitter))).max(1);
        self.turn(slow, OPEN, until, now);
    }

    fn probed(&self, word: u64, ended: Ended, now: u64) {
        let mut slow = self.slow.lock();
        if self.word.load(Relaxed) != word {
            return;
        }
        if ended.failed || ended.slow {
            return self.open_locked(&mut slow, now);
        }
        slow.successes += 1;
        if slow.successes >= self.options.successes {
            let ramp = self.options.ramp.map_or(0, |ramp| now.saturating_add(nanos(ramp)).max(1));
            slow.ramped = 0;
            self.turn(&mut slow, CLOSED, ramp, now);
        } else {
            slow.places += 1; // the next probe may go
        }
    }

    /// Takes a ticket back that nothing is known of.
    pub(super) fn abandon(&self, ticket: Ticket) {
        if ticket.word & TAG != HALF_OPEN || ticket.word == UNCOUNTED {
            return;
        }
        let mut slow = self.slow.lock();
        if self.word.load(Relaxed) == ticket.word {
            slow.places += 1;
        }
    }

    /// Changes the state, which begins a generation.
    fn turn(&self, slow: &mut Slow, tag: u64, until: u64, now: u64) -> u64 {
        let generation = (self.word.load(Relaxed) >> TAG_BITS) + 1;
        self.window.clear();
        slow.since = now;
        self.until.store(until, Relaxed);
        let word = generation << TAG_BITS | tag;
        self.word.store(word, Release);
        self.metrics.turned(state(tag));
        word
    }

    pub(super) fn force(&self, forced: Option<Forced>, now: Instant) {
        let mut slow = self.slow.lock();
        let tag = match forced {
            Some(Forced::Open) => FORCED_OPEN,
            Some(Forced::Closed) => DISABLED,
            None => CLOSED,
        };
        slow.openings = 0;
        let now = self.at(now);
        self.turn(&mut slow, tag, 0, now);
    }

    pub(super) fn state(&self) -> State {
        state(self.word.load(Acquire) & TAG)
    }

    pub(super) fn time_in_state(&self, now: Instant) -> Duration {
        Duration::from_nanos(self.at(now).saturating_sub(self.slow.lock().since))
    }
}

fn state(tag: u64) -> State {
    match tag {
        CLOSED => State::Closed,
        OPEN => State::Open,
        HALF_OPEN => State::HalfOpen,
        FORCED_OPEN => State::ForcedOpen,
        _ => State::Disabled,
    }
}

const OPEN_NOW: Refusal = Refusal::new(Policy::Breaker, "the circuit is open");
const PROBING: Refusal =
    Refusal::new(Policy::Breaker, "the circuit is half-open, and its probes are out");
const RAMPING: Refusal =
    Refusal::new(Policy::Breaker, "the circuit has just closed, and lets a part through");
const FORCED: Refusal = Refusal::new(Policy::Breaker, "the circuit was forced open");

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl fmt::Debug for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.word.load(Acquire);
        f.debug_struct("Circuit")
            .field("state", &state(word & TAG))
            .field("generation", &(word >> TAG_BITS))
            .finish_non_exhaustive()
    }
}
