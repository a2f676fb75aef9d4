//! The queue: finds the group, checks what is asked, and has the group's lane do it.

use std::sync::Arc;

use async_trait::async_trait;
use carrick_core::name::Group;
use hashbrown::HashMap;

use super::{
    PostgresStore, count,
    group::{GroupRef, Outcome, What},
    log::{record, text},
    session::Failure,
};
use crate::{
    StoreError, Stream, check,
    lease::{
        BlockedKey, Claim, Claims, DeadLetter, GroupStats, LeaseToken, Queue, Select, Settle,
        Settled, Start,
    },
    log::Seq,
    micros,
};

/// Groups kept in memory by number and by name: some megabytes.
const GROUPS_KNOWN: usize = 10_000;

/// Groups that were found. A group is never removed, so what it holds stays true.
#[derive(Debug, Default)]
pub(super) struct GroupsKnown {
    by_name: HashMap<(Stream, Group), Arc<GroupRef>>,
    by_id: HashMap<i64, Arc<GroupRef>>,
}

impl GroupsKnown {
    fn insert(&mut self, found: GroupRef) -> Arc<GroupRef> {
        if self.by_id.len() >= GROUPS_KNOWN {
            *self = Self::default();
        }
        let found = Arc::new(found);
        self.by_id.insert(found.id, Arc::clone(&found));
        let name = (found.stream.clone(), found.group.clone());
        self.by_name.insert(name, Arc::clone(&found));
        found
    }
}

fn not_asked() -> StoreError {
    StoreError::Engine("a group answered what it was not asked".into())
}

#[async_trait]
impl Queue for PostgresStore {
    async fn create_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, StoreError> {
        if self.find_group(stream, group).await?.is_some() {
            return Ok(false);
        }
        Ok(self.make_group(stream, group, start).await?)
    }

    async fn claim(
        &self,
        stream: &Stream,
        group: &Group,
        claim: Claim,
    ) -> Result<Claims, StoreError> {
        check::claim(claim)?;
        let group = loop {
            if let Some(found) = self.find_group(stream, group).await? {
                break found;
            }
            self.make_group(stream, group, Start::default()).await?;
        };
        match self.ask(group, What::Claim(claim)).await? {
            Outcome::Claims(claims) => Ok(claims),
            _ => Err(not_asked()),
        }
    }

    async fn settle(
        &self,
        settlements: Vec<(LeaseToken, Settle)>,
    ) -> Result<Vec<Settled>, StoreError> {
        check::settle(&settlements)?;
        let mut settled = vec![Settled::Stale; settlements.len()];
        let mut by_group: HashMap<u64, (Vec<usize>, Vec<(LeaseToken, Settle)>)> = HashMap::new();
        for (place, settlement) in settlements.into_iter().enumerate() {
            let (places, its) = by_group.entry(settlement.0.group.get()).or_default();
            places.push(place);
            its.push(settlement);
        }
        for (group, (places, its)) in by_group {
            let Some(group) = self.group_by_id(group).await? else { continue };
            match self.ask(group, What::Settle(its)).await? {
                Outcome::Settled(answers) => {
                    for (place, answer) in places.into_iter().zip(answers) {
                        settled[place] = answer;
                    }
                }
                _ => return Err(not_asked()),
            }
        }
        Ok(settled)
    }

    async fn group_of(&self, token: LeaseToken) -> Result<Option<(Stream, Group)>, StoreError> {
        let found = self.group_by_id(token.group.get()).await?;
        Ok(found.map(|found| (found.stream.clone(), found.group.clone())))
    }

    async fn groups(&self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>, StoreError> {
        let Some(stream_id) = self.find(stream).await? else {
            return Ok(Vec::new());
        };
        let mut groups = Vec::new();
        for name in self.db().within(self.group_names(stream_id)).await? {
            let group: Group = name.parse().map_err(|error| StoreError::Engine(Box::new(error)))?;
            let Some(found) = self.find_group(stream, &group).await? else { continue };
            match self.ask(found, What::Stats).await? {
                Outcome::Stats(stats) => groups.push((group, stats)),
                _ => return Err(not_asked()),
            }
        }
        Ok(groups)
    }

    async fn dead_letters(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        match self.find_group(stream, group).await? {
            Some(group) => Ok(self.db().within(self.list_dead(&group, after, limit)).await?),
            None => Ok(Vec::new()),
        }
    }

    async fn redrive(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        self.act(stream, group, What::Redrive(select.clone(), limit)).await
    }

    async fn purge(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        self.act(stream, group, What::Purge(select.clone(), limit)).await
    }

    async fn skip(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, StoreError> {
        self.act(stream, group, What::Skip(select.clone(), cause.to_owned())).await
    }

    async fn blocked_keys(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, StoreError> {
        let Some(group) = self.find_group(stream, group).await? else { return Ok(Vec::new()) };
        match self.ask(group, What::Blocked(after, limit)).await? {
            Outcome::Blocked(keys) => Ok(keys),
            _ => Err(not_asked()),
        }
    }
}

impl PostgresStore {
    /// Has a group do something that is counted; a group that does not exist does nothing.
    async fn act(&self, stream: &Stream, group: &Group, what: What) -> Result<usize, StoreError> {
        let Some(group) = self.find_group(stream, group).await? else { return Ok(0) };
        match self.ask(group, what).await? {
            Outcome::Count(count) => Ok(count),
            _ => Err(not_asked()),
        }
    }

    async fn find_group(
        &self,
        stream: &Stream,
        group: &Group,
    ) -> Result<Option<Arc<GroupRef>>, Failure> {
        let name = (stream.clone(), group.clone());
        if let Some(found) = self.0.groups_known.lock().by_name.get(&name) {
            return Ok(Some(Arc::clone(found)));
        }
        let row = self.db().within(self.read_group_named(stream, group)).await?;
        let (stream, group) = name;
        Ok(row.map(|(id, stream_id)| {
            self.0.groups_known.lock().insert(GroupRef { id, stream_id, stream, group })
        }))
    }

    async fn read_group_named(
        &self,
        stream: &Stream,
        group: &Group,
    ) -> Result<Option<(i64, i64)>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let row = db
            .query_as(
                "SELECT one.id, one.stream_id FROM carrick_stream AS stream
                 JOIN carrick_group AS one ON one.stream_id = stream.id
                 WHERE stream.name = $1 AND one.name = $2",
            )
            .bind(stream.as_str())
            .bind(group.as_str())
            .fetch_optional(session.conn())
            .await?;
        session.finish().await?;
        Ok(row)
    }

    async fn group_by_id(&self, id: u64) -> Result<Option<Arc<GroupRef>>, StoreError> {
        let id = count(id);
        if let Some(found) = self.0.groups_known.lock().by_id.get(&id) {
            return Ok(Some(Arc::clone(found)));
        }
        let Some((stream_id, stream, group)) = self.db().within(self.read_group(id)).await? else {
            return Ok(None);
        };
        let unreadable = |error| StoreError::Engine(Box::new(error));
        let stream = stream.parse().map_err(unreadable)?;
        let group = group.parse().map_err(unreadable)?;
        Ok(Some(self.0.groups_known.lock().insert(GroupRef { id, stream_id, stream, group })))
    }

    async fn read_group(&self, id: i64) -> Result<Option<(i64, String, String)>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let row = db
            .query_as(
                "SELECT one.stream_id, stream.name, one.name FROM carrick_group AS one
                 JOIN carrick_stream AS stream ON stream.id = one.stream_id WHERE one.id = $1",
            )
            .bind(id)
            .fetch_optional(session.conn())
            .await?;
        session.finish().await?;
        Ok(row)
    }

    async fn group_names(&self, stream: i64) -> Result<Vec<String>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let rows: Vec<(String,)> = db
            .query_as("SELECT name FROM carrick_group WHERE stream_id = $1 ORDER BY name")
            .bind(stream)
            .fetch_all(session.conn())
            .await?;
        session.finish().await?;
        Ok(rows.into_iter().map(|(name,)| name).collect())
    }

    async fn list_dead(
        &self,
        group: &GroupRef,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let rows: Vec<DeadRow> = db
            .query_as(
                "SELECT log.seq, log.stored_at, log.key, log.body, dead.attempts, dead.cause,
                     dead.fence, dead.first_claimed_at, dead.buried_at
                 FROM carrick_dead AS dead
                 JOIN carrick_log AS log ON log.stream_id = $2 AND log.seq = dead.seq
                 WHERE dead.group_id = $1 AND dead.seq > $3 ORDER BY dead.seq LIMIT $4",
            )
            .bind(group.id)
            .bind(group.stream_id)
            .bind(count(after))
            .bind(count(limit))
            .fetch_all(session.conn())
            .await?;
        session.finish().await?;
        Ok(rows.into_iter().map(dead_letter).collect())
    }
}

type DeadRow = (i64, i64, Option<Vec<u8>>, Vec<u8>, i64, Vec<u8>, i64, i64, i64);

fn dead_letter(row: DeadRow) -> DeadLetter {
    let (seq, stored_at, key, body, attempts, cause, fence, first_claimed_at, buried_at) = row;
    DeadLetter {
        record: record((seq, stored_at, key, body)),
        attempts: u32::try_from(attempts).unwrap_or(u32::MAX),
        cause: text(cause),
        fence: fence.cast_unsigned(),
        first_claimed_at: micros::time(first_claimed_at),
        buried_at: micros::time(buried_at),
    }
}
