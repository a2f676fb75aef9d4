//! What happens next: events by time, and by order of entry where times are equal.

use std::{cmp::Ordering, collections::BinaryHeap};

/// Events to come. There are at most a few for each call under way.
#[derive(Debug)]
pub(super) struct Agenda<E> {
    heap: BinaryHeap<Entry<E>>,
    entered: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: u64,
    order: u64,
    event: E,
}

impl<E> Agenda<E> {
    pub(super) fn new() -> Self {
        Self { heap: BinaryHeap::new(), entered: 0 }
    }

    pub(super) fn add(&mut self, at: u64, event: E) {
        self.heap.push(Entry { at, order: self.entered, event });
        self.entered += 1;
    }

    /// The next event and its time.
    pub(super) fn next(&mut self) -> Option<(u64, E)> {
        self.heap.pop().map(|Entry { at, event, .. }| (at, event))
    }
}

impl<E> Entry<E> {
    fn key(&self) -> (u64, u64) {
        (self.at, self.order)
    }
}

/// Reversed, since a heap gives its greatest first.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_come_by_time_and_equal_times_in_the_order_of_entry(times: Vec<u8>) {
            let mut agenda = Agenda::new();
            for (n, at) in times.iter().enumerate() {
                agenda.add((*at).into(), n);
            }
            let found: Vec<_> = std::iter::from_fn(|| agenda.next()).collect();
            let mut expected: Vec<_> =
                times.iter().enumerate().map(|(n, at)| (u64::from(*at), n)).collect();
            expected.sort(); // stable, and equal times are already in order
            prop_assert_eq!(found, expected);
        }
    }
}
