//! Logs that a failing loop cannot flood: one line in a while, which tells how many it stands for.
//!
//! Source: graphile/worker#224, 30 000 lines in 20 s while a database was read-only.

use std::time::Duration;

use tokio::time::Instant;

/// The shortest time between two lines of one kind.
const EVERY: Duration = Duration::from_secs(10);

/// Lets one line pass in a while.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    next: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Whether to log now; if so, how many lines were left out since the last one.
    pub(crate) fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.next.is_some_and(|next| now < next) {
            self.suppressed += 1;
            return None;
        }
        self.next = Some(now + EVERY);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_fails_all_the_time_logs_once_in_a_while() {
        let mut limit = LogLimit::default();
        let start = Instant::now();
        assert_eq!(limit.pass(start), Some(0));
        let lines: Vec<u64> =
            (1..=30_000).filter_map(|ms| limit.pass(start + Duration::from_millis(ms))).collect();
        assert_eq!(lines, [9_999, 9_999, 9_999]);
    }
}
