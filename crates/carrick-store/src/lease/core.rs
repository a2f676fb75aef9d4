//! What a group knows of its stream: decisions only. Time is an argument, and the engine's.
//!
//! Records above `cursor` have not been looked at. Of those below, the unfinished are here: under
//! lease, or waiting (for a retry, for their time, or behind their key). All others are finished.
//!
//! Only the first unfinished record of a key, its head, can be handed out, and with it those that
//! follow, to the same claim. What a transaction touched is told as a [`Change`], which an engine
//! writes down; applied to a copy, it brings that to the same point.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use hashbrown::HashMap;

use super::{BlockedKey, DeadLetter, GroupStats, Select, Settle};
use crate::{
    log::{Record, Seq},
    micros,
};

/// Microseconds since 1970, by the engine's clock.
pub(crate) type Micros = i64;

/// The longest cause of a dead letter, in bytes.
pub(crate) const CAUSE: usize = 4096;

/// Records that wait, beyond which no new ones are looked at: see the contract of the queue.
pub(crate) const WAITING: usize = 10_000;

/// Records under lease, beyond which none is handed out. A group that holds as many does not work on
/// them; each takes about two hundred bytes here.
pub(crate) const LEASED: usize = 100_000;

/// An unfinished record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) key: Option<Arc<str>>,
    pub(crate) place: Place,
    /// The fence of its latest claim; 0 before the first.
    pub(crate) fence: u64,
    pub(crate) attempt: u32,
    /// 0 before the first claim.
    pub(crate) first_claimed: Micros,
    pub(crate) stored: Micros,
    pub(crate) expires: Option<Micros>,
    pub(crate) size: u32,
}

/// Where an unfinished record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// With a holder until then.
    Leased(Micros),
    /// Here, and not handed out before then.
    Waiting(Micros),
}

/// A record that was just read from the log.
#[derive(Clone, Debug)]
pub(crate) struct New {
    pub(crate) seq: Seq,
    pub(crate) key: Option<Arc<str>>,
    pub(crate) due: Option<Micros>,
    pub(crate) expires: Option<Micros>,
    pub(crate) stored: Micros,
    pub(crate) size: u32,
}

/// What a transaction did to a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg(any(test, feature = "sqlite", feature = "postgres"))]
pub(crate) struct Change {
    pub(crate) cursor: Seq,
    pub(crate) fence: u64,
    pub(crate) put: Vec<(Seq, Item)>,
    pub(crate) gone: Vec<Seq>,
}

/// A record that goes to the dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buried {
    pub(crate) seq: Seq,
    pub(crate) attempts: u32,
    pub(crate) cause: String,
    pub(crate) fence: u64,
    pub(crate) first_claimed: Micros,
    pub(crate) at: Micros,
}

impl Buried {
    pub(crate) fn letter(self, record: Record) -> DeadLetter {
        DeadLetter {
            record,
            attempts: self.attempts,
            cause: self.cause,
            fence: self.fence,
            first_claimed_at: micros::time(self.first_claimed),
            buried_at: micros::time(self.at),
        }
    }
}

/// A claim while it is being filled.
#[derive(Debug)]
pub(crate) struct Filling {
    pub(crate) fence: u64,
    pub(crate) until: Micros,
    pub(crate) taken: Vec<Seq>,
    pub(crate) expired: usize,
    records: usize,
    bytes: usize,
    /// Something was ready and had no room.
    full: bool,
}

impl Filling {
    /// How many records, and bytes, it still takes.
    pub(crate) fn room(&self) -> (usize, usize) {
        if self.full { (0, 0) } else { (self.records - self.taken.len(), self.bytes) }
    }

    fn takes(&mut self, size: u32) -> bool {
        let size = size as usize;
        let fits = self.taken.len() < self.records && (self.taken.is_empty() || size <= self.bytes);
        self.full |= !fits;
        if fits {
            self.bytes = self.bytes.saturating_sub(size);
        }
        fits
    }
}

/// The unfinished records of a key.
#[derive(Debug, Default)]
struct Chain {
    all: BTreeSet<Seq>,
    /// Those of them that are with a holder: one and the same, for none is handed out beside them.
    leased: BTreeSet<Seq>,
}

/// A group.
#[derive(Debug, Default)]
pub(crate) struct State {
    cursor: Seq,
    fence: u64,
    now: Micros,
    items: BTreeMap<Seq, Item>,
    keys: HashMap<Arc<str>, Chain>,
    /// When leases end and waiting ends.
    timers: BTreeSet<(Micros, Seq)>,
    /// Heads, and records without a key, whose waiting has ended.
    ready: BTreeSet<Seq>,
    leased: usize,
    /// Records that changed since the last [`State::take_change`].
    touched: BTreeSet<Seq>,
    moved: bool,
}

impl State {
    /// A group that starts after `cursor`.
    pub(crate) fn at(cursor: Seq) -> Self {
        Self { cursor, moved: true, ..Self::default() }
    }

    #[cfg(any(test, feature = "postgres"))]
    pub(crate) fn now(&self) -> Micros {
        self.now
    }

    pub(crate) fn cursor(&self) -> Seq {
        self.cursor
    }

    pub(crate) fn items(&self) -> &BTreeMap<Seq, Item> {
        &self.items
    }

    #[cfg(test)]
    pub(crate) fn leased(&self) -> usize {
        self.leased
    }

    pub(crate) fn waiting(&self) -> usize {
        self.items.len() - self.leased
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The lowest number that is not finished.
    pub(crate) fn floor(&self) -> Seq {
        self.items.keys().next().map_or(self.cursor + 1, |&seq| seq.min(self.cursor + 1))
    }

    /// Whether new records may be looked at.
    pub(crate) fn looks_further(&self) -> bool {
        self.waiting() < WAITING && self.leased < LEASED
    }

    /// When something becomes ready by itself.
    pub(crate) fn next_timer(&self) -> Option<Micros> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// Goes on to `now`: leases that have ended give their records back, and waiting ends.
    ///
    /// A holder that lost a key's head must not go on with what follows: those leases end too, and
    /// all of these deliveries count, for the holder may be crashing over any of them.
    pub(crate) fn advance(&mut self, now: Micros) {
        // A clock that was set back stands still here until it has caught up.
        self.now = self.now.max(now);
        while let Some(&(at, seq)) = self.timers.first()
            && at <= self.now
        {
            self.timers.pop_first();
            let item = self.items.get(&seq).expect("a timer belongs to an unfinished record");
            if let Place::Leased(_) = item.place {
                let key = item.key.clone();
                self.place(seq, Place::Waiting(at));
                self.end_followers(key, seq, true);
            } else {
                self.refresh(seq);
            }
        }
    }

    /// Starts a claim, and gives it what waits here and is ready.
    pub(crate) fn claim(&mut self, records: usize, bytes: usize, lease: Micros) -> Filling {
        let mut filling = Filling {
            fence: self.fence + 1,
            until: self.now.saturating_add(lease),
            taken: Vec::new(),
            expired: 0,
            records,
            bytes,
            full: false,
        };
        let mut after = 0;
        while !filling.full
            && self.leased < LEASED
            && let Some(&head) = self.ready.range(after..).next()
        {
            after = head + 1;
            match self.items[&head].key.clone() {
                None => {
                    self.hand_out(head, &mut filling);
                }
                Some(key) => self.hand_out_key(&key, &mut filling),
            }
        }
        filling
    }

    /// Hands out a key's records from its head on.
    fn hand_out_key(&mut self, key: &Arc<str>, filling: &mut Filling) {
        let Some(chain) = self.keys.get(key) else { return };
        // A head that was redriven while a later record is with a holder waits for that one.
        if !chain.leased.is_empty() {
            return;
        }
        let now = self.now;
        let is_due = |seq: &&Seq| matches!(self.items[*seq].place, Place::Waiting(at) if at <= now);
        // No more than fits is looked at: a key may have thousands waiting.
        let due: Vec<Seq> =
            chain.all.iter().take(filling.records).take_while(is_due).copied().collect();
        for seq in due {
            if self.leased >= LEASED || !self.hand_out(seq, filling) {
                return;
            }
        }
    }

    /// Hands out one record; `false` if there is no room for it.
    fn hand_out(&mut self, seq: Seq, filling: &mut Filling) -> bool {
        let item = &self.items[&seq];
        if item.expires.is_some_and(|at| at <= self.now) {
            filling.expired += 1;
            self.remove(seq);
            return true;
        }
        if !filling.takes(item.size) {
            return false;
        }
        let mut item = self.take(seq);
        item.place = Place::Leased(filling.until);
        item.fence = filling.fence;
        item.attempt = item.attempt.saturating_add(1);
        if item.first_claimed == 0 {
            item.first_claimed = self.now;
        }
        self.put(seq, item);
        self.touched.insert(seq);
        self.fence = filling.fence;
        filling.taken.push(seq);
        true
    }

    /// Shows a claim the next record of the log: it is taken, dropped or kept waiting. `false` if
    /// there is no room for it, and it has not been looked at.
    pub(crate) fn offer(&mut self, new: New, filling: &mut Filling) -> bool {
        debug_assert!(new.seq > self.cursor, "a record is looked at once");
        let due = new.due.filter(|&at| at > self.now);
        let follows = new.key.as_ref().and_then(|key| self.keys.get(key)).map(|chain| {
            let last = chain.all.last().expect("a key without unfinished records is not kept");
            let last = &self.items[last];
            last.fence == filling.fence && matches!(last.place, Place::Leased(_))
        });
        let expired = new.expires.is_some_and(|at| at <= self.now);
        let may_go = due.is_none() && follows.unwrap_or(true);
        if !expired && may_go && (self.leased >= LEASED || !filling.takes(new.size)) {
            filling.full = true;
            return false;
        }
        self.cursor = new.seq;
        self.moved = true;
        if expired {
            filling.expired += 1;
            return true;
        }
        let mut item = Item {
            key: new.key,
            place: Place::Waiting(due.unwrap_or(0)),
            fence: 0,
            attempt: 0,
            first_claimed: 0,
            stored: new.stored,
            expires: new.expires,
            size: new.size,
        };
        if may_go {
            item.place = Place::Leased(filling.until);
            item.fence = filling.fence;
            item.attempt = 1;
            item.first_claimed = self.now;
            self.fence = filling.fence;
            filling.taken.push(new.seq);
        }
        self.put(new.seq, item);
        self.touched.insert(new.seq);
        true
    }

    /// When to come again for more; see [`Claims::next_ready`](crate::lease::Claims::next_ready).
    pub(crate) fn next_ready(&self, filling: &Filling) -> Option<Micros> {
        let more = filling.full || filling.taken.len() == filling.records;
        if more && self.leased < LEASED { Some(self.now) } else { self.next_timer() }
    }

    /// Does with a record under lease what its holder asks; `None` if the lease is not held.
    pub(crate) fn settle(
        &mut self,
        seq: Seq,
        fence: u64,
        settle: &Settle,
    ) -> Option<Option<Buried>> {
        let item = self.items.get(&seq)?;
        if item.fence != fence || !matches!(item.place, Place::Leased(_)) {
            return None;
        }
        let key = item.key.clone();
        match settle {
            Settle::Ack => self.remove(seq),
            Settle::Extend { lease } => {
                self.place(seq, Place::Leased(self.now.saturating_add(micros::of(*lease))));
            }
            Settle::Release { delay, counted } => {
                let at = self.now.saturating_add(micros::of(*delay));
                if !counted {
                    self.give_back(seq);
                }
                self.place(seq, Place::Waiting(at));
                self.end_followers(key, seq, false);
            }
            Settle::Bury { cause } => {
                let buried = self.bury(seq, cause);
                self.end_followers(key, seq, false);
                return Some(Some(buried));
            }
        }
        Some(None)
    }

    /// Buries the heads that wait for a retry and that an operator chose.
    pub(crate) fn skip(&mut self, select: &Select, cause: &str) -> Vec<Buried> {
        let waits = |item: &Item| matches!(item.place, Place::Waiting(_));
        let heads: Vec<Seq> = self
            .blocked(0)
            .filter(|(seq, key, item, _)| waits(item) && select.takes(*seq, Some(key), ""))
            .map(|(seq, ..)| seq)
            .collect();
        heads.into_iter().map(|seq| self.bury(seq, cause)).collect()
    }

    /// Keys that cannot move on, with heads above `after`.
    pub(crate) fn blocked_keys(&self, after: Seq, limit: usize) -> Vec<BlockedKey> {
        let told = |(head, key, item, behind): (Seq, &Arc<str>, &Item, usize)| BlockedKey {
            key: key.to_string(),
            head,
            attempts: item.attempt,
            ready_at: match item.place {
                Place::Leased(_) => None,
                Place::Waiting(at) => Some(micros::time(at.max(item.stored))),
            },
            behind,
        };
        self.blocked(after).take(limit).map(told).collect()
    }

    /// How the group stands, in a stream that ends at `last`; `next` is when the first record after
    /// the cursor was stored.
    pub(crate) fn stats(&self, last: Seq, next: Option<Micros>, dead: u64) -> GroupStats {
        let oldest = self.items.values().next().map(|item| item.stored).or(next);
        GroupStats {
            backlog: last.saturating_sub(self.cursor) + self.items.len() as u64,
            leased: self.leased as u64,
            waiting: self.waiting() as u64,
            dead,
            oldest: oldest.map(micros::time),
        }
    }

    /// Takes an unfinished record out, for the dead letters.
    pub(crate) fn bury(&mut self, seq: Seq, cause: &str) -> Buried {
        let item = &self.items[&seq];
        let buried = Buried {
            seq,
            attempts: item.attempt,
            cause: cut(cause, CAUSE),
            fence: item.fence,
            first_claimed: if item.first_claimed == 0 { self.now } else { item.first_claimed },
            at: self.now,
        };
        self.remove(seq);
        buried
    }

    /// Takes a dead letter back, as if it had never been delivered.
    pub(crate) fn redrive(&mut self, new: New) {
        let item = Item {
            key: new.key,
            place: Place::Waiting(0),
            fence: 0,
            attempt: 0,
            first_claimed: 0,
            stored: new.stored,
            expires: new.expires,
            size: new.size,
        };
        self.put(new.seq, item);
        self.touched.insert(new.seq);
    }

    /// Takes out a record whose body is not in the log any more.
    pub(crate) fn lost(&mut self, seq: Seq) {
        self.remove(seq);
    }

    /// The heads of keys that cannot move on, ascending, with how many wait behind each.
    pub(crate) fn blocked(
        &self,
        after: Seq,
    ) -> impl Iterator<Item = (Seq, &Arc<str>, &Item, usize)> {
        self.items.range(after.saturating_add(1)..).filter_map(|(&seq, item)| {
            let key = item.key.as_ref()?;
            let chain = &self.keys[key];
            let blocked = match item.place {
                Place::Leased(_) => true,
                Place::Waiting(at) => at > self.now || item.attempt > 0,
            };
            (chain.all.first() == Some(&seq) && blocked)
                .then(|| (seq, key, item, chain.all.len() - 1))
        })
    }

    /// Ends the leases of those records of a key that were claimed together with `head` and follow
    /// it.
    fn end_followers(&mut self, key: Option<Arc<str>>, head: Seq, counted: bool) {
        let Some(chain) = key.and_then(|key| self.keys.get(&key)) else { return };
        let followers: Vec<Seq> = chain.leased.range(head + 1..).copied().collect();
        for seq in followers {
            if !counted {
                self.give_back(seq);
            }
            self.place(seq, Place::Waiting(0));
        }
    }

    fn give_back(&mut self, seq: Seq) {
        let item = self.items.get_mut(&seq).expect("the caller found it");
        item.attempt = item.attempt.saturating_sub(1);
    }

    fn place(&mut self, seq: Seq, place: Place) {
        let mut item = self.take(seq);
        item.place = place;
        self.put(seq, item);
        self.touched.insert(seq);
    }

    fn remove(&mut self, seq: Seq) {
        self.take(seq);
        self.touched.insert(seq);
    }

    /// Takes a record out of everything.
    fn take(&mut self, seq: Seq) -> Item {
        let item = self.items.remove(&seq).expect("the caller found it");
        let (Place::Leased(at) | Place::Waiting(at)) = item.place;
        self.timers.remove(&(at, seq));
        self.ready.remove(&seq);
        if matches!(item.place, Place::Leased(_)) {
            self.leased -= 1;
        }
        if let Some(key) = &item.key {
            let chain = self.keys.get_mut(key).expect("a keyed record is in its key");
            chain.all.remove(&seq);
            chain.leased.remove(&seq);
            match chain.all.first() {
                Some(&head) if head > seq => self.refresh(head),
                Some(_) => {}
                None => {
                    self.keys.remove(key);
                }
            }
        }
        item
    }

    /// Puts a record into everything.
    fn put(&mut self, seq: Seq, item: Item) {
        let (Place::Leased(at) | Place::Waiting(at)) = item.place;
        if matches!(item.place, Place::Leased(_)) {
            self.leased += 1;
            self.timers.insert((at, seq));
        } else if at > self.now {
            self.timers.insert((at, seq));
        }
        let mut second = None;
        if let Some(key) = &item.key {
            let chain = self.keys.entry(Arc::clone(key)).or_default();
            chain.all.insert(seq);
            if matches!(item.place, Place::Leased(_)) {
                chain.leased.insert(seq);
            }
            second = chain.all.range(seq + 1..).next().copied();
        }
        self.items.insert(seq, item);
        self.refresh(seq);
        // Whoever was the head may not be it any more.
        if let Some(second) = second {
            self.refresh(second);
        }
    }

    /// Says anew whether a record is ready.
    fn refresh(&mut self, seq: Seq) {
        let item = &self.items[&seq];
        let is_head = item.key.as_ref().is_none_or(|key| self.keys[key].all.first() == Some(&seq));
        if is_head && matches!(item.place, Place::Waiting(at) if at <= self.now) {
            self.ready.insert(seq);
        } else {
            self.ready.remove(&seq);
        }
    }

    /// What changed since the last time; `None` if nothing did.
    #[cfg(any(test, feature = "sqlite", feature = "postgres"))]
    pub(crate) fn take_change(&mut self) -> Option<Change> {
        if self.touched.is_empty() && !std::mem::take(&mut self.moved) {
            return None;
        }
        self.moved = false;
        let mut change = Change { cursor: self.cursor, fence: self.fence, ..Change::default() };
        for seq in std::mem::take(&mut self.touched) {
            match self.items.get(&seq) {
                Some(item) => change.put.push((seq, item.clone())),
                None => change.gone.push(seq),
            }
        }
        Some(change)
    }

    /// The whole state, as the change that makes it from nothing.
    #[cfg(any(test, feature = "postgres"))]
    pub(crate) fn whole(&self) -> Change {
        let put = self.items.iter().map(|(&seq, item)| (seq, item.clone())).collect();
        Change { cursor: self.cursor, fence: self.fence, put, gone: Vec::new() }
    }

    /// Does what another process did, at its time.
    #[cfg(any(test, feature = "sqlite", feature = "postgres"))]
    pub(crate) fn apply(&mut self, change: Change, at: Micros) {
        self.now = self.now.max(at);
        self.cursor = change.cursor;
        self.fence = change.fence;
        for seq in change.gone {
            if self.items.contains_key(&seq) {
                self.take(seq);
            }
        }
        for (seq, item) in change.put {
            if self.items.contains_key(&seq) {
                self.take(seq);
            }
            self.put(seq, item);
        }
    }
}

/// Cuts a text to so many bytes, between characters.
fn cut(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}
