//! The consumer's circuit: when nearly everything fails, and fails alike, it is not the events.
//!
//! Then the consumer stops consuming instead of filling the dead letters: it hands back what it
//! holds, waits for a cool-down and tries one event. Unlike a caller's breaker, its window looks at
//! what failed *how*: distinct events that fail with the same text. One poisoned event that is
//! retried, or events that fail each for their own reason, do not open it.
//!
//! Source: pattern document, circuit breaker; PostHog/posthog#100310 for what happens without.

use std::{collections::VecDeque, time::Duration};

use hashbrown::{HashMap, HashSet};
use rand::{RngExt, rngs::SmallRng};
use tokio::time::Instant;

/// What counts as failing alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CircuitRules {
    /// Results looked at.
    pub(crate) window: usize,
    /// Share of them that must have failed alike.
    pub(crate) share: f64,
    /// First cool-down; doubles with every failed probe.
    pub(crate) cool_down: Duration,
    /// Longest cool-down; also the age at which a result leaves the window.
    pub(crate) max_cool_down: Duration,
}

/// How an event failed, in a form in which failures of one cause are equal.
pub(super) type Signature = u64;

/// Makes the signature of a failure: digits and quoted parts name the event and not the cause.
pub(super) fn signature(kind: u8, text: &str) -> Signature {
    let mut plain = Vec::with_capacity(129);
    plain.push(kind);
    let mut quote = None;
    for byte in text.bytes() {
        match (quote, byte) {
            (Some(open), byte) if byte == open => quote = None,
            (Some(_), _) | (None, b'0'..=b'9') => {}
            (None, b'"' | b'`') => quote = Some(byte),
            (None, byte) => plain.push(byte),
        }
        if plain.len() > 128 {
            break;
        }
    }
    xxhash_rust::xxh3::xxh3_64(&plain)
}

/// Where the circuit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Events flow.
    Closed,
    /// Nothing is consumed until then.
    Open(Instant),
    /// One event at a time is tried.
    HalfOpen,
}

/// A result as the window keeps it.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    at: Instant,
    event: u128,
    failed: Option<Signature>,
}

/// One consumer's circuit.
#[derive(Debug)]
pub(super) struct Circuit {
    rules: CircuitRules,
    state: State,
    /// Changes with the state, so that a result of an earlier state decides nothing.
    epoch: u32,
    window: VecDeque<Outcome>,
    /// Why it opened, and how often in a row.
    cause: Option<Signature>,
    trips: u32,
}

impl Circuit {
    pub(super) fn new(rules: CircuitRules) -> Self {
        let window = VecDeque::with_capacity(rules.window);
        Self { rules, state: State::Closed, epoch: 0, window, cause: None, trips: 0 }
    }

    /// The state now; an open circuit whose cool-down is over is half-open.
    pub(super) fn state(&mut self, now: Instant) -> State {
        if matches!(self.state, State::Open(until) if until <= now) {
            self.turn(State::HalfOpen);
        }
        self.state
    }

    /// The state as it was at the last look.
    pub(super) fn last_state(&self) -> State {
        self.state
    }

    /// Names the present state, for results to come back with.
    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether a failure is the one for which the circuit is not closed.
    pub(super) fn is_alike(&self, failure: Signature) -> bool {
        self.state != State::Closed && self.cause == Some(failure)
    }

    /// Takes in a result of an event that was started in `epoch`; returns whether that opened it.
    pub(super) fn record(
        &mut self,
        now: Instant,
        epoch: u32,
        event: u128,
        failed: Option<Signature>,
        rng: &mut SmallRng,
    ) -> bool {
        if epoch != self.epoch {
            return false;
        }
        match self.state {
            State::Closed => {
                self.push(Outcome { at: now, event, failed });
                let Some(cause) = self.common_cause() else { return false };
                self.cause = Some(cause);
                self.open(now, rng);
                true
            }
            State::HalfOpen if failed.is_some() && failed == self.cause => {
                self.open(now, rng);
                true
            }
            // The probe failed for a reason of its own: it proves nothing, and another one follows.
            State::HalfOpen if failed.is_some() => false,
            State::HalfOpen => {
                self.trips = 0;
                self.cause = None;
                self.turn(State::Closed);
                false
            }
            State::Open(_) => false,
        }
    }

    fn push(&mut self, outcome: Outcome) {
        if self.window.len() == self.rules.window {
            self.window.pop_front();
        }
        self.window.push_back(outcome);
        let too_old = |first: &Outcome| outcome.at - first.at > self.rules.max_cool_down;
        while self.window.front().is_some_and(too_old) {
            self.window.pop_front();
        }
    }

    /// The way in which nearly all of a full window failed, if there is one.
    fn common_cause(&self) -> Option<Signature> {
        let needed = (self.rules.window as f64 * self.rules.share).ceil() as usize;
        let newest = self.window.back().and_then(|outcome| outcome.failed)?;
        if self.window.len() < self.rules.window {
            return None;
        }
        let mut alike: HashMap<Signature, usize> = HashMap::new();
        let mut events = HashSet::new();
        for outcome in &self.window {
            if let Some(failed) = outcome.failed {
                *alike.entry(failed).or_default() += 1;
                if failed == newest {
                    events.insert(outcome.event);
                }
            }
        }
        // Half of the window as distinct events: a few poisoned ones that are retried are not it.
        let enough = alike[&newest] >= needed && events.len() >= self.rules.window.div_ceil(2);
        enough.then_some(newest)
    }

    fn open(&mut self, now: Instant, rng: &mut SmallRng) {
        let doubled = self.rules.cool_down.saturating_mul(1 << self.trips.min(16));
        let cool_down = doubled.min(self.rules.max_cool_down);
        self.trips = self.trips.saturating_add(1);
        // Spread by a tenth, so that the workers of a group do not probe in step.
        let jitter = rng.random_range(0.0..=0.1);
        self.turn(State::Open(now + cool_down + cool_down.mul_f64(jitter)));
    }

    fn turn(&mut self, state: State) {
        self.state = state;
        self.epoch = self.epoch.wrapping_add(1);
        self.window.clear();
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const RULES: CircuitRules = CircuitRules {
        window: 20,
        share: 0.9,
        cool_down: Duration::from_secs(30),
        max_cool_down: Duration::from_secs(300),
    };

    struct Bench {
        circuit: Circuit,
        now: Instant,
        rng: SmallRng,
        event: u128,
    }

    impl Bench {
        fn new() -> Self {
            let rng = SmallRng::seed_from_u64(7);
            Self { circuit: Circuit::new(RULES), now: Instant::now(), rng, event: 0 }
        }

        fn result(&mut self, failed: Option<&str>) -> bool {
            self.event += 1;
            self.result_of(self.event, failed)
        }

        fn result_of(&mut self, event: u128, failed: Option<&str>) -> bool {
            let failed = failed.map(|text| signature(0, text));
            let epoch = self.circuit.epoch();
            self.circuit.record(self.now, epoch, event, failed, &mut self.rng)
        }

        fn cool_down(&mut self) -> Duration {
            let State::Open(until) = self.circuit.state(self.now) else { panic!("not open") };
            let cool_down = until - self.now;
            self.now = until;
            assert_eq!(self.circuit.state(self.now), State::HalfOpen);
            cool_down
        }
    }

    #[test]
    fn a_whole_window_that_fails_alike_opens_it_whatever_ids_the_texts_carry() {
        let mut bench = Bench::new();
        for n in 1..20 {
            let text = format!("order {n}: no route to host `db-{n}`");
            assert!(!bench.result(Some(&text)), "failure {n}");
        }
        assert!(bench.result(Some("order 20: no route to host `x`")));
    }

    #[test]
    fn failures_that_differ_and_one_event_that_is_retried_do_not_open_it() {
        let mut bench = Bench::new();
        for n in 0..100 {
            let text = ["broken pipe", "no such order", "bad amount"][n % 3];
            assert!(!bench.result(Some(text)));
        }
        for _ in 0..100 {
            assert!(!bench.result_of(1, Some("poison")));
        }
    }

    #[test]
    fn two_successes_in_twenty_are_allowed_and_three_are_not() {
        for (successes, opens) in [(2, true), (3, false)] {
            let mut bench = Bench::new();
            let mut opened = false;
            for n in 0..20 {
                opened |= bench.result((n >= successes).then_some("down"));
            }
            assert_eq!(opened, opens, "{successes} successes");
        }
    }

    #[test]
    fn the_cool_down_doubles_to_its_cap_and_starts_over_after_a_success() {
        let mut bench = Bench::new();
        for _ in 0..20 {
            bench.result(Some("down"));
        }
        let mut expected = 30.0;
        for _ in 0..6 {
            let cool_down = bench.cool_down().as_secs_f64();
            assert!((expected..=expected * 1.1).contains(&cool_down), "{cool_down} {expected}");
            assert!(bench.result(Some("down")), "the probe fails alike");
            expected = (expected * 2.0_f64).min(300.0);
        }
        bench.cool_down();
        assert!(!bench.result(Some("another reason")), "proves nothing");
        assert_eq!(bench.circuit.state(bench.now), State::HalfOpen);
        bench.result(None);
        assert_eq!(bench.circuit.state(bench.now), State::Closed);
        for _ in 0..20 {
            bench.result(Some("down"));
        }
        assert!(bench.cool_down() < Duration::from_secs(34));
    }

    #[test]
    fn a_result_of_an_earlier_state_decides_nothing() {
        let mut bench = Bench::new();
        let stale = bench.circuit.epoch();
        for _ in 0..20 {
            bench.result(Some("down"));
        }
        bench.cool_down();
        let now = bench.now;
        assert!(!bench.circuit.record(now, stale, 99, None, &mut bench.rng));
        assert_eq!(bench.circuit.state(now), State::HalfOpen, "not closed by an old success");
    }

    #[test]
    fn failures_of_long_ago_do_not_add_up() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            bench.now += Duration::from_secs(60);
            assert!(!bench.result(Some("once a minute")));
        }
    }
}
