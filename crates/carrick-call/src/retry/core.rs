//! The decision.

use std::{fmt, time::Duration};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use rand::{Rng, RngExt};
use tokio::time::Instant;

use super::RetryConfig;

/// An attempt that ended, and what matters for another.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// Its number, from 1.
    pub n: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// Whether it ended by our own timeout of one try, so that there is time left.
    pub timed_out_here: bool,
    /// Whether the request may be sent again.
    pub repeat: Repeat,
    /// Whether the head of an answer was handed on already.
    pub answered: bool,
    /// Whether somebody below says that retrying was done there.
    pub retried_below: bool,
    /// What the server wishes.
    pub pushback: Option<Pushback>,
    /// Failures since the server last said when to come: what the backoff is counted by.
    pub backoff: u32,
    /// When the whole call ends.
    pub deadline: Deadline,
}

/// Whether a request may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// It is idempotent, by method or by key.
    Idempotent,
    /// The dependency never saw it.
    NeverSent,
    /// It might take effect twice.
    Unsafe,
    /// Its body is gone: it was too large to be kept.
    BodyGone,
}

/// What a server wishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushback {
    /// Come back after this.
    After(Duration),
    /// Do not come back.
    Stop,
}

/// What to do after an attempt. `P` is the proof that it is paid for.
#[derive(Debug)]
pub enum Decision<P> {
    /// Try again after a wait.
    Retry {
        /// How long to wait.
        delay: Duration,
        /// Whether the server named it, which begins the backoff anew.
        asked: bool,
        /// What the budget gave; a retry in flight holds it.
        paid: P,
    },
    /// Do not try again.
    Stop(Stop),
}

/// Why a call is not tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// As many attempts as may be were made.
    Attempts(u32),
    /// Another try would end alike.
    Outcome(Outcome),
    /// The request might take effect twice.
    Unsafe,
    /// The body was too large to be kept.
    BodyGone,
    /// Part of an answer was handed on.
    Answered,
    /// Somebody below has retried already.
    RetriedBelow,
    /// The server says not to.
    Pushback,
    /// The deadline comes first.
    Late {
        /// What is left.
        left: Duration,
        /// What the wait and a useful try need.
        needed: Duration,
    },
    /// The budget does not pay.
    Budget,
}

/// Decides whether a call is tried again.
///
/// * `withdraw`: takes what a retry costs; asked last, so that nothing is paid in vain.
pub fn decide<P>(
    attempt: &Attempt,
    config: &RetryConfig,
    now: Instant,
    rng: &mut (impl Rng + ?Sized),
    withdraw: impl FnOnce() -> Option<P>,
) -> Decision<P> {
    match wait(attempt, config, now, rng) {
        Err(stop) => Decision::Stop(stop),
        Ok((delay, asked)) => match withdraw() {
            Some(paid) => Decision::Retry { delay, asked, paid },
            None => Decision::Stop(Stop::Budget),
        },
    }
}

/// How long to wait, if the call is worth another try.
fn wait(
    attempt: &Attempt,
    config: &RetryConfig,
    now: Instant,
    rng: &mut (impl Rng + ?Sized),
) -> Result<(Duration, bool), Stop> {
    let Attempt { n, outcome, timed_out_here, repeat, deadline, .. } = *attempt;
    if n >= config.max_attempts() {
        return Err(Stop::Attempts(n));
    }
    if !outcome.is_retryable() && !timed_out_here {
        return Err(Stop::Outcome(outcome));
    }
    match repeat {
        Repeat::Idempotent | Repeat::NeverSent => {}
        Repeat::Unsafe => return Err(Stop::Unsafe),
        Repeat::BodyGone => return Err(Stop::BodyGone),
    }
    if attempt.answered {
        return Err(Stop::Answered);
    }
    if attempt.retried_below {
        return Err(Stop::RetriedBelow);
    }
    let asked = match (attempt.pushback, outcome) {
        (Some(Pushback::Stop), _) => return Err(Stop::Pushback),
        (Some(Pushback::After(after)), _) => Some(after),
        (None, Outcome::Overload { retry_after }) => retry_after,
        (None, _) => None,
    };
    let delay = match asked {
        // Never earlier than asked, and not all at the same moment.
        Some(asked) => {
            let asked = asked.min(config.retry_after_cap());
            let most = u64::try_from((asked / 10).as_nanos()).unwrap_or(u64::MAX);
            asked + Duration::from_nanos(rng.random_range(0..=most))
        }
        None => config.backoff().delay(attempt.backoff, rng),
    };
    let (left, needed) = (deadline.remaining(now), delay.saturating_add(config.min_useful()));
    if left < needed {
        return Err(Stop::Late { left, needed });
    }
    Ok((delay, asked.is_some()))
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attempts(n) => write!(f, "attempt {n} was the last that is allowed"),
            Self::Outcome(outcome) => {
                write!(f, "another try would end alike ({})", crate::explain::word(*outcome))
            }
            Self::Unsafe => f.write_str("it might take effect twice: no idempotency key"),
            Self::BodyGone => f.write_str("the body was too large to be kept"),
            Self::Answered => f.write_str("part of the answer was handed on"),
            Self::RetriedBelow => f.write_str("a server below has retried already"),
            Self::Pushback => f.write_str("the server says not to come back"),
            Self::Late { left, needed } => {
                write!(f, "{} ms left < {} ms", left.as_millis(), needed.as_millis())
            }
            Self::Budget => f.write_str("the budget does not pay"),
        }
    }
}

#[cfg(test)]
mod tests {
    use carrick_core::backoff::Backoff;
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    use super::{super::RetryOptions, *};

    fn config() -> RetryConfig {
        RetryConfig::default()
    }

    fn attempt(now: Instant) -> Attempt {
        Attempt {
            n: 1,
            outcome: Outcome::Transient,
            timed_out_here: false,
            repeat: Repeat::Idempotent,
            answered: false,
            retried_below: false,
            pushback: None,
            backoff: 0,
            deadline: Deadline::at(now + Duration::from_secs(60)),
        }
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut Attempt), expected: Option<Stop>) {
        let now = Instant::now();
        let mut one = attempt(now);
        change(&mut one);
        let mut rng = SmallRng::seed_from_u64(1);
        let mut paid = false;
        let decision = decide(&one, &config(), now, &mut rng, || {
            paid = true;
            Some(())
        });
        let stop = match decision {
            Decision::Retry { .. } => None,
            Decision::Stop(stop) => Some(stop),
        };
        assert_eq!(stop, expected, "{one:?}");
        assert_eq!(paid, expected.is_none(), "nothing is paid for a retry that is not made");
    }

    #[test]
    fn each_question_can_stop_a_retry() {
        check(|_| {}, None);
        check(|one| one.n = 3, Some(Stop::Attempts(3)));
        for outcome in [Outcome::Success, Outcome::Permanent, Outcome::Rejected, Outcome::Cancelled]
        {
            check(|one| one.outcome = outcome, Some(Stop::Outcome(outcome)));
        }
        check(|one| one.outcome = Outcome::Expired, Some(Stop::Outcome(Outcome::Expired)));
        check(|one| (one.outcome, one.timed_out_here) = (Outcome::Expired, true), None);
        check(|one| one.repeat = Repeat::Unsafe, Some(Stop::Unsafe));
        check(|one| one.repeat = Repeat::BodyGone, Some(Stop::BodyGone));
        check(|one| one.repeat = Repeat::NeverSent, None);
        check(|one| one.answered = true, Some(Stop::Answered));
        check(|one| one.retried_below = true, Some(Stop::RetriedBelow));
        check(|one| one.pushback = Some(Pushback::Stop), Some(Stop::Pushback));
    }

    #[test]
    fn the_budget_has_the_last_word() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(1);
        let decision = decide(&attempt(now), &config(), now, &mut rng, || None::<()>);
        assert!(matches!(decision, Decision::Stop(Stop::Budget)));
    }

    #[test]
    fn a_retry_that_the_deadline_would_cut_off_is_not_made() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(1);
        let one = Attempt {
            deadline: Deadline::at(now + Duration::from_millis(38)),
            backoff: 0,
            ..attempt(now)
        };
        let decision = decide(&one, &config(), now, &mut rng, || Some(()));
        let Decision::Stop(stop @ Stop::Late { .. }) = decision else { panic!("{decision:?}") };
        assert!(stop.to_string().starts_with("38 ms left < "), "{stop}");
    }

    #[test]
    fn hermes_agent_84762_go_retryablehttp_283_a_server_is_not_asked_earlier_than_it_says() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(1);
        for (asked, least, most) in [(0, 0, 0), (5, 5000, 5500), (86_400, 30_000, 33_000)] {
            let retry_after = Some(Duration::from_secs(asked));
            for pushback in [None, retry_after.map(Pushback::After)] {
                let outcome = match pushback {
                    None => Outcome::Overload { retry_after },
                    Some(_) => Outcome::Transient,
                };
                let one = Attempt { outcome, pushback, ..attempt(now) };
                let decision = decide(&one, &config(), now, &mut rng, || Some(()));
                let Decision::Retry { delay, asked: true, .. } = decision else {
                    panic!("{decision:?}")
                };
                assert!((least..=most).contains(&delay.as_millis()), "{delay:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn envoy_32580_no_more_attempts_are_made_than_configured(most in 1..20_u32, seed: u64) {
            let now = Instant::now();
            let options = RetryOptions { max_attempts: most, ..RetryOptions::default() };
            let config = RetryConfig::try_from(options).unwrap();
            let mut rng = SmallRng::seed_from_u64(seed);
            let far = Deadline::at(now + Duration::from_secs(100_000));
            let mut made = 1;
            loop {
                let one = Attempt { n: made, backoff: made - 1, deadline: far, ..attempt(now) };
                match decide(&one, &config, now, &mut rng, || Some(())) {
                    Decision::Retry { .. } => made += 1,
                    Decision::Stop(_) => break,
                }
            }
            prop_assert_eq!(made, most);
        }

        #[test]
        fn polly_2164_latte_208_no_attempt_number_makes_a_delay_overflow(n: u32, seed: u64) {
            let backoff = Backoff::default();
            let mut rng = SmallRng::seed_from_u64(seed);
            prop_assert!(backoff.delay(n, &mut rng) <= backoff.cap);
        }
    }
}
