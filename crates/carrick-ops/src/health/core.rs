//! Hysteresis: when a condition that moves to and fro counts as changed.

use std::time::Duration;

use tokio::time::Instant;

/// How long a condition must hold before the verdict follows it.
///
/// Zero on a side means at once. Without hysteresis one saturated moment takes an instance out of
/// rotation, its share of the load goes to the others, and they saturate next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hysteresis {
    /// Bad for this long without a break: the verdict turns bad.
    pub fail_after: Duration,
    /// Good for this long without a break: the verdict turns good again.
    pub recover_after: Duration,
}

impl Hysteresis {
    /// Follows the condition at once. For facts that do not flap: migrated, draining.
    pub const NONE: Self = Self { fail_after: Duration::ZERO, recover_after: Duration::ZERO };
}

impl Default for Hysteresis {
    /// Bad for 2 s takes out, good for 10 s puts back: quick to protect, slow to trust. Two seconds
    /// are shorter than the usual probe period of 5 s, so the next probe sees it.
    fn default() -> Self {
        Self { fail_after: Duration::from_secs(2), recover_after: Duration::from_secs(10) }
    }
}

/// A band that a level must leave before it counts: bad at or above `high`, good at or below `low`,
/// in between as it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// At or above this the level is bad.
    pub high: f64,
    /// At or below this it is good again.
    pub low: f64,
}

impl Band {
    /// Whether `level` is good, given what it was before. Not-a-number is bad: a gauge that cannot
    /// be read protects nothing.
    pub fn good(&self, level: f64, was_good: bool) -> bool {
        if level >= self.high || level.is_nan() { false } else { level <= self.low || was_good }
    }
}

/// The verdict on one condition over time.
#[derive(Clone, Debug)]
pub struct Gate {
    hysteresis: Hysteresis,
    good: bool,
    /// Since when the condition differs from the verdict, without a break.
    differs_since: Option<Instant>,
}

impl Gate {
    /// A gate that starts good or bad, without having to wait for it.
    pub fn new(hysteresis: Hysteresis, good: bool) -> Self {
        Self { hysteresis, good, differs_since: None }
    }

    /// Takes note of the condition and returns the verdict.
    pub fn observe(&mut self, now: Instant, good: bool) -> bool {
        if good == self.good {
            self.differs_since = None;
            return self.good;
        }
        let since = *self.differs_since.get_or_insert(now);
        let patience =
            if good { self.hysteresis.recover_after } else { self.hysteresis.fail_after };
        if now.saturating_duration_since(since) >= patience {
            self.good = good;
            self.differs_since = None;
        }
        self.good
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> (Gate, Instant) {
        (Gate::new(Hysteresis::default(), true), Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_dip_changes_nothing() {
        let (mut gate, start) = gate();
        assert!(gate.observe(start, false));
        assert!(gate.observe(start + Duration::from_millis(1_999), false));
        assert!(gate.observe(start + Duration::from_millis(2_000), true), "the dip ended in time");
        assert!(
            gate.observe(start + Duration::from_millis(2_001), false),
            "and the count restarts"
        );
        assert!(gate.observe(start + Duration::from_millis(4_000), false));
        assert!(!gate.observe(start + Duration::from_millis(4_001), false));
    }

    #[tokio::test(start_paused = true)]
    async fn recovery_needs_an_unbroken_good_stretch() {
        let (mut gate, start) = gate();
        gate.observe(start, false);
        assert!(!gate.observe(start + Duration::from_secs(2), false));
        assert!(!gate.observe(start + Duration::from_secs(3), true));
        assert!(!gate.observe(start + Duration::from_secs(12), false), "broke off after nine");
        assert!(!gate.observe(start + Duration::from_secs(13), true));
        assert!(!gate.observe(start + Duration::from_secs(22), true));
        assert!(gate.observe(start + Duration::from_secs(23), true));
    }

    #[test]
    fn a_fact_is_followed_at_once() {
        let now = Instant::now();
        let mut gate = Gate::new(Hysteresis::NONE, true);
        assert!(!gate.observe(now, false));
        assert!(gate.observe(now, true));
    }

    #[test]
    fn a_level_inside_the_band_stays_what_it_was() {
        let band = Band { high: 0.9, low: 0.5 };
        for (level, was_good, good) in [
            (0.0, false, true),
            (0.5, false, true),
            (0.7, true, true),
            (0.7, false, false),
            (0.9, true, false),
            (f64::NAN, true, false),
            (f64::INFINITY, true, false),
        ] {
            assert_eq!(band.good(level, was_good), good, "level {level}, was good: {was_good}");
        }
    }
}
