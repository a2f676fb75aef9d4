//! Who is drawn, and who of two is better.

use std::{cmp::Reverse, time::Duration};

use rand::Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{BalanceOptions, Strategy};

/// How much better the second host must be to be taken before the first. Below that the draw decides,
/// which is what gives hosts that are about as good their shares by weight.
const CLEARLY: f32 = 1.25;

/// The cost, in seconds, of a call under way to a host that never answered one: more than any host
/// that did.
const NEVER_ANSWERED: f32 = 1e6;

/// The share that a new host starts with.
const FLOOR: f32 = 0.1;

/// Draws places in proportion to their weights.
#[derive(Debug)]
pub(super) struct Wheel {
    /// Where each place's part ends. Weights are 16 bits and places at most 10 000, so 32 bits do.
    ends: Box<[u32]>,
    even: bool,
}

impl Wheel {
    pub(super) fn new(weights: impl Iterator<Item = u16> + Clone) -> Self {
        let mut end = 0u32;
        let add = |weight| {
            end = end.saturating_add(u32::from(weight));
            end
        };
        let first = weights.clone().next();
        Self {
            even: weights.clone().all(|weight| Some(weight) == first),
            ends: weights.map(add).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn total(&self) -> u32 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Draws a usable place other than `other`; `None` if there is none.
    pub(super) fn draw(
        &self,
        rng: &mut (impl Rng + ?Sized),
        other: Option<usize>,
        usable: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let left = self.total() - other.map_or(0, |other| self.weight(other));
        if left == 0 {
            return None;
        }
        // Drawing again what cannot be used is exact and mostly enough.
        for _ in 0..4 {
            let place = self.any(rng, other, left);
            if usable(place) {
                return Some(place);
            }
        }
        let may =
            |place: &usize| Some(*place) != other && self.weight(*place) > 0 && usable(*place);
        let rest = || (0..self.len()).filter(may);
        let mut point = below(rng, rest().map(|place| self.weight(place)).sum());
        // What is usable may change between the two passes: then the last that was is taken.
        let mut last = None;
        for place in rest() {
            last = Some(place);
            match point.checked_sub(self.weight(place)) {
                Some(left) => point = left,
                None => break,
            }
        }
        last
    }

    fn weight(&self, place: usize) -> u32 {
        self.ends[place] - self.start(place)
    }

    fn start(&self, place: usize) -> u32 {
        if place == 0 { 0 } else { self.ends[place - 1] }
    }

    fn any(&self, rng: &mut (impl Rng + ?Sized), other: Option<usize>, left: u32) -> usize {
        if self.even {
            let drawn = below(rng, (self.len() - usize::from(other.is_some())) as u32) as usize;
            return drawn + usize::from(other.is_some_and(|other| drawn >= other));
        }
        let mut point = below(rng, left);
        // The part of `other` is cut out of the wheel.
        if let Some(other) = other
            && point >= self.start(other)
        {
            point += self.weight(other);
        }
        self.ends.partition_point(|end| *end <= point)
    }
}

/// A number in `[0, bound)`, or 0: one multiplication, off by less than a weight in four milliards.
fn below(rng: &mut (impl Rng + ?Sized), bound: u32) -> u32 {
    ((u64::from(rng.next_u32()) * u64::from(bound)) >> 32) as u32
}

/// What is known of a host that was drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Expected seconds; `None` if it never answered.
    pub(super) latency: Option<f32>,
    pub(super) pending: u32,
    /// Its weight as a multiple of the mean.
    pub(super) weight: f32,
    /// Its share of its weight while it starts, in (0, 1].
    pub(super) warmth: f32,
}

impl Seen {
    /// What one more call to it costs.
    ///
    /// The weight divides the calls under way and not the whole: else a host of little weight would
    /// get nothing while there is little to do, however low the others' weights are too.
    pub(super) fn cost(&self, options: &BalanceOptions) -> f32 {
        let load = self.pending as f32 / (self.weight * self.warmth) + 1.0;
        match (options.strategy, self.latency) {
            (Strategy::PeakEwma, Some(latency)) => latency * load,
            (Strategy::PeakEwma, None) => (load - 1.0) * NEVER_ANSWERED,
            (Strategy::LeastRequest, _) if options.bias == 1.0 => load,
            (Strategy::LeastRequest, _) => load.powf(options.bias as f32),
        }
    }
}

/// Whether the second host is taken and not the first.
pub(super) fn second_is_better(
    options: &BalanceOptions,
    rng: &mut (impl Rng + ?Sized),
    first: Seen,
    second: Seen,
) -> bool {
    let cheaper = second.cost(options) * CLEARLY < first.cost(options);
    if first.warmth >= 1.0 && second.warmth >= 1.0 {
        return cheaper;
    }
    // A host that starts steps aside in proportion, for the other that was drawn and not for nobody:
    // where both step aside, or there is one only, it is as if they were warm.
    let mut stays = |seen: Seen| (below(rng, 1 << 24) as f32) < seen.warmth * (1 << 24) as f32;
    match (stays(first), stays(second)) {
        (true, false) => false,
        (false, true) => true,
        _ => cheaper,
    }
}

/// A new host's share of its weight after `age`.
pub(super) fn warmth(slow_start: Duration, age: Duration) -> f32 {
    if age >= slow_start { 1.0 } else { (age.as_secs_f32() / slow_start.as_secs_f32()).max(FLOOR) }
}

/// The seconds that a call counts as, given how long it took and that it failed.
pub(super) fn penalty(
    options: &BalanceOptions,
    elapsed: Duration,
    retry_after: Option<Duration>,
) -> Duration {
    // Who says "in an hour" is not believed beyond the longest penalty that can be set.
    let asked = retry_after.unwrap_or_default().min(Duration::from_secs(600));
    elapsed.max(options.failure_penalty).max(asked)
}

/// The middle one of the latencies of hosts that have answered.
pub(super) fn median(mut latencies: Vec<f32>) -> Option<f32> {
    latencies.sort_by(f32::total_cmp);
    latencies.get(latencies.len().checked_sub(1)? / 2).copied()
}

/// Keeps the `subset` of hosts that this client ranks highest (rendezvous hashing): a host that comes
/// or goes changes one place of some clients' subsets, and nothing of the others'. The hash is part
/// of the behaviour: clients of two versions must spread alike.
pub(super) fn keep_subset<T>(
    hosts: &mut Vec<T>,
    subset: usize,
    client_id: &str,
    address: impl Fn(&T) -> &str,
) {
    if hosts.len() <= subset {
        return;
    }
    let seed = xxh3_64_with_seed(client_id.as_bytes(), 0);
    hosts.sort_by_cached_key(|host| Reverse(xxh3_64_with_seed(address(host).as_bytes(), seed)));
    hosts.truncate(subset);
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    use super::{Strategy, *};

    /// Chi-square of drawing from these weights; its 99.9 % limit for up to 9 degrees is 27.9.
    #[track_caller]
    fn check_shares(weights: &[u16], usable: impl Fn(usize) -> bool) {
        let wheel = Wheel::new(weights.iter().copied());
        let mut rng = SmallRng::seed_from_u64(5);
        let mut drawn = vec![0u32; weights.len()];
        for _ in 0..100_000 {
            drawn[wheel.draw(&mut rng, None, &usable).unwrap()] += 1;
        }
        let weight = |n: usize| if usable(n) { f64::from(weights[n]) } else { 0.0 };
        let total: f64 = (0..weights.len()).map(weight).sum();
        let chi: f64 = drawn
            .iter()
            .enumerate()
            .map(|(n, drawn)| {
                let expected = weight(n) / total * 100_000.0;
                if expected == 0.0 {
                    assert_eq!(*drawn, 0, "a share of nothing");
                    return 0.0;
                }
                (f64::from(*drawn) - expected).powi(2) / expected
            })
            .sum();
        assert!(chi < 27.9, "{weights:?}: {drawn:?}, {chi}");
    }

    #[test]
    fn emissary_1605_ingress_nginx_3461_seldon_4067_shares_are_the_weights_and_zero_is_none() {
        check_shares(&[1; 10], |_| true);
        check_shares(&[1, 2, 3, 4], |_| true);
        check_shares(&[1, 99], |_| true);
        check_shares(&[0, 5, 0, 5, 90], |_| true);
        check_shares(&[50, 50], |_| true);
        check_shares(&[1, 2, 3, 4, 5], |n| n > 2);
        check_shares(&[1, 1, 1, 1, 1, 1, 1, 1], |n| n == 2 || n == 7);
    }

    fn seen(latency: impl Into<Option<f32>>, pending: u32) -> Seen {
        Seen { latency: latency.into(), pending, weight: 1.0, warmth: 1.0 }
    }

    #[track_caller]
    fn check(first: Seen, second: Seen, expected: bool) {
        let (options, mut rng) = (BalanceOptions::default(), SmallRng::seed_from_u64(1));
        let found = second_is_better(&options, &mut rng, first, second);
        assert_eq!(found, expected, "{first:?} {second:?}");
    }

    #[test]
    fn the_second_is_taken_only_if_it_is_clearly_better() {
        check(seen(0.1, 0), seen(0.1, 0), false);
        check(seen(0.1, 0), seen(0.09, 0), false);
        check(seen(0.1, 0), seen(0.05, 0), true);
        check(seen(0.1, 1), seen(0.1, 0), true);
        check(seen(0.1, 3), seen(0.5, 0), false);
        check(seen(None, 0), seen(0.01, 0), false);
        check(seen(None, 1), seen(5.0, 9), true);
        check(seen(None, 1), seen(None, 0), true);
        check(Seen { weight: 4.0, ..seen(0.1, 4) }, seen(0.1, 1), false);
        check(Seen { weight: 0.1, ..seen(0.1, 1) }, seen(0.1, 1), true);
    }

    #[test]
    fn a_bias_of_nothing_is_by_weight_alone() {
        let options = |bias| BalanceOptions {
            strategy: Strategy::LeastRequest,
            bias,
            ..BalanceOptions::default()
        };
        assert_eq!(seen(9.0, 7).cost(&options(0.0)), 1.0);
        assert_eq!(seen(9.0, 7).cost(&options(1.0)), 8.0);
        assert_eq!(seen(9.0, 7).cost(&options(2.0)), 64.0);
    }

    #[test]
    fn a_host_that_starts_gets_its_part_of_its_share() {
        let (options, mut rng) = (BalanceOptions::default(), SmallRng::seed_from_u64(1));
        let cold = Seen { warmth: 0.1, ..seen(0.1, 0) };
        let mut taken = 0;
        for _ in 0..10_000 {
            taken += u32::from(!second_is_better(&options, &mut rng, cold, seen(0.1, 0)));
        }
        assert!((800..1200).contains(&taken), "{taken}");
        assert_eq!(warmth(Duration::from_secs(10), Duration::ZERO), 0.1);
        assert_eq!(warmth(Duration::from_secs(10), Duration::from_secs(5)), 0.5);
        assert_eq!(warmth(Duration::ZERO, Duration::ZERO), 1.0);
    }

    #[test]
    fn a_host_that_comes_changes_at_most_one_place_of_a_subset() {
        let subset = |hosts: u32, client: &str| -> HashSet<String> {
            let mut hosts: Vec<_> = (0..hosts).map(|n| format!("10.0.0.{n}:80")).collect();
            keep_subset(&mut hosts, 20, client, |host| host);
            hosts.into_iter().collect()
        };
        let mut load = [0; 100];
        for client in 0..200 {
            let client = format!("client-{client}");
            assert!(subset(100, &client).difference(&subset(101, &client)).count() <= 1);
            for (n, load) in load.iter_mut().enumerate() {
                *load += u32::from(subset(100, &client).contains(&format!("10.0.0.{n}:80")));
            }
        }
        assert!(load.iter().all(|load| (15..=70).contains(load)), "{load:?}");
        assert_eq!(subset(7, "any").len(), 7);
    }

    proptest! {
        #[test]
        fn a_draw_is_usable_and_not_the_other_and_fails_only_if_there_is_none(
            hosts in prop::collection::vec((0..3u16, any::<bool>()), 0..12),
            other in prop::option::of(0..12usize),
            seed: u64,
        ) {
            let wheel = Wheel::new(hosts.iter().map(|(weight, _)| *weight));
            let other = other.filter(|other| *other < hosts.len());
            let may = |n: usize| hosts[n].0 > 0 && hosts[n].1 && Some(n) != other;
            let mut rng = SmallRng::seed_from_u64(seed);
            match wheel.draw(&mut rng, other, |n| hosts[n].1) {
                Some(n) => prop_assert!(may(n)),
                None => prop_assert!(!(0..hosts.len()).any(may)),
            }
        }
    }
}
