//! The ring: the youngest entries of a topic, shared by whoever is up to date.

use std::collections::VecDeque;

use carrick_store::log::Seq;

/// What a ring holds at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingLimit {
    pub(super) entries: usize,
    pub(super) bytes: usize,
}

#[derive(Debug)]
struct Held<T> {
    seq: Seq,
    bytes: usize,
    entry: T,
}

/// What is there after a number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<T> {
    /// These come next.
    Entries(Vec<T>),
    /// Nothing yet.
    UpToDate,
    /// What comes next has left the ring, or was never in it: the store has it.
    Behind,
}

/// Entries in order of their numbers, complete from `floor` to `last`.
#[derive(Debug)]
pub(super) struct Ring<T> {
    entries: VecDeque<Held<T>>,
    /// Everything after this number, up to `last`, is here.
    floor: Seq,
    last: Seq,
    bytes: usize,
    /// Bytes that ever passed: how far behind a reader is, is a difference of two of these.
    passed: u64,
    limit: RingLimit,
}

impl<T: Clone> Ring<T> {
    /// An empty ring that is complete from `last` on.
    pub(super) fn new(last: Seq, limit: RingLimit) -> Self {
        Self { entries: VecDeque::new(), floor: last, last, bytes: 0, passed: 0, limit }
    }

    pub(super) fn last(&self) -> Seq {
        self.last
    }

    /// Bytes that passed since the ring was made.
    pub(super) fn passed(&self) -> u64 {
        self.passed
    }

    /// Adds the next entry; the oldest leave. The newest stays, however large it is.
    pub(super) fn push(&mut self, seq: Seq, bytes: usize, entry: T) {
        debug_assert!(seq > self.last, "{seq} after {}", self.last);
        self.entries.push_back(Held { seq, bytes, entry });
        self.last = seq;
        self.bytes += bytes;
        self.passed += bytes as u64;
        while self.entries.len() > 1
            && (self.entries.len() > self.limit.entries || self.bytes > self.limit.bytes)
        {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.bytes;
            self.floor = oldest.seq;
        }
    }

    /// Forgets everything: the log went on from somewhere else.
    pub(super) fn restart(&mut self, last: Seq) {
        self.entries.clear();
        self.bytes = 0;
        (self.floor, self.last) = (last, last);
    }

    /// What comes after a number: at least one entry if there is one.
    pub(super) fn after(&self, seq: Seq, entries: usize, bytes: usize) -> Found<T> {
        if seq == self.last {
            return Found::UpToDate;
        }
        if seq < self.floor || seq > self.last {
            return Found::Behind;
        }
        let start = self.entries.partition_point(|held| held.seq <= seq);
        let mut found = Vec::new();
        let mut size = 0;
        for held in self.entries.range(start..).take(entries.max(1)) {
            size += held.bytes;
            if size > bytes && !found.is_empty() {
                break;
            }
            found.push(held.entry.clone());
        }
        Found::Entries(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: RingLimit = RingLimit { entries: 4, bytes: 100 };

    #[test]
    fn an_entry_larger_than_the_ring_is_held_until_the_next() {
        let mut ring = Ring::new(7, LIMIT);
        ring.push(8, 10, 8);
        ring.push(9, 1000, 9);
        assert_eq!(ring.after(7, 10, 10), Found::Behind);
        assert_eq!(ring.after(8, 10, 10), Found::Entries(vec![9]));
        ring.push(10, 1, 10);
        assert_eq!(ring.after(9, 10, 10), Found::Entries(vec![10]));
        assert_eq!(ring.after(8, 10, 10), Found::Behind);
    }

    #[test]
    fn a_reader_ahead_of_the_ring_asks_the_store() {
        let ring: Ring<()> = Ring::new(7, LIMIT);
        assert_eq!(ring.after(8, 1, 1), Found::Behind);
        assert_eq!(ring.after(7, 1, 1), Found::UpToDate);
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_comes_next_with_nothing_left_out(
            start in 0..5_u64,
            steps in prop::collection::vec((1..60_usize, 0..30_u64, 1..6_usize, 1..200_usize), 1..40),
        ) {
            let mut ring = Ring::new(start, LIMIT);
            let mut seq = start;
            for (bytes, back, entries, most) in steps {
                seq += 1;
                ring.push(seq, bytes, seq);
                let after = seq.saturating_sub(back);
                match ring.after(after, entries, most) {
                    Found::Entries(found) => {
                        prop_assert!((1..=entries).contains(&found.len()));
                        let expected: Vec<_> = (after + 1..).take(found.len()).collect();
                        prop_assert_eq!(&found, &expected);
                        prop_assert!(*found.last().unwrap() <= seq);
                    }
                    Found::UpToDate => prop_assert_eq!(after, seq),
                    Found::Behind => prop_assert!(back > 0),
                }
                prop_assert!(ring.entries.len() == 1 || ring.bytes <= LIMIT.bytes);
                prop_assert!(ring.entries.len() <= LIMIT.entries);
            }
        }
    }
}
