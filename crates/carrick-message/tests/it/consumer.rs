//! The consumer on the memory engine and a paused clock: what it does, and what it refrains from.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_message::{
    broker::{
        Broker, BrokerError, Capabilities, Delivery, LeaseId, LeaseRequest, Outgoing,
        PublishLimits, Published, StoreBroker, Verdict, Verdicted,
    },
    consumer::{
        Consumer, ConsumerConfig, ConsumerError, ConsumerHandle, ConsumerOptions, Handler,
        HandlerError, Incoming,
    },
    dead_letter::{DeadLetters, Redrive, Select},
};
use carrick_store::{
    engine::memory::MemoryStore,
    lease::{GroupStats, Queue},
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::paused::PausedClock;

struct Bench {
    store: Arc<MemoryStore>,
    broker: StoreBroker,
    clock: Arc<PausedClock>,
    topic: Topic,
    group: Group,
}

impl Bench {
    fn new() -> Self {
        let clock = Arc::new(PausedClock::new());
        let store = Arc::new(MemoryStore::with_clock(clock.clone()));
        let broker = StoreBroker::with(store.clone(), clock.clone(), PublishLimits::default());
        let (topic, group) = (Topic::new("orders").unwrap(), Group::new("billing").unwrap());
        Self { store, broker, clock, topic, group }
    }

    async fn publish(&self, events: impl IntoIterator<Item = (usize, Option<&str>)>) {
        let events: Vec<Outgoing> =
            events.into_iter().map(|(id, key)| event(id, key).into()).collect();
        self.broker.publish(&self.topic, events).await.unwrap();
    }

    fn consume(&self, options: ConsumerOptions, handler: impl Handler) -> ConsumerHandle {
        self.consume_from(Arc::new(self.broker.clone()), options, handler)
    }

    fn consume_from(
        &self,
        broker: Arc<dyn Broker>,
        options: ConsumerOptions,
        handler: impl Handler,
    ) -> ConsumerHandle {
        let config = ConsumerConfig::try_from(options).unwrap();
        Consumer::new(broker, self.topic.clone(), self.group.clone(), config, handler)
            .with_clock(self.clock.clone())
            .spawn()
    }

    /// How the group stands; `None` before its first lease call.
    async fn group(&self) -> Option<GroupStats> {
        let groups = self.store.groups(&self.topic).await.unwrap();
        groups.into_iter().find(|(group, _)| *group == self.group).map(|(_, stats)| stats)
    }

    async fn stats(&self) -> GroupStats {
        self.group().await.expect("somebody has consumed")
    }

    /// Waits, in virtual time, until the group stands as asked.
    async fn until(&self, what: &str, holds: impl Fn(GroupStats) -> bool) {
        let give_up = Instant::now() + Duration::from_secs(48 * 3600);
        while !self.group().await.is_some_and(&holds) {
            assert!(Instant::now() < give_up, "never {what}: {:?}", self.group().await);
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_empty(&self) {
        self.until("empty", |stats| stats.backlog == 0).await;
    }
}

fn event(id: usize, key: Option<&str>) -> Event {
    let event = Event::builder("order.placed.v1").id(id.to_string()).source("/shop");
    let event = match key {
        Some(key) => event.extension("partitionkey", key),
        None => event,
    };
    event.build().unwrap()
}

fn id(incoming: &Incoming) -> usize {
    incoming.event.id().parse().unwrap()
}

/// What handlers saw: event and attempt, in order.
type Log = Arc<Mutex<Vec<(usize, u32)>>>;

fn log() -> Log {
    Arc::default()
}

fn options() -> ConsumerOptions {
    ConsumerOptions::default()
}

#[tokio::test(start_paused = true)]
async fn every_event_is_handled_once_and_in_order_per_key() {
    let bench = Bench::new();
    let keys = ["a", "b", "c"];
    bench.publish((0..300).map(|n| (n, Some(keys[n % 3])))).await;
    let seen = log();
    let log = seen.clone();
    let consumer = bench.consume(options(), move |incoming: Incoming| {
        let log = log.clone();
        async move {
            sleep(Duration::from_millis(id(&incoming) as u64 % 7)).await;
            log.lock().push((id(&incoming), incoming.attempt));
            Ok(())
        }
    });
    bench.until_empty().await;
    let report = consumer.drain().await.unwrap();
    assert_eq!((report.status.handled, report.gave_up), (300, 0));
    let seen = seen.lock();
    for key in 0..3 {
        let of_key: Vec<usize> =
            seen.iter().map(|(id, _)| *id).filter(|id| id % 3 == key).collect();
        assert_eq!(of_key, (0..100).map(|n| n * 3 + key).collect::<Vec<_>>());
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_event_does_not_keep_the_next_one_waiting() {
    let bench = Bench::new();
    bench.publish((0..50).map(|n| (n, None))).await;
    let done = Arc::new(AtomicUsize::new(0));
    let count = done.clone();
    let options = ConsumerOptions { concurrency: 2, ..options() };
    let consumer = bench.consume(options, move |incoming: Incoming| {
        let count = count.clone();
        async move {
            let slow = id(&incoming) == 0;
            sleep(if slow { Duration::from_secs(120) } else { Duration::from_millis(10) }).await;
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    });
    sleep(Duration::from_secs(10)).await;
    assert_eq!(done.load(Ordering::Relaxed), 49, "defects.md M6: no batch waits for its slowest");
    bench.until_empty().await;
    assert_eq!(consumer.drain().await.unwrap().status.stale, 0, "its lease was kept");
}

#[tokio::test(start_paused = true)]
async fn a_handler_longer_than_its_lease_keeps_it_and_runs_once() {
    let bench = Bench::new();
    bench.publish([(1, Some("k"))]).await;
    let runs = log();
    let log = runs.clone();
    let handler = move |incoming: Incoming| {
        let log = log.clone();
        async move {
            log.lock().push((id(&incoming), incoming.attempt));
            sleep(Duration::from_secs(200)).await;
            Ok(())
        }
    };
    // Two consumers: the second one would get it if the lease were lost.
    let one = bench.consume(options(), handler.clone());
    let two = bench.consume(options(), handler);
    bench.until_empty().await;
    assert_eq!(*runs.lock(), [(1, 1)], "wolverine#585: not taken over while it is handled");
    one.drain().await.unwrap();
    two.drain().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_retried_with_backoff_and_then_put_aside_with_its_cause() {
    let bench = Bench::new();
    bench.publish([(1, Some("k")), (2, Some("k"))]).await;
    let seen = log();
    let log = seen.clone();
    let options = ConsumerOptions { max_attempts: 3, ..options() };
    let consumer = bench.consume(options, move |incoming: Incoming| {
        let log = log.clone();
        async move {
            log.lock().push((id(&incoming), incoming.attempt));
            if id(&incoming) == 1 {
                return Err(HandlerError::transient("the ledger is away"));
            }
            Ok(())
        }
    });
    bench.until_empty().await;
    assert_eq!(*seen.lock(), [(1, 1), (1, 2), (1, 3), (2, 1)], "the key waited for its head");
    let letters = bench.broker.letters(&bench.topic, &bench.group, 0, 10).await.unwrap();
    assert_eq!(letters[0].cause, "gave up after 3 attempts: the ledger is away");
    assert_eq!((letters[0].attempts, letters[0].key.as_deref()), (3, Some("k")));
    let status = consumer.drain().await.unwrap().status;
    assert_eq!((status.handled, status.retried, status.dead), (1, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_permanent_failure_and_a_panic_do_not_end_the_process() {
    let bench = Bench::new();
    bench.publish([(1, None), (2, None), (3, None)]).await;
    let consumer = bench.consume(options(), |incoming: Incoming| {
        // Not in the future: a handler may panic before there is one.
        assert!(id(&incoming) != 2 || incoming.attempt > 1, "order 2 is cursed");
        async move {
            match id(&incoming) {
                1 => Err(HandlerError::permanent("no such customer")),
                3 if incoming.attempt == 1 => panic!("in the future"),
                _ => Ok(()),
            }
        }
    });
    bench.until_empty().await;
    let status = consumer.drain().await.unwrap().status;
    assert_eq!((status.handled, status.dead, status.failed), (2, 1, 3));
    let letters = bench.broker.letters(&bench.topic, &bench.group, 0, 10).await.unwrap();
    assert_eq!((letters[0].cause.as_str(), letters[0].attempts), ("no such customer", 1));
}

#[tokio::test(start_paused = true)]
async fn a_redriven_event_is_handled_like_a_new_one() {
    let bench = Bench::new();
    bench.publish([(1, Some("k"))]).await;
    let healed = Arc::new(AtomicBool::new(false));
    let (heal, seen) = (healed.clone(), log());
    let log = seen.clone();
    let consumer = bench.consume(options(), move |incoming: Incoming| {
        let (healed, log) = (heal.clone(), log.clone());
        async move {
            log.lock().push((id(&incoming), incoming.attempt));
            match healed.load(Ordering::Relaxed) {
                true => Ok(()),
                false => Err(HandlerError::permanent("not yet")),
            }
        }
    });
    bench.until("dead", |stats| stats.dead == 1).await;
    healed.store(true, Ordering::Relaxed);
    let redrive = Redrive::new(Select::All);
    let redriven = bench.broker.redrive(&bench.topic, &bench.group, &redrive).await.unwrap();
    assert_eq!(redriven, 1);
    bench.until("handled", |stats| stats.backlog == 0 && stats.dead == 0).await;
    assert_eq!(*seen.lock(), [(1, 1), (1, 1)], "attempts start over");
    consumer.drain().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_takes_too_long_is_stopped_and_its_event_tried_again() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let stopped = Arc::new(AtomicUsize::new(0));
    let count = stopped.clone();
    let options = ConsumerOptions { handler_timeout: Duration::from_secs(5), ..options() };
    let consumer = bench.consume(options, move |incoming: Incoming| {
        let count = count.clone();
        async move {
            if incoming.attempt > 1 {
                return Ok(());
            }
            let left = incoming.context.deadline().remaining(Instant::now());
            assert!(left <= Duration::from_secs(5), "{left:?}");
            incoming.cancelled.cancelled().await;
            count.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }
    });
    bench.until_empty().await;
    assert_eq!(stopped.load(Ordering::Relaxed), 1, "it saw its token before it was dropped");
    let status = consumer.drain().await.unwrap().status;
    assert_eq!((status.failed, status.handled), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_event_that_expires_while_it_waits_here_is_dropped_and_counted() {
    let bench = Bench::new();
    let soon = carrick_core::clock::Clock::wall(&*bench.clock) + Duration::from_secs(2);
    let expiring = Event::builder("order.placed.v1")
        .id("2")
        .source("/shop")
        .extension("partitionkey", "k")
        .extension("expirytime", soon.to_string())
        .build()
        .unwrap();
    bench.publish([(1, Some("k"))]).await;
    bench.broker.publish(&bench.topic, vec![expiring.into()]).await.unwrap();
    bench.publish([(3, Some("k"))]).await;
    let seen = log();
    let log = seen.clone();
    let consumer = bench.consume(options(), move |incoming: Incoming| {
        let log = log.clone();
        async move {
            log.lock().push((id(&incoming), incoming.attempt));
            sleep(Duration::from_secs(3)).await;
            Ok(())
        }
    });
    bench.until_empty().await;
    assert_eq!(*seen.lock(), [(1, 1), (3, 1)]);
    assert_eq!(consumer.drain().await.unwrap().status.expired, 1);
}

#[tokio::test(start_paused = true)]
async fn when_everything_fails_alike_the_dead_letters_are_spared() {
    let bench = Bench::new();
    bench.publish((0..1000).map(|n| (n, None))).await;
    let (down, runs) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (is_down, count) = (down.clone(), runs.clone());
    let options = ConsumerOptions { concurrency: 8, ..options() };
    let consumer = bench.consume(options, move |incoming: Incoming| {
        let (down, count) = (is_down.clone(), count.clone());
        async move {
            count.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(10)).await;
            if down.load(Ordering::Relaxed) {
                let text = format!("order {}: the new release is broken", id(&incoming));
                return Err(HandlerError::permanent(text));
            }
            Ok(())
        }
    });
    sleep(Duration::from_secs(3600)).await;
    let (runs, dead) = (runs.load(Ordering::Relaxed), bench.stats().await.dead);
    assert!(dead < 40, "PostHog/posthog#100310: {dead} dead letters of 1000");
    assert!(runs < 60, "{runs} runs in an hour that could only fail");
    assert!(!consumer.status().circuit_closed);
    down.store(false, Ordering::Relaxed);
    bench.until_empty().await;
    let status = consumer.drain().await.unwrap().status;
    assert!(status.circuit_closed);
    assert_eq!(status.handled + status.dead, 1000, "nothing is lost");
}

#[tokio::test(start_paused = true)]
async fn one_poisoned_key_neither_opens_the_circuit_nor_holds_up_the_others() {
    let bench = Bench::new();
    bench.publish((0..100).map(|n| (n, Some("poisoned")))).await;
    bench.publish((100..400).map(|n| (n, Some(["a", "b", "c"][n % 3])))).await;
    let healthy = Arc::new(AtomicUsize::new(0));
    let count = healthy.clone();
    let options = ConsumerOptions { concurrency: 4, prefetch: 8, lane: 2, ..options() };
    let consumer = bench.consume(options, move |incoming: Incoming| {
        let count = count.clone();
        async move {
            if incoming.event.partition_key().as_deref() == Some("poisoned") {
                sleep(Duration::from_secs(20)).await;
                return Err(HandlerError::transient("poison"));
            }
            sleep(Duration::from_millis(10)).await;
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    });
    sleep(Duration::from_secs(15)).await;
    assert_eq!(healthy.load(Ordering::Relaxed), 300, "pulsar#25706: the others flow");
    assert!(consumer.status().circuit_closed);
    assert_eq!(consumer.drain().await.unwrap().status.dead, 0);
}

#[tokio::test(start_paused = true)]
async fn a_drain_returns_what_is_unstarted_at_once_and_lets_the_running_finish() {
    let bench = Bench::new();
    bench.publish((0..100).map(|n| (n, Some(["a", "b"][n % 2])))).await;
    let consumer = bench.consume(options(), |_: Incoming| async {
        sleep(Duration::from_secs(10)).await;
        Ok(())
    });
    sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.stats().await.leased, 64, "fetched up to its bound");
    let started = Instant::now();
    consumer.stop();
    sleep(Duration::from_millis(50)).await;
    assert_eq!(bench.stats().await.leased, 2, "only what runs is held");
    let report = consumer.drain().await.unwrap();
    assert_eq!((report.status.handled, report.gave_up), (2, 0));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let stats = bench.stats().await;
    assert_eq!((stats.leased, stats.backlog), (0, 98));
    let next = bench.broker.lease(&bench.topic, &bench.group, LeaseRequest::default()).await;
    assert!(next.unwrap().iter().all(|one| one.attempt == 1), "a drain burns no attempt");
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_outlives_the_grace_is_stopped_and_its_event_given_back() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let options = ConsumerOptions { grace: Duration::from_secs(3), ..options() };
    let consumer = bench.consume(options, |_: Incoming| std::future::pending());
    sleep(Duration::from_secs(1)).await;
    let started = Instant::now();
    let report = consumer.drain().await.unwrap();
    assert_eq!(report.gave_up, 1);
    let took = started.elapsed();
    assert!((3..4).contains(&took.as_secs()), "{took:?}");
    let next = bench.broker.lease(&bench.topic, &bench.group, LeaseRequest::default()).await;
    assert_eq!(next.unwrap()[0].attempt, 1, "ready at once, and not counted");
}

#[tokio::test(start_paused = true)]
async fn an_idle_consumer_drains_at_once() {
    let bench = Bench::new();
    let consumer = bench.consume(options(), |_: Incoming| async { Ok(()) });
    sleep(Duration::from_secs(1)).await;
    let started = Instant::now();
    consumer.drain().await.unwrap();
    assert_eq!(started.elapsed(), Duration::ZERO, "its long poll is not waited for");
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_dropped_loses_nothing() {
    let bench = Bench::new();
    bench.publish((0..10).map(|n| (n, Some("k")))).await;
    let consumer = bench.consume(options(), |_: Incoming| std::future::pending());
    sleep(Duration::from_secs(1)).await;
    drop(consumer);
    let done = bench.consume(options(), |_: Incoming| async { Ok(()) });
    let started = Instant::now();
    bench.until_empty().await;
    let took = started.elapsed();
    assert!(took < Duration::from_secs(31), "procrastinate#1518: rescued by the lease, {took:?}");
    assert_eq!(done.drain().await.unwrap().status.handled, 10);
}

/// A broker that is away from time to time.
#[derive(Debug)]
struct Away {
    inner: StoreBroker,
    away: AtomicBool,
    calls: AtomicUsize,
    extend_is_stale: AtomicBool,
    refuses: AtomicBool,
    lacks: Mutex<Option<fn(&mut Capabilities)>>,
}

impl Away {
    fn new(inner: &StoreBroker) -> Arc<Self> {
        Arc::new(Self {
            inner: inner.clone(),
            away: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            extend_is_stale: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            lacks: Mutex::new(None),
        })
    }

    fn set(&self, away: bool) {
        self.away.store(away, Ordering::Relaxed);
    }

    fn answer(&self) -> Result<(), BrokerError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.refuses.load(Ordering::Relaxed) {
            return Err(BrokerError::Refused("wrong tenant".into()));
        }
        match self.away.load(Ordering::Relaxed) {
            true => Err(BrokerError::Unavailable("connection refused".into())),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Broker for Away {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        if let Some(lacks) = *self.lacks.lock() {
            lacks(&mut capabilities);
        }
        capabilities
    }

    async fn publish(
        &self,
        topic: &Topic,
        events: Vec<Outgoing>,
    ) -> Result<Published, BrokerError> {
        self.inner.publish(topic, events).await
    }

    async fn lease(
        &self,
        topic: &Topic,
        group: &Group,
        request: LeaseRequest,
    ) -> Result<Vec<Delivery>, BrokerError> {
        self.answer()?;
        self.inner.lease(topic, group, request).await
    }

    async fn settle(
        &self,
        verdicts: Vec<(LeaseId, Verdict)>,
    ) -> Result<Vec<Verdicted>, BrokerError> {
        self.answer()?;
        let extends = matches!(verdicts[0].1, Verdict::Extend { .. });
        if extends && self.extend_is_stale.load(Ordering::Relaxed) {
            return Ok(vec![Verdicted::Stale; verdicts.len()]);
        }
        self.inner.settle(verdicts).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_is_away_is_waited_for_without_hammering_it() {
    let bench = Bench::new();
    let away = Away::new(&bench.broker);
    away.set(true);
    let consumer = bench.consume_from(away.clone(), options(), |_: Incoming| async { Ok(()) });
    sleep(Duration::from_secs(3600)).await;
    let calls = away.calls.load(Ordering::Relaxed);
    assert!((120..600).contains(&calls), "{calls} calls in an hour");
    assert_eq!(consumer.status().last_fetch, None, "a watchdog sees it");
    bench.publish([(1, None)]).await;
    away.set(false);
    let back = Instant::now();
    bench.until_empty().await;
    assert!(back.elapsed() <= Duration::from_secs(31), "{:?}", back.elapsed());
    assert!(consumer.status().last_fetch.is_some());
    consumer.drain().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_acknowledgement_outlives_a_short_absence_of_the_broker() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let away = Away::new(&bench.broker);
    let runs = Arc::new(AtomicUsize::new(0));
    let (leaves, count) = (away.clone(), runs.clone());
    let consumer = bench.consume_from(away.clone(), options(), move |_: Incoming| {
        leaves.set(true);
        count.fetch_add(1, Ordering::Relaxed);
        async { Ok(()) }
    });
    sleep(Duration::from_secs(10)).await;
    away.set(false);
    bench.until_empty().await;
    assert_eq!(runs.load(Ordering::Relaxed), 1, "acknowledged within its lease, so handled once");
    assert_eq!(consumer.drain().await.unwrap().status.handled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_stopped_when_the_broker_says_that_its_lease_is_lost() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let away = Away::new(&bench.broker);
    away.extend_is_stale.store(true, Ordering::Relaxed);
    struct Stopped(Arc<Mutex<Vec<Duration>>>, Instant);
    impl Drop for Stopped {
        fn drop(&mut self) {
            self.0.lock().push(self.1.elapsed());
        }
    }
    let stopped = Arc::new(Mutex::new(Vec::new()));
    let record = stopped.clone();
    let consumer = bench.consume_from(away.clone(), options(), move |incoming: Incoming| {
        let guard = Stopped(record.clone(), Instant::now());
        async move {
            let _guard = guard;
            if incoming.attempt == 1 {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    });
    bench.until_empty().await;
    let ran = stopped.lock()[0];
    assert_eq!(ran.as_secs(), 10, "at the first extension that came back stale");
    assert_eq!(consumer.drain().await.unwrap().status.stale, 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_stopped_before_its_lease_ends_when_extensions_cannot_be_sent() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let away = Away::new(&bench.broker);
    let (leaves, ended) = (away.clone(), Arc::new(Mutex::new(None)));
    let (started, end) = (Instant::now(), ended.clone());
    let consumer = bench.consume_from(away.clone(), options(), move |incoming: Incoming| {
        leaves.set(true);
        let end = end.clone();
        async move {
            incoming.cancelled.cancelled().await;
            *end.lock() = Some(Instant::now());
            std::future::pending().await
        }
    });
    sleep(Duration::from_secs(60)).await;
    let ran = ended.lock().expect("it was stopped") - started;
    assert!(ran <= Duration::from_secs(30), "the broker's lease ends at 30 s: {ran:?}");
    drop(consumer);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_no_retry_cures_ends_the_consumer_with_its_reason() {
    let bench = Bench::new();
    let away = Away::new(&bench.broker);
    away.refuses.store(true, Ordering::Relaxed);
    let consumer = bench.consume_from(away, options(), |_: Incoming| async { Ok(()) });
    let error = consumer.ended().await.unwrap_err();
    let ConsumerError::Broker { source, .. } = error else { panic!("{error:?}") };
    assert!(matches!(source, BrokerError::Refused(_)));
}

#[tokio::test(start_paused = true)]
async fn the_fence_of_a_delivery_exceeds_that_of_an_earlier_one() {
    let bench = Bench::new();
    bench.publish([(1, None)]).await;
    let fences = Arc::new(Mutex::new(Vec::new()));
    let record = fences.clone();
    let consumer = bench.consume(options(), move |incoming: Incoming| {
        record.lock().push(incoming.fence.unwrap());
        async move {
            match incoming.attempt {
                1..=3 => Err(HandlerError::transient("again")),
                _ => Ok(()),
            }
        }
    });
    bench.until_empty().await;
    consumer.drain().await.unwrap();
    assert!(fences.lock().is_sorted_by(|a, b| a < b), "{fences:?}");
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_cannot_do_what_is_needed_is_refused_at_start_with_the_reason() {
    type Lack = (fn(&mut Capabilities), &'static str);
    let lacks: [Lack; 4] = [
        (|can| can.dead_letters = false, "keep dead letters"),
        (|can| can.attempts = false, "count deliveries"),
        (|can| can.delay = false, "hold retries back"),
        (|can| can.extend = false, "handler-timeout (5m) must not exceed lease (30s)"),
    ];
    for (lacks, told) in lacks {
        let bench = Bench::new();
        let away = Away::new(&bench.broker);
        *away.lacks.lock() = Some(lacks);
        let consumer = bench.consume_from(away.clone(), options(), |_: Incoming| async { Ok(()) });
        let error = consumer.ended().await.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        assert_eq!(away.calls.load(Ordering::Relaxed), 0, "nothing was consumed");
    }
}

/// The spans that a test opens, by their fields.
#[derive(Clone, Default)]
struct SpanFields(Arc<Mutex<Vec<(String, String)>>>);

impl tracing::field::Visit for SpanFields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.lock().push((field.name().to_owned(), format!("{value:?}")));
    }
}

impl tracing::Subscriber for SpanFields {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name() == "consume"
    }

    fn new_span(&self, attributes: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        assert!(attributes.is_root(), "defects.md M5: the consumer's span is a root");
        attributes.record(&mut self.clone());
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, values: &tracing::span::Record<'_>) {
        values.record(&mut self.clone());
    }

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(start_paused = true)]
async fn a_span_links_to_the_events_trace_and_joins_it_only_when_young_and_asked_to() {
    const ORIGIN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let hour = Duration::from_secs(3600);
    for (join, age, expected) in [
        (Duration::ZERO, Duration::ZERO, "link.traceparent"),
        (hour, hour, "link.traceparent"),
        (hour, hour / 2, "traceparent"),
    ] {
        let fields = SpanFields::default();
        let _guard = tracing::subscriber::set_default(fields.clone());
        let bench = Bench::new();
        let event = Event::builder("order.placed.v1")
            .id("1")
            .source("/shop")
            .time(carrick_core::clock::Clock::wall(&*bench.clock) - age)
            .extension("traceparent", ORIGIN)
            .build()
            .unwrap();
        bench.broker.publish(&bench.topic, vec![event.into()]).await.unwrap();
        let seen = Arc::new(Mutex::new(None));
        let see = seen.clone();
        let options = ConsumerOptions { trace_join: join, ..options() };
        let consumer = bench.consume(options, move |incoming: Incoming| {
            let current = carrick_core::context::Context::current().expect("in scope");
            assert_eq!(current, incoming.context);
            assert_eq!(incoming.event.traceparent().as_deref(), Some(ORIGIN), "never rewritten");
            *see.lock() = Some(current.trace().trace_id().to_string());
            async { Ok(()) }
        });
        bench.until_empty().await;
        consumer.drain().await.unwrap();
        let fields = fields.0.lock();
        let naming: Vec<&str> = fields
            .iter()
            .filter(|(_, value)| value == ORIGIN)
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(naming, [expected], "{fields:?}");
        let trace = seen.lock().clone().unwrap();
        assert_eq!(ORIGIN.contains(&trace), expected == "traceparent");
    }
}

/// On a real file, with threads: the same promises without a paused clock.
#[cfg(feature = "embedded")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_consumers_on_a_file_finish_everything_in_order_per_key_though_handlers_fail() {
    use carrick_store::engine::sqlite::{SqliteConfig, SqliteStore};

    const EVENTS: usize = 4000;
    const KEYS: usize = 50;
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("c.db"), SqliteConfig::default()).unwrap();
    let broker = StoreBroker::new(Arc::new(store.clone()));
    let (topic, group) = (Topic::new("orders").unwrap(), Group::new("billing").unwrap());
    let keys: Vec<String> = (0..KEYS).map(|key| key.to_string()).collect();
    for from in (0..EVENTS).step_by(1000) {
        let events = (from..from + 1000).map(|n| event(n, Some(&keys[n % KEYS])).into());
        broker.publish(&topic, events.collect()).await.unwrap();
    }
    let effects: Arc<Mutex<Vec<usize>>> = Arc::default();
    let consume = || {
        let effects = effects.clone();
        let options = ConsumerOptions {
            concurrency: 8,
            backoff: Duration::from_millis(5),
            max_backoff: Duration::from_millis(50),
            ..options()
        };
        let config = ConsumerConfig::try_from(options).unwrap();
        let handler = move |incoming: Incoming| {
            let effects = effects.clone();
            async move {
                tokio::task::yield_now().await;
                match (id(&incoming) % 20, incoming.attempt) {
                    (3, 1) => return Err(HandlerError::transient("not at the first time")),
                    (7, 1..=2) => panic!("not at the first two times"),
                    _ => {}
                }
                effects.lock().push(id(&incoming));
                Ok(())
            }
        };
        Consumer::new(Arc::new(broker.clone()), topic.clone(), group.clone(), config, handler)
            .spawn()
    };
    let (one, two) = (consume(), consume());
    let patience = Instant::now() + Duration::from_secs(60);
    while effects.lock().len() < EVENTS {
        assert!(Instant::now() < patience, "{} done: {:?}", effects.lock().len(), one.status());
        sleep(Duration::from_millis(10)).await;
    }
    let reports = [one.drain().await.unwrap().status, two.drain().await.unwrap().status];
    assert_eq!(reports.iter().map(|report| report.handled).sum::<u64>(), EVENTS as u64);
    assert_eq!(store.groups(&topic).await.unwrap()[0].1.backlog, 0);
    let effects = effects.lock().clone();
    for key in 0..KEYS {
        let of_key: Vec<usize> = effects.iter().copied().filter(|id| id % KEYS == key).collect();
        assert_eq!(of_key, (key..EVENTS).step_by(KEYS).collect::<Vec<_>>(), "key {key}");
    }
    store.close().await;
}
