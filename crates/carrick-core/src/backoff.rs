//! Backoff: exponential, with full jitter.
//!
//! Clients that failed together must not come back together. Full jitter draws from zero up to the
//! exponential bound, which spreads them best; adding a little jitter to a fixed delay keeps the
//! crowd together.
//!
//! Source: pattern document, retry listing.

use std::time::Duration;

use rand::{Rng, RngExt};

/// How long to wait before an attempt: `U(0, min(cap, base · 2ⁿ))`.
///
/// ```
/// # use carrick_core::backoff::Backoff;
/// # use std::time::Duration;
/// let backoff = Backoff::default();
/// let delay = backoff.delay(3, &mut rand::rng());
/// assert!(delay <= Duration::from_millis(1600));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The bound for the first retry.
    pub base: Duration,
    /// The bound that no retry exceeds.
    pub cap: Duration,
}

/// 200 ms doubling to 10 s.
impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_millis(200), cap: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// The longest delay that retry `n` (from 0) can draw.
    pub fn bound(&self, n: u32) -> Duration {
        let factor = 1_u32.checked_shl(n).unwrap_or(u32::MAX);
        self.base.saturating_mul(factor).min(self.cap)
    }

    /// A delay for retry `n` (from 0).
    pub fn delay(&self, n: u32, rng: &mut (impl Rng + ?Sized)) -> Duration {
        let bound = u64::try_from(self.bound(n).as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(rng.random_range(0..=bound))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    proptest! {
        #[test]
        fn a_delay_never_exceeds_its_bound(base in any::<u32>(), cap in any::<u32>(), n: u32, seed: u64) {
            let backoff = Backoff {
                base: Duration::from_millis(base.into()),
                cap: Duration::from_millis(cap.into()),
            };
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let delay = backoff.delay(n, &mut rng);
            prop_assert!(delay <= backoff.bound(n) && backoff.bound(n) <= backoff.cap);
        }
    }

    #[test]
    fn bounds_double_up_to_the_cap_and_stay_there() {
        let bounds: Vec<_> = [0, 1, 2, 5, 6, 31, 32, u32::MAX]
            .map(|n| Backoff::default().bound(n).as_millis())
            .into();
        assert_eq!(bounds, [200, 400, 800, 6400, 10_000, 10_000, 10_000, 10_000]);
    }

    #[test]
    fn delays_spread_over_the_whole_range() {
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let delays: Vec<_> =
            (0..1000).map(|_| Backoff::default().delay(0, &mut rng).as_millis()).collect();
        assert!(delays.iter().any(|delay| *delay < 20), "full jitter starts at zero");
        assert!(delays.iter().any(|delay| *delay > 180), "and reaches the bound");
    }
}
