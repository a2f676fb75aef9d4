//! The contract of the broker on each engine, and what `StoreBroker` promises beyond it.

use std::{sync::Arc, time::Duration};

use carrick_core::{
    clock::Clock,
    event::Event,
    name::{Group, Topic},
};
use carrick_message::{
    broker::{Broker, LeaseRequest, PublishLimits, StoreBroker, Verdict, contract::Subject},
    dead_letter::DeadLetters,
};
use carrick_store::{
    engine::memory::MemoryStore,
    lease::Queue,
    log::{Log, NewRecord},
    wake::Wake,
};

use crate::{paused::PausedClock, watched::Watched};

fn on_memory() -> (Arc<MemoryStore>, StoreBroker) {
    let clock = Arc::new(PausedClock::new());
    let store = Arc::new(MemoryStore::with_clock(clock.clone()));
    let broker = StoreBroker::with(store.clone(), clock, PublishLimits::default());
    (store, broker)
}

fn names() -> (Topic, Group) {
    (Topic::new("orders").unwrap(), Group::new("billing").unwrap())
}

fn event(id: &str) -> Event {
    Event::builder("order.placed.v1").id(id).source("/shop").build().unwrap()
}

mod memory {
    use super::*;

    async fn subject() -> Subject {
        let (_, broker) = on_memory();
        let letters: Arc<dyn DeadLetters> = Arc::new(broker.clone());
        Subject { broker: Arc::new(broker), letters: Some(letters), keep: Box::new(()) }
    }

    carrick_message::broker_contract!(subject, #[tokio::test(start_paused = true)]);
}

#[cfg(feature = "embedded")]
mod embedded {
    use carrick_message::broker::{BrokerError, Verdicted};
    use carrick_store::engine::sqlite::{SqliteConfig, SqliteStore};

    use super::*;

    async fn subject() -> Subject {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("broker.db");
        let store = SqliteStore::open(file, SqliteConfig::default()).unwrap();
        let broker = StoreBroker::new(Arc::new(store));
        let letters: Arc<dyn DeadLetters> = Arc::new(broker.clone());
        Subject { broker: Arc::new(broker), letters: Some(letters), keep: Box::new(folder) }
    }

    carrick_message::broker_contract!(subject, #[tokio::test]);

    #[tokio::test]
    async fn a_store_that_is_closed_is_not_worth_a_retry() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("broker.db");
        let store = SqliteStore::open(file, SqliteConfig::default()).unwrap();
        let broker = StoreBroker::new(Arc::new(store.clone()));
        let (topic, group) = names();
        store.close().await;
        let error = broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap_err();
        assert!(matches!(error, BrokerError::Closed), "{error:?}");
        assert!(!error.is_transient());
    }

    #[tokio::test]
    async fn what_was_published_and_leased_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("broker.db");
        let (topic, group) = names();
        let held = {
            let store = SqliteStore::open(&file, SqliteConfig::default()).unwrap();
            let broker = StoreBroker::new(Arc::new(store.clone()));
            broker.publish(&topic, vec![event("1").into(), event("2").into()]).await.unwrap();
            let request = LeaseRequest { max: 1, ..LeaseRequest::default() };
            let held = broker.lease(&topic, &group, request).await.unwrap();
            store.close().await;
            held
        };
        let store = SqliteStore::open(&file, SqliteConfig::default()).unwrap();
        let broker = StoreBroker::new(Arc::new(store.clone()));
        let again = broker.publish(&topic, vec![event("1").into()]).await.unwrap();
        assert_eq!(again.fresh, [false], "the dedupe window is durable");
        let other = broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap();
        assert_eq!(other.len(), 1);
        assert_eq!(other[0].event.id(), "2", "the first one is still under lease");
        // Its holder outlived the broker, and a waiter in the new one is not needed for that.
        let ack = vec![(held[0].lease.clone(), Verdict::Ack)];
        assert_eq!(broker.settle(ack).await.unwrap(), [Verdicted::Done]);
        store.close().await;
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use carrick_store::Store;

    use super::*;

    async fn subject() -> Subject {
        let url = std::env::var("CARRICK_TEST_POSTGRES")
            .expect("CARRICK_TEST_POSTGRES is the URL of a database that tests may use");
        let store: Arc<dyn Store> = carrick_store::engine::open(&url).await.unwrap();
        let broker = StoreBroker::new(store);
        let letters: Arc<dyn DeadLetters> = Arc::new(broker.clone());
        Subject { broker: Arc::new(broker), letters: Some(letters), keep: Box::new(()) }
    }

    carrick_message::broker_contract!(
        subject,
        #[tokio::test]
        #[ignore = "needs a Postgres server at CARRICK_TEST_POSTGRES"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_publisher_that_cannot_be_pushed_back_is_refused_with_a_time() {
    let (store, _) = on_memory();
    let limits = PublishLimits { events: 10, bytes: 1024 * 1024 };
    let broker = StoreBroker::with(store, Arc::new(PausedClock::new()), limits);
    let (topic, _) = names();
    let publish = |from: usize, count: usize| {
        let events = (from..from + count).map(|n| event(&n.to_string()).into()).collect();
        let (broker, topic) = (broker.clone(), topic.clone());
        async move { broker.publish(&topic, events).await }
    };
    let mut first = Box::pin(publish(0, 8));
    let pending = std::future::poll_fn(|cx| {
        std::task::Poll::Ready(std::future::Future::poll(first.as_mut(), cx).is_pending())
    });
    if pending.await {
        let refused = publish(8, 3).await.unwrap_err();
        assert!(refused.is_transient());
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(1)));
        drop(first);
    }
    // Whatever happened to the first one, its share is given back.
    assert_eq!(publish(20, 10).await.unwrap().fresh.len(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_no_event_is_put_aside_and_holds_up_nobody() {
    let (store, broker) = on_memory();
    let (topic, group) = names();
    let junk = NewRecord { body: "no event".into(), ..NewRecord::default() };
    store.append(&topic, vec![junk]).await.unwrap();
    broker.publish(&topic, vec![event("1").into()]).await.unwrap();
    let deliveries = broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap();
    assert_eq!(deliveries.len(), 1);
    assert_eq!(deliveries[0].event.id(), "1");
    broker.close().await; // the burial goes on beside the caller
    let letters = broker.letters(&topic, &group, 0, 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    assert!(letters[0].event.is_none());
    assert_eq!(&letters[0].body[..], b"no event");
    assert!(letters[0].cause.starts_with("not a CloudEvent"), "{}", letters[0].cause);
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_wakes_a_waiter_without_polling() {
    let (_, broker) = on_memory();
    let (topic, group) = names();
    broker.publish(&topic, vec![event("1").into()]).await.unwrap();
    let request = LeaseRequest { lease: Duration::from_secs(30), ..LeaseRequest::default() };
    broker.lease(&topic, &group, request).await.unwrap();
    let started = tokio::time::Instant::now();
    let request = LeaseRequest { wait: Duration::from_secs(60), ..LeaseRequest::default() };
    let again = broker.lease(&topic, &group, request).await.unwrap();
    assert_eq!(again[0].attempt, 2);
    let took = started.elapsed();
    assert!(took < Duration::from_secs(31), "soon after the lease's end: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_group_made_at_the_end_gets_only_what_comes_after() {
    let (store, broker) = on_memory();
    let (topic, group) = names();
    broker.publish(&topic, vec![event("before").into()]).await.unwrap();
    let start = carrick_store::lease::Start::Latest;
    assert!(broker.create_group(&topic, &group, start).await.unwrap());
    assert!(!broker.create_group(&topic, &group, start).await.unwrap());
    broker.publish(&topic, vec![event("after").into()]).await.unwrap();
    let deliveries = broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap();
    assert_eq!(deliveries[0].event.id(), "after");
    broker.settle(vec![(deliveries[0].lease.clone(), Verdict::Ack)]).await.unwrap();
    assert_eq!(store.groups(&topic).await.unwrap()[0].1.backlog, 0);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_waiters_do_not_stampede() {
    let (memory, _) = on_memory();
    let store = Watched::new(memory);
    let clock = Arc::new(PausedClock::new());
    let broker = StoreBroker::with(store.clone(), clock, PublishLimits::default());
    let (topic, group) = names();
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let (broker, topic, group) = (broker.clone(), topic.clone(), group.clone());
        waiters.spawn(async move {
            let wait = Duration::from_secs(30);
            let request = LeaseRequest { max: 1, wait, ..LeaseRequest::default() };
            broker.lease(&topic, &group, request).await.unwrap().len()
        });
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = store.claims();
    broker.publish(&topic, vec![event("1").into()]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let looks = store.claims() - before;
    assert!((1..=8).contains(&looks), "{looks} looks for one event");
    let got: usize = waiters.join_all().await.into_iter().sum();
    assert_eq!(got, 1);
    let idle = store.claims() - before - looks;
    let least = store.backstop().max(Duration::from_millis(5));
    let allowed = 4 * (30_000 / least.as_millis() as usize + 2) + 1000;
    assert!(idle <= allowed, "{idle} looks while nothing came, {allowed} are allowed");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_hung_up_while_its_claim_was_under_way_holds_nothing() {
    let (memory, _) = on_memory();
    let store = Watched::new(memory);
    let clock = Arc::new(PausedClock::new());
    let broker = StoreBroker::with(store.clone(), clock, PublishLimits::default());
    let (topic, group) = names();
    broker.publish(&topic, (1..=3).map(|n| event(&n.to_string()).into()).collect()).await.unwrap();
    store.answer_after(Duration::from_millis(100));
    let call = broker.lease(&topic, &group, LeaseRequest::default());
    assert!(tokio::time::timeout(Duration::from_millis(50), call).await.is_err());
    broker.close().await;
    let again = broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap();
    assert_eq!(again.len(), 3, "at once, though their leases were for 30 s");
    assert!(again.iter().all(|delivery| delivery.attempt == 1), "uncounted");
}

/// A clock that is wrong by an hour.
#[derive(Debug)]
struct Fast(PausedClock);

impl Clock for Fast {
    fn now(&self) -> tokio::time::Instant {
        self.0.now()
    }

    fn wall(&self) -> jiff::Timestamp {
        self.0.wall() + Duration::from_secs(3600)
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_disagrees_with_the_stores_does_not_make_a_waiter_spin() {
    let (memory, _) = on_memory();
    let store = Watched::new(memory);
    let clock = Arc::new(Fast(PausedClock::new()));
    let broker = StoreBroker::with(store.clone(), clock, PublishLimits::default());
    let (topic, group) = names();
    broker.publish(&topic, vec![event("1").into()]).await.unwrap();
    broker.lease(&topic, &group, LeaseRequest::default()).await.unwrap();
    let before = store.claims();
    let request = LeaseRequest { wait: Duration::from_secs(60), ..LeaseRequest::default() };
    let again = broker.lease(&topic, &group, request).await.unwrap();
    assert_eq!(again[0].attempt, 2);
    let looks = store.claims() - before;
    assert!(looks < 200, "{looks} looks in half a minute");
}
