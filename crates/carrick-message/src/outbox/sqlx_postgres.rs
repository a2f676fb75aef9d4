//! Appending inside a transaction of `sqlx` on Postgres.

use sqlx::{AssertSqlSafe, PgConnection};

use super::{AppendError, OutboxEvent, event::Fields};

/// Who sees to it that writers of one key take their numbers in the order of their commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyOrder {
    /// The append: it takes an advisory lock on the key, which ends with the transaction. Of two
    /// transactions with several keys each, both in another order, one may be rolled back by the
    /// database (`40P01`); append in the order of the keys, or with [`append_all`].
    #[default]
    Lock,
    /// The caller, who holds a lock on the entity's row already (it updated it, or selected it for
    /// update) before every append of that key.
    Caller,
}

const INSERT: &str = "INSERT INTO carrick_outbox (topic, key, version, id, type, source, event)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (topic, key, version) WHERE version IS NOT NULL DO NOTHING
    RETURNING seq";

// The row's number is taken when a row of `lock` is there: after the lock.
const LOCKED_INSERT: &str = "WITH lock AS MATERIALIZED (SELECT carrick_outbox_lock($1, $2))
    INSERT INTO carrick_outbox (topic, key, version, id, type, source, event)
    SELECT $1, $2, $3, $4, $5, $6, $7 FROM lock
    ON CONFLICT (topic, key, version) WHERE version IS NOT NULL DO NOTHING
    RETURNING seq";

/// Appends an event in the caller's transaction; returns the row's number.
///
/// The event leaves with the transaction's commit, or never was. Nothing is notified inside the
/// transaction: that would make all commits of the database wait for each other. After the commit,
/// call [`Waker::wake`](super::Waker::wake) if the relay runs in this process, or
/// [`Notifier::notify`](super::Notifier::notify) if it does not; without either the relay looks by
/// itself.
///
/// ```no_run
/// # use carrick_core::{event::Event, name::Topic};
/// # use carrick_message::outbox::{self, OutboxEvent, sqlx_postgres::KeyOrder};
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// sqlx::query("UPDATE orders SET paid = true WHERE id = 'A-4471'").execute(&mut *tx).await?;
/// let event = Event::builder("order.paid.v1").source("/shop").id("A-4471-paid").build()?;
/// let event = OutboxEvent::new(Topic::new("orders")?, event).key("A-4471")?;
/// outbox::sqlx_postgres::append(&mut tx, &event, KeyOrder::Caller).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`AppendError`]; nothing was appended then, and unless it is [`AppendError::Database`] the
/// transaction goes on.
///
/// # Cancel safety
/// The row may have been written; roll the transaction back.
pub async fn append(
    conn: &mut PgConnection,
    event: &OutboxEvent,
    order: KeyOrder,
) -> Result<i64, AppendError> {
    let fields = event.fields()?;
    let locks = order == KeyOrder::Lock && fields.key.is_some();
    let seq: Option<i64> = sqlx::query_scalar(if locks { LOCKED_INSERT } else { INSERT })
        .bind(&fields.topic)
        .bind(&fields.key)
        .bind(fields.version)
        .bind(fields.event.id().to_string())
        .bind(fields.event.ty().to_string())
        .bind(fields.event.source().to_string())
        .bind(fields.document())
        .fetch_optional(conn)
        .await
        .map_err(AppendError::database)?;
    seq.ok_or_else(|| fields.version_taken())
}

/// The most events of one [`append_all`].
pub const MAX_APPEND: usize = 1000;

/// Appends events in their order, in one statement, in the caller's transaction; keys are locked in
/// an order that all writers share.
///
/// # Errors
/// [`AppendError`]; after [`AppendError::VersionTaken`] the other events are in the transaction
/// nevertheless: roll it back.
///
/// # Cancel safety
/// Rows may have been written; roll the transaction back.
pub async fn append_all(
    conn: &mut PgConnection,
    events: &[OutboxEvent],
    order: KeyOrder,
) -> Result<(), AppendError> {
    if events.len() > MAX_APPEND {
        return Err(AppendError::Invalid {
            field: "events",
            range: "at most 1000",
            value: events.len().to_string(),
        });
    }
    let fields = events.iter().map(OutboxEvent::fields).collect::<Result<Vec<Fields>, _>>()?;
    let topics: Vec<&str> = fields.iter().map(|one| one.topic.as_str()).collect();
    let keys: Vec<Option<&str>> = fields.iter().map(|one| one.key.as_deref()).collect();
    let versions: Vec<Option<i64>> = fields.iter().map(|one| one.version).collect();
    let ids: Vec<String> = fields.iter().map(|one| one.event.id().to_string()).collect();
    let types: Vec<String> = fields.iter().map(|one| one.event.ty().to_string()).collect();
    let sources: Vec<String> = fields.iter().map(|one| one.event.source().to_string()).collect();
    let documents: Vec<&str> = fields.iter().map(Fields::document).collect();
    if order == KeyOrder::Lock {
        sqlx::query(
            "SELECT carrick_outbox_lock(topic, key) FROM (
                 SELECT DISTINCT topic, key FROM unnest($1::text[], $2::text[]) AS one (topic, key)
                 WHERE key IS NOT NULL ORDER BY topic, key
             ) AS keys",
        )
        .bind(&topics)
        .bind(&keys)
        .execute(&mut *conn)
        .await
        .map_err(AppendError::database)?;
    }
    let appended: Vec<(String, Option<String>, Option<i64>)> = sqlx::query_as(AssertSqlSafe(
        "INSERT INTO carrick_outbox (topic, key, version, id, type, source, event)
         SELECT topic, key, version, id, type, source, event
         FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[],
                     $7::text[]) WITH ORDINALITY
              AS one (topic, key, version, id, type, source, event, place)
         ORDER BY place
         ON CONFLICT (topic, key, version) WHERE version IS NOT NULL DO NOTHING
         RETURNING topic, key, version",
    ))
    .bind(&topics)
    .bind(&keys)
    .bind(&versions)
    .bind(&ids)
    .bind(&types)
    .bind(&sources)
    .bind(&documents)
    .fetch_all(conn)
    .await
    .map_err(AppendError::database)?;
    if appended.len() == fields.len() {
        return Ok(());
    }
    // Versions of a key are distinct in what was appended, so the first one that is not there, or
    // is there a second time, was taken.
    let mut left: std::collections::HashSet<_> = appended.into_iter().collect();
    let taken = fields
        .iter()
        .filter(|one| one.version.is_some())
        .find(|one| !left.remove(&(one.topic.clone(), one.key.clone(), one.version)));
    Err(taken.expect("only a taken version leaves a row out").version_taken())
}
