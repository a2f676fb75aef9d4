//! A deadline that may move, on the timer.

use std::{
    fmt,
    task::{Context, Poll, ready},
};

use tokio::time::Instant;

use super::{Armed, Timer};

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

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("armed", &self.armed).finish_non_exhaustive()
    }
}
