//! What does the consumer add to an event, beside leasing and acknowledging it by hand? Judge
//! `consumer` by `bare_loop` of the same run: both drain the same backlog, from memory and from a
//! file that is synced at every commit.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_message::{
    broker::{Broker, LeaseRequest, StoreBroker, Verdict},
    consumer::{Consumer, ConsumerConfig, Incoming},
};
#[cfg(feature = "embedded")]
use carrick_store::engine::sqlite::{SqliteConfig, SqliteStore};
use carrick_store::{Store, engine::memory::MemoryStore};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tokio::{runtime::Runtime, sync::Notify};

/// Events in a backlog: enough that the consumer's start and drain do not show.
const BACKLOG: usize = 20_000;

fn names() -> (Topic, Group) {
    (Topic::new("bench").expect("a name"), Group::new("bench").expect("a name"))
}

/// Where a backlog lies.
#[derive(Clone, Copy, Debug)]
enum Engine {
    Memory,
    #[cfg(feature = "embedded")]
    File,
}

fn store(engine: Engine) -> (Arc<dyn Store>, Option<tempfile::TempDir>) {
    match engine {
        Engine::Memory => (Arc::new(MemoryStore::new()), None),
        #[cfg(feature = "embedded")]
        Engine::File => {
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("bench.db");
            let store = SqliteStore::open(file, SqliteConfig::default()).expect("a store");
            (Arc::new(store), Some(folder))
        }
    }
}

async fn backlog(store: Arc<dyn Store>, keys: usize) -> StoreBroker {
    let broker = StoreBroker::new(store);
    let (topic, _) = names();
    for batch in 0..BACKLOG / 1000 {
        let events = (0..1000).map(|n| {
            let id = batch * 1000 + n;
            let event = Event::builder("bench.drained.v1").id(id.to_string()).source("/bench");
            let event = match keys {
                0 => event,
                keys => event.extension("partitionkey", (id % keys).to_string()),
            };
            event.build().expect("an event").into()
        });
        broker.publish(&topic, events.collect()).await.expect("published");
    }
    broker
}

async fn bare_loop(broker: &StoreBroker) {
    let (topic, group) = names();
    let mut left = BACKLOG;
    while left > 0 {
        let request = LeaseRequest { max: 500, ..LeaseRequest::default() };
        let deliveries = broker.lease(&topic, &group, request).await.expect("leased");
        left -= deliveries.len();
        let acks = deliveries.into_iter().map(|one| (black_box(one).lease, Verdict::Ack));
        broker.settle(acks.collect()).await.expect("settled");
    }
}

async fn consumer(broker: &StoreBroker) {
    let (topic, group) = names();
    let (left, done) = (Arc::new(AtomicUsize::new(BACKLOG)), Arc::new(Notify::new()));
    let finished = done.clone();
    let handler = move |incoming: Incoming| {
        black_box(&incoming);
        if left.fetch_sub(1, Ordering::Relaxed) == 1 {
            finished.notify_one();
        }
        async { Ok(()) }
    };
    let broker = Arc::new(broker.clone());
    let running = Consumer::new(broker, topic, group, ConsumerConfig::default(), handler).spawn();
    done.notified().await;
    running.drain().await.expect("drained");
}

fn drain(c: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let mut group = c.benchmark_group("consumer/drain");
    group.throughput(Throughput::Elements(BACKLOG as u64)).sample_size(10);
    group.measurement_time(Duration::from_secs(5));
    let cases = [
        (Engine::Memory, 0),
        (Engine::Memory, 500),
        #[cfg(feature = "embedded")]
        (Engine::File, 0),
        #[cfg(feature = "embedded")]
        (Engine::File, 500),
    ];
    for (engine, keys) in cases {
        let time = |work: fn(StoreBroker) -> BoxFuture<'static, ()>| {
            let runtime = &runtime;
            move |rounds: u64| {
                let mut total = Duration::ZERO;
                for _ in 0..rounds {
                    let (store, _folder) = store(engine);
                    let broker = runtime.block_on(backlog(store, keys));
                    let start = Instant::now();
                    runtime.block_on(work(broker));
                    total += start.elapsed();
                }
                total
            }
        };
        let case = format!("{engine:?}/{keys}_keys").to_lowercase();
        group.bench_function(format!("{case}/bare_loop"), |b| {
            b.iter_custom(time(|broker| Box::pin(async move { bare_loop(&broker).await })));
        });
        group.bench_function(format!("{case}/consumer"), |b| {
            b.iter_custom(time(|broker| Box::pin(async move { consumer(&broker).await })));
        });
    }
    group.finish();
}

criterion_group!(benches, drain);
criterion_main!(benches);
