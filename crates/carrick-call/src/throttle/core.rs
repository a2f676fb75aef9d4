//! What was asked and what was accepted, lately.

use rand::{Rng, RngExt};

use super::config::ThrottleOptions;

/// Parts of the window.
const PARTS: u64 = 10;

#[derive(Debug)]
pub(super) struct Window {
    k: f64,
    most: f64,
    floor: u32,
    part: u64,
    parts: [Part; PARTS as usize],
    /// The second that the floor is counted in, and what passed in it.
    second: u64,
    passed: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Part {
    /// Which stretch of time it counts, from 1; 0 for none.
    stretch: u64,
    asked: u64,
    accepted: u64,
}

impl Window {
    pub(super) fn new(options: &ThrottleOptions) -> Self {
        let length = u64::try_from(options.window.as_millis()).unwrap_or(u64::MAX);
        Self {
            k: options.k,
            most: options.max_refused,
            floor: options.floor,
            part: (length / PARTS).max(1),
            parts: [Part::default(); PARTS as usize],
            second: 0,
            passed: 0,
        }
    }

    fn now(&mut self, millis: u64) -> &mut Part {
        let stretch = millis / self.part + 1;
        let part = &mut self.parts[(stretch % PARTS) as usize];
        if part.stretch < stretch {
            *part = Part { stretch, ..Part::default() };
        }
        part
    }

    pub(super) fn chance(&self, millis: u64) -> f64 {
        let stretch = millis / self.part + 1;
        let alive = |part: &&Part| part.stretch > 0 && part.stretch + PARTS > stretch;
        let (mut asked, mut accepted) = (0, 0);
        for part in self.parts.iter().filter(alive) {
            asked += part.asked;
            accepted += part.accepted;
        }
        let (asked, accepted) = (asked as f64, accepted as f64);
        ((asked - self.k * accepted) / (asked + 1.0)).clamp(0.0, self.most)
    }

    pub(super) fn admit(&mut self, millis: u64, rng: &mut (impl Rng + ?Sized)) -> bool {
        let chance = self.chance(millis);
        self.now(millis).asked += 1;
        let second = millis / 1000;
        if self.second != second {
            (self.second, self.passed) = (second, 0);
        }
        let passes = self.passed < self.floor || chance == 0.0 || rng.random::<f64>() >= chance;
        self.passed = self.passed.saturating_add(u32::from(passes));
        passes
    }

    pub(super) fn accepted(&mut self, millis: u64) {
        self.now(millis).accepted += 1;
    }

    /// A call that was counted and says nothing.
    pub(super) fn take_back(&mut self, millis: u64) {
        let part = self.now(millis);
        part.asked = part.asked.saturating_sub(1);
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    /// Asks so many times a second for so many seconds of a server that accepts `capacity` a second;
    /// returns what reached it and what it accepted in the last second.
    fn run(window: &mut Window, from: u64, seconds: u64, rate: u64, capacity: u64) -> (u64, u64) {
        let mut rng = SmallRng::seed_from_u64(from);
        let mut last = (0, 0);
        for second in from..from + seconds {
            last = (0, 0);
            for n in 0..rate {
                let millis = second * 1000 + n * 1000 / rate;
                if window.admit(millis, &mut rng) {
                    last.0 += 1;
                    if last.1 < capacity {
                        last.1 += 1;
                        window.accepted(millis);
                    }
                }
            }
        }
        last
    }

    #[test]
    fn while_all_is_accepted_nothing_is_refused() {
        let mut window = Window::new(&ThrottleOptions::default());
        assert_eq!(run(&mut window, 0, 300, 1000, 1000), (1000, 1000));
    }

    #[test]
    fn a_server_that_accepts_little_is_asked_about_twice_as_much() {
        let mut window = Window::new(&ThrottleOptions::default());
        let (reached, accepted) = run(&mut window, 0, 300, 1000, 300);
        assert_eq!(accepted, 300);
        assert!((500..=700).contains(&reached), "{reached}");
    }

    #[test]
    fn go_zero_3837_5011_it_lets_go_when_the_server_is_well_again() {
        let mut window = Window::new(&ThrottleOptions::default());
        let (reached, _) = run(&mut window, 0, 300, 1000, 0);
        assert!((200..=300).contains(&reached), "a quarter goes through: {reached}");
        let (reached, accepted) = run(&mut window, 300, 180, 1000, 1000);
        assert_eq!((reached, accepted), (1000, 1000));
    }

    #[test]
    fn a_few_calls_a_second_always_go_through() {
        let options = ThrottleOptions { max_refused: 1.0, ..ThrottleOptions::default() };
        let mut window = Window::new(&options);
        let (reached, _) = run(&mut window, 0, 300, 1000, 0);
        assert!((5..=10).contains(&reached), "{reached}");
    }
}
