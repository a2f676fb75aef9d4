//! What the writer works on: the tables, and what it keeps of them in memory.
//!
//! The streams' ends, the groups' states and the dedupe window are kept, for nobody else writes to
//! them: a file has one engine at a time. If a transaction fails, they are forgotten and read again
//! (the window: what the transaction added).

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use carrick_core::{clock::Clock, name::Group};
use hashbrown::HashMap;
use rusqlite::{Connection, OptionalExtension, Row, params};
use tokio::time::Instant;

use super::schema;
use crate::{
    Stream,
    lease::{
        BlockedKey, Claim, Claims, GroupStats, LeaseToken, Select, Settle, Settled, Start,
        claim::{self, Shelf, Stored},
        core::{Buried, Change, Item, Micros, Place, State, WAITING},
    },
    log::{
        Appended, NewRecord, Record, Seq, Trim,
        dedupe::{Identity, Turn, Window, identity},
    },
    micros,
};

/// Streams whose ends are kept in memory, 150 bytes each; beyond that they are read again.
const STREAMS_KEPT: usize = 100_000;

/// Groups whose state is kept in memory; a quiet one is small.
const GROUPS_KEPT: usize = 10_000;

/// Old dedupe rows that one commit removes: more than a commit adds, which is one, so that they do not
/// pile up, and few enough not to be felt.
const DEDUPE_PRUNED: i64 = 16;

/// At most one log line about failed commits in this time: a full disk fails every one.
const QUIET: Duration = Duration::from_secs(10);

type Result<T> = rusqlite::Result<T>;

/// A stream as the writer knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) number: u64,
    pub(super) first: Seq,
    pub(super) last: Seq,
    /// Whether whoever waits for it is to be woken.
    woken: bool,
}

#[derive(Debug)]
struct Member {
    stream: Stream,
    name: Group,
    number: u64,
    state: State,
    touched: bool,
}

pub(super) struct Tables {
    conn: Connection,
    clock: Arc<dyn Clock>,
    now: Micros,
    streams: HashMap<Stream, End>,
    groups: HashMap<u64, Member>,
    by_name: HashMap<(Stream, Group), u64>,
    touched: Vec<u64>,
    woken: Vec<Stream>,
    dedupe: Dedupe,
    last_log: Option<Instant>,
    /// Held for as long as the engine writes: a second engine on this file must not start.
    _alone: std::fs::File,
}

/// The dedupe window, and which rows of its table belong to which generation.
#[derive(Debug)]
struct Dedupe {
    window: Window,
    next: i64,
    /// First rows of the current and of the previous generation.
    current: i64,
    previous: i64,
    /// Rows below are gone; 0 if that is not known.
    pruned: i64,
    /// What the present transaction added.
    added: Vec<(Identity, Seq)>,
}

impl Tables {
    pub(super) fn new(
        conn: Connection,
        clock: Arc<dyn Clock>,
        window: Duration,
        alone: std::fs::File,
    ) -> Result<Self> {
        let now = clock.wall().as_microsecond();
        let dedupe = Dedupe::load(&conn, micros::of(window), now)?;
        Ok(Self {
            conn,
            clock,
            now,
            streams: HashMap::new(),
            groups: HashMap::new(),
            by_name: HashMap::new(),
            touched: Vec::new(),
            woken: Vec::new(),
            dedupe,
            last_log: None,
            _alone: alone,
        })
    }

    pub(super) fn conn(&self) -> &Connection {
        &self.conn
    }

    /// The present, by the engine's clock; it never goes back.
    pub(super) fn now(&self) -> Micros {
        self.now
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        if self.streams.len() > STREAMS_KEPT {
            self.streams.clear();
        }
        if self.groups.len() > GROUPS_KEPT {
            self.groups.clear();
            self.by_name.clear();
        }
        self.now = self.now.max(self.clock.wall().as_microsecond());
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    pub(super) fn commit(&mut self) -> Result<()> {
        for id in std::mem::take(&mut self.touched) {
            if let Some(member) = self.groups.get_mut(&id) {
                member.touched = false;
                if let Some(change) = member.state.take_change() {
                    write_change(&self.conn, id, change)?;
                }
            }
        }
        self.dedupe.write(&self.conn, self.now)?;
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        self.dedupe.added.clear();
        Ok(())
    }

    /// Ends a transaction that failed, and forgets what is not in the tables.
    pub(super) fn give_up(&mut self) {
        // SQLite may have rolled back by itself, as it does when the disk is full.
        if !self.conn.is_autocommit()
            && let Err(error) = self.conn.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "a failed commit could not be rolled back");
        }
        self.streams.clear();
        self.groups.clear();
        self.by_name.clear();
        self.touched.clear();
        self.woken.clear();
        self.dedupe.give_up();
    }

    pub(super) fn take_woken(&mut self) -> Vec<Stream> {
        for stream in &self.woken {
            if let Some(end) = self.streams.get_mut(stream) {
                end.woken = false;
            }
        }
        std::mem::take(&mut self.woken)
    }

    /// Whether it is time for another log line about a failure that repeats.
    pub(super) fn may_log(&mut self) -> bool {
        let now = Instant::now();
        let quiet = self.last_log.is_some_and(|last| now.duration_since(last) < QUIET);
        if !quiet {
            self.last_log = Some(now);
        }
        !quiet
    }

    // The log.

    pub(super) fn append(
        &mut self,
        stream: &Stream,
        records: &[NewRecord],
    ) -> Result<Vec<Appended>> {
        let now = self.now;
        let mut end = self.make_stream(stream)?;
        let mut appended = Vec::with_capacity(records.len());
        for NewRecord { key, dedupe, due, expires, body } in records {
            let name = dedupe.map(|dedupe| identity(end.number, dedupe));
            if let Some(seq) = name.and_then(|name| self.dedupe.window.get(&name)) {
                appended.push(Appended::Duplicate(seq));
                continue;
            }
            end.last += 1;
            let seq = end.last;
            self.conn
                .prepare_cached(
                    "INSERT INTO carrick_log (place, stored_at, key, due, expires, body)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                )?
                .execute(params![
                    schema::place(end.number, seq),
                    now,
                    key,
                    due.map(|due| due.as_microsecond()),
                    expires.map(|expires| expires.as_microsecond()),
                    &body[..],
                ])?;
            if let Some(name) = name {
                self.dedupe.add(name, seq, now);
            }
            appended.push(Appended::Stored(seq));
        }
        *self.streams.get_mut(stream).expect("it was found or made above") = end;
        self.wake(stream);
        Ok(appended)
    }

    /// Has whoever waits for a stream woken after the commit.
    fn wake(&mut self, stream: &Stream) {
        let end = self.streams.get_mut(stream);
        if !end.is_some_and(|end| std::mem::replace(&mut end.woken, true)) {
            self.woken.push(stream.clone());
        }
    }

    pub(super) fn stream(&mut self, stream: &Stream) -> Result<Option<End>> {
        if let Some(end) = self.streams.get(stream) {
            return Ok(Some(*end));
        }
        let end = end(&self.conn, stream)?;
        if let Some(end) = end {
            self.streams.insert(stream.clone(), end);
        }
        Ok(end)
    }

    fn make_stream(&mut self, stream: &Stream) -> Result<End> {
        if let Some(end) = self.stream(stream)? {
            return Ok(end);
        }
        self.conn
            .prepare_cached("INSERT INTO carrick_stream (name) VALUES (?1)")?
            .execute([stream.as_str()])?;
        let number = self.conn.last_insert_rowid().cast_unsigned();
        let end = End { number, first: 1, last: 0, woken: false };
        self.streams.insert(stream.clone(), end);
        Ok(end)
    }

    /// Removes those of the records that every group has finished with.
    pub(super) fn trim(&mut self, stream: &Stream, old: &[Seq]) -> Result<usize> {
        let Some(mut end) = self.stream(stream)? else { return Ok(0) };
        let number = end.number.cast_signed();
        let names: Vec<String> =
            self.column("SELECT name FROM carrick_group WHERE stream_id = ?1", number)?;
        let mut floor = end.last + 1;
        for name in names {
            let name = name.parse().map_err(unreadable)?;
            if let Some(id) = self.member(stream, &name)? {
                floor = floor.min(self.groups[&id].state.floor());
            }
        }
        // What was not dead when it was chosen may be by now.
        let mut delete = self.conn.prepare_cached(
            "DELETE FROM carrick_log WHERE place = ?1 AND NOT EXISTS (
                 SELECT 1 FROM carrick_dead AS dead
                 JOIN carrick_group AS one ON one.id = dead.group_id
                 WHERE one.stream_id = ?2 AND dead.seq = ?3)",
        )?;
        let mut gone = 0;
        for seq in old.iter().copied().filter(|seq| *seq < floor) {
            let rows =
                delete.execute([schema::place(end.number, seq), number, seq.cast_signed()])?;
            gone += rows;
            if rows > 0 {
                end.first = end.first.max(seq + 1);
            }
        }
        drop(delete);
        if gone > 0 {
            self.conn
                .prepare_cached("UPDATE carrick_stream SET first = ?2, last = ?3 WHERE id = ?1")?
                .execute([number, end.first.cast_signed(), end.last.cast_signed()])?;
            self.streams.insert(stream.clone(), end);
        }
        Ok(gone)
    }

    fn column(&self, sql: &str, key: i64) -> Result<Vec<String>> {
        self.conn.prepare_cached(sql)?.query_map([key], |row| row.get(0))?.collect()
    }

    // The queue.

    pub(super) fn create_group(
        &mut self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<(u64, bool)> {
        if let Some(id) = self.member(stream, group)? {
            return Ok((id, false));
        }
        let end = self.make_stream(stream)?;
        let cursor = match start {
            Start::Earliest => end.first - 1,
            Start::Latest => end.last,
        };
        self.conn
            .prepare_cached(
                "INSERT INTO carrick_group (stream_id, name, cursor, fence) VALUES (?1, ?2, ?3, 0)",
            )?
            .execute(params![end.number.cast_signed(), group.as_str(), cursor.cast_signed()])?;
        let id = self.conn.last_insert_rowid().cast_unsigned();
        self.keep(id, stream, group, end.number, State::at(cursor));
        Ok((id, true))
    }

    fn keep(&mut self, id: u64, stream: &Stream, group: &Group, number: u64, state: State) {
        let (stream, name) = (stream.clone(), group.clone());
        self.by_name.insert((stream.clone(), name.clone()), id);
        self.groups.insert(id, Member { stream, name, number, state, touched: false });
    }

    /// The number of a group, with its state in memory and at the present time; `None` if there is no
    /// such group.
    fn member(&mut self, stream: &Stream, group: &Group) -> Result<Option<u64>> {
        let name = (stream.clone(), group.clone());
        let id = match self.by_name.get(&name) {
            Some(id) => *id,
            None => {
                let row: Option<(i64, i64, i64, i64)> = self
                    .conn
                    .prepare_cached(
                        "SELECT one.id, one.stream_id, one.cursor, one.fence
                         FROM carrick_group AS one
                         JOIN carrick_stream AS stream ON stream.id = one.stream_id
                         WHERE stream.name = ?1 AND one.name = ?2",
                    )?
                    .query_row(params![stream.as_str(), group.as_str()], |row| {
                        Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
                    })
                    .optional()?;
                let Some((id, number, cursor, fence)) = row else { return Ok(None) };
                let (id, number) = (id.cast_unsigned(), number.cast_unsigned());
                let state = self.load(id, number, cursor.cast_unsigned(), fence.cast_unsigned())?;
                self.keep(id, stream, group, number, state);
                id
            }
        };
        self.touch(id);
        Ok(Some(id))
    }

    /// The same by its number.
    fn member_by_id(&mut self, id: u64) -> Result<bool> {
        if !self.groups.contains_key(&id) {
            let Some((stream, group)) = self.name_of(id)? else { return Ok(false) };
            return Ok(self.member(&stream, &group)?.is_some());
        }
        self.touch(id);
        Ok(true)
    }

    fn touch(&mut self, id: u64) {
        let member = self.groups.get_mut(&id).expect("the caller has it in memory");
        member.state.advance(self.now);
        if !member.touched {
            member.touched = true;
            self.touched.push(id);
        }
    }

    pub(super) fn name_of(&mut self, id: u64) -> Result<Option<(Stream, Group)>> {
        if let Some(member) = self.groups.get(&id) {
            return Ok(Some((member.stream.clone(), member.name.clone())));
        }
        let row: Option<(String, String)> = self
            .conn
            .prepare_cached(
                "SELECT stream.name, one.name FROM carrick_group AS one
                 JOIN carrick_stream AS stream ON stream.id = one.stream_id WHERE one.id = ?1",
            )?
            .query_row([id.cast_signed()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((stream, group)) = row else { return Ok(None) };
        Ok(Some((stream.parse().map_err(unreadable)?, group.parse().map_err(unreadable)?)))
    }

    /// Reads a group's state.
    fn load(&self, id: u64, number: u64, cursor: Seq, fence: u64) -> Result<State> {
        let put = self
            .conn
            .prepare_cached(
                "SELECT delivery.seq, leased, until, fence, attempt, first_claimed_at,
                     key, stored_at, expires, length(body)
                 FROM carrick_delivery AS delivery
                 LEFT JOIN carrick_log ON place = ?2 + delivery.seq
                 WHERE group_id = ?1 ORDER BY delivery.seq",
            )?
            .query_map(params![id.cast_signed(), schema::place(number, 0)], |row| {
                let (leased, until): (bool, Micros) = (row.get(1)?, row.get(2)?);
                let key: Option<String> = row.get(6)?;
                let item = Item {
                    key: key.map(Arc::from),
                    place: if leased { Place::Leased(until) } else { Place::Waiting(until) },
                    fence: row.get::<_, i64>(3)?.cast_unsigned(),
                    attempt: row.get(4)?,
                    first_claimed: row.get(5)?,
                    stored: row.get::<_, Option<_>>(7)?.unwrap_or(0),
                    expires: row.get(8)?,
                    size: row.get::<_, Option<_>>(9)?.unwrap_or(0),
                };
                Ok((row.get::<_, i64>(0)?.cast_unsigned(), item))
            })?
            .collect::<Result<Vec<_>>>()?;
        let mut state = State::default();
        state.apply(Change { cursor, fence, put, gone: Vec::new() }, self.now);
        Ok(state)
    }

    pub(super) fn claim(&mut self, stream: &Stream, group: &Group, claim: Claim) -> Result<Claims> {
        let id = match self.member(stream, group)? {
            Some(id) => id,
            None => {
                let (id, _) = self.create_group(stream, group, Start::Earliest)?;
                self.touch(id);
                id
            }
        };
        let member = self.groups.get_mut(&id).expect("just found or made");
        let mut shelf = Log { conn: &self.conn, number: member.number };
        let id = NonZeroU64::new(id).expect("SQLite numbers rows from 1");
        claim::claim(&mut member.state, &mut shelf, id, claim)
    }

    pub(super) fn settle(&mut self, settlements: &[(LeaseToken, Settle)]) -> Result<Vec<Settled>> {
        let mut settled = Vec::with_capacity(settlements.len());
        for (token, settle) in settlements {
            let id = token.group.get();
            if !self.member_by_id(id)? {
                settled.push(Settled::Stale);
                continue;
            }
            let member = self.groups.get_mut(&id).expect("just found");
            settled.push(match member.state.settle(token.seq, token.fence, settle) {
                Some(buried) => {
                    if let Some(buried) = buried {
                        bury(&self.conn, id, &buried)?;
                    }
                    if member.state.has_ready() {
                        let stream = member.stream.clone();
                        self.wake(&stream);
                    }
                    Settled::Done
                }
                None => Settled::Stale,
            });
        }
        Ok(settled)
    }

    pub(super) fn groups(&mut self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>> {
        let Some(end) = self.stream(stream)? else { return Ok(Vec::new()) };
        let names: Vec<String> = self.column(
            "SELECT name FROM carrick_group WHERE stream_id = ?1 ORDER BY name",
            end.number.cast_signed(),
        )?;
        let mut groups = Vec::with_capacity(names.len());
        for name in names {
            let name: Group = name.parse().map_err(unreadable)?;
            let Some(id) = self.member(stream, &name)? else { continue };
            let dead: i64 = self
                .conn
                .prepare_cached("SELECT count(*) FROM carrick_dead WHERE group_id = ?1")?
                .query_row([id.cast_signed()], |row| row.get(0))?;
            let state = &self.groups[&id].state;
            let next = self
                .conn
                .prepare_cached(
                    "SELECT stored_at FROM carrick_log WHERE place BETWEEN ?1 AND ?2
                     ORDER BY place LIMIT 1",
                )?
                .query_row(
                    [
                        schema::place(end.number, state.cursor() + 1),
                        schema::place(end.number, Seq::MAX),
                    ],
                    |row| row.get(0),
                )
                .optional()?;
            groups.push((name, state.stats(end.last, next, dead.cast_unsigned())));
        }
        Ok(groups)
    }

    pub(super) fn redrive(
        &mut self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize> {
        let Some(id) = self.member(stream, group)? else { return Ok(0) };
        // No more than may wait: the rest is redriven when these have been worked on.
        let limit = limit.min(WAITING.saturating_sub(self.groups[&id].state.waiting()));
        let chosen = self.chosen(id, select, limit)?;
        for stored in &chosen {
            self.remove_dead(id, stored.record.seq)?;
            let member = self.groups.get_mut(&id).expect("just found");
            member.state.redrive(stored.to_new());
        }
        if !chosen.is_empty() {
            self.wake(stream);
        }
        Ok(chosen.len())
    }

    pub(super) fn purge(
        &mut self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize> {
        let Some(id) = self.member(stream, group)? else { return Ok(0) };
        let chosen = self.chosen(id, select, limit)?;
        for stored in &chosen {
            self.remove_dead(id, stored.record.seq)?;
        }
        Ok(chosen.len())
    }

    fn remove_dead(&self, id: u64, seq: Seq) -> Result<()> {
        self.conn
            .prepare_cached("DELETE FROM carrick_dead WHERE group_id = ?1 AND seq = ?2")?
            .execute([id.cast_signed(), seq.cast_signed()])?;
        Ok(())
    }

    /// The dead letters that an action is for, oldest first.
    fn chosen(&self, id: u64, select: &Select, limit: usize) -> Result<Vec<Stored>> {
        let number = self.groups[&id].number;
        let mut statement = self.conn.prepare_cached(
            "SELECT place, stored_at, key, body, due, expires, cause FROM carrick_dead
             JOIN carrick_log ON place = ?2 + seq WHERE group_id = ?1 ORDER BY seq",
        )?;
        let mut rows = statement.query(params![id.cast_signed(), schema::place(number, 0)])?;
        let mut chosen = Vec::new();
        while chosen.len() < limit
            && let Some(row) = rows.next()?
        {
            let (key, cause): (Option<String>, String) = (row.get(2)?, row.get(6)?);
            if select.takes(schema::seq(row.get(0)?), key.as_deref(), &cause) {
                chosen.push(stored(row)?);
            }
        }
        Ok(chosen)
    }

    pub(super) fn skip(
        &mut self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize> {
        let Some(id) = self.member(stream, group)? else { return Ok(0) };
        let member = self.groups.get_mut(&id).expect("just found");
        let buried = member.state.skip(select, cause);
        for buried in &buried {
            bury(&self.conn, id, buried)?;
        }
        if !buried.is_empty() {
            self.wake(stream);
        }
        Ok(buried.len())
    }

    pub(super) fn blocked_keys(
        &mut self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>> {
        let Some(id) = self.member(stream, group)? else { return Ok(Vec::new()) };
        Ok(self.groups[&id].state.blocked_keys(after, limit))
    }
}

/// How far a stream reaches, from the tables; `None` if there is no such stream.
pub(super) fn end(conn: &Connection, stream: &Stream) -> Result<Option<End>> {
    let row: Option<(i64, i64, i64)> = conn
        .prepare_cached("SELECT id, first, last FROM carrick_stream WHERE name = ?1")?
        .query_row([stream.as_str()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((number, first, last)) = row else { return Ok(None) };
    let number = number.cast_unsigned();
    let newest: Option<i64> = conn
        .prepare_cached(
            "SELECT place FROM carrick_log WHERE place BETWEEN ?1 AND ?2
             ORDER BY place DESC LIMIT 1",
        )?
        .query_row([schema::place(number, 0), schema::place(number, Seq::MAX)], |row| row.get(0))
        .optional()?;
    let last = newest.map_or(0, schema::seq).max(last.cast_unsigned());
    Ok(Some(End { number, first: first.cast_unsigned(), last, woken: false }))
}

/// Old records that may be trimmed: those that are not dead. Ends at the first that is too young, so
/// that nobody reads through a long stream to find nothing.
pub(super) fn old(conn: &Connection, stream: &Stream, trim: Trim) -> Result<Vec<Seq>> {
    let Some(end) = end(conn, stream)? else { return Ok(Vec::new()) };
    let mut statement = conn.prepare_cached(
        "SELECT place, stored_at, EXISTS (
             SELECT 1 FROM carrick_dead AS dead
             JOIN carrick_group AS one ON one.id = dead.group_id
             WHERE one.stream_id = ?3 AND dead.seq = place - ?1)
         FROM carrick_log WHERE place BETWEEN ?1 AND ?2 ORDER BY place",
    )?;
    let number = end.number;
    let (from, to) = (schema::place(number, 0), schema::place(number, Seq::MAX));
    let mut rows = statement.query([from, to, number.cast_signed()])?;
    let before = trim.stored_before.as_microsecond();
    let mut old = Vec::new();
    while old.len() < trim.limit
        && let Some(row) = rows.next()?
        && row.get::<_, Micros>(1)? < before
    {
        if !row.get::<_, bool>(2)? {
            old.push(schema::seq(row.get(0)?));
        }
    }
    Ok(old)
}

/// A record of `place, stored_at, key, body, …`.
pub(super) fn record(row: &Row<'_>) -> Result<Record> {
    let body = row.get_ref(3)?.as_blob()?;
    Ok(Record {
        seq: schema::seq(row.get(0)?),
        stored_at: micros::time(row.get(1)?),
        key: row.get(2)?,
        body: bytes::Bytes::copy_from_slice(body),
    })
}

fn stored(row: &Row<'_>) -> Result<Stored> {
    Ok(Stored { record: record(row)?, due: row.get(4)?, expires: row.get(5)? })
}

/// A name in the tables that is none: somebody wrote there.
fn unreadable(error: carrick_core::name::InvalidName) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
}

/// The log of one stream.
struct Log<'a> {
    conn: &'a Connection,
    number: u64,
}

impl Shelf for Log<'_> {
    type Error = rusqlite::Error;

    fn record(&mut self, seq: Seq) -> Result<Option<Record>> {
        self.conn
            .prepare_cached("SELECT place, stored_at, key, body FROM carrick_log WHERE place = ?1")?
            .query_row([schema::place(self.number, seq)], record)
            .optional()
    }

    fn after(
        &mut self,
        seq: Seq,
        limit: usize,
        each: &mut dyn FnMut(Stored) -> bool,
    ) -> Result<()> {
        let mut statement = self.conn.prepare_cached(
            "SELECT place, stored_at, key, body, due, expires FROM carrick_log
             WHERE place BETWEEN ?1 AND ?2 ORDER BY place LIMIT ?3",
        )?;
        let (from, to) =
            (schema::place(self.number, seq + 1), schema::place(self.number, Seq::MAX));
        let mut rows = statement.query(params![from, to, limit.min(i64::MAX as usize) as i64])?;
        while let Some(row) = rows.next()? {
            if !each(stored(row)?) {
                break;
            }
        }
        Ok(())
    }
}

fn write_change(conn: &Connection, id: u64, change: Change) -> Result<()> {
    let id = id.cast_signed();
    conn.prepare_cached("UPDATE carrick_group SET cursor = ?2, fence = ?3 WHERE id = ?1")?
        .execute(params![id, change.cursor.cast_signed(), change.fence.cast_signed()])?;
    let mut put = conn.prepare_cached(
        "INSERT OR REPLACE INTO carrick_delivery
             (group_id, seq, leased, until, fence, attempt, first_claimed_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    for (seq, item) in change.put {
        let (leased, until) = match item.place {
            Place::Leased(until) => (true, until),
            Place::Waiting(until) => (false, until),
        };
        put.execute(params![
            id,
            seq.cast_signed(),
            leased,
            until,
            item.fence.cast_signed(),
            item.attempt,
            item.first_claimed
        ])?;
    }
    let mut gone =
        conn.prepare_cached("DELETE FROM carrick_delivery WHERE group_id = ?1 AND seq = ?2")?;
    for seq in change.gone {
        gone.execute([id, seq.cast_signed()])?;
    }
    Ok(())
}

fn bury(conn: &Connection, id: u64, buried: &Buried) -> Result<()> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO carrick_dead
             (group_id, seq, attempts, cause, fence, first_claimed_at, buried_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?
    .execute(params![
        id.cast_signed(),
        buried.seq.cast_signed(),
        buried.attempts,
        buried.cause,
        buried.fence.cast_signed(),
        buried.first_claimed,
        buried.at
    ])?;
    Ok(())
}

impl Dedupe {
    /// Reads what came within twice the window, as the window would have it.
    fn load(conn: &Connection, length: Micros, now: Micros) -> Result<Self> {
        let since = now.saturating_sub(length.saturating_mul(2));
        let mut loaded = Self {
            window: Window::new(length),
            next: 1,
            current: 1,
            previous: 1,
            pruned: 0,
            added: Vec::new(),
        };
        let mut statement =
            conn.prepare("SELECT id, stored_at, records FROM carrick_dedupe ORDER BY id")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let at: Micros = row.get(1)?;
            loaded.next = row.get(0)?;
            if at >= since {
                for (name, seq) in unpack(row.get_ref(2)?.as_blob()?) {
                    loaded.note(name, seq, at);
                }
            } else {
                (loaded.previous, loaded.current) = (loaded.next + 1, loaded.next + 1);
            }
            loaded.next += 1;
        }
        Ok(loaded)
    }

    /// Forgets what a transaction added that failed: remembered, it would refuse its repeat.
    fn give_up(&mut self) {
        for (name, _) in self.added.drain(..) {
            self.window.remove(&name);
        }
        self.pruned = 0;
    }

    fn add(&mut self, name: Identity, seq: Seq, now: Micros) {
        self.note(name, seq, now);
        self.added.push((name, seq));
    }

    /// Takes what goes into row `next` into the window.
    fn note(&mut self, name: Identity, seq: Seq, at: Micros) {
        if let Turn::Turned { shortened } = self.window.insert(name, seq, at) {
            (self.previous, self.current) = (self.current, self.next);
            if shortened {
                metrics::counter!("carrick_store_dedupe_shortened_total").increment(1);
            }
        }
    }

    /// Writes down what the transaction added, and removes some rows that no generation needs.
    fn write(&mut self, conn: &Connection, now: Micros) -> Result<()> {
        if !self.added.is_empty() {
            conn.prepare_cached(
                "INSERT INTO carrick_dedupe (id, stored_at, records) VALUES (?1, ?2, ?3)",
            )?
            .execute(params![self.next, now, pack(&self.added)])?;
            self.next += 1;
        }
        if self.pruned >= self.previous {
            return Ok(());
        }
        if self.pruned == 0 {
            let lowest: Option<i64> =
                conn.query_row("SELECT min(id) FROM carrick_dedupe", [], |row| row.get(0))?;
            self.pruned = lowest.unwrap_or(self.previous);
        }
        let to = self.previous.min(self.pruned + DEDUPE_PRUNED);
        conn.prepare_cached("DELETE FROM carrick_dedupe WHERE id >= ?1 AND id < ?2")?
            .execute([self.pruned, to])?;
        self.pruned = to;
        Ok(())
    }
}

/// Bytes of a record in `carrick_dedupe`.
const PACKED: usize = 24;

fn pack(records: &[(Identity, Seq)]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(records.len() * PACKED);
    for ([high, low], seq) in records {
        for part in [high, low, seq] {
            packed.extend_from_slice(&part.to_be_bytes());
        }
    }
    packed
}

fn unpack(packed: &[u8]) -> impl Iterator<Item = (Identity, Seq)> {
    packed.chunks_exact(PACKED).map(|record| {
        let part = |at: usize| {
            let bytes = record[at..at + 8].try_into().expect("a chunk has three parts");
            u64::from_be_bytes(bytes)
        };
        ([part(0), part(8)], part(16))
    })
}
