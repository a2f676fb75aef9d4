//! A broker that records what it is given, and databases with an outbox in them.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use carrick_core::{
    event::Event,
    name::{Group, Topic},
};
use carrick_message::{
    broker::{
        Broker, BrokerError, Capabilities, Delivery, LeaseId, LeaseRequest, Outgoing, Published,
        Verdict, Verdicted,
    },
    inbox,
    outbox::{self, OutboxEvent, RelayConfig, RelayOptions},
};
use carrick_store::schema;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

type Rule = Box<dyn Fn(&Event) -> Option<BrokerError> + Send + Sync>;

/// Takes events unless a rule refuses them; an event that it has already is taken once.
#[derive(Clone, Default)]
pub(crate) struct Recorder(Arc<Inner>);

#[derive(Default)]
struct Inner {
    taken: Mutex<Vec<(Topic, Event)>>,
    known: Mutex<HashSet<u128>>,
    publishes: Mutex<Vec<usize>>,
    rule: Mutex<Option<Rule>>,
    delays: Mutex<HashMap<String, Duration>>,
    forgets: Mutex<bool>,
    jitters: Mutex<bool>,
}

impl Recorder {
    /// Refuses batches with an event for which the rule has an error.
    pub(crate) fn refuse(
        &self,
        rule: impl Fn(&Event) -> Option<BrokerError> + Send + Sync + 'static,
    ) {
        *self.0.rule.lock() = Some(Box::new(rule));
    }

    pub(crate) fn accept_all(&self) {
        *self.0.rule.lock() = None;
    }

    /// Takes this long for a publish with an event of that key.
    pub(crate) fn delay(&self, key: &str, delay: Duration) {
        self.0.delays.lock().insert(key.to_owned(), delay);
    }

    /// Takes a while for each publish, another one for each, so that publishes under way together
    /// end in any order.
    pub(crate) fn jitter(&self) {
        *self.0.jitters.lock() = true;
    }

    /// Takes events again that it has already, as after its dedupe window.
    pub(crate) fn forget(&self) {
        *self.0.forgets.lock() = true;
    }

    /// Ids of what was taken, in order.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.0.taken.lock().iter().map(|(_, event)| event.id().to_string()).collect()
    }

    pub(crate) fn taken(&self) -> Vec<(Topic, Event)> {
        self.0.taken.lock().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.taken.lock().len()
    }

    /// Sizes of the publishes, refused ones included.
    pub(crate) fn publishes(&self) -> Vec<usize> {
        self.0.publishes.lock().clone()
    }

    /// Waits until so many events were taken.
    #[track_caller]
    pub(crate) fn wait_for(&self, count: usize) -> impl Future<Output = ()> {
        let (me, caller) = (self.clone(), std::panic::Location::caller());
        async move {
            let deadline = Instant::now() + PATIENCE;
            while me.count() < count {
                let got = me.count();
                assert!(Instant::now() < deadline, "{caller}: {got} of {count} events came");
                sleep(Duration::from_millis(2)).await;
            }
        }
    }
}

/// How long a condition may take to come true on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a condition.
pub(crate) async fn eventually(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true().await {
        assert!(Instant::now() < deadline, "in vain: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("count", &self.count()).finish()
    }
}

#[async_trait]
impl Broker for Recorder {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            order_per_key: true,
            delay: false,
            attempts: false,
            extend: false,
            dead_letters: false,
            dedupe_window: Some(Duration::from_secs(120)),
            max_event: 1024 * 1024,
        }
    }

    async fn publish(
        &self,
        topic: &Topic,
        events: Vec<Outgoing>,
    ) -> Result<Published, BrokerError> {
        self.0.publishes.lock().push(events.len());
        let longest = {
            let delays = self.0.delays.lock();
            let keys = events.iter().filter_map(|one| one.event.partition_key());
            keys.filter_map(|key| delays.get(&*key).copied()).max()
        };
        match longest {
            Some(delay) => sleep(delay).await,
            None if *self.0.jitters.lock() => {
                sleep(Duration::from_millis(rand::random_range(0..8))).await;
            }
            None => tokio::task::yield_now().await,
        }
        if let Some(rule) = &*self.0.rule.lock()
            && let Some(error) = events.iter().find_map(|one| rule(&one.event))
        {
            return Err(error);
        }
        let (mut taken, mut known) = (self.0.taken.lock(), self.0.known.lock());
        let forgets = *self.0.forgets.lock();
        let fresh = events.into_iter().map(|one| {
            let is_fresh = known.insert(one.event.dedupe_key()) || forgets;
            if is_fresh {
                taken.push((topic.clone(), one.event));
            }
            is_fresh
        });
        Ok(Published { fresh: fresh.collect(), position: None })
    }

    async fn lease(
        &self,
        _: &Topic,
        _: &Group,
        _: LeaseRequest,
    ) -> Result<Vec<Delivery>, BrokerError> {
        Err(BrokerError::Closed)
    }

    async fn settle(&self, _: Vec<(LeaseId, Verdict)>) -> Result<Vec<Verdicted>, BrokerError> {
        Err(BrokerError::Closed)
    }
}

pub(crate) fn refused(why: &'static str) -> BrokerError {
    BrokerError::Refused(why.into())
}

/// Short times, so that a test waits for what happens and not for a timer.
pub(crate) fn quick() -> RelayOptions {
    RelayOptions {
        idle_poll: Duration::from_millis(20),
        lease: Duration::from_secs(1),
        backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(200),
        sweep: Duration::from_secs(1),
        ..RelayOptions::default()
    }
}

pub(crate) fn config(options: RelayOptions) -> RelayConfig {
    options.try_into().expect("within range")
}

/// The event `id` of a key, which may be empty for none.
pub(crate) fn event(id: &str, key: &str) -> OutboxEvent {
    let event = Event::builder("order.placed.v1").source("/test").id(id);
    let event = event.data_json(&serde_json::json!({ "id": id })).build().unwrap();
    let event = OutboxEvent::new(Topic::new("orders").unwrap(), event);
    if key.is_empty() { event } else { event.key(key).unwrap() }
}

/// A connection to an SQLite file with the tables of outbox and inbox.
pub(crate) fn sqlite(path: &Path) -> rusqlite::Connection {
    let mut conn = rusqlite::Connection::open(path).unwrap();
    conn.busy_timeout(Duration::from_secs(10)).unwrap();
    conn.pragma_update(None, "journal_mode", "WAL").unwrap();
    for component in [&outbox::COMPONENT, &inbox::COMPONENT] {
        schema::sqlite::migrate(&mut conn, component).unwrap();
    }
    conn
}

/// A pool on a Postgres database with the tables of outbox and inbox.
pub(crate) async fn postgres(url: &str) -> sqlx::PgPool {
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(20).connect(url).await.unwrap();
    for component in [&outbox::COMPONENT, &inbox::COMPONENT] {
        schema::postgres::migrate(&pool, component).await.unwrap();
    }
    pool
}

/// Asserts that of each key, ids `key-n` came with ascending n.
#[track_caller]
pub(crate) fn assert_key_order(taken: &[(Topic, Event)]) {
    let mut last: HashMap<String, u64> = HashMap::new();
    for (_, event) in taken {
        let Some(key) = event.partition_key() else { continue };
        let number = event.id().rsplit('-').next().unwrap().parse().unwrap();
        let before = last.insert(key.to_string(), number).unwrap_or(0);
        assert!(before < number, "{key}: {number} came after {before}");
    }
}
