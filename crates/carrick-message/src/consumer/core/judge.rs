//! The verdict on a failure: again, later, or aside.

use std::time::Duration;

use carrick_core::backoff::Backoff;
use jiff::Timestamp;
use rand::rngs::SmallRng;

use crate::{broker::Verdict, consumer::HandlerErrorKind};

/// The longest cause that goes into a dead letter, in bytes: enough for a chain of errors.
const MAX_CAUSE: usize = 2048;

/// When trying ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Deliveries, from 1.
    pub(crate) max_attempts: u32,
    /// Time since the first delivery.
    pub(crate) max_age: Option<Duration>,
    /// Pause between attempts.
    pub(crate) backoff: Backoff,
}

/// A failure, and what is known of its event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure<'a> {
    pub(super) kind: HandlerErrorKind,
    pub(super) text: &'a str,
    pub(super) attempt: u32,
    pub(super) first_delivered_at: Timestamp,
}

/// What the circuit says of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// It is the event's own.
    Event,
    /// It is that of everything, and this was the probe that showed it.
    EveryEventByProbe,
    /// It is that of everything.
    EveryEvent,
}

/// Decides on a failure.
pub(super) fn judge(
    failure: Failure<'_>,
    blame: Blame,
    limits: &Limits,
    wall: Timestamp,
    rng: &mut SmallRng,
) -> Verdict {
    let Failure { kind, text, attempt, first_delivered_at } = failure;
    if let Some(max_age) = limits.max_age {
        let age = Duration::try_from(wall.duration_since(first_delivered_at));
        // An age below zero is a broker whose clock is ahead: not old.
        if age.is_ok_and(|age| age >= max_age) {
            return aside(&format!("gave up {max_age:?} after the first delivery: {text}"));
        }
    }
    let counted = !matches!(kind, HandlerErrorKind::Overload { .. }) && blame != Blame::EveryEvent;
    if counted && attempt >= limits.max_attempts {
        return aside(&format!("gave up after {attempt} attempts: {text}"));
    }
    let backoff = limits.backoff.delay(attempt.saturating_sub(1), rng);
    match kind {
        HandlerErrorKind::Permanent if blame == Blame::Event => aside(text),
        HandlerErrorKind::Overload { retry_after } => {
            // Never earlier than asked, and spread after that.
            let delay = retry_after.unwrap_or_default().saturating_add(backoff);
            Verdict::Nack { delay: delay.min(MAX_DELAY), counted: false }
        }
        HandlerErrorKind::Permanent | HandlerErrorKind::Transient => {
            Verdict::Nack { delay: backoff, counted }
        }
    }
}

/// The longest delay that brokers on a store take.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Puts an event aside, with a cause cut to its bound.
pub(super) fn aside(cause: &str) -> Verdict {
    let end = (0..=MAX_CAUSE.min(cause.len())).rev().find(|end| cause.is_char_boundary(*end));
    Verdict::DeadLetter { cause: cause[..end.expect("0 is a boundary")].to_owned() }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn limits() -> Limits {
        let backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(300) };
        Limits { max_attempts: 3, max_age: Some(HOUR), backoff }
    }

    fn verdict(kind: HandlerErrorKind, attempt: u32, age: Duration, blame: Blame) -> String {
        let now: Timestamp = "2026-12-01T10:00:00Z".parse().unwrap();
        let first_delivered_at = now - age;
        let failure = Failure { kind, text: "no", attempt, first_delivered_at };
        let rng = &mut SmallRng::seed_from_u64(1);
        match judge(failure, blame, &limits(), now, rng) {
            Verdict::Nack { counted, .. } => format!("retry, counted: {counted}"),
            Verdict::DeadLetter { cause } => cause,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn check(kind: HandlerErrorKind, attempt: u32, age: Duration, blame: Blame, expected: &str) {
        assert_eq!(verdict(kind, attempt, age, blame), expected, "{kind:?} {attempt} {blame:?}");
    }

    #[test]
    fn attempts_age_and_kind_decide_on_a_failure() {
        use HandlerErrorKind::{Permanent, Transient};
        let young = Duration::ZERO;
        check(Transient, 1, young, Blame::Event, "retry, counted: true");
        check(Transient, 2, young, Blame::Event, "retry, counted: true");
        check(Transient, 3, young, Blame::Event, "gave up after 3 attempts: no");
        check(Transient, 1, HOUR, Blame::Event, "gave up 3600s after the first delivery: no");
        check(Permanent, 1, young, Blame::Event, "no");
        let overload = HandlerErrorKind::Overload { retry_after: None };
        check(overload, 9, young, Blame::Event, "retry, counted: false");
        check(overload, 1, HOUR, Blame::Event, "gave up 3600s after the first delivery: no");
    }

    #[test]
    fn what_everything_fails_of_is_neither_put_aside_nor_held_against_the_event() {
        use HandlerErrorKind::{Permanent, Transient};
        let young = Duration::ZERO;
        check(Permanent, 1, young, Blame::EveryEvent, "retry, counted: false");
        check(Transient, 3, young, Blame::EveryEvent, "retry, counted: false");
        // A probe counts: or one poisoned event that is alone would be probed for ever.
        check(Permanent, 1, young, Blame::EveryEventByProbe, "retry, counted: true");
        check(Permanent, 3, young, Blame::EveryEventByProbe, "gave up after 3 attempts: no");
    }

    #[test]
    fn a_long_cause_is_cut_between_characters() {
        let Verdict::DeadLetter { cause } = aside(&"é".repeat(2000)) else { panic!() };
        assert_eq!(cause.len(), MAX_CAUSE);
        let Verdict::DeadLetter { cause } = aside(&format!("x{}", "é".repeat(2000))) else {
            panic!()
        };
        assert_eq!(cause.len(), MAX_CAUSE - 1);
    }
}
