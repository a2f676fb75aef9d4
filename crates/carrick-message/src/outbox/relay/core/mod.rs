//! What a relay decides: which rows may be published now, and what becomes of each.
//!
//! No clock, no I/O: time and randomness are arguments, rows and outcomes go in, reads, batches and
//! marks come out. The rules:
//!
//! * Rows of one key are a [`Lane`]; of a lane, one run of rows is in flight at a time, in order,
//!   and the first one that fails blocks the lane, and no other, until it is tried again.
//! * What was read is in memory once, until it is marked ([`Core::held`] knows), so that a second
//!   read of the same rows is harmless. What is not kept (rows behind a failed one, rows of a key
//!   that has a thousand already) is remembered as a number to read on from.
//! * A batch starts only while the lease of its rows' bucket holds by the local clock, and its
//!   marks carry that lease's token.

mod horizon;
mod lane;
mod pace;
mod topics;
mod types;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    sync::Arc,
    time::Duration,
};

use carrick_core::{backoff::Backoff, name::Topic};
use carrick_store::fence::FenceToken;
use hashbrown::{HashMap, HashSet};
use rand::Rng;
use tokio::time::Instant;

#[cfg(feature = "sqlx-postgres")]
pub(crate) use self::horizon::Snapshot;
use self::{
    horizon::Horizon,
    lane::{Blocked, Lane},
    pace::Pace,
    topics::Topics,
};
pub(crate) use self::{
    lane::{Content, LaneKey, Row},
    types::{
        Accepted, Batch, Bucket, Failed, Fetch, Fetched, Found, Heading, Holding, Key, Marks, Page,
        Read, Refusal, RefusalKind, Scan, Seq, Sweep, Wanted,
    },
};

/// Bounds and times of a relay's decisions.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Events of one publish.
    pub(crate) batch: usize,
    /// Bytes of one publish; one event may be larger.
    pub(crate) batch_bytes: usize,
    /// Publishes at a time.
    pub(crate) window: usize,
    /// Rows of one read.
    pub(crate) page: usize,
    /// Rows in memory.
    pub(crate) buffer: usize,
    /// Bytes in memory; the page that passes it is the last.
    pub(crate) buffer_bytes: usize,
    /// Until the next look after one that found something.
    pub(crate) busy_poll: Duration,
    /// Until the next look at most.
    pub(crate) idle_poll: Duration,
    /// Between two sweeps of all unpublished rows.
    pub(crate) sweep: Duration,
    /// Until a failed row is tried again.
    pub(crate) retry: Backoff,
    /// Until a topic is tried again whose broker cannot be reached.
    pub(crate) outage: Backoff,
}

/// The most keys blocked at a time, at some 200 bytes each. Beyond it nothing new is read, so that
/// no key can be forgotten and overtaken.
const MAX_BLOCKED: usize = 100_000;
/// Lanes that one read serves.
const LANES_PER_READ: usize = 32;
/// Rows that one read takes for each of them.
const ROWS_PER_LANE: usize = 200;
/// Headings of one page of a sweep.
const SWEEP_PAGE: usize = 5000;
/// Between two pages of a sweep: it is a backstop, and takes a small share of the time.
const SWEEP_PAUSE: Duration = Duration::from_millis(50);
/// Rows of one mark: a statement of a few milliseconds.
const MARKS: usize = 1000;
/// Before a mark or a read that failed is tried again, at most.
const DATABASE_BACKOFF: Backoff =
    Backoff { base: Duration::from_millis(50), cap: Duration::from_secs(5) };

#[derive(Debug)]
struct Flight {
    topic: Topic,
    rows: Vec<(Key, FenceToken, Row)>,
}

/// The decisions of one relay.
#[derive(Debug)]
pub(crate) struct Core {
    limits: Limits,
    holdings: HashMap<Bucket, Holding>,
    lanes: HashMap<Key, Lane>,
    topics: Topics,
    flights: HashMap<u64, Flight>,
    next_flight: u64,
    /// Rows in memory: queued, in flight, or not marked yet.
    held: HashSet<Seq>,
    bytes: usize,
    /// Rows marked since the current read began: it may still tell of them as unpublished.
    settled: HashSet<Seq>,
    reading: bool,
    /// Leases changed since the current read began: it may have left out rows that are ours now.
    read_is_stale: bool,
    read_failures: u32,
    scan_is_next: bool,
    /// Lanes whose rows are to be fetched.
    hungry: VecDeque<Key>,
    /// When blocked lanes are tried again.
    waiting: BinaryHeap<Reverse<(Instant, Key)>>,
    blocked: usize,
    marks: Marks,
    marking: bool,
    mark_failures: u32,
    marks_after: Instant,
    horizon: Horizon,
    pace: Pace,
    sweep_after: Seq,
    next_sweep: Instant,
}

impl Core {
    pub(crate) fn new(limits: Limits, now: Instant) -> Self {
        Self {
            holdings: HashMap::new(),
            lanes: HashMap::new(),
            topics: Topics::new(limits.batch, limits.outage),
            flights: HashMap::new(),
            next_flight: 0,
            held: HashSet::new(),
            bytes: 0,
            settled: HashSet::new(),
            reading: false,
            read_is_stale: false,
            read_failures: 0,
            scan_is_next: true,
            hungry: VecDeque::new(),
            waiting: BinaryHeap::new(),
            blocked: 0,
            marks: Marks::default(),
            marking: false,
            mark_failures: 0,
            marks_after: now,
            horizon: Horizon::default(),
            pace: Pace::new(limits.busy_poll, limits.idle_poll, now),
            sweep_after: 0,
            next_sweep: now + limits.sweep,
            limits,
        }
    }

    /// Keys whose first row failed.
    pub(crate) fn blocked(&self) -> usize {
        self.blocked
    }

    /// Rows in memory.
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is under way.
    pub(crate) fn is_settled(&self) -> bool {
        self.flights.is_empty() && self.marks.is_empty() && !self.marking
    }

    /// The lowest number of a row that may be unpublished, as far as is known.
    pub(crate) fn floor(&self) -> Seq {
        let held = self.held.iter().copied();
        let behind = self.lanes.values().filter_map(|lane| lane.behind);
        held.chain(behind).fold(self.horizon.floor() + 1, Seq::min)
    }

    /// Somebody says that there are new rows.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.pace.wake(now);
    }

    /// Takes over the leases as they are now.
    pub(crate) fn set_holdings(&mut self, new: HashMap<Bucket, Holding>, now: Instant) {
        let old = std::mem::replace(&mut self.holdings, new);
        let holdings = &self.holdings;
        // Lanes stay as they are where the same lease goes on without a break.
        let goes_on = |bucket: &Bucket| {
            let unbroken = |was: &Holding, is: &Holding| {
                was.token == is.token && was.until > now && (is.leaving || !was.leaving)
            };
            matches!((old.get(bucket), holdings.get(bucket)), (Some(was), Some(is)) if unbroken(was, is))
        };
        let broken: HashSet<Bucket> =
            old.keys().chain(holdings.keys()).filter(|bucket| !goes_on(bucket)).copied().collect();
        if broken.is_empty() {
            return;
        }
        self.forget_lanes(&broken);
        self.read_is_stale |= self.reading;
        if broken.iter().any(|bucket| self.holdings.contains_key(bucket)) {
            self.horizon.rewind();
            self.pace.wake(now);
        }
    }

    /// Whether what was under way in a bucket is finished and marked.
    pub(crate) fn is_quiet(&self, bucket: Bucket) -> bool {
        let flying = self.flights.values().flat_map(|flight| &flight.rows);
        let mut buckets = flying.map(|(_, _, row)| row.bucket);
        let accepted = self.marks.accepted.iter().map(|row| row.bucket);
        let mut unmarked = accepted.chain(self.marks.failed.iter().map(|row| row.bucket));
        // Marks under way are few and short; which buckets they are of is not looked up.
        !self.marking && !buckets.any(|b| b == bucket) && !unmarked.any(|b| b == bucket)
    }

    fn forget_lanes(&mut self, buckets: &HashSet<Bucket>) {
        let Self { lanes, held, bytes, blocked, .. } = self;
        lanes.retain(|_, lane| {
            if !buckets.contains(&lane.bucket) {
                return true;
            }
            for row in lane.queue.drain(..) {
                held.remove(&row.seq);
                *bytes -= row.bytes();
            }
            lane.listed = false;
            // While its rows are in flight, or the failure of its first one is not written yet, a
            // lane keeps later ones from overtaking them, also under the next lease: no read brings
            // those rows.
            if lane.blocked.is_some_and(|blocked| held.contains(&blocked.first)) {
                return true;
            }
            *blocked -= usize::from(lane.blocked.take().is_some());
            lane.behind = None;
            lane.in_flight
        });
    }

    // ---- reading ----

    /// What to read now, if anything; one read at a time.
    pub(crate) fn next_read(&mut self, now: Instant) -> Option<Read> {
        if self.reading || self.holdings.is_empty() {
            return None;
        }
        self.release_due(now);
        let has_room = self.has_room();
        let may_scan = has_room && self.blocked < MAX_BLOCKED && self.pace.next() <= now;
        let may_fetch = has_room && !self.hungry.is_empty() && self.read_failures == 0;
        if may_fetch && !(may_scan && self.scan_is_next) {
            self.scan_is_next = true;
            let wanted = self.take_hungry();
            if !wanted.is_empty() {
                self.reading = true;
                let rows = (self.room() / wanted.len()).clamp(1, ROWS_PER_LANE);
                return Some(Read::Lanes(Fetch { wanted, rows, bytes: self.room_for_bytes() }));
            }
        }
        if may_scan {
            self.scan_is_next = false;
            self.reading = true;
            return Some(Read::Scan(self.scan()));
        }
        if self.next_sweep <= now {
            self.reading = true;
            let upto = self.horizon.after();
            return Some(Read::Sweep(Sweep { after: self.sweep_after, upto, rows: SWEEP_PAGE }));
        }
        None
    }

    fn has_room(&self) -> bool {
        self.held.len() + self.limits.page / 2 <= self.limits.buffer
            && self.bytes < self.limits.buffer_bytes
    }

    fn room(&self) -> usize {
        self.limits.buffer.saturating_sub(self.held.len())
    }

    fn room_for_bytes(&self) -> usize {
        self.limits.buffer_bytes.saturating_sub(self.bytes)
    }

    fn scan(&self) -> Scan {
        let buckets = self.holdings.iter().filter(|(_, holding)| !holding.leaving);
        let floor = self.horizon.floor();
        Scan {
            buckets: buckets.map(|(bucket, _)| *bucket).collect(),
            after: self.horizon.after(),
            pending: self.horizon.pending().to_vec(),
            known: self.held.iter().copied().filter(|seq| *seq > floor).collect(),
            rows: self.limits.page.min(self.room()),
            bytes: self.room_for_bytes(),
        }
    }

    fn take_hungry(&mut self) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        while wanted.len() < LANES_PER_READ {
            let Some(key) = self.hungry.pop_front() else { break };
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            if !lane.is_hungry() || lane.blocked.is_some() {
                continue; // forgotten meanwhile, and made anew
            }
            lane.listed = false;
            let from = lane.behind.expect("a hungry lane has rows behind");
            wanted.push(Wanted { from, lane: key });
        }
        wanted
    }

    /// Takes in what a scan found.
    pub(crate) fn scanned(&mut self, page: Page, now: Instant) {
        if self.read_is_stale {
            // Its rows may lie above others of the same keys that were not asked for, or were
            // forgotten since.
            return self.read_ended();
        }
        self.horizon.advance(page.last, page.full, page.snapshot.as_ref());
        self.pace.looked(page.rows.len(), page.full, now);
        for found in page.rows {
            self.arrive(found, now);
        }
        self.read_ended();
    }

    /// Takes in the rows of some keys.
    pub(crate) fn fetched(&mut self, fetch: &Fetch, fetched: Fetched, now: Instant) {
        let mut rows = fetched.rows.into_iter().peekable();
        // What was read before leases changed is read again, as far as it is ours.
        let mut is_over = self.read_is_stale;
        for Wanted { lane: key, from } in &fetch.wanted {
            if is_over {
                self.tend(key, now);
                continue;
            }
            if let Some(lane) = self.lanes.get_mut(key) {
                lane.behind = None;
            }
            let (mut count, mut next) = (0, *from);
            while let Some(found) = rows.next_if(|found| found.lane == **key) {
                count += 1;
                next = found.row.seq + 1;
                self.arrive(found, now);
            }
            is_over = fetched.full && rows.peek().is_none();
            if let Some(lane) = self.lanes.get_mut(key)
                && (is_over || count == fetch.rows)
            {
                lane.leave_behind(next);
            }
            self.tend(key, now);
        }
        self.read_ended();
    }

    /// Takes in headings; rows that should have been read and were not are fetched.
    pub(crate) fn swept(&mut self, sweep: &Sweep, headings: Vec<Heading>, now: Instant) {
        let is_last = headings.len() < sweep.rows;
        let last = headings.last().map_or(0, |heading| heading.seq);
        for Heading { seq, bucket, lane, wait } in headings {
            if self.is_known(seq) || !self.may_work(bucket, now) || seq > self.horizon.after() {
                continue;
            }
            let key = self.key(lane);
            let lane = self.lanes.entry(Arc::clone(&key)).or_insert_with(|| Lane::new(bucket));
            let is_first = lane.blocked.is_some_and(|blocked| blocked.first == seq);
            lane.leave_behind(seq);
            if is_first && wait.is_none() {
                self.unblock(&key); // somebody wants it tried again now
            }
            self.tend(&key, now);
        }
        (self.sweep_after, self.next_sweep) =
            if is_last { (0, now + self.limits.sweep) } else { (last, now + SWEEP_PAUSE) };
        self.read_ended();
    }

    /// The read failed; says how long to wait.
    pub(crate) fn read_failed(&mut self, read: &Read, now: Instant, rng: &mut impl Rng) {
        let pause = DATABASE_BACKOFF.delay(self.read_failures, rng);
        let failures = self.read_failures.saturating_add(1);
        self.read_ended();
        self.read_failures = failures;
        self.pace.later(pause, now);
        match read {
            Read::Scan(_) => {}
            Read::Lanes(fetch) => {
                for one in &fetch.wanted {
                    self.tend(&one.lane, now);
                }
            }
            Read::Sweep(_) => self.next_sweep = now + pause.max(SWEEP_PAUSE),
        }
    }

    /// The connection was lost: another database may answer from now on, so nothing that was
    /// remembered of transactions holds.
    pub(crate) fn start_over(&mut self) {
        self.horizon = Horizon::default();
    }

    fn read_ended(&mut self) {
        self.reading = false;
        self.read_is_stale = false;
        self.read_failures = 0;
        self.settled.clear();
    }

    fn is_known(&self, seq: Seq) -> bool {
        self.held.contains(&seq) || self.settled.contains(&seq)
    }

    fn may_work(&self, bucket: Bucket, now: Instant) -> bool {
        self.holdings.get(&bucket).is_some_and(|held| !held.leaving && held.until > now)
    }

    fn key(&self, lane: LaneKey) -> Key {
        self.lanes.get_key_value(&lane).map_or_else(|| Arc::new(lane), |(key, _)| Arc::clone(key))
    }

    fn arrive(&mut self, found: Found, now: Instant) {
        let Found { row, lane, wait } = found;
        if self.is_known(row.seq) || !self.may_work(row.bucket, now) {
            return;
        }
        let key = self.key(lane);
        let lane = self.lanes.entry(Arc::clone(&key)).or_insert_with(|| Lane::new(row.bucket));
        if let Some(blocked) = lane.blocked {
            lane.leave_behind(row.seq);
            if blocked.first == row.seq && wait.is_none() {
                self.unblock(&key); // somebody wants it tried again now
                self.tend(&key, now);
            }
            return;
        }
        let is_first = lane.queue.is_empty() && !lane.in_flight && lane.behind.is_none();
        if let Some(wait) = wait
            && is_first
        {
            return self.block(&key, row.seq, now + wait);
        }
        let is_full =
            lane.queue.len() >= self.limits.buffer / 4 || self.held.len() >= self.limits.buffer;
        if lane.behind.is_some() || wait.is_some() || is_full {
            lane.leave_behind(row.seq);
            return self.tend(&key, now);
        }
        self.held.insert(row.seq);
        self.bytes += row.bytes();
        lane.insert(row);
        self.tend(&key, now);
    }

    // ---- lanes ----

    /// Puts a lane where it belongs: to those that may go, to those to fetch, or away.
    fn tend(&mut self, key: &Key, now: Instant) {
        loop {
            let Some(lane) = self.lanes.get_mut(key) else { return };
            if lane.in_flight || lane.blocked.is_some() || lane.listed {
                return;
            }
            let Some(first) = lane.queue.front() else {
                if lane.behind.is_some() {
                    lane.listed = true;
                    self.hungry.push_back(Arc::clone(key));
                } else {
                    self.lanes.remove(key);
                }
                return;
            };
            match &first.content {
                Ok((topic, _)) => {
                    lane.listed = true;
                    return self.topics.push(topic, Arc::clone(key));
                }
                Err(error) => {
                    let (error, attempts) = (error.clone(), first.attempts);
                    let row = lane.queue.pop_front().expect("it has a first row");
                    let Some(holding) = self.holdings.get(&row.bucket) else {
                        self.let_go(key, &row);
                        continue;
                    };
                    // What is wrong with it will not go away by itself; it is looked at again
                    // because somebody may mend the row.
                    let delay = self
                        .limits
                        .retry
                        .cap
                        .min(self.limits.retry.base.saturating_mul(1 << attempts.min(20)));
                    let token = holding.token;
                    self.fail(key, token, &row, error, delay, now);
                }
            }
        }
    }

    fn fail(
        &mut self,
        key: &Key,
        token: FenceToken,
        row: &Row,
        error: String,
        delay: Duration,
        now: Instant,
    ) {
        let failed = Failed { seq: row.seq, bucket: row.bucket, token, error, delay };
        self.bytes -= row.bytes();
        self.marks.failed.push(failed);
        self.block(key, row.seq, now + delay);
    }

    /// Blocks a lane at its first row; the rows behind it are left in the table.
    fn block(&mut self, key: &Key, seq: Seq, until: Instant) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        for row in lane.queue.drain(..) {
            self.held.remove(&row.seq);
            self.bytes -= row.bytes();
        }
        lane.leave_behind(seq);
        lane.listed = false;
        if lane.blocked.replace(Blocked { first: seq, until }).is_none() {
            self.blocked += 1;
        }
        self.waiting.push(Reverse((until, Arc::clone(key))));
    }

    fn unblock(&mut self, key: &Key) {
        if let Some(lane) = self.lanes.get_mut(key)
            && lane.blocked.take().is_some()
        {
            self.blocked -= 1;
        }
    }

    fn release_due(&mut self, now: Instant) {
        while let Some(Reverse((until, _))) = self.waiting.peek() {
            if *until > now {
                return;
            }
            let Some(Reverse((until, key))) = self.waiting.pop() else { return };
            let lane = self.lanes.get_mut(&key);
            let Some(blocked) = lane.and_then(|lane| lane.blocked.as_mut()) else { continue };
            if blocked.until != until {
                continue; // blocked anew since
            }
            if self.held.contains(&blocked.first) {
                // Its failure is not written yet, so a read would not bring it.
                blocked.until = now + self.limits.idle_poll;
                self.waiting.push(Reverse((blocked.until, key)));
                continue;
            }
            self.unblock(&key);
            self.tend(&key, now);
        }
    }

    // ---- publishing ----

    /// The next publish that may start now.
    pub(crate) fn next_batch(&mut self, now: Instant) -> Option<Batch> {
        while self.flights.len() < self.limits.window {
            let turn = self.topics.turn(now)?;
            let rows = self.collect(&turn.topic, turn.size, now);
            if rows.is_empty() {
                continue; // its lanes were forgotten; the next turn finds its queue empty
            }
            let events = rows.iter().filter_map(|(_, _, row)| row.content.as_ref().ok());
            let events = events.map(|(_, event)| event.clone().into()).collect();
            let id = self.next_flight;
            self.next_flight += 1;
            self.topics.sent(&turn.topic);
            self.flights.insert(id, Flight { topic: turn.topic.clone(), rows });
            return Some(Batch { id, topic: turn.topic, events });
        }
        None
    }

    fn collect(&mut self, topic: &Topic, size: usize, now: Instant) -> Vec<(Key, FenceToken, Row)> {
        let mut rows = Vec::new();
        let mut bytes = 0;
        while rows.len() < size && bytes < self.limits.batch_bytes {
            let Some(key) = self.topics.pop(topic) else { break };
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            if !std::mem::take(&mut lane.listed) || lane.in_flight || lane.blocked.is_some() {
                continue; // forgotten meanwhile, and a new lane of that key is listed by itself
            }
            if lane.queue.front().is_none_or(|row| row.content.is_err()) {
                self.tend(&key, now);
                continue;
            }
            let holding = self.holdings.get(&lane.bucket);
            let Some(holding) = holding.filter(|held| !held.leaving && held.until > now) else {
                continue; // the next news of the leases tends to it
            };
            while let Some(row) = lane.queue.front()
                && row.content.is_ok()
                && rows.len() < size
                && (rows.is_empty() || bytes + row.bytes() <= self.limits.batch_bytes)
            {
                bytes += row.bytes();
                let row = lane.queue.pop_front().expect("it has a first row");
                rows.push((Arc::clone(&key), holding.token, row));
                lane.in_flight = true;
            }
            if !lane.in_flight {
                lane.listed = true;
                self.topics.push_front(topic, key);
                break;
            }
        }
        rows
    }

    /// The broker has the events of a publish.
    pub(crate) fn published(&mut self, id: u64, now: Instant) {
        let Some(flight) = self.flights.remove(&id) else { return };
        self.topics.accepted(&flight.topic, now);
        for (_, token, row) in &flight.rows {
            self.bytes -= row.bytes();
            let (seq, bucket, token) = (row.seq, row.bucket, *token);
            self.marks.accepted.push(Accepted { seq, bucket, token });
        }
        self.landed(flight.rows.iter().map(|(key, _, _)| key), now);
    }

    /// The broker refused a publish, or nothing is known of it.
    pub(crate) fn refused(&mut self, id: u64, refusal: Refusal, now: Instant, rng: &mut impl Rng) {
        let Some(mut flight) = self.flights.remove(&id) else { return };
        let (shrink, pause) = match refusal.kind {
            RefusalKind::Overload(pause) => (false, Some(pause)),
            RefusalKind::Transient => (true, Some(Duration::ZERO)),
            RefusalKind::Permanent => (true, None),
        };
        let count = flight.rows.len();
        self.topics.refused(&flight.topic, count, shrink, pause, now, rng);
        let keys: Vec<Key> = flight.rows.iter().map(|(key, _, _)| Arc::clone(key)).collect();
        if count == 1 && shrink {
            let (key, token, row) = flight.rows.pop().expect("it has one row");
            if let Some(lane) = self.lanes.get_mut(&key) {
                lane.in_flight = false;
            }
            if self.may_work(row.bucket, now) {
                let mut backoff = self.limits.retry;
                if refusal.kind == RefusalKind::Transient {
                    // It may be the broker and not the row: that must not delay a row for long.
                    backoff.cap = backoff.cap.min(self.limits.outage.cap);
                }
                let delay = backoff.delay(row.attempts, rng);
                self.fail(&key, token, &row, refusal.error, delay, now);
                return;
            }
            self.let_go(&key, &row);
        }
        for (key, _, row) in flight.rows.into_iter().rev() {
            if self.may_work(row.bucket, now)
                && let Some(lane) = self.lanes.get_mut(&key)
            {
                lane.queue.push_front(row);
            } else {
                self.let_go(&key, &row);
            }
        }
        self.landed(keys.iter(), now);
    }

    /// A row whose bucket is not ours any more: whoever has it now will read it.
    fn let_go(&mut self, key: &Key, row: &Row) {
        self.held.remove(&row.seq);
        self.bytes -= row.bytes();
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.leave_behind(row.seq);
        }
    }

    fn landed<'a>(&mut self, keys: impl Iterator<Item = &'a Key>, now: Instant) {
        let mut last = None;
        for key in keys {
            if last.is_some_and(|last| Arc::ptr_eq(last, key)) {
                continue; // rows of a key are next to each other
            }
            last = Some(key);
            if let Some(lane) = self.lanes.get_mut(key) {
                lane.in_flight = false;
            }
            self.tend(key, now);
        }
    }

    // ---- marking ----

    /// Rows to mark now, if any; one mark at a time.
    pub(crate) fn next_marks(&mut self, now: Instant) -> Option<Marks> {
        if self.marking || self.marks.is_empty() || self.marks_after > now {
            return None;
        }
        self.marking = true;
        let take = |len: usize| len.min(MARKS);
        let (accepted, failed) = (self.marks.accepted.len(), self.marks.failed.len());
        Some(Marks {
            accepted: self.marks.accepted.drain(..take(accepted)).collect(),
            failed: self.marks.failed.drain(..take(failed)).collect(),
        })
    }

    /// So many of the marks are in the table; the others were refused because the lease is another
    /// one now. If that is ours again, a sweep finds what it left unpublished.
    pub(crate) fn marked(&mut self, marks: &Marks, written: usize, now: Instant) {
        self.marking = false;
        self.mark_failures = 0;
        if written < marks.accepted.len() + marks.failed.len() {
            (self.sweep_after, self.next_sweep) = (0, now);
        }
        for seq in marks.seqs() {
            self.held.remove(&seq);
            if self.reading {
                self.settled.insert(seq);
            }
        }
    }

    /// The mark failed; what it was to say is said again later.
    pub(crate) fn mark_failed(&mut self, marks: Marks, now: Instant, rng: &mut impl Rng) {
        self.marking = false;
        self.marks_after = now + DATABASE_BACKOFF.delay(self.mark_failures, rng);
        self.mark_failures = self.mark_failures.saturating_add(1);
        self.marks.accepted.splice(..0, marks.accepted);
        self.marks.failed.splice(..0, marks.failed);
    }

    /// When to ask again at the latest, if nothing happens before.
    pub(crate) fn next_time(&self, now: Instant) -> Instant {
        let mut next = now + Duration::from_secs(60);
        if !self.marks.is_empty() && !self.marking {
            next = next.min(self.marks_after);
        }
        if let Some(end) = self.topics.next_end_of_pause(now) {
            next = next.min(end);
        }
        // While a read is under way only its end can start another one.
        if !self.reading && !self.holdings.is_empty() {
            next = next.min(self.next_sweep);
            if self.has_room() && self.blocked < MAX_BLOCKED {
                next = next.min(self.pace.next());
            }
            if let Some(Reverse((until, _))) = self.waiting.peek() {
                next = next.min(*until);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests;
