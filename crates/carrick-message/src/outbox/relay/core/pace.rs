//! When to look next: at once after a full page, soon after rows, and ever more seldom while idle.

use std::time::Duration;

use tokio::time::Instant;

/// Adaptive polling.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    busy: Duration,
    idle: Duration,
    pause: Duration,
    next: Instant,
}

impl Pace {
    pub(crate) fn new(busy: Duration, idle: Duration, now: Instant) -> Self {
        Self { busy, idle, pause: busy, next: now }
    }

    pub(crate) fn next(&self) -> Instant {
        self.next
    }

    /// Somebody says there is something.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.pause = self.busy;
        self.next = self.next.min(now);
    }

    pub(crate) fn looked(&mut self, rows: usize, full: bool, now: Instant) {
        if rows > 0 {
            self.pause = self.busy;
            self.next = if full { now } else { now + self.pause };
        } else {
            self.next = now + self.pause;
            self.pause = (self.pause * 2).min(self.idle);
        }
    }

    /// The look failed, or could not be taken.
    pub(crate) fn later(&mut self, pause: Duration, now: Instant) {
        self.next = now + pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn polling_slows_down_while_idle_and_a_wake_up_ends_that() {
        let mut now = Instant::now();
        let ms = Duration::from_millis;
        let mut pace = Pace::new(ms(5), ms(250), now);
        pace.looked(100, true, now);
        assert_eq!(pace.next(), now, "a full page is followed by the next one at once");
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pace.looked(0, false, now);
            pauses.push((pace.next() - now).as_millis());
            now = pace.next();
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 250, 250, 250]);
        pace.wake(now - ms(100));
        pace.looked(1, false, now);
        assert_eq!(pace.next(), now + ms(5));
    }
}
