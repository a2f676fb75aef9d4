//! A reader of a stream: what to tell it next, whichever door it came through.

use std::{pin::Pin, time::Duration};

use carrick_core::{backoff::Backoff, name::Topic};
use carrick_store::StoreError;
use tokio::time::{Instant, Sleep, sleep_until};

use super::{Batch, Ended, FeedOptions, Item, Limit, Place, Subscription};

/// What one read takes: what a socket's buffer takes at once.
const LIMIT: Limit = Limit { events: 256, bytes: 64 * 1024 };

/// Between two looks at a reader that takes nothing.
pub(crate) const LOOK: Duration = Duration::from_millis(500);

/// What to tell a reader.
pub(crate) enum Next {
    /// Events, at least one.
    Items(Vec<Item>),
    /// What came before is gone.
    Reset(Topic),
    /// There was nothing for a while: it still lives.
    Silence {
        /// Its place has moved without it having been told a position.
        moved: bool,
    },
}

/// A subscription whose reader stays.
pub(crate) struct Reader {
    subscription: Subscription,
    _place: Place,
    expires: Option<Instant>,
    moved: bool,
    failures: u32,
    told: Instant,
    leave_at: Option<Instant>,
    /// Fires at the next time that something may be due; set anew only when it has fired.
    timer: Pin<Box<Sleep>>,
}

impl Reader {
    pub(crate) fn new(subscription: Subscription, place: Place, expires: Option<Instant>) -> Self {
        let now = Instant::now();
        let keep_alive = subscription.feed().config().options().keep_alive;
        // Readers that came together are not told together.
        let phase = keep_alive.mul_f64(rand::random_range(0.5..=1.0));
        let due = expires.map_or(now + phase, |expires| expires.min(now + phase));
        Self {
            subscription,
            _place: place,
            expires,
            moved: false,
            failures: 0,
            told: now,
            leave_at: None,
            timer: Box::pin(sleep_until(due)),
        }
    }

    pub(crate) fn options(&self) -> &FeedOptions {
        self.subscription.feed().config().options()
    }

    pub(crate) fn position(&self) -> String {
        self.subscription.position()
    }

    /// Whether it begins with a reset.
    pub(crate) fn is_lost(&self) -> bool {
        self.subscription.is_lost()
    }

    /// When it was told something for the last time.
    pub(crate) fn told(&self) -> Instant {
        self.told
    }

    /// Whether it is too slow to be kept, with so much that is unwritten for so long.
    pub(crate) fn is_slow(&self, unwritten: usize, blocked: Duration) -> bool {
        let waiting = self.subscription.waiting_bytes().saturating_add(unwritten as u64);
        self.options().is_slow(waiting, blocked)
    }

    /// What to tell next; waits for it.
    ///
    /// # Cancel safety
    /// Safe to drop: nothing is taken from the subscription that is not given back.
    pub(crate) async fn next(&mut self) -> Result<Next, Ended> {
        loop {
            let pause = match self.subscription.read(LIMIT).await {
                Ok(Batch::Events(items)) if items.is_empty() => {
                    self.moved = true;
                    continue;
                }
                Ok(Batch::Events(items)) => return Ok(self.tell(Next::Items(items))),
                Ok(Batch::Reset(topic)) => return Ok(self.tell(Next::Reset(topic))),
                Ok(Batch::UpToDate) => {
                    self.failures = 0;
                    None
                }
                Err(StoreError::Closed) => return Err(Ended::Closed),
                Err(_) => {
                    let pause = Backoff::default().delay(self.failures, &mut rand::rng());
                    self.failures = self.failures.saturating_add(1);
                    Some(pause)
                }
            };
            let changed = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => self.subscription.changed().await,
                }
            };
            let fired = tokio::select! {
                biased;
                () = changed => false,
                () = self.timer.as_mut() => true,
            };
            self.leave(fired);
            if fired && self.is_silent()? {
                let moved = self.moved;
                return Ok(self.tell(Next::Silence { moved }));
            }
        }
    }

    fn tell(&mut self, next: Next) -> Next {
        (self.told, self.moved) = (Instant::now(), false);
        next
    }

    /// Draws the time to leave, once the feed drains.
    fn leave(&mut self, fired: bool) {
        if self.leave_at.is_some() {
            return;
        }
        if let Some(within) = self.subscription.leave_within() {
            let at = Instant::now() + within.mul_f64(rand::random_range(0.0..=1.0));
            self.leave_at = Some(at);
            if !fired {
                let due = at.min(self.timer.deadline());
                self.timer.as_mut().reset(due);
            }
        }
    }

    /// Whether it was told nothing for long enough; sets the timer anew.
    fn is_silent(&mut self) -> Result<bool, Ended> {
        let now = Instant::now();
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(self.leave_at) {
            return Err(Ended::Drain);
        }
        if is_over(self.expires) {
            return Err(Ended::Expired);
        }
        let keep_alive = self.options().keep_alive;
        let silent = now - self.told >= keep_alive;
        let next = if silent { now + keep_alive } else { self.told + keep_alive };
        let ends = [self.leave_at, self.expires];
        let next = ends.into_iter().flatten().fold(next, Instant::min);
        self.timer.as_mut().reset(next);
        Ok(silent)
    }
}
