//! Keyed lanes: of the events of a key that this consumer holds, one runs and the others are
//! parked behind it in order. A key that is stuck so parks its own events and no others.

use std::{collections::VecDeque, sync::Arc};

use hashbrown::HashMap;

use super::SlotId;

/// The lanes that are occupied, each with what is parked behind its occupant.
///
/// Bounded by what the consumer holds: a lane exists only while an event of its key is held.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: HashMap<Arc<str>, VecDeque<SlotId>>,
    parked: usize,
}

/// What an event that entered its lane may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entered {
    /// It occupies the lane and may run.
    Ready,
    /// It waits behind others; this many are parked in the lane now, itself included.
    Parked(usize),
}

impl Lanes {
    /// Enters the lane of a key.
    pub(super) fn enter(&mut self, key: &Arc<str>, slot: SlotId) -> Entered {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.push_back(slot);
            self.parked += 1;
            return Entered::Parked(lane.len());
        }
        self.lanes.insert(Arc::clone(key), VecDeque::new());
        Entered::Ready
    }

    /// Ends the occupancy of a lane; returns who occupies it now, and may run.
    pub(super) fn advance(&mut self, key: &Arc<str>) -> Option<SlotId> {
        let next = self.lanes.get_mut(key).and_then(VecDeque::pop_front);
        match next {
            Some(_) => self.parked -= 1,
            None => {
                self.lanes.remove(key);
            }
        }
        next
    }

    /// Takes out everything that is parked in a lane, last first; its occupant stays.
    pub(super) fn clear(&mut self, key: &Arc<str>) -> Vec<SlotId> {
        let Some(lane) = self.lanes.get_mut(key) else { return Vec::new() };
        self.parked -= lane.len();
        lane.drain(..).rev().collect()
    }

    /// Takes out the last that is parked in a lane.
    pub(super) fn pop_last(&mut self, key: &Arc<str>) -> Option<SlotId> {
        let last = self.lanes.get_mut(key).and_then(VecDeque::pop_back);
        self.parked -= usize::from(last.is_some());
        last
    }

    /// Takes out a parked event and everything behind it, last first.
    pub(super) fn cut(&mut self, key: &Arc<str>, slot: SlotId) -> Vec<SlotId> {
        let Some(lane) = self.lanes.get_mut(key) else { return Vec::new() };
        let Some(place) = lane.iter().position(|parked| *parked == slot) else { return Vec::new() };
        self.parked -= lane.len() - place;
        lane.drain(place..).rev().collect()
    }

    /// How many are parked in all lanes.
    pub(super) fn parked(&self) -> usize {
        self.parked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Arc<str> {
        text.into()
    }

    #[test]
    fn a_lane_runs_one_after_another_and_other_lanes_do_not_wait() {
        let mut lanes = Lanes::default();
        let (a, b) = (key("a"), key("b"));
        assert_eq!(lanes.enter(&a, 1), Entered::Ready);
        assert_eq!(lanes.enter(&a, 2), Entered::Parked(1));
        assert_eq!(lanes.enter(&b, 3), Entered::Ready);
        assert_eq!(lanes.advance(&a), Some(2));
        assert_eq!((lanes.advance(&a), lanes.parked()), (None, 0));
        assert_eq!(lanes.enter(&a, 4), Entered::Ready, "the lane was left empty");
    }

    #[test]
    fn a_cleared_lane_stays_occupied_until_its_occupant_leaves() {
        let mut lanes = Lanes::default();
        let a = key("a");
        for slot in 1..=4 {
            lanes.enter(&a, slot);
        }
        assert_eq!(lanes.cut(&a, 3), [4, 3]);
        assert_eq!(lanes.clear(&a), [2]);
        assert_eq!(lanes.enter(&a, 5), Entered::Parked(1), "the occupant has not left");
        assert_eq!(lanes.advance(&a), Some(5));
    }
}
