//! A deadline that may move, on the timer.

use std::{
    fmt,
    task::{Context, Poll, ready},
};

use tokio::time::Instant;

use super::{Armed, Timer, core::Span};

/// Waits for a deadline, and arms the timer only when there is something to wait for.
pub(super) struct Watch {
    timer: Timer,
    armed: Option<Armed>,
    /// What it is armed for; of no meaning when it is not.
    armed_for: Instant,
}

impl Watch {
    pub(super) fn new(timer: Timer, ends: Instant) -> Self {
        Self { timer, armed: None, armed_for: ends }
    }

    /// Ready when a moment has come. It may be another moment with each poll: one that moves away, as
    /// that of a stream does with each frame, is armed anew only when the old one has come.
    pub(super) fn poll(&mut self, ends: Instant, cx: &Context<'_>) -> Poll<()> {
        loop {
            if self.armed.is_none() || ends < self.armed_for {
                (self.armed, self.armed_for) = (None, ends);
            }
            ready!(self.timer.poll_at(self.armed_for, &mut self.armed, cx.waker()));
            self.armed = None;
            if ends <= self.armed_for {
                return Poll::Ready(());
            }
        }
    }
}

/// What a body is held to from its head on.
#[derive(Debug)]
pub(crate) struct Bound {
    span: Span,
    watch: Watch,
}

impl Bound {
    pub(crate) fn new(span: Span, timer: Timer) -> Self {
        // Nothing is armed, so for which moment says nothing.
        Self { span, watch: Watch { timer, armed: None, armed_for: Instant::now() } }
    }

    /// A frame came, and is not the last: whether time is over all the same.
    pub(crate) fn came(&mut self) -> bool {
        self.span.came();
        self.span.is_over(Instant::now())
    }

    /// Ready when time is over while a frame is awaited.
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        let ends = self.span.ends(Instant::now);
        self.watch.poll(ends, cx)
    }

    /// Whether it is a stream, and one that has lived for as long as it may.
    #[cfg(feature = "client")]
    pub(crate) fn is_aged(&self, now: Instant) -> bool {
        matches!(self.span, Span::Stream { .. }) && self.span.is_over(now)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("armed", &self.armed).finish_non_exhaustive()
    }
}
