//! The engine in memory: the same rules, and nothing outlives the process.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fmt,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    name::Group,
};
use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::{
    StoreError, Stream, check,
    fence::{Acquired, Fence, FenceToken},
    lease::{
        BlockedKey, Claim, Claims, DeadLetter, GroupStats, LeaseToken, Queue, Select, Settle,
        Settled, Start,
        claim::{self, Shelf, Stored},
        core::{Buried, Micros, State, WAITING},
    },
    log::{
        Appended, Bounds, Log, NewRecord, ReadLimit, Record, Seq, Trim,
        dedupe::{Window, identity},
    },
    micros,
    once::{Once, OnceKey, OnceToken, Reserved},
    wake::{Waiter, Wake, Wakes},
};

/// How long dedupe identities are remembered.
const DEDUPE_WINDOW: Duration = Duration::from_secs(120);

/// Everything happens in this process, so a look that nothing asked for finds nothing; this bounds
/// only how late a clock that was moved is noticed.
const BACKSTOP: Duration = Duration::from_millis(250);

/// A store in memory. Clones share it.
///
/// ```
/// # use carrick_store::{engine::memory::MemoryStore, log::{Log, NewRecord}};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let record = NewRecord { body: "hello".into(), ..NewRecord::default() };
/// let appended = store.append(&"greetings".parse()?, vec![record]).await?;
/// assert_eq!(appended[0].seq(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    clock: Arc<dyn Clock>,
    epoch: u64,
    wakes: Wakes,
    book: Mutex<Book>,
}

struct Book {
    now: Micros,
    streams: BTreeMap<Stream, Entry>,
    groups: Vec<Member>,
    window: Window,
    once: HashMap<(String, String), Work>,
    once_tokens: u64,
    leases: HashMap<String, (FenceToken, Micros)>,
}

#[derive(Default)]
struct Entry {
    number: u64,
    /// Numbers below were trimmed, but for what dead letters still need.
    first: Seq,
    last: Seq,
    records: BTreeMap<Seq, Stored>,
    groups: BTreeMap<Group, usize>,
}

struct Member {
    stream: Stream,
    name: Group,
    state: State,
    dead: BTreeMap<Seq, Buried>,
}

struct Work {
    fingerprint: u128,
    token: u64,
    answer: Option<Bytes>,
    ends_at: Micros,
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store by the machine's clock.
    pub fn new() -> Self {
        Self::with_clock(Arc::new(SystemClock))
    }

    /// An empty store by another clock.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        let book = Book {
            now: Micros::MIN,
            streams: BTreeMap::new(),
            groups: Vec::new(),
            window: Window::new(micros::of(DEDUPE_WINDOW)),
            once: HashMap::new(),
            once_tokens: 0,
            leases: HashMap::new(),
        };
        let epoch = rand::random();
        Self(Arc::new(Inner { clock, epoch, wakes: Wakes::default(), book: Mutex::new(book) }))
    }

    /// Does nothing: there is nothing to flush. Every engine has it.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn close(&self) {}

    /// Works on the book, at the present time.
    fn book<T>(&self, work: impl FnOnce(&mut Book) -> T) -> T {
        let now = self.0.clock.wall().as_microsecond();
        let mut book = self.0.book.lock();
        // A clock that was set back stands still here until it has caught up.
        book.now = book.now.max(now);
        work(&mut book)
    }

    /// Works on a group that exists; `None` if it does not.
    fn group<T>(
        &self,
        stream: &Stream,
        group: &Group,
        work: impl FnOnce(&mut Member, &mut Entry) -> T,
    ) -> Option<T> {
        let (answer, ready) = self.book(|book| {
            let entry = book.streams.get_mut(stream)?;
            let index = *entry.groups.get(group)?;
            let member = &mut book.groups[index];
            member.state.advance(book.now);
            Some((work(member, entry), member.state.has_ready()))
        })?;
        if ready {
            self.0.wakes.wake(stream);
        }
        Some(answer)
    }
}

impl Book {
    fn entry(&mut self, stream: &Stream) -> &mut Entry {
        let number = self.streams.len() as u64 + 1;
        let new = || Entry { number, first: 1, ..Entry::default() };
        self.streams.entry(stream.clone()).or_insert_with(new)
    }

    /// The group's place, and whether it was made.
    fn member(&mut self, stream: &Stream, group: &Group, start: Start) -> (usize, bool) {
        let next = self.groups.len();
        let entry = self.entry(stream);
        if let Some(index) = entry.groups.get(group) {
            return (*index, false);
        }
        let cursor = match start {
            Start::Earliest => entry.first - 1,
            Start::Latest => entry.last,
        };
        entry.groups.insert(group.clone(), next);
        let (stream, name) = (stream.clone(), group.clone());
        self.groups.push(Member { stream, name, state: State::at(cursor), dead: BTreeMap::new() });
        (next, true)
    }
}

impl Shelf for &Entry {
    type Error = Infallible;

    fn record(&mut self, seq: Seq) -> Result<Option<Record>, Infallible> {
        Ok(self.records.get(&seq).map(|stored| stored.record.clone()))
    }

    fn after(
        &mut self,
        seq: Seq,
        limit: usize,
        each: &mut dyn FnMut(Stored) -> bool,
    ) -> Result<(), Infallible> {
        for stored in self.records.range(seq + 1..).map(|(_, stored)| stored).take(limit) {
            if !each(stored.clone()) {
                break;
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Log for MemoryStore {
    fn epoch(&self) -> u64 {
        self.0.epoch
    }

    fn dedupe_window(&self) -> Duration {
        DEDUPE_WINDOW
    }

    async fn append(
        &self,
        stream: &Stream,
        records: Vec<NewRecord>,
    ) -> Result<Vec<Appended>, StoreError> {
        check::append(&records)?;
        let appended = self.book(|book| {
            let now = book.now;
            let number = book.entry(stream).number;
            let mut appended = Vec::with_capacity(records.len());
            for record in records {
                let name = record.dedupe.map(|dedupe| identity(number, dedupe));
                if let Some(seq) = name.and_then(|name| book.window.get(&name)) {
                    appended.push(Appended::Duplicate(seq));
                    continue;
                }
                let entry = book.streams.get_mut(stream).expect("made above");
                entry.last += 1;
                let seq = entry.last;
                let NewRecord { key, due, expires, body, .. } = record;
                let stored_at = micros::time(now);
                entry.records.insert(
                    seq,
                    Stored {
                        record: Record { seq, stored_at, key, body },
                        due: due.map(|due| due.as_microsecond()),
                        expires: expires.map(|expires| expires.as_microsecond()),
                    },
                );
                if let Some(name) = name {
                    book.window.insert(name, seq, now);
                }
                appended.push(Appended::Stored(seq));
            }
            appended
        });
        self.0.wakes.wake(stream);
        Ok(appended)
    }

    async fn read(
        &self,
        stream: &Stream,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, StoreError> {
        check::read(limit)?;
        self.book(|book| {
            let Some(entry) = book.streams.get(stream) else {
                let bounds = Bounds { first: 1, last: 0 };
                return bounds.check(after).map(|()| Vec::new());
            };
            Bounds { first: entry.first, last: entry.last }.check(after)?;
            let mut bytes = 0;
            let fits = |record: &&Stored| {
                let first = bytes == 0;
                bytes += record.record.body.len().max(1);
                first || bytes <= limit.bytes
            };
            let records = entry.records.range(after + 1..).map(|(_, stored)| stored);
            let records = records.take(limit.records).take_while(fits);
            Ok(records.map(|stored| stored.record.clone()).collect())
        })
    }

    async fn bounds(&self, stream: &Stream) -> Result<Bounds, StoreError> {
        Ok(self.book(|book| {
            let entry = book.streams.get(stream);
            entry.map_or(Bounds { first: 1, last: 0 }, |entry| Bounds {
                first: entry.first,
                last: entry.last,
            })
        }))
    }

    async fn streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(Stream, Bounds)>, StoreError> {
        Ok(self.book(|book| {
            let beyond = |stream: &&Stream| after.is_none_or(|after| *stream > after);
            let named = book.streams.iter().filter(|(stream, _)| beyond(stream));
            named
                .filter(|(_, entry)| entry.last > 0)
                .take(limit)
                .map(|(stream, entry)| {
                    (stream.clone(), Bounds { first: entry.first, last: entry.last })
                })
                .collect()
        }))
    }

    async fn trim(&self, stream: &Stream, trim: Trim) -> Result<usize, StoreError> {
        Ok(self.book(|book| {
            let Some(entry) = book.streams.get_mut(stream) else { return 0 };
            let members: Vec<&Member> =
                entry.groups.values().map(|index| &book.groups[*index]).collect();
            let floor = members.iter().map(|member| member.state.floor()).min();
            let floor = floor.unwrap_or(entry.last + 1);
            let dead = |seq: &Seq| members.iter().any(|member| member.dead.contains_key(seq));
            let gone: Vec<Seq> = entry
                .records
                .range(..floor)
                .take_while(|(_, stored)| stored.record.stored_at < trim.stored_before)
                .map(|(seq, _)| *seq)
                .filter(|seq| !dead(seq))
                .take(trim.limit)
                .collect();
            for seq in &gone {
                entry.records.remove(seq);
                entry.first = entry.first.max(seq + 1);
            }
            gone.len()
        }))
    }
}

#[async_trait]
impl Queue for MemoryStore {
    async fn create_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, StoreError> {
        Ok(self.book(|book| book.member(stream, group, start).1))
    }

    async fn claim(
        &self,
        stream: &Stream,
        group: &Group,
        claim: Claim,
    ) -> Result<Claims, StoreError> {
        check::claim(claim)?;
        Ok(self.book(|book| {
            let (index, _) = book.member(stream, group, Start::Earliest);
            let member = &mut book.groups[index];
            member.state.advance(book.now);
            let number = number(index);
            let claimed =
                claim::claim(&mut member.state, &mut &book.streams[stream], number, claim);
            let Ok(claims) = claimed;
            claims
        }))
    }

    async fn settle(
        &self,
        settlements: Vec<(LeaseToken, Settle)>,
    ) -> Result<Vec<Settled>, StoreError> {
        check::settle(&settlements)?;
        let mut ready = BTreeSet::new();
        let settled = self.book(|book| {
            let one = |(token, settle): (LeaseToken, Settle)| {
                let Some(member) = book.groups.get_mut(index(token)) else {
                    return Settled::Stale;
                };
                member.state.advance(book.now);
                let Some(buried) = member.state.settle(token.seq, token.fence, &settle) else {
                    return Settled::Stale;
                };
                member.dead.extend(buried.map(|buried| (buried.seq, buried)));
                if member.state.has_ready() {
                    ready.insert(member.stream.clone());
                }
                Settled::Done
            };
            settlements.into_iter().map(one).collect()
        });
        for stream in ready {
            self.0.wakes.wake(&stream);
        }
        Ok(settled)
    }

    async fn group_of(&self, token: LeaseToken) -> Result<Option<(Stream, Group)>, StoreError> {
        Ok(self.book(|book| {
            let member = book.groups.get(index(token))?;
            Some((member.stream.clone(), member.name.clone()))
        }))
    }

    async fn groups(&self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>, StoreError> {
        let names = self.book(|book| {
            let entry = book.streams.get(stream);
            entry.map(|entry| entry.groups.keys().cloned().collect::<Vec<_>>()).unwrap_or_default()
        });
        let stats = |name: Group| {
            let stats = self.group(stream, &name, |member, entry| {
                let next = entry.records.range(member.state.cursor() + 1..).next();
                let next = next.map(|(_, stored)| stored.record.stored_at.as_microsecond());
                member.state.stats(entry.last, next, member.dead.len() as u64)
            });
            stats.map(|stats| (name, stats))
        };
        Ok(names.into_iter().filter_map(stats).collect())
    }

    async fn dead_letters(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let letters = self.group(stream, group, |member, entry| {
            let dead = member.dead.range(after.saturating_add(1)..).take(limit);
            dead.filter_map(|(seq, buried)| {
                Some(buried.clone().letter(entry.records.get(seq)?.record.clone()))
            })
            .collect()
        });
        Ok(letters.unwrap_or_default())
    }

    async fn redrive(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let count = self.group(stream, group, |member, entry| {
            // No more than may wait: the rest is redriven when these have been worked on.
            let limit = limit.min(WAITING.saturating_sub(member.state.waiting()));
            let chosen = chosen(member, entry, select, limit);
            for seq in &chosen {
                member.dead.remove(seq);
                member.state.redrive(entry.records[seq].to_new());
            }
            chosen.len()
        });
        Ok(count.unwrap_or(0))
    }

    async fn purge(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let count = self.group(stream, group, |member, entry| {
            let chosen = chosen(member, entry, select, limit);
            member.dead.retain(|seq, _| !chosen.contains(seq));
            chosen.len()
        });
        Ok(count.unwrap_or(0))
    }

    async fn skip(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, StoreError> {
        let count = self.group(stream, group, |member, _| {
            let buried = member.state.skip(select, cause);
            let count = buried.len();
            member.dead.extend(buried.into_iter().map(|buried| (buried.seq, buried)));
            count
        });
        Ok(count.unwrap_or(0))
    }

    async fn blocked_keys(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, StoreError> {
        let keys = self.group(stream, group, |member, _| member.state.blocked_keys(after, limit));
        Ok(keys.unwrap_or_default())
    }
}

fn number(index: usize) -> NonZeroU64 {
    NonZeroU64::MIN.saturating_add(index as u64)
}

fn index(token: LeaseToken) -> usize {
    usize::try_from(token.group.get() - 1).unwrap_or(usize::MAX)
}

/// The dead letters that an action is for, oldest first.
fn chosen(member: &Member, entry: &Entry, select: &Select, limit: usize) -> BTreeSet<Seq> {
    let key = |seq| entry.records.get(seq).and_then(|stored| stored.record.key.as_deref());
    let dead = member.dead.iter();
    let chosen = dead.filter(|(seq, buried)| select.takes(**seq, key(seq), &buried.cause));
    chosen.map(|(seq, _)| *seq).take(limit).collect()
}

#[async_trait]
impl Once for MemoryStore {
    async fn reserve(&self, key: &OnceKey, hold: Duration) -> Result<Reserved, StoreError> {
        check::once(key)?;
        Ok(self.book(|book| {
            let now = book.now;
            let place = (key.scope.clone(), key.key.clone());
            if let Some(work) = book.once.get(&place).filter(|work| work.ends_at > now) {
                if work.fingerprint != key.fingerprint {
                    return Reserved::Mismatch;
                }
                return match &work.answer {
                    Some(answer) => Reserved::Done(answer.clone()),
                    None => Reserved::Busy(left(work.ends_at, now)),
                };
            }
            book.once_tokens += 1;
            let token = book.once_tokens;
            let ends_at = now.saturating_add(micros::of(hold));
            let fingerprint = key.fingerprint;
            book.once.insert(place, Work { fingerprint, token, answer: None, ends_at });
            Reserved::New(OnceToken(token))
        }))
    }

    async fn complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: Bytes,
        keep: Duration,
    ) -> Result<bool, StoreError> {
        check::once(key)?;
        Ok(self.book(|book| {
            let now = book.now;
            let place = (key.scope.clone(), key.key.clone());
            let held = |work: &&mut Work| {
                work.token == token.0 && work.answer.is_none() && work.ends_at > now
            };
            let Some(work) = book.once.get_mut(&place).filter(held) else { return false };
            work.answer = Some(answer);
            work.ends_at = now.saturating_add(micros::of(keep));
            true
        }))
    }

    async fn release(&self, key: &OnceKey, token: OnceToken) -> Result<(), StoreError> {
        check::once(key)?;
        self.book(|book| {
            let place = (key.scope.clone(), key.key.clone());
            let held = |work: &Work| work.token == token.0 && work.answer.is_none();
            if book.once.get(&place).is_some_and(held) {
                book.once.remove(&place);
            }
        });
        Ok(())
    }

    async fn sweep(&self, limit: usize) -> Result<usize, StoreError> {
        Ok(self.book(|book| {
            let now = book.now;
            let over = book.once.iter().filter(|(_, work)| work.ends_at <= now);
            let over: Vec<_> = over.map(|(place, _)| place.clone()).take(limit).collect();
            for place in &over {
                book.once.remove(place);
            }
            over.len()
        }))
    }
}

#[async_trait]
impl Fence for MemoryStore {
    async fn acquire(&self, name: &str, ttl: Duration) -> Result<Acquired, StoreError> {
        check::lease_name(name)?;
        Ok(self.book(|book| {
            let now = book.now;
            let lease = book.leases.entry_ref(name).or_insert((0, Micros::MIN));
            if lease.1 > now {
                return Acquired::Busy(left(lease.1, now));
            }
            *lease = (lease.0 + 1, now.saturating_add(micros::of(ttl)));
            Acquired::Held(lease.0)
        }))
    }

    async fn renew(
        &self,
        name: &str,
        token: FenceToken,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        Ok(self.book(|book| book.set_end(name, token, micros::of(ttl))))
    }

    async fn release_lease(&self, name: &str, token: FenceToken) -> Result<bool, StoreError> {
        check::lease_name(name)?;
        Ok(self.book(|book| book.set_end(name, token, 0)))
    }
}

impl Book {
    fn set_end(&mut self, name: &str, token: FenceToken, from_now: Micros) -> bool {
        let now = self.now;
        let held = |lease: &&mut (FenceToken, Micros)| lease.0 == token && lease.1 > now;
        let Some(lease) = self.leases.get_mut(name).filter(held) else { return false };
        lease.1 = now.saturating_add(from_now);
        true
    }
}

fn left(end: Micros, now: Micros) -> Duration {
    Duration::from_micros(u64::try_from(end.saturating_sub(now)).unwrap_or(0))
}

#[async_trait]
impl Wake for MemoryStore {
    fn waiter(&self, stream: &Stream) -> Waiter {
        self.0.wakes.waiter(stream)
    }

    fn backstop(&self) -> Duration {
        BACKSTOP
    }
}
