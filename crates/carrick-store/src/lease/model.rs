//! A group's decisions against an observer who knows the rules: whatever happens, the order of keys
//! and the leases hold, nothing is lost, and a copy that follows the changes is at the same point.

use std::{collections::BTreeSet, sync::Arc};

use proptest::prelude::*;

use super::{
    Settle,
    core::{Item, Micros, New, Place, State, WAITING},
};
use crate::log::Seq;

/// What happens to a group, step by step.
#[derive(Clone, Debug)]
enum Step {
    Append { key: u8, due: Option<u8>, expires: Option<u8>, size: u8 },
    Claim { records: usize, bytes: usize, lease: u8 },
    Settle { which: usize, what: u8, delay: u8 },
    Redrive,
    Skip,
    Wait(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    let soon = || proptest::option::weighted(0.2, any::<u8>());
    prop_oneof![
        4 => (0..5_u8, soon(), soon(), any::<u8>())
            .prop_map(|(key, due, expires, size)| Step::Append { key, due, expires, size }),
        3 => (1..6_usize, 0..600_usize, 1..50_u8)
            .prop_map(|(records, bytes, lease)| Step::Claim { records, bytes, lease }),
        6 => (any::<usize>(), 0..8_u8, any::<u8>())
            .prop_map(|(which, what, delay)| Step::Settle { which, what, delay }),
        1 => Just(Step::Redrive),
        1 => Just(Step::Skip),
        2 => any::<u8>().prop_map(Step::Wait),
    ]
}

/// A group, a copy that follows its changes, and what an observer knows.
#[derive(Default)]
struct World {
    state: State,
    copy: State,
    now: Micros,
    log: Vec<New>,
    held: Vec<(Seq, u64)>,
    dead: Vec<Seq>,
    finished: BTreeSet<Seq>,
    fence: u64,
}

impl World {
    fn key(&self, seq: Seq) -> Option<&Arc<str>> {
        self.log[seq as usize - 1].key.as_ref()
    }

    fn step(&mut self, step: &Step) {
        self.state.advance(self.now);
        match *step {
            Step::Append { key, due, expires, size } => self.log.push(New {
                seq: self.log.len() as u64 + 1,
                key: (key > 0).then(|| Arc::from(key.to_string())),
                due: due.map(|at| self.now + i64::from(at) * 100),
                expires: expires.map(|at| self.now + i64::from(at) * 100),
                stored: self.now,
                size: size.into(),
            }),
            Step::Claim { records, bytes, lease } => {
                self.claim(records, bytes, i64::from(lease) * 100);
            }
            Step::Settle { which, what, delay } if !self.held.is_empty() => {
                let which = which % self.held.len();
                self.settle(which, what, delay);
            }
            Step::Redrive => {
                if let Some(seq) = self.dead.pop() {
                    self.state.redrive(self.log[seq as usize - 1].clone());
                }
            }
            Step::Skip => {
                let waits = |item: &Item| matches!(item.place, Place::Waiting(_));
                let head = self.state.blocked(0).find(|(_, _, item, _)| waits(item));
                if let Some(seq) = head.map(|(seq, ..)| seq) {
                    self.dead.push(self.state.bury(seq, "skipped").seq);
                }
            }
            Step::Wait(time) => self.now += i64::from(time) * 100,
            Step::Settle { .. } => {}
        }
        if let Some(change) = self.state.take_change() {
            self.copy.apply(change, self.state.now());
        }
        self.copy.advance(self.state.now());
        assert_eq!(self.copy.whole(), self.state.whole());
        assert_eq!(self.copy.has_ready(), self.state.has_ready());
        assert_eq!(self.copy.next_timer(), self.state.next_timer());
        assert_eq!(self.copy.leased(), self.state.leased());
        let leased = |item: &&Item| matches!(item.place, Place::Leased(_));
        assert_eq!(self.state.items().values().filter(leased).count(), self.state.leased());
    }

    fn claim(&mut self, records: usize, bytes: usize, lease: Micros) {
        let before = self.state.whole().put;
        let mut filling = self.state.claim(records, bytes, lease);
        let cursor = self.state.cursor() as usize;
        let unseen = self.log[cursor..].to_vec();
        for new in unseen {
            if filling.room().0 == 0 || !self.state.offer(new, &mut filling) {
                break;
            }
        }
        let taken = &filling.taken;
        assert!(taken.len() <= records);
        let size: usize = taken.iter().map(|&seq| self.log[seq as usize - 1].size as usize).sum();
        let first = taken.first().map_or(0, |&seq| self.log[seq as usize - 1].size as usize);
        assert!(size <= bytes.max(first), "{size} bytes, {bytes} asked for");
        if !taken.is_empty() {
            assert!(filling.fence > self.fence, "a fence only grows");
            self.fence = filling.fence;
        }
        for &seq in taken {
            assert!(!self.finished.contains(&seq), "{seq} was finished before");
            let new = &self.log[seq as usize - 1];
            assert!(new.expires.is_none_or(|at| at > self.state.now()));
            assert!(
                new.due.is_none_or(|at| at <= self.state.now())
                    || before.iter().any(|(one, _)| *one == seq)
            );
            // Nobody else has it, nor a record of its key.
            for (other, item) in &before {
                let same = *other == seq || (new.key.is_some() && item.key == new.key);
                assert!(!same || matches!(item.place, Place::Waiting(_)), "{seq} and {other}");
            }
            // Everything unfinished before it in its key is in this claim too.
            for (other, item) in self.state.items().range(..seq) {
                let same = new.key.is_some() && item.key == new.key;
                assert!(!same || taken.contains(other), "{seq} before {other}");
            }
        }
        self.held.extend(taken.iter().map(|&seq| (seq, filling.fence)));
    }

    fn settle(&mut self, which: usize, what: u8, delay: u8) {
        let (seq, fence) = self.held[which];
        let item = self.state.items().get(&seq).cloned();
        let live = item.as_ref().is_some_and(|item| {
            item.fence == fence && matches!(item.place, Place::Leased(at) if at > self.state.now())
        });
        let delay = std::time::Duration::from_micros(u64::from(delay) * 100);
        let settle = match what {
            0..=3 => Settle::Ack,
            4 => Settle::Release { delay, counted: true },
            5 => Settle::Release { delay, counted: false },
            6 => Settle::Extend { lease: delay + std::time::Duration::from_millis(1) },
            _ => Settle::Bury { cause: "é".repeat(3000) },
        };
        let before = self.state.whole();
        let settled = self.state.settle(seq, fence, &settle);
        assert_eq!(settled.is_some(), live, "a token is good exactly while its lease holds");
        if !live {
            assert_eq!(self.state.whole(), before, "a stale token changes nothing");
            return;
        }
        match settle {
            Settle::Ack => {
                self.finished.insert(seq);
            }
            Settle::Bury { .. } => {
                let buried = settled.flatten().expect("it was buried");
                assert_eq!(buried.cause.len(), 4096);
                self.dead.push(seq);
            }
            Settle::Release { counted, .. } => {
                let attempt = item.expect("it was there").attempt;
                let now = self.state.items()[&seq].attempt;
                assert_eq!(now, if counted { attempt } else { attempt - 1 });
                self.held_back(seq, fence);
            }
            Settle::Extend { .. } => {}
        }
    }

    /// What follows a failed head in its claim is not held any more.
    fn held_back(&self, head: Seq, fence: u64) {
        for (&seq, item) in self.state.items().range(head + 1..) {
            let follows =
                item.fence == fence && item.key.is_some() && item.key.as_ref() == self.key(head);
            assert!(!follows || matches!(item.place, Place::Waiting(_)), "{seq} after {head}");
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_order_and_leases_hold_and_a_copy_follows(
        steps in proptest::collection::vec(any_step(), 1..120)
    ) {
        let mut world = World { now: 1_000_000, ..World::default() };
        for step in &steps {
            world.step(step);
        }
        // Once everybody works, everything comes to an end.
        for round in 0.. {
            prop_assert!(round < 1000, "left: {:?}", world.state.items());
            world.now += 60_000_000;
            world.state.advance(world.now);
            world.held.clear();
            world.claim(10, usize::MAX, 1_000_000);
            if world.held.is_empty() && world.state.cursor() as usize == world.log.len() {
                break;
            }
            for which in 0..world.held.len() {
                world.settle(which, 0, 0);
            }
        }
        prop_assert_eq!(world.state.items().len(), 0);
        prop_assert_eq!(world.state.floor(), world.log.len() as u64 + 1);
        prop_assert!(world.state.next_timer().is_none() && !world.state.has_ready());
    }
}

#[test]
fn a_failed_head_ends_its_followers_also_past_one_that_was_redriven() {
    let mut state = State::at(0);
    state.advance(1);
    let new =
        |seq| New { seq, key: Some("k".into()), due: None, expires: None, stored: 1, size: 1 };
    let mut claim = state.claim(3, 100, 1000);
    for seq in 1..=3 {
        assert!(state.offer(new(seq), &mut claim));
    }
    let bury = Settle::Bury { cause: "bad".to_owned() };
    state.settle(2, claim.fence, &bury);
    // Burying 2 has ended 3's lease; all of them are claimed again, but for 2, which comes late.
    state.settle(1, claim.fence, &Settle::Release { delay: Default::default(), counted: true });
    let again = state.claim(3, 100, 1000);
    assert_eq!(again.taken, [1, 3]);
    state.redrive(new(2));
    state.settle(1, again.fence, &Settle::Release { delay: Default::default(), counted: true });
    assert_eq!(state.settle(3, again.fence, &Settle::Ack), None, "its head failed");
    assert_eq!(state.claim(3, 100, 1000).taken, [1, 2, 3]);
}

#[test]
fn a_stuck_group_looks_no_further_once_ten_thousand_wait() {
    let mut state = State::at(0);
    state.advance(1);
    let mut seq = 0;
    let new = |seq, key: &str| New {
        seq,
        key: Some(key.into()),
        due: None,
        expires: None,
        stored: 1,
        size: 1,
    };
    let mut claim = state.claim(1, 100, 1000);
    assert!(state.offer(new(1, "stuck"), &mut claim));
    let mut next = state.claim(1, 100, 1000);
    while state.looks_further() {
        seq += 1;
        assert!(state.offer(new(seq + 1, "stuck"), &mut next));
    }
    assert_eq!(seq as usize, WAITING);
    assert_eq!(state.settle(1, claim.fence, &Settle::Ack), Some(None));
    let freed = state.claim(1000, usize::MAX, 1000);
    assert_eq!(freed.taken.len(), 1000, "what waits is still handed out");
}
