//! The log: appends go to their lanes, reads and trims are here.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::{sync::oneshot, time::timeout};

use super::{
    PostgresStore,
    append::{self, Append},
    count,
    session::Failure,
    unanswered,
};
use crate::{
    StoreError, Stream, check,
    log::{Appended, Bounds, Log, NewRecord, ReadLimit, Record, Seq, Trim},
    micros,
};

/// Bodies of appends that may wait in memory, in KiB: 64 MiB, a few transactions of the largest
/// size. One append larger than that takes all of it.
pub(super) const WAITING_KIB: u32 = 64 * 1024;

type LogRow = (i64, i64, Option<Vec<u8>>, Vec<u8>);

#[async_trait]
impl Log for PostgresStore {
    fn epoch(&self) -> u64 {
        self.0.epoch
    }

    fn dedupe_window(&self) -> Duration {
        self.0.options.dedupe_window
    }

    async fn append(
        &self,
        stream: &Stream,
        records: Vec<NewRecord>,
    ) -> Result<Vec<Appended>, StoreError> {
        check::append(&records)?;
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let bytes: usize = records.iter().map(|record| record.body.len() + 128).sum();
        let kib = u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX).min(WAITING_KIB);
        let room = std::sync::Arc::clone(&self.0.room).acquire_many_owned(kib);
        let memory = timeout(self.0.options.acquire_timeout, room)
            .await
            .map_err(|_waited| StoreError::Overloaded)?
            .map_err(|_closed| StoreError::Closed)?;
        let (answer, answered) = oneshot::channel();
        let append = Append { records, answer, _memory: memory };
        let (db, notices) = (self.0.db.clone(), self.0.notices.clone());
        self.0.appends.submit(stream.clone(), append, |lane| append::work(lane, db, notices))?;
        answered.await.map_err(|_gone| unanswered())?
    }

    async fn read(
        &self,
        stream: &Stream,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, StoreError> {
        check::read(limit)?;
        let Some(id) = self.find(stream).await? else {
            return EMPTY.check(after).map(|()| Vec::new());
        };
        let records = self.db().within(self.read_from(id, after, limit)).await?;
        if records.first().is_some_and(|first| first.seq - 1 == after) {
            return Ok(records);
        }
        // Nothing, or not what comes next: the bounds tell why.
        let bounds = self.db().within(self.bounds_of(id)).await?;
        // What there is may have come a moment ago: the next read finds it.
        bounds.check(after).map(|()| Vec::new())
    }

    async fn bounds(&self, stream: &Stream) -> Result<Bounds, StoreError> {
        match self.find(stream).await? {
            Some(id) => Ok(self.db().within(self.bounds_of(id)).await?),
            None => Ok(EMPTY),
        }
    }

    async fn streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(Stream, Bounds)>, StoreError> {
        let rows = self.db().within(self.list_streams(after, limit)).await?;
        rows.into_iter()
            .map(|(name, first, last)| {
                let stream = name.parse().map_err(|error| StoreError::Engine(Box::new(error)))?;
                Ok((stream, Bounds { first: first.cast_unsigned(), last: last.cast_unsigned() }))
            })
            .collect()
    }

    async fn trim(&self, stream: &Stream, trim: Trim) -> Result<usize, StoreError> {
        match self.find(stream).await? {
            Some(id) => Ok(self.db().within(self.trim_stream(id, trim)).await?),
            None => Ok(0),
        }
    }
}

const EMPTY: Bounds = Bounds { first: 1, last: 0 };

impl PostgresStore {
    pub(super) async fn find(&self, stream: &Stream) -> Result<Option<i64>, Failure> {
        self.db().within(self.db().find_stream(stream)).await
    }

    async fn read_from(
        &self,
        stream: i64,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        // Sizes are summed before the bodies are fetched: what does not fit is not read.
        let rows: Vec<LogRow> = db
            .query_as(
                "SELECT seq, stored_at, key, body FROM (
                     SELECT seq, stored_at, key, body,
                         sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS before
                     FROM (
                         SELECT seq, stored_at, key, body FROM carrick_log
                         WHERE stream_id = $1 AND seq > $2
                             AND seq >= (SELECT first FROM carrick_stream WHERE id = $1)
                         ORDER BY seq LIMIT $3
                     ) AS next
                 ) AS sized
                 WHERE before = 0 OR before + octet_length(body) <= $4
                 ORDER BY seq",
            )
            .bind(stream)
            .bind(count(after))
            .bind(count(limit.records))
            .bind(count(limit.bytes))
            .fetch_all(session.conn())
            .await?;
        session.finish().await?;
        Ok(rows.into_iter().map(record).collect())
    }

    async fn bounds_of(&self, stream: i64) -> Result<Bounds, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let (first, last): (i64, i64) = db
            .query_as(
                "SELECT first, coalesce(
                     (SELECT log.seq FROM carrick_log AS log
                      WHERE log.stream_id = stream.id AND log.seq >= stream.first
                      ORDER BY log.seq DESC LIMIT 1),
                     first - 1)
                 FROM carrick_stream AS stream WHERE id = $1",
            )
            .bind(stream)
            .fetch_one(session.conn())
            .await?;
        session.finish().await?;
        Ok(Bounds { first: first.cast_unsigned(), last: last.cast_unsigned() })
    }

    async fn list_streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(String, i64, i64)>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        // A group may have come before the first record; the stream exists from that on.
        let rows = db
            .query_as(
                "SELECT name, first, coalesce(
                     (SELECT log.seq FROM carrick_log AS log
                      WHERE log.stream_id = stream.id AND log.seq >= stream.first
                      ORDER BY log.seq DESC LIMIT 1),
                     first - 1)
                 FROM carrick_stream AS stream
                 WHERE name > $1 AND (first > 1 OR EXISTS (
                     SELECT FROM carrick_log AS log WHERE log.stream_id = stream.id))
                 ORDER BY name LIMIT $2",
            )
            .bind(after.map_or("", Stream::as_str))
            .bind(count(limit))
            .fetch_all(session.conn())
            .await?;
        session.finish().await?;
        Ok(rows)
    }

    /// Cuts the beginning off: what is old and lies below everything unfinished. A dead letter is
    /// left standing alone, below the first number that readers are offered; once nobody holds it,
    /// a later trim takes it too.
    async fn trim_stream(&self, stream: i64, trim: Trim) -> Result<usize, Failure> {
        let db = self.db();
        let mut tx = db.begin(None).await?;
        // A group that is made at the earliest record holds this row, so it starts before the cut
        // or after it, not in the middle.
        db.query("SELECT FROM carrick_stream WHERE id = $1 FOR UPDATE")
            .bind(stream)
            .execute(tx.conn())
            .await?;
        // One statement, one snapshot: a record that goes from waiting to dead or back is seen as
        // one of the two.
        let (gone,): (i64,) = db
            .query_as(
                "WITH floor AS MATERIALIZED (
                     SELECT coalesce(min(newest.floor), 9223372036854775807) AS seq
                     FROM carrick_group AS one CROSS JOIN LATERAL (
                         SELECT floor FROM carrick_journal
                         WHERE group_id = one.id ORDER BY version DESC LIMIT 1
                     ) AS newest
                     WHERE one.stream_id = $1
                 ), old AS MATERIALIZED (
                     SELECT log.seq, log.stored_at FROM carrick_log AS log
                     WHERE log.stream_id = $1 AND log.seq < (SELECT seq FROM floor)
                         AND NOT EXISTS (
                             SELECT FROM carrick_group AS one
                             JOIN carrick_dead AS dead ON dead.group_id = one.id
                             WHERE one.stream_id = $1 AND dead.seq = log.seq)
                     ORDER BY log.seq LIMIT $3
                 ), gone AS (
                     DELETE FROM carrick_log AS log USING old
                     WHERE log.stream_id = $1 AND log.seq = old.seq AND old.seq < coalesce(
                         (SELECT min(seq) FROM old WHERE stored_at >= $2), 9223372036854775807)
                     RETURNING log.seq
                 ), cut AS (
                     UPDATE carrick_stream SET first = greatest(first, last.seq + 1)
                     FROM (SELECT max(seq) AS seq FROM gone) AS last
                     WHERE id = $1 AND last.seq >= first
                 )
                 SELECT count(*) FROM gone",
            )
            .bind(stream)
            .bind(trim.stored_before.as_microsecond())
            .bind(count(trim.limit))
            .fetch_one(tx.conn())
            .await?;
        tx.commit().await?;
        Ok(usize::try_from(gone).unwrap_or(0))
    }
}

pub(super) fn record((seq, stored_at, key, body): LogRow) -> Record {
    Record {
        seq: seq.cast_unsigned(),
        stored_at: micros::time(stored_at),
        key: key.map(text),
        body: Bytes::from(body),
    }
}

/// What went in as text.
pub(super) fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}
