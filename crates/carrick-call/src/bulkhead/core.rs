//! Limits that adapt.

use std::time::Duration;

use carrick_core::outcome::Outcome;
use tokio::time::Instant;

use super::config::{AimdOptions, GradientOptions, LimitOptions};

/// Calls shorter than this tell more of the clock than of the dependency.
const TOO_SHORT: Duration = Duration::from_micros(100);

/// What a call teaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It took so long, and did what it should.
    Took(Duration),
    /// It was too much.
    Dropped,
}

impl Ended {
    /// What a call teaches, if anything.
    pub(super) fn of(outcome: Outcome, elapsed: Duration) -> Option<Self> {
        match outcome {
            Outcome::Success | Outcome::Permanent => {
                (elapsed >= TOO_SHORT).then_some(Self::Took(elapsed))
            }
            Outcome::Overload { .. } | Outcome::Expired => Some(Self::Dropped),
            // A quick failure says nothing of how much is too much.
            Outcome::Transient | Outcome::Rejected | Outcome::Cancelled => None,
        }
    }
}

/// A limit that learns.
#[derive(Debug)]
pub(super) enum Adaptive {
    Aimd(AimdOptions, f64),
    Gradient(Gradient),
}

impl Adaptive {
    pub(super) fn new(options: &LimitOptions) -> Option<Self> {
        match options {
            LimitOptions::Fixed => None,
            LimitOptions::Aimd(options) => {
                Some(Self::Aimd(options.clone(), f64::from(options.start)))
            }
            LimitOptions::Gradient(options) => Some(Self::Gradient(Gradient::new(options.clone()))),
        }
    }

    pub(super) fn limit(&self) -> u32 {
        match self {
            Self::Aimd(_, limit) => *limit as u32,
            Self::Gradient(gradient) => gradient.limit(),
        }
    }

    /// Learns from a call; `with` were under way when it began.
    pub(super) fn learn(&mut self, ended: Ended, with: u32, now: Instant) {
        match self {
            Self::Aimd(options, limit) => {
                let is_used = f64::from(with) * 2.0 >= *limit;
                *limit = match ended {
                    Ended::Dropped => *limit * options.decrease,
                    Ended::Took(took) if took > options.timeout => *limit * options.decrease,
                    Ended::Took(_) if is_used => *limit + 1.0 / *limit,
                    Ended::Took(_) => *limit,
                }
                .clamp(f64::from(options.min), f64::from(options.max));
            }
            Self::Gradient(gradient) => gradient.learn(ended, with, now),
        }
    }
}

/// Follows latency: the limit times the best latency over the present one, plus room for a queue.
#[derive(Debug)]
pub(super) struct Gradient {
    options: GradientOptions,
    limit: f64,
    /// The best latency, and when it is to be measured anew.
    best: Option<Duration>,
    again_at: Option<Instant>,
    /// Measuring the best latency now, with few calls at a time.
    probing: bool,
    samples: Vec<Duration>,
    dropped: usize,
    /// Whether enough calls were under way for the limit to matter.
    is_used: bool,
    window_ends: Option<Instant>,
}

/// Samples that a window keeps: enough for its median.
const SAMPLES: usize = 1000;

impl Gradient {
    fn new(options: GradientOptions) -> Self {
        let limit = f64::from(options.start);
        Self {
            options,
            limit,
            best: None,
            again_at: None,
            probing: true,
            samples: Vec::new(),
            dropped: 0,
            is_used: false,
            window_ends: None,
        }
    }

    fn limit(&self) -> u32 {
        let limit = self.limit as u32;
        // A probe is for looking, and never lets more through than before it.
        if self.probing && self.best.is_some() { limit.min(self.options.probe) } else { limit }
    }

    fn learn(&mut self, ended: Ended, with: u32, now: Instant) {
        let window = self.options.window;
        let ends = *self.window_ends.get_or_insert(now + window);
        match ended {
            Ended::Took(took) if self.samples.len() < SAMPLES => self.samples.push(took),
            Ended::Took(_) => {}
            Ended::Dropped => self.dropped += 1,
        }
        self.is_used |= with * 2 >= self.limit();
        if now < ends || self.samples.len() + self.dropped < self.options.min_samples {
            return;
        }
        self.samples.sort_unstable();
        let middle = self.samples.get(self.samples.len() / 2).copied();
        self.end_window(middle, now);
        self.samples.clear();
        self.dropped = 0;
        self.is_used = false;
        self.window_ends = Some(now + window);
    }

    fn end_window(&mut self, middle: Option<Duration>, now: Instant) {
        let (least, most) = (f64::from(self.options.min), f64::from(self.options.max));
        let Some(middle) = middle else {
            self.limit = (self.limit * 0.5).max(least); // all of them were too much
            return;
        };
        let Some(best) = self.best.filter(|_| !self.probing) else {
            self.best = Some(middle);
            self.probing = false;
            self.again_at = Some(now + self.options.probe_every);
            return;
        };
        if self.again_at.is_some_and(|at| now >= at) {
            self.probing = true;
            return;
        }
        let allowed = best.as_secs_f64() * (1.0 + self.options.tolerance);
        let gradient = (allowed / middle.as_secs_f64()).clamp(0.5, 2.0);
        let share = self.dropped as f64 / (self.dropped + self.samples.len()) as f64;
        let next =
            if share > 0.1 { self.limit * 0.9 } else { gradient * self.limit + self.limit.sqrt() };
        // Who does not use the limit does not know whether more would be well.
        let next = if next > self.limit && !self.is_used { self.limit } else { next };
        self.limit = next.clamp(least, most);
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn aimd() -> Adaptive {
        Adaptive::new(&LimitOptions::Aimd(AimdOptions::default())).unwrap()
    }

    #[test]
    fn what_teaches_nothing_is_left_out() {
        for outcome in [Outcome::Transient, Outcome::Rejected, Outcome::Cancelled] {
            assert_eq!(Ended::of(outcome, MS), None);
        }
        assert_eq!(Ended::of(Outcome::Success, Duration::from_micros(99)), None);
        assert_eq!(Ended::of(Outcome::Success, MS), Some(Ended::Took(MS)));
        assert_eq!(Ended::of(Outcome::Expired, MS), Some(Ended::Dropped));
    }

    #[test]
    fn aimd_grows_by_one_a_round_if_it_is_used_and_is_cut_by_a_tenth() {
        let (mut limit, now) = (aimd(), Instant::now());
        let start = limit.limit();
        (0..1000).for_each(|_| limit.learn(Ended::Took(MS), start / 2 - 1, now));
        assert_eq!(limit.limit(), start, "half of it is not used");
        (0..start + 1).for_each(|_| limit.learn(Ended::Took(MS), start, now));
        assert_eq!(limit.limit(), start + 1);
        limit.learn(Ended::Dropped, start, now);
        assert_eq!(limit.limit(), ((f64::from(start) + 1.0) * 0.9) as u32);
        (0..1000).for_each(|_| limit.learn(Ended::Dropped, start, now));
        assert_eq!(limit.limit(), AimdOptions::default().min);
    }

    /// A dependency with so many workers, each of which takes ten milliseconds.
    fn run(gradient: &mut Adaptive, workers: u32, start: Instant, windows: u32) -> Instant {
        let mut now = start;
        for _ in 0..windows * 20 {
            now += 5 * MS;
            let with = gradient.limit();
            let took = 10 * MS * with.max(workers) / workers;
            (0..20).for_each(|_| gradient.learn(Ended::Took(took), with, now));
        }
        now
    }

    #[test]
    fn a_gradient_finds_about_what_the_dependency_can_do_and_follows_it() {
        let options = GradientOptions::default();
        let mut gradient = Adaptive::new(&LimitOptions::Gradient(options)).unwrap();
        let now = run(&mut gradient, 50, Instant::now(), 60);
        let found = gradient.limit();
        assert!((50..=120).contains(&found), "{found}");
        run(&mut gradient, 10, now, 60);
        assert!(gradient.limit() < found / 2, "{}", gradient.limit());
    }

    #[test]
    fn envoy_46532_38338_a_probe_looks_with_few_and_never_raises_the_limit() {
        let options = GradientOptions { probe: 20, start: 8, ..GradientOptions::default() };
        let every = options.probe_every;
        let mut gradient = Gradient::new(options);
        let mut now = Instant::now();
        let window = |gradient: &mut Gradient, now: &mut Instant| {
            *now += Duration::from_millis(100);
            (0..100).for_each(|_| gradient.learn(Ended::Took(10 * MS), 1, *now));
        };
        window(&mut gradient, &mut now);
        window(&mut gradient, &mut now);
        let before = gradient.limit();
        now += every;
        window(&mut gradient, &mut now);
        assert!(gradient.probing);
        assert_eq!(gradient.limit(), before.min(20), "eight stay eight");
    }

    proptest! {
        #[test]
        fn a_limit_stays_in_its_bounds(
            steps in prop::collection::vec((0..3_u8, 1..5000_u64, 1..2000_u32), 1..300),
            is_gradient: bool,
        ) {
            let options = if is_gradient {
                LimitOptions::Gradient(GradientOptions { min_samples: 1, ..Default::default() })
            } else {
                LimitOptions::Aimd(AimdOptions::default())
            };
            let mut limit = Adaptive::new(&options).unwrap();
            let mut now = Instant::now();
            for (what, millis, with) in steps {
                now += MS * millis as u32;
                let ended = if what == 0 { Ended::Dropped } else { Ended::Took(MS * millis as u32) };
                limit.learn(ended, with, now);
                prop_assert!((1..=1000).contains(&limit.limit()), "{}", limit.limit());
            }
        }
    }
}
