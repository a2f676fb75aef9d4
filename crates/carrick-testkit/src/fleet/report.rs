//! What happened, second by second.

use std::ops::Range;

/// One second of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Second {
    /// Calls that began in it.
    pub calls: u32,
    /// Of those calls, how many were answered, be it in a later second.
    pub answered: u32,
    /// Of those calls, how many their own client refused without sending anything at all.
    pub refused: u32,
    /// Attempts that clients sent in it.
    pub attempts: u32,
    /// Attempts that servers refused in it, for want of room.
    pub shed: u32,
    /// Attempts that servers dropped from their line in it, since it was too late for them.
    pub dropped: u32,
    /// Attempts that servers finished in it.
    pub worked: u32,
    /// Of those, how many nobody waited for any more.
    pub wasted: u32,
}

/// What happened in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Second by second, and one more for what came after the last call.
    pub seconds: Vec<Second>,
    /// Events that made up the run.
    pub events: u64,
}

impl Report {
    /// The share of the calls that began in these seconds that were answered; 1 if there were none.
    pub fn goodput(&self, seconds: Range<usize>) -> f64 {
        let sum = self.sum(seconds);
        share(sum.answered, sum.calls).unwrap_or(1.0)
    }

    /// Attempts for each call, in these seconds.
    pub fn amplification(&self, seconds: Range<usize>) -> f64 {
        let sum = self.sum(seconds);
        share(sum.attempts, sum.calls).unwrap_or(1.0)
    }

    /// The share of the servers' work in these seconds that nobody waited for.
    pub fn waste(&self, seconds: Range<usize>) -> f64 {
        let sum = self.sum(seconds);
        share(sum.wasted, sum.worked).unwrap_or(0.0)
    }

    /// The first second from `from` on at which the goodput is `share` or more and stays so for as
    /// long as calls are made.
    pub fn recovers(&self, from: usize, share: f64) -> Option<usize> {
        let end = self.seconds.len().saturating_sub(1);
        let is_good = |second: &usize| self.goodput(*second..second + 1) >= share;
        let first = (from..end).rev().take_while(is_good).last();
        first.filter(|first| *first < end)
    }

    /// The sum over these seconds.
    pub fn sum(&self, seconds: Range<usize>) -> Second {
        let end = seconds.end.min(self.seconds.len());
        let mut sum = Second::default();
        for second in self.seconds.get(seconds.start..end).unwrap_or_default() {
            sum.calls += second.calls;
            sum.answered += second.answered;
            sum.refused += second.refused;
            sum.attempts += second.attempts;
            sum.shed += second.shed;
            sum.dropped += second.dropped;
            sum.worked += second.worked;
            sum.wasted += second.wasted;
        }
        sum
    }
}

fn share(part: u32, whole: u32) -> Option<f64> {
    (whole > 0).then(|| f64::from(part) / f64::from(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_is_when_it_stays_good_and_not_a_good_moment() {
        let second = |answered| Second { calls: 100, answered, ..Second::default() };
        let seconds = [100, 10, 99, 10, 96, 100, 0].map(second).to_vec();
        let report = Report { seconds, events: 0 };
        assert_eq!(report.recovers(1, 0.95), Some(4), "the last second is not looked at");
        assert_eq!(report.recovers(5, 0.95), Some(5));
        assert_eq!(report.recovers(1, 0.999), Some(5));
        assert_eq!(Report::default().recovers(0, 0.5), None);
        assert_eq!(report.goodput(7..9), 1.0, "no calls, no failures");
    }
}
