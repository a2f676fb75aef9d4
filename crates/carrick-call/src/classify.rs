//! How an attempt ended, decided once for all policies.

use carrick_core::{
    clock::{Clock, SystemClock},
    outcome::{Outcome, parse_retry_after},
};
use http::{HeaderMap, Response, header::RETRY_AFTER};
use jiff::Timestamp;

use crate::{
    CallError, Policy,
    retry::{Pushback, RETRIED, pushback},
};

/// Decides how an attempt ended. Breaker, outlier detector, balancer, limiter and budget all read
/// the one verdict; two of them that disagree work against each other.
pub trait Classify<T, E>: Send + Sync {
    /// The verdict on a response's head, or on an error.
    fn classify(&self, result: Result<&T, &E>) -> Outcome;

    /// What else a failure tells of whether to try again. Without knowledge: nothing.
    fn hints(&self, _result: Result<&T, &E>) -> Hints {
        Hints::default()
    }
}

/// What a failure tells of whether to try again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// The dependency cannot have seen the request.
    pub never_sent: bool,
    /// No answer came: the failure is the connection's.
    pub is_local: bool,
    /// The answer is that of a gateway without its service.
    pub is_gateway: bool,
    /// Somebody below has retried already.
    pub retried_below: bool,
    /// What the server wishes.
    pub pushback: Option<Pushback>,
}

impl<T, E, F: Fn(Result<&T, &E>) -> Outcome + Send + Sync> Classify<T, E> for F {
    fn classify(&self, result: Result<&T, &E>) -> Outcome {
        self(result)
    }
}

/// Takes every response for a success and every error for a transient failure.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnyError;

impl<T, E> Classify<T, E> for AnyError {
    fn classify(&self, result: Result<&T, &E>) -> Outcome {
        if result.is_ok() { Outcome::Success } else { Outcome::Transient }
    }
}

/// The verdict on HTTP answers: by status, and by `grpc-status` where a response has it in its head.
/// An error is a transient failure.
#[derive(Clone, Copy, Debug, Default)]
pub struct Http;

impl Http {
    /// The verdict on a head, at a wall-clock time that dates in `Retry-After` are read against.
    pub fn verdict<B>(response: &Response<B>, wall: Timestamp) -> Outcome {
        let retry_after = || retry_after(response.headers(), wall);
        let grpc =
            response.headers().get("grpc-status").and_then(|code| code.to_str().ok()?.parse().ok());
        match grpc {
            Some(code) => Outcome::from_grpc(code, retry_after()),
            None => Outcome::from_status(response.status(), retry_after()),
        }
    }
}

impl<B, E> Classify<Response<B>, E> for Http {
    fn classify(&self, result: Result<&Response<B>, &E>) -> Outcome {
        result.map_or(Outcome::Transient, |head| Self::verdict(head, SystemClock.wall()))
    }

    fn hints(&self, result: Result<&Response<B>, &E>) -> Hints {
        let Ok(head) = result else { return Hints { is_local: true, ..Hints::default() } };
        Hints {
            is_gateway: matches!(head.status().as_u16(), 502..=504),
            retried_below: head.headers().contains_key(RETRIED),
            pushback: pushback(head.headers()),
            ..Hints::default()
        }
    }
}

/// The verdict on calls through other policies: a refusal of theirs is no failure of the dependency,
/// and what comes from below is for `C` to judge.
///
/// ```
/// use carrick_call::{CallError, Classify, Policy, Refusal, classify::{AnyError, Guarded}};
/// use carrick_core::outcome::Outcome;
///
/// let refused: CallError<()> = Refusal::new(Policy::Breaker, "open").into();
/// let outcome = Guarded(AnyError).classify(Err::<&(), _>(&refused));
/// assert_eq!(outcome, Outcome::Rejected);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Guarded<C>(pub C);

impl<T, E, C: Classify<T, E>> Classify<T, CallError<E>> for Guarded<C> {
    fn classify(&self, result: Result<&T, &CallError<E>>) -> Outcome {
        match result {
            Ok(answer) => self.0.classify(Ok(answer)),
            Err(error) => call_error(error, |inner| self.0.classify(Err(inner))),
        }
    }

    fn hints(&self, result: Result<&T, &CallError<E>>) -> Hints {
        match result {
            Ok(answer) => self.0.hints(Ok(answer)),
            Err(CallError::Inner(inner)) => self.0.hints(Err(inner)),
            Err(error) => {
                Hints { never_sent: error.was_never_sent(), is_local: true, ..Hints::default() }
            }
        }
    }
}

/// The first readable `Retry-After` of a head, in either form.
pub fn retry_after(headers: &HeaderMap, wall: Timestamp) -> Option<std::time::Duration> {
    parse_retry_after(headers.get(RETRY_AFTER)?.to_str().ok()?, wall)
}

/// The verdict on an error of a guarded call; `inner` judges what came from below.
pub fn call_error<E>(error: &CallError<E>, inner: impl FnOnce(&E) -> Outcome) -> Outcome {
    match error {
        CallError::Inner(error) => inner(error),
        CallError::Refused(refusal) if refusal.policy == Policy::Deadline => Outcome::Expired,
        CallError::Refused(_) => Outcome::Rejected,
        CallError::Expired => Outcome::Expired,
    }
}
