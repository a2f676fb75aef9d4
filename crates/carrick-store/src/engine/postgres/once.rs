//! The dedupe table with answers: one statement each, on a row of its own.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{
    PostgresStore, count,
    session::{Failure, now},
};
use crate::{
    StoreError, check, micros,
    once::{Once, OnceKey, OnceToken, Reserved},
};

#[async_trait]
impl Once for PostgresStore {
    async fn reserve(&self, key: &OnceKey, hold: Duration) -> Result<Reserved, StoreError> {
        check::once(key)?;
        // A row that ends between the two statements is neither taken nor found: then once more.
        for _ in 0..3 {
            if let Some(reserved) = self.db().within(self.try_reserve(key, hold)).await? {
                return Ok(reserved);
            }
        }
        Ok(Reserved::Busy(Duration::ZERO))
    }

    async fn complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: Bytes,
        keep: Duration,
    ) -> Result<bool, StoreError> {
        check::once(key)?;
        Ok(self.db().within(self.try_complete(key, token, &answer, keep)).await?)
    }

    async fn release(&self, key: &OnceKey, token: OnceToken) -> Result<(), StoreError> {
        check::once(key)?;
        Ok(self.db().within(self.try_release(key, token)).await?)
    }

    async fn sweep(&self, limit: usize) -> Result<usize, StoreError> {
        Ok(self.db().within(self.try_sweep(limit)).await?)
    }
}

impl PostgresStore {
    async fn try_reserve(
        &self,
        key: &OnceKey,
        hold: Duration,
    ) -> Result<Option<Reserved>, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        // The token comes from a sequence, so that a key taken anew after its row was swept does
        // not repeat one that an earlier holder still shows.
        let taken: Option<(i64,)> = db
            .query_as(concat!(
                "INSERT INTO carrick_once AS held (scope, key, fingerprint, token, ends_at)
                 VALUES ($1, $2, $3, nextval('carrick_once_token'), ",
                now!(),
                " + $4) ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint,
                 token = excluded.token, ends_at = excluded.ends_at, answer = NULL
                 WHERE held.ends_at <= ",
                now!(),
                " RETURNING token",
            ))
            .bind(key.scope.as_bytes())
            .bind(key.key.as_bytes())
            .bind(&key.fingerprint.to_be_bytes()[..])
            .bind(micros::of(hold))
            .fetch_optional(session.conn())
            .await?;
        if let Some((token,)) = taken {
            session.finish().await?;
            return Ok(Some(Reserved::New(OnceToken(token.cast_unsigned()))));
        }
        let row: Option<(Vec<u8>, i64, Option<Vec<u8>>)> = db
            .query_as(concat!(
                "SELECT fingerprint, ends_at - ",
                now!(),
                ", answer FROM carrick_once WHERE scope = $1 AND key = $2 AND ends_at > ",
                now!(),
            ))
            .bind(key.scope.as_bytes())
            .bind(key.key.as_bytes())
            .fetch_optional(session.conn())
            .await?;
        session.finish().await?;
        Ok(row.map(|(fingerprint, left, answer)| {
            if fingerprint != key.fingerprint.to_be_bytes() {
                return Reserved::Mismatch;
            }
            match answer {
                Some(answer) => Reserved::Done(answer.into()),
                None => Reserved::Busy(Duration::from_micros(left.max(0).cast_unsigned())),
            }
        }))
    }

    async fn try_complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: &[u8],
        keep: Duration,
    ) -> Result<bool, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        let done = db
            .query(concat!(
                "UPDATE carrick_once SET answer = $4, ends_at = ",
                now!(),
                " + $5 WHERE scope = $1 AND key = $2 AND token = $3 AND answer IS NULL
                 AND ends_at > ",
                now!(),
            ))
            .bind(key.scope.as_bytes())
            .bind(key.key.as_bytes())
            .bind(token.0.cast_signed())
            .bind(answer)
            .bind(micros::of(keep))
            .execute(session.conn())
            .await?
            .rows_affected();
        session.finish().await?;
        Ok(done == 1)
    }

    async fn try_release(&self, key: &OnceKey, token: OnceToken) -> Result<(), Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        db.query(
            "DELETE FROM carrick_once
             WHERE scope = $1 AND key = $2 AND token = $3 AND answer IS NULL",
        )
        .bind(key.scope.as_bytes())
        .bind(key.key.as_bytes())
        .bind(token.0.cast_signed())
        .execute(session.conn())
        .await?;
        session.finish().await
    }

    async fn try_sweep(&self, limit: usize) -> Result<usize, Failure> {
        let db = self.db();
        let mut session = db.single().await?;
        // The time is read once, so that the index is read up to it and no further. Rows that
        // somebody else sweeps or takes over at this moment are left to them.
        let swept = db
            .query(concat!(
                "DELETE FROM carrick_once WHERE (scope, key) IN (
                     SELECT scope, key FROM carrick_once WHERE ends_at <= (SELECT ",
                now!(),
                ")   ORDER BY ends_at LIMIT $1 FOR UPDATE SKIP LOCKED)",
            ))
            .bind(count(limit))
            .execute(session.conn())
            .await?
            .rows_affected();
        session.finish().await?;
        Ok(usize::try_from(swept).unwrap_or(usize::MAX))
    }
}
