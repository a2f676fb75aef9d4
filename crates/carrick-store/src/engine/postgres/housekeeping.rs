//! What must be done now and then, by any one of the processes that share the tables.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use super::session::{Db, Failure, Sparse, now};

/// Ends turns of the dedupe tables, for as long as the store is open.
pub(super) async fn work(db: Arc<Db>, window: Duration) {
    // Often enough that an identity is kept for little more than two windows.
    let every = (window / 8).clamp(Duration::from_millis(500), Duration::from_secs(60));
    let mut sparse = Sparse::default();
    loop {
        sleep(every.mul_f64(0.75 + rand::random::<f64>() / 2.0)).await;
        if let Err(failure) = end_turn(&db).await
            && let Some(held_back) = sparse.due(Instant::now())
        {
            tracing::warn!(error = %failure.told(), held_back, "old identities stay for longer");
        }
    }
}

/// Empties the older dedupe table and makes it the one that is written, if the window is over.
///
/// What it holds was written before the present turn began, so it is older than the window. Emptying
/// takes the table for itself for a moment, and waits for that only for as short a time that nobody
/// behind it notices; a dump of the database may hold it for an hour, and then identities are kept
/// for an hour longer, which is no harm.
pub(super) async fn end_turn(db: &Db) -> Result<bool, Failure> {
    let mut tx = db.begin(None).await?;
    let over: Option<(i64,)> = db
        .query_as(concat!(
            "SELECT turn.turn FROM carrick_store
             CROSS JOIN LATERAL (
                 SELECT turn, started_at FROM carrick_dedupe_turn ORDER BY turn DESC LIMIT 1
             ) AS turn
             WHERE turn.started_at + carrick_store.dedupe_window <= ",
            now!(),
            " AND pg_try_advisory_xact_lock($1)",
        ))
        .bind(db.lock("dedupe", 0).0)
        .fetch_optional(tx.conn())
        .await?;
    let Some((turn,)) = over else { return Ok(false) };
    let next = turn + 1;
    let empty = if next % 2 == 0 {
        "SET LOCAL lock_timeout = 50; TRUNCATE carrick_dedupe_0"
    } else {
        "SET LOCAL lock_timeout = 50; TRUNCATE carrick_dedupe_1"
    };
    sqlx::raw_sql(empty).execute(tx.conn()).await?;
    // Another process may have ended the same turn between our look and our lock: then its row is
    // there, and this transaction comes to nothing, the emptying included.
    let ended = db
        .query(concat!(
            "INSERT INTO carrick_dedupe_turn (turn, started_at) VALUES ($1, ",
            now!(),
            ") ON CONFLICT DO NOTHING",
        ))
        .bind(next)
        .execute(tx.conn())
        .await?
        .rows_affected();
    if ended == 0 {
        return Ok(false);
    }
    db.query("DELETE FROM carrick_dedupe_turn WHERE turn < $1")
        .bind(turn)
        .execute(tx.conn())
        .await?;
    tx.commit().await?;
    Ok(true)
}
