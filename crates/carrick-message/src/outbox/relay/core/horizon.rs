//! How far a relay has read, when numbers are not given out in the order of commits.
//!
//! A number is taken before its transaction commits, so a reader that remembers "up to 95" would
//! never see 90 if that commits late; and of one key, 90 must be published before 110. Reading
//! everything unpublished each time would be right, but slow: the entries of published rows stay in
//! the index for as long as anybody holds an old snapshot. So each read tells which transactions
//! were running, and the next one starts above all that was read, unless one of those has ended
//! since; then it starts above what had been read when that one cannot have begun yet.
//!
//! The table gives a transaction its id before its first number, and a read that found rows took an
//! id of its own after its snapshot. Hence: whoever has a higher id took its numbers later than
//! every row of that read, and whoever has a lower one was running, had ended, or is remembered.
//!
//! Engines with one writer at a time (SQLite) tell nothing of transactions, and need nothing of it.

use super::Seq;

/// A transaction's id.
pub(crate) type Xid = u64;

/// Transactions `from..to` that may still bring numbers above `low`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) from: Xid,
    pub(crate) to: Xid,
    pub(crate) low: Seq,
}

/// Which transactions a read could see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The first id that had not ended, with all above it.
    pub(crate) next: Xid,
    /// Ids below `next` that were running.
    pub(crate) running: Vec<Xid>,
    /// The read's own id, taken after the snapshot; only if it found rows.
    pub(crate) own: Option<Xid>,
}

/// The position of a relay and what may still appear below it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Horizon {
    /// Read up to here.
    after: Seq,
    /// The highest number ever seen.
    seen: Seq,
    /// Ids from here on have numbers above `seen`.
    fresh: Xid,
    pending: Vec<Pending>,
}

impl Horizon {
    /// Read up to here, apart from [`Horizon::pending`].
    pub(crate) fn after(&self) -> Seq {
        self.after
    }

    /// Whose end means to start lower. As many as the database has sessions, at most twice.
    pub(crate) fn pending(&self) -> &[Pending] {
        &self.pending
    }

    /// Starts over from the first row.
    pub(crate) fn rewind(&mut self) {
        self.after = 0;
    }

    /// The lowest number above which something unknown may still appear.
    pub(crate) fn floor(&self) -> Seq {
        self.pending.iter().map(|pending| pending.low).fold(self.after, Seq::min)
    }

    /// Takes in a read: its last row, and whether it stopped there although there may be more.
    ///
    /// A read without rows of ours may tell as its last the highest number given out, if it took an
    /// id of its own after that: numbers of other relays need not be passed again and again.
    pub(crate) fn advance(&mut self, last: Option<Seq>, full: bool, snapshot: Option<&Snapshot>) {
        if let Some(snapshot) = snapshot {
            if snapshot.next < self.fresh {
                // Ids went back: this is another database than before.
                *self = Self::default();
            }
            self.settle(snapshot);
        }
        match last {
            Some(last) if full => self.after = last,
            Some(last) => self.after = self.after.max(last),
            None => {}
        }
        self.seen = self.seen.max(self.after);
    }

    fn settle(&mut self, snapshot: &Snapshot) {
        let mut pending = Vec::with_capacity(self.pending.len() + snapshot.running.len());
        for Pending { from, to, low } in self.pending.drain(..) {
            let alive = snapshot.running.iter().filter(|xid| (from..to).contains(xid));
            pending.extend(alive.map(|&xid| Pending { from: xid, to: xid + 1, low }));
            if to > snapshot.next {
                pending.push(Pending { from: from.max(snapshot.next), to, low });
            }
        }
        // Without rows the position stays, and ids from `fresh` on are above it as before.
        if let Some(own) = snapshot.own {
            let low = self.seen;
            let new = snapshot.running.iter().filter(|xid| **xid >= self.fresh);
            pending.extend(new.map(|&xid| Pending { from: xid, to: xid + 1, low }));
            let from = snapshot.next.max(self.fresh);
            if own > from {
                pending.push(Pending { from, to: own, low });
            }
            self.fresh = own + 1;
        }
        self.pending = pending;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(next: Xid, running: &[Xid], own: Option<Xid>) -> Snapshot {
        Snapshot { next, running: running.to_vec(), own }
    }

    /// Where the database would start: the rule of the scan's statement.
    fn start(horizon: &Horizon, now: &Snapshot) -> Seq {
        let ended = |pending: &&Pending| {
            now.next > pending.from
                && (pending.to > pending.from + 1 || !now.running.contains(&pending.from))
        };
        let lows = horizon.pending().iter().filter(ended).map(|pending| pending.low);
        lows.fold(horizon.after(), Seq::min)
    }

    #[test]
    fn an_idle_database_is_read_from_the_last_row_on() {
        let mut horizon = Horizon::default();
        horizon.advance(Some(10), false, Some(&snapshot(100, &[], Some(100))));
        let idle = snapshot(101, &[], None);
        assert_eq!(start(&horizon, &idle), 10);
        horizon.advance(None, false, Some(&idle));
        assert!(horizon.pending().is_empty());
    }

    #[test]
    fn the_end_of_a_running_transaction_moves_the_start_below_its_first_number() {
        let mut horizon = Horizon::default();
        horizon.advance(Some(10), false, Some(&snapshot(100, &[], Some(100))));
        // 101 takes number 11 and goes on; 102 takes 12 and commits.
        horizon.advance(Some(12), false, Some(&snapshot(103, &[101], Some(103))));
        assert_eq!(start(&horizon, &snapshot(104, &[101], None)), 12, "it is still running");
        assert_eq!(start(&horizon, &snapshot(104, &[], None)), 10, "11 may be there now");
        horizon.advance(Some(12), false, Some(&snapshot(104, &[], Some(104))));
        assert_eq!(start(&horizon, &snapshot(105, &[], None)), 12);
    }

    #[test]
    fn a_transaction_that_no_snapshot_lists_yet_is_remembered_too() {
        let mut horizon = Horizon::default();
        horizon.advance(Some(10), false, Some(&snapshot(100, &[], Some(100))));
        // 102 took 11 and runs; 101 took 12 and has ended: the snapshot ends below 102.
        horizon.advance(Some(12), false, Some(&snapshot(102, &[], Some(103))));
        assert_eq!(start(&horizon, &snapshot(104, &[], None)), 10);
        // Once a snapshot lists it, nothing is read twice until it ends.
        let listed = snapshot(104, &[102], None);
        horizon.advance(None, false, Some(&listed));
        assert_eq!(start(&horizon, &snapshot(110, &[102], None)), 12);
        assert_eq!(start(&horizon, &snapshot(110, &[], None)), 10);
    }

    #[test]
    fn a_full_page_moves_the_position_back_when_it_started_lower() {
        let mut horizon = Horizon::default();
        horizon.advance(Some(100), false, None);
        horizon.advance(Some(40), true, None);
        assert_eq!(horizon.after(), 40);
        horizon.advance(Some(90), false, None);
        assert_eq!(horizon.after(), 90);
        horizon.advance(None, false, None);
        assert_eq!(horizon.after(), 90);
    }

    /// A random schedule of transactions against the rule; every committed number must be read.
    #[test]
    fn no_schedule_of_transactions_hides_a_row() {
        use rand::{RngExt, SeedableRng};
        for seed in 0..300u64 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let (mut next_xid, mut next_seq) = (10u64, 1u64);
            let mut latest_ended = 9u64;
            let mut running: Vec<(Xid, Vec<Seq>)> = Vec::new();
            let mut visible: Vec<Seq> = Vec::new();
            let mut read: Vec<Seq> = Vec::new();
            let mut horizon = Horizon::default();
            for step in 0..400 {
                let ending = step >= 380;
                match rng.random_range(0..10) {
                    0..=2 if !ending => {
                        running.push((next_xid, Vec::new()));
                        next_xid += 1;
                    }
                    3..=5 if !running.is_empty() && !ending => {
                        let at = rng.random_range(0..running.len());
                        running[at].1.push(next_seq);
                        next_seq += 1;
                    }
                    6..=7 if !running.is_empty() => {
                        let at = rng.random_range(0..running.len());
                        let (xid, numbers) = running.swap_remove(at);
                        latest_ended = latest_ended.max(xid);
                        if rng.random_range(0..10) > 0 {
                            visible.extend(numbers);
                            visible.sort_unstable();
                        }
                    }
                    _ => {
                        let next = latest_ended + 1;
                        let ids = running.iter().map(|one| one.0).filter(|xid| *xid < next);
                        let mut now = snapshot(next, &ids.collect::<Vec<_>>(), None);
                        let low = start(&horizon, &now);
                        let limit = rng.random_range(1..6);
                        let page: Vec<Seq> = visible
                            .iter()
                            .copied()
                            .filter(|seq| *seq > low && !read.contains(seq))
                            .take(limit)
                            .collect();
                        let skip = page.is_empty() && rng.random_range(0..3) == 0;
                        let last = if skip { Some(next_seq - 1) } else { page.last().copied() };
                        if last.is_some() {
                            now.own = Some(next_xid);
                            latest_ended = latest_ended.max(next_xid);
                            next_xid += 1;
                        }
                        read.extend(&page);
                        horizon.advance(last, page.len() == limit, Some(&now));
                    }
                }
            }
            // Everybody ends, and reads go on until they find nothing.
            while let Some((xid, numbers)) = running.pop() {
                latest_ended = latest_ended.max(xid);
                visible.extend(numbers);
            }
            visible.sort_unstable();
            for _ in 0..1000 {
                let mut now = snapshot(latest_ended.max(next_xid - 1) + 1, &[], None);
                let low = start(&horizon, &now);
                let page: Vec<Seq> = visible
                    .iter()
                    .copied()
                    .filter(|seq| *seq > low && !read.contains(seq))
                    .take(3)
                    .collect();
                if !page.is_empty() {
                    now.own = Some(next_xid);
                    next_xid += 1;
                }
                read.extend(&page);
                horizon.advance(page.last().copied(), page.len() == 3, Some(&now));
            }
            read.sort_unstable();
            assert_eq!(read, visible, "seed {seed}");
        }
    }
}
