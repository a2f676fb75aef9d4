//! What the stack asks of a request, and what becomes of an answer.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use tokio::time::Instant;

#[cfg(feature = "client")]
use super::Policies;
use super::{Ended, Open, Shared};
#[cfg(feature = "client")]
use crate::deadline::{Bound, Span};
use crate::{balance::HostId, bulkhead::Priority, explain::Explain};

/// What the stack asks of a request.
pub trait Call: Sized {
    /// Until when its caller wants an answer.
    fn deadline(&self) -> Option<Deadline>;

    /// Whether it may take effect twice.
    fn is_idempotent(&self) -> bool;

    /// A copy for another attempt, which is to be made before this one is sent.
    fn copy(&self) -> Self;

    /// Whether the copy can still be sent, now that an attempt has been made.
    fn is_replayable(&self) -> bool;

    /// Whether its answer is a stream: the deadline that is sent is then the stream's.
    fn is_streaming(&self) -> bool {
        false
    }

    /// Gets ready for an attempt: what goes on the wire of attempt and deadline.
    fn prepare(&mut self, attempt: u32, deadline: Deadline, now: Instant);

    /// Where decisions are noted, if anybody wants to know.
    fn explain(&self) -> Option<&Explain>;

    /// How important it is where it has to wait in line.
    fn priority(&self) -> Priority {
        Priority::Default
    }

    /// Wants its copies to go to other hosts than it does, as a hedge should.
    fn keep_apart(&mut self) {}

    /// What it and its copies share for that.
    fn tried(&self) -> Option<&Tried> {
        None
    }
}

/// Which host a request went to last, shared by its copies that are under way at the same time.
#[derive(Clone, Debug, Default)]
pub struct Tried(Arc<AtomicUsize>);

impl Tried {
    pub(super) fn host(&self) -> Option<HostId> {
        let id = self.0.load(Relaxed);
        (id != 0).then_some(HostId(id)) // no host is at address 0
    }

    pub(super) fn set(&self, host: HostId) {
        self.0.store(host.0, Relaxed);
    }
}

/// Nothing to ask for, as benches and tests do it.
impl Call for () {
    fn deadline(&self) -> Option<Deadline> {
        None
    }

    fn is_idempotent(&self) -> bool {
        true
    }

    fn copy(&self) -> Self {}

    fn is_replayable(&self) -> bool {
        true
    }

    fn prepare(&mut self, _attempt: u32, _deadline: Deadline, _now: Instant) {}

    fn explain(&self) -> Option<&Explain> {
        None
    }
}

/// Ends the attempt whose answer is handed on.
pub trait Finish<S, T> {
    /// What the caller gets.
    type Output;

    /// Takes an answer and what its attempt holds. Whatever keeps `held` keeps the host busy.
    fn finish(&self, answer: T, held: Held<S>) -> Self::Output;
}

/// Takes an answer's head for its end: what an attempt holds is given back with it.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtHead;

impl<S, T> Finish<S, T> for AtHead {
    type Output = T;

    fn finish(&self, answer: T, held: Held<S>) -> T {
        held.settle_as_judged();
        answer
    }
}

/// What the attempt holds whose answer is handed on. Dropping it gives everything back and decides
/// nothing.
pub struct Held<S> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) open: Option<Open<S>>,
    pub(super) ended: Ended,
    pub(super) attempts: u32,
    pub(super) deadline: Deadline,
    #[cfg(feature = "client")]
    pub(super) asked: Option<Deadline>,
    pub(super) is_streaming: bool,
    pub(super) now: Instant,
}

impl<S> Held<S> {
    /// How the head was judged.
    pub fn outcome(&self) -> Outcome {
        self.ended.outcome
    }

    /// How many attempts were made.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// When the call ends, its body with it unless that is a stream.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// What the body of the answer is held to: limits of streams, if the request said that it is one
    /// or it is seen to be.
    #[cfg(feature = "client")]
    pub(crate) fn bound(&self, is_stream: bool) -> Bound {
        let Policies { timer, stream, .. } = &self.shared.policies;
        let span = if is_stream || self.is_streaming {
            let ends = stream.options().ends(self.asked, self.now);
            Span::stream(self.now, stream.options(), ends.instant())
        } else {
            Span::Whole(self.deadline.instant())
        };
        Bound::new(span, timer.clone())
    }

    /// Whether the request said that its answer is a stream.
    pub fn is_streaming(&self) -> bool {
        self.is_streaming
    }

    /// Gives back what the attempt holds, by the verdict on its head, as of when it came.
    pub fn settle_as_judged(mut self) {
        let (ended, now) = (self.ended, self.now);
        self.close(Some(ended), now, now);
    }

    /// The same by another verdict, as what comes after the head may give.
    pub fn settle(mut self, outcome: Outcome, now: Instant) {
        let ended = self.ended.with(outcome);
        self.close(Some(ended), now, now);
    }

    /// The end of a stream, which took as long as its head did: how long it lived says nothing of how
    /// fast its host is. The verdict is that on its head, if it has no other.
    pub fn settle_stream(mut self, outcome: Option<Outcome>, now: Instant) {
        let (ended, answered) = (self.ended, self.now);
        let ended = outcome.map_or(ended, |outcome| ended.with(outcome));
        self.close(Some(ended), answered, now);
    }

    fn close(&mut self, ended: Option<Ended>, answered: Instant, now: Instant) {
        if let Some(open) = self.open.take() {
            self.shared.close(open, ended, answered, now);
        }
    }
}

impl<S> Drop for Held<S> {
    fn drop(&mut self) {
        if self.open.is_some() {
            let now = Instant::now();
            self.close(None, now, now);
        }
    }
}

impl<S> fmt::Debug for Held<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("outcome", &self.ended.outcome).finish_non_exhaustive()
    }
}
