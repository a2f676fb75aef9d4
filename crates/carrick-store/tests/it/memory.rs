//! The memory engine passes the contract.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use carrick_core::clock::{Clock, ManualClock};
use carrick_store::{Store, contract::Subject, engine::memory::MemoryStore};
use jiff::Timestamp;

struct Memory(Arc<ManualClock>);

fn memory() -> Memory {
    Memory(Arc::new(ManualClock::at("2026-12-01T00:00:00Z".parse().unwrap())))
}

#[async_trait]
impl Subject for Memory {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(MemoryStore::with_clock(self.0.clone()))
    }

    async fn pass(&self, time: Duration) {
        self.0.advance(time);
    }

    async fn now(&self) -> Timestamp {
        self.0.wall()
    }

    fn is_durable(&self) -> bool {
        false
    }
}

carrick_store::store_contract!(memory(), #[tokio::test]);
