//! The purses: integers that change by one compare-and-swap.

#[cfg(carrick_loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(carrick_loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A whole token, in thousandths: what one retry costs.
pub(super) const WHOLE: u64 = 1000;

/// A share in thousandths.
pub(super) fn milli(share: f64) -> u64 {
    // Checked to lie in [0, 1000].
    (share * WHOLE as f64).round() as u64
}

/// Bits of the amount; the time in milliseconds has the rest, which is 34 years.
const AMOUNT_BITS: u32 = 24;

/// The most that a purse holds.
pub(super) const MAX_CAP: u32 = 16_000;

/// What recent calls earned, with a floor that time refills.
#[derive(Debug)]
pub(super) struct Purse {
    earning: u64,
    /// Tokens a second, which is thousandths a millisecond.
    floor: u64,
    cap: u64,
    /// When it was last changed, and what it held then.
    state: AtomicU64,
}

fn pack(at: u64, amount: u64) -> u64 {
    (at << AMOUNT_BITS) | amount
}

fn unpack(state: u64) -> (u64, u64) {
    (state >> AMOUNT_BITS, state & ((1 << AMOUNT_BITS) - 1))
}

impl Purse {
    /// A purse that starts with what its floor brings in a second.
    pub(super) fn new(earning: u64, floor: u32, cap: u32) -> Self {
        let (floor, cap) = (u64::from(floor), u64::from(cap) * WHOLE);
        Self { earning, floor, cap, state: AtomicU64::new(pack(0, cap.min(floor * WHOLE))) }
    }

    /// Whether another deposit changes nothing, whatever the time: as it mostly is.
    pub(super) fn is_full(&self) -> bool {
        unpack(self.state.load(Ordering::Relaxed)).1 == self.cap
    }

    pub(super) fn deposit(&self, now: u64) {
        self.change(now, |amount| Some((amount + self.earning).min(self.cap)));
    }

    pub(super) fn withdraw(&self, now: u64) -> bool {
        self.change(now, |amount| amount.checked_sub(WHOLE))
    }

    pub(super) fn balance(&self, now: u64) -> u64 {
        let (at, amount) = unpack(self.state.load(Ordering::Relaxed));
        self.refilled(at, amount, now)
    }

    fn refilled(&self, at: u64, amount: u64, now: u64) -> u64 {
        let earned = now.saturating_sub(at).saturating_mul(self.floor);
        amount.saturating_add(earned).min(self.cap)
    }

    fn change(&self, now: u64, to: impl Fn(u64) -> Option<u64>) -> bool {
        let now = now.min(u64::MAX >> AMOUNT_BITS); // what is packed, and no more
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let (at, held) = unpack(state);
            let Some(next) = to(self.refilled(at, held, now)) else { return false };
            let next = pack(at.max(now), next);
            match self.state.compare_exchange_weak(
                state,
                next,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(other) => state = other,
            }
        }
    }
}

/// Calls and retries in flight.
#[derive(Debug)]
pub(super) struct Flying {
    calls: AtomicU64,
    retries: AtomicU64,
}

impl Default for Flying {
    fn default() -> Self {
        Self { calls: AtomicU64::new(0), retries: AtomicU64::new(0) }
    }
}

impl Flying {
    pub(super) fn enter(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leave(&self) {
        self.calls.fetch_sub(1, Ordering::Relaxed);
    }

    fn most(&self, share: u64, floor: u64) -> u64 {
        (self.calls.load(Ordering::Relaxed).saturating_mul(share) / WHOLE).max(floor)
    }

    pub(super) fn withdraw(&self, share: u64, floor: u64) -> bool {
        let most = self.most(share, floor);
        let one_more = |retries| (retries < most).then_some(retries + 1);
        self.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    pub(super) fn end_retry(&self) {
        self.retries.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn left(&self, share: u64, floor: u64) -> u64 {
        self.most(share, floor).saturating_sub(self.retries.load(Ordering::Relaxed))
    }
}

/// gRPC's tokens: a failure takes one, a success brings a part of one, and at half there are no
/// retries.
#[derive(Debug)]
pub(super) struct Tokens {
    cap: u64,
    earning: u64,
    held: AtomicU64,
}

impl Tokens {
    pub(super) fn new(cap: u32, earning: u64) -> Self {
        let cap = u64::from(cap) * WHOLE;
        Self { cap, earning, held: AtomicU64::new(cap) }
    }

    pub(super) fn succeeded(&self) {
        if self.held.load(Ordering::Relaxed) < self.cap {
            self.change(|held| (held + self.earning).min(self.cap));
        }
    }

    pub(super) fn failed(&self) {
        self.change(|held| held.saturating_sub(WHOLE));
    }

    fn change(&self, to: impl Fn(u64) -> u64) {
        // It cannot fail: there is always a next value.
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| Some(to(held))).ok();
    }

    pub(super) fn may_retry(&self) -> bool {
        self.held.load(Ordering::Relaxed) > self.cap / 2
    }

    pub(super) fn retries_left(&self) -> u64 {
        self.held.load(Ordering::Relaxed).saturating_sub(self.cap / 2).div_ceil(WHOLE)
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ten_earnings_of_a_tenth_are_one_retry() {
        let purse = Purse::new(100, 0, 100);
        assert!(!purse.withdraw(0), "without a floor it starts empty");
        (0..9).for_each(|_| purse.deposit(0));
        assert!(!purse.withdraw(0));
        purse.deposit(0);
        assert!(purse.withdraw(0) && !purse.withdraw(0));
    }

    #[test]
    fn a_quiet_client_may_retry_its_first_calls_and_the_floor_comes_back_with_time() {
        let purse = Purse::new(100, 10, 100);
        assert_eq!((0..20).filter(|_| purse.withdraw(0)).count(), 10);
        assert!(!purse.withdraw(99) && purse.withdraw(100), "one in a tenth of a second");
        assert_eq!(purse.balance(1_000_000), 100 * WHOLE, "never more than the cap");
    }

    #[test]
    fn a_clock_that_is_behind_refills_nothing_twice() {
        let purse = Purse::new(0, 10, 100);
        (0..10).for_each(|_| assert!(purse.withdraw(0)));
        assert!(purse.withdraw(100));
        assert!(!purse.withdraw(50), "an older caller");
        assert!(!purse.withdraw(150) && purse.withdraw(200));
    }

    #[test]
    fn a_time_beyond_what_is_packed_is_the_last_there_is() {
        let purse = Purse::new(0, 10, 100);
        assert!(purse.withdraw(u64::MAX));
        assert_eq!((0..1000).filter(|_| purse.withdraw(u64::MAX)).count(), 99);
    }

    #[test]
    fn envoy_mobile_811_the_default_does_not_shrink_as_errors_speed_up() {
        let purse = Purse::new(100, 10, 100);
        (0..10_000).for_each(|_| purse.deposit(0));
        // All calls fail at once, so that none is in flight: what was earned is there all the same.
        assert_eq!((0..1000).filter(|_| purse.withdraw(0)).count(), 100);
        let flying = Flying::default();
        assert_eq!((0..1000).filter(|_| flying.withdraw(200, 3)).count(), 3);
    }

    #[test]
    fn retries_in_flight_are_a_share_of_calls_in_flight() {
        let flying = Flying::default();
        (0..50).for_each(|_| flying.enter());
        assert_eq!((0..100).filter(|_| flying.withdraw(200, 3)).count(), 10);
        flying.end_retry();
        assert!(flying.withdraw(200, 3) && !flying.withdraw(200, 3));
        (0..50).for_each(|_| flying.leave());
        assert_eq!(flying.left(200, 3), 0);
    }

    #[test]
    fn grpc_tokens_stop_at_half_and_come_back_by_successes() {
        let tokens = Tokens::new(10, 100);
        (0..4).for_each(|_| tokens.failed());
        assert!(tokens.may_retry());
        tokens.failed();
        assert!(!tokens.may_retry(), "five of ten is half");
        (0..20).for_each(|_| tokens.failed());
        (0..50).for_each(|_| tokens.succeeded());
        assert!(!tokens.may_retry());
        tokens.succeeded();
        assert!(tokens.may_retry());
    }

    proptest! {
        /// Against arithmetic without packing.
        #[test]
        fn a_purse_is_what_was_put_in_less_what_was_taken(
            earning in 0..=1000_u64,
            floor in 0..50_u32,
            cap in 1..200_u32,
            steps in prop::collection::vec((0..500_u64, any::<bool>()), 0..200),
        ) {
            let purse = Purse::new(earning, floor, cap);
            let cap = u64::from(cap) * WHOLE;
            let (mut held, mut now) = (cap.min(u64::from(floor) * WHOLE), 0);
            for (wait, takes) in steps {
                now += wait;
                held = (held + wait * u64::from(floor)).min(cap);
                if takes {
                    let pays = held >= WHOLE;
                    prop_assert_eq!(purse.withdraw(now), pays);
                    held -= if pays { WHOLE } else { 0 };
                } else {
                    prop_assert!(!purse.is_full() || held == cap, "full, and a deposit would count");
                    purse.deposit(now);
                    held = (held + earning).min(cap);
                }
                prop_assert_eq!(purse.balance(now), held);
            }
        }
    }
}

#[cfg(all(test, carrick_loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn loom_two_callers_cannot_spend_one_coin() {
        loom::model(|| {
            let purse = Arc::new(Purse::new(1000, 0, 2));
            purse.deposit(0);
            let other = Arc::clone(&purse);
            let there = thread::spawn(move || other.withdraw(0));
            let here = purse.withdraw(0);
            assert!(here ^ there.join().unwrap());
            assert_eq!(purse.balance(0), 0);
        });
    }

    #[test]
    fn loom_no_earning_is_lost() {
        loom::model(|| {
            let purse = Arc::new(Purse::new(400, 0, 2));
            let other = Arc::clone(&purse);
            let there = thread::spawn(move || other.deposit(0));
            purse.deposit(0);
            there.join().unwrap();
            assert_eq!(purse.balance(0), 800);
        });
    }

    #[test]
    fn loom_no_more_retries_fly_than_may() {
        loom::model(|| {
            let flying = Arc::new(Flying::default());
            let other = Arc::clone(&flying);
            let there = thread::spawn(move || other.withdraw(0, 1));
            let here = flying.withdraw(0, 1);
            assert!(here ^ there.join().unwrap());
        });
    }
}
