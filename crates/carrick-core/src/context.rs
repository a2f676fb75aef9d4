//! The context of a piece of work: what entered at the edge and must still be there at the end.

use std::{
    future::Future,
    pin::Pin,
    task::{self, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::{task::futures::TaskLocalFuture, time::Instant};

use crate::{deadline::Deadline, trace::TraceContext};

tokio::task_local! {
    static CURRENT: Context;
}

/// Deadline, trace, idempotency key, identity and attempt of the work at hand.
///
/// Server layers put it in scope for the handler; clients read it from there, unless one is passed
/// explicitly. A spawned task has none unless it is given one.
///
/// ```
/// # use carrick_core::{context::Context, deadline::Deadline, trace::TraceContext};
/// # use tokio::time::{Duration, Instant};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let deadline = Deadline::at(Instant::now() + Duration::from_secs(2));
/// let context = Context::new(deadline, TraceContext::new()).with_attempt(2);
/// context.scope(async {
///     assert_eq!(Context::current().unwrap().attempt(), 2);
/// }).await;
/// assert!(Context::current().is_none());
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    deadline: Deadline,
    trace: TraceContext,
    idempotency_key: Option<String>,
    identity: Option<String>,
    attempt: u32,
}

impl Context {
    /// A context of a first attempt.
    pub fn new(deadline: Deadline, trace: TraceContext) -> Self {
        Self { deadline, trace, idempotency_key: None, identity: None, attempt: 1 }
    }

    /// With the key under which a repeat of this work is recognised.
    #[must_use]
    pub fn with_idempotency_key(self, key: impl Into<String>) -> Self {
        Self { idempotency_key: Some(key.into()), ..self }
    }

    /// With the caller that asks for this work.
    #[must_use]
    pub fn with_identity(self, identity: impl Into<String>) -> Self {
        Self { identity: Some(identity.into()), ..self }
    }

    /// With the number of this attempt, from 1.
    #[must_use]
    pub fn with_attempt(self, attempt: u32) -> Self {
        Self { attempt, ..self }
    }

    /// When this work is of no use any more.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// The span that this work is in.
    pub fn trace(&self) -> &TraceContext {
        &self.trace
    }

    /// The key under which a repeat is recognised.
    pub fn idempotency_key(&self) -> Option<&str> {
        self.idempotency_key.as_deref()
    }

    /// Who asks.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The context in scope, if there is one.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Runs a future with this context in scope.
    ///
    /// # Cancel safety
    /// That of the future.
    pub fn scope<F: Future>(self, future: F) -> Scoped<F> {
        Scoped { inner: CURRENT.scope(self, future) }
    }

    /// A context for work that must outlive its caller: its own deadline, `cap` from `now`, and a
    /// new span in the same trace.
    #[must_use]
    pub fn detach(&self, now: Instant, cap: Duration) -> Self {
        Self { deadline: Deadline::at(now + cap), trace: self.trace.child(), ..self.clone() }
    }
}

pin_project! {
    /// A future with a context in scope; see [`Context::scope`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are polled"]
    pub struct Scoped<F> {
        #[pin]
        inner: TaskLocalFuture<Context, F>,
    }
}

impl<F: Future> Future for Scoped<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<F::Output> {
        self.project().inner.poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let deadline = Deadline::at(Instant::now() + Duration::from_secs(1));
        Context::new(deadline, TraceContext::new()).with_identity("shop").with_idempotency_key("k")
    }

    #[tokio::test]
    async fn a_spawned_task_has_no_context_unless_given_one() {
        let context = context();
        context
            .clone()
            .scope(async {
                let bare = tokio::spawn(async { Context::current() }).await;
                assert_eq!(bare.unwrap(), None);
                let given = Context::current().unwrap();
                let seen = tokio::spawn(given.scope(async { Context::current() })).await;
                assert_eq!(seen.unwrap().as_ref(), Some(&context));
            })
            .await;
    }

    #[tokio::test]
    async fn detached_work_has_its_own_deadline_and_the_same_trace() {
        let (context, now) = (context(), Instant::now());
        let detached = context.detach(now, Duration::from_secs(60));
        assert_eq!(detached.deadline(), Deadline::at(now + Duration::from_secs(60)));
        assert_eq!(detached.trace().trace_id(), context.trace().trace_id());
        assert_eq!(detached.idempotency_key(), Some("k"));
    }
}
