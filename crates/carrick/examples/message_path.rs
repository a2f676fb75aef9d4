//! One event, from the row that commits it to the effect that happens once: outbox, relay, broker,
//! consumer and inbox, all in this process and on two SQLite files.
//!
//! `cargo run -p carrick --example message_path`

use std::{error::Error, sync::Arc, time::Duration};

use carrick::{
    core::{
        event::Event,
        name::{Group, Topic},
    },
    message::{
        broker::StoreBroker,
        consumer::{Consumer, ConsumerConfig, HandlerError, Incoming},
        inbox::{self, EventId, Seen},
        outbox::{self, Outbox, OutboxEvent, Relay, RelayConfig},
    },
    store::{
        engine::sqlite::{SqliteConfig, SqliteStore},
        schema::sqlite::migrate,
    },
};
use rusqlite::Connection;
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let folder = tempfile::tempdir()?;
    let shop = folder.path().join("shop.db");
    let (orders, ledger) = (Topic::new("orders")?, Group::new("ledger")?);

    // The broker, on a file of its own.
    let store = SqliteStore::open(folder.path().join("broker.db"), SqliteConfig::default())?;
    let broker = Arc::new(StoreBroker::new(Arc::new(store.clone())));

    // The shop's own database, with the tables of both patterns.
    let mut conn = Connection::open(&shop)?;
    conn.execute_batch(
        "CREATE TABLE orders (id TEXT PRIMARY KEY, total INTEGER);
         CREATE TABLE ledger (id INTEGER PRIMARY KEY, total INTEGER);
         INSERT INTO ledger VALUES (1, 0)",
    )?;
    migrate(&mut conn, &outbox::COMPONENT)?;
    migrate(&mut conn, &inbox::COMPONENT)?;

    // A relay carries committed rows to the broker; a consumer books each event once.
    let outbox = Outbox::sqlite(&shop).await?;
    let relay = Relay::spawn(&outbox, broker.clone(), RelayConfig::default());
    let (told, mut booked) = mpsc::channel(16);
    let handler = move |incoming: Incoming| {
        let (shop, told) = (shop.clone(), told.clone());
        async move {
            let total = tokio::task::spawn_blocking(move || book(&shop, &incoming.event)).await??;
            told.send(total).await?;
            Ok(())
        }
    };
    let consumer =
        Consumer::new(broker.clone(), orders.clone(), ledger, ConsumerConfig::default(), handler)
            .spawn();

    // Three orders; each commits together with its event, and the last one is rolled back.
    for (number, total) in [(1, 1299), (2, 450), (3, 9999)] {
        let id = format!("A-{number}");
        let tx = conn.transaction()?;
        tx.execute("INSERT INTO orders VALUES (?1, ?2)", (&id, total))?;
        let event = Event::builder("order.placed.v1")
            .source("/shop")
            .id(format!("{id}-placed"))
            .data_json(&total)
            .build()?;
        outbox::rusqlite::append(&tx, &OutboxEvent::new(orders.clone(), event).key(&id)?)?;
        if number < 3 {
            tx.commit()?;
        } else {
            tx.rollback()?;
        }
        relay.waker().wake();
    }

    let patience = Duration::from_secs(10);
    for _ in 0..2 {
        let total = tokio::time::timeout(patience, booked.recv()).await?;
        println!("the ledger holds {}", total.ok_or("the consumer ended")?);
    }
    consumer.drain().await?;
    relay.stop().await;
    let total: i64 = conn.query_row("SELECT total FROM ledger", (), |row| row.get(0))?;
    assert_eq!(total, 1299 + 450, "what was rolled back was never told");
    store.close().await;
    Ok(())
}

/// Books an order: the inbox row and the effect commit together, so a repeat finds the row.
fn book(shop: &std::path::Path, event: &Event) -> Result<i64, HandlerError> {
    let mut conn = Connection::open(shop)?;
    conn.busy_timeout(Duration::from_secs(5))?;
    let tx = conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    if inbox::rusqlite::once(&tx, "ledger", &EventId::from(event))? == Seen::First {
        let data = event.data().ok_or_else(|| HandlerError::permanent("an order has a total"))?;
        let amount: i64 = serde_json::from_slice(&data.bytes)?;
        tx.execute("UPDATE ledger SET total = total + ?1", [amount])?;
    }
    let total = tx.query_row("SELECT total FROM ledger", (), |row| row.get(0))?;
    tx.commit()?;
    Ok(total)
}
