//! Appending inside a transaction of `rusqlite`.

use ::rusqlite::{Connection, params};

use super::{AppendError, OutboxEvent};

const INSERT: &str = "INSERT INTO carrick_outbox (topic, key, version, id, type, source, event)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
    ON CONFLICT (topic, key, version) WHERE version IS NOT NULL DO NOTHING";

/// Appends an event in the caller's transaction; returns the row's number.
///
/// The event leaves with the transaction's commit, or never was. After the commit, call
/// [`Waker::wake`](super::Waker::wake) if the relay runs in this process.
///
/// ```
/// # use carrick_core::{event::Event, name::Topic};
/// # use carrick_message::outbox::{self, OutboxEvent};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut conn = rusqlite::Connection::open_in_memory()?;
/// carrick_store::schema::sqlite::migrate(&mut conn, &outbox::COMPONENT)?;
/// conn.execute_batch("CREATE TABLE orders (id TEXT PRIMARY KEY, total REAL)")?;
///
/// let tx = conn.transaction()?;
/// tx.execute("INSERT INTO orders VALUES ('A-4471', 12.5)", ())?;
/// let event = Event::builder("order.placed.v1").source("/shop").id("A-4471-placed").build()?;
/// outbox::rusqlite::append(&tx, &OutboxEvent::new(Topic::new("orders")?, event).key("A-4471")?)?;
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`AppendError`]; nothing was appended then.
pub fn append(conn: &Connection, event: &OutboxEvent) -> Result<i64, AppendError> {
    let fields = event.fields()?;
    let mut insert = conn.prepare_cached(INSERT).map_err(AppendError::database)?;
    let inserted = insert
        .execute(params![
            fields.topic,
            fields.key,
            fields.version,
            &*fields.event.id(),
            &*fields.event.ty(),
            &*fields.event.source(),
            fields.document(),
        ])
        .map_err(AppendError::database)?;
    if inserted == 0 {
        return Err(fields.version_taken());
    }
    Ok(conn.last_insert_rowid())
}
