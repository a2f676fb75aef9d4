//! The broker on a store: a thin layer between events and records.

use std::{
    fmt,
    future::Future,
    num::NonZeroU64,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use carrick_core::{
    clock::{Clock, SystemClock},
    event::{Event, HARD_LIMIT},
    name::{Group, Topic},
    position::Position,
};
use carrick_store::{
    Store, StoreError,
    lease::{Claim, Claimed, Claims, LeaseToken, Settle, Settled, Start},
    log::{Appended, MAX_BATCH, NewRecord},
};
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::{
    Broker, BrokerError, Capabilities, Delivery, LeaseId, LeaseRequest, Outgoing, PublishLimits,
    Published, Verdict, Verdicted,
    groups::{Groups, Watch},
    shed::Outstanding,
};

/// The shortest pause between two looks of one waiter; doubles while looks stay empty although the
/// store says that something is ready, as it seems to when its clock and ours disagree.
const PAUSE: Duration = Duration::from_millis(5);

/// The broker on any engine of `carrick-store`: memory, SQLite or Postgres.
///
/// A clone is the same broker. What it promises beyond [`Broker`]: a lease call that is dropped
/// while it claims hands back what it got, so that a client which hung up blocks nobody.
///
/// ```
/// # use carrick_message::broker::{Broker, LeaseRequest, StoreBroker, Verdict};
/// # use carrick_core::{event::Event, name::{Group, Topic}};
/// # use std::{sync::Arc, time::Duration};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = carrick_store::engine::memory::MemoryStore::new();
/// let broker = StoreBroker::new(Arc::new(store));
/// let (orders, billing) = (Topic::new("orders")?, Group::new("billing")?);
///
/// let event = Event::builder("order.placed.v1").id("4471").source("/shop").build()?;
/// broker.publish(&orders, vec![event.into()]).await?;
///
/// let request = LeaseRequest { max: 10, ..LeaseRequest::default() };
/// let deliveries = broker.lease(&orders, &billing, request).await?;
/// assert_eq!(deliveries[0].event.id(), "4471");
/// broker.settle(vec![(deliveries[0].lease.clone(), Verdict::Ack)]).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct StoreBroker(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    outstanding: Outstanding,
    groups: Groups,
    hand_backs: TaskTracker,
}

impl StoreBroker {
    /// A broker on a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with(store, Arc::new(SystemClock), PublishLimits::default())
    }

    /// A broker on a store, with a clock that agrees with the store's, and bounds of its own.
    pub fn with(store: Arc<dyn Store>, clock: Arc<dyn Clock>, limits: PublishLimits) -> Self {
        Self(Arc::new(Inner {
            store,
            clock,
            outstanding: Outstanding::new(limits),
            groups: Groups::default(),
            hand_backs: TaskTracker::new(),
        }))
    }

    /// The store below.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// Makes a group, so that it gets events from now on; returns whether it was made.
    ///
    /// Without this, a group exists from its first lease call and starts at the oldest event.
    ///
    /// # Errors
    /// [`BrokerError`] if the store fails.
    ///
    /// # Cancel safety
    /// The group may still be made.
    pub async fn create_group(
        &self,
        topic: &Topic,
        group: &Group,
        start: Start,
    ) -> Result<bool, BrokerError> {
        Ok(self.0.store.create_group(topic, group, start).await?)
    }

    /// Waits until what dropped lease calls had claimed is handed back; call it before the store
    /// is closed.
    ///
    /// # Cancel safety
    /// Safe to drop; the hand-backs go on.
    pub async fn close(&self) {
        self.0.hand_backs.close();
        self.0.hand_backs.wait().await;
    }

    /// Tells waiters of a group in this process that something may have become ready.
    pub(crate) fn nudge(&self, topic: &Topic, group: &Group) {
        self.0.groups.watch(topic, group).changed.notify_waiters();
    }
}

impl fmt::Debug for StoreBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreBroker").field(&self.0.store).finish()
    }
}

#[async_trait]
impl Broker for StoreBroker {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            order_per_key: true,
            delay: true,
            attempts: true,
            extend: true,
            dead_letters: true,
            dedupe_window: Some(self.0.store.dedupe_window()),
            max_event: HARD_LIMIT,
        }
    }

    async fn publish(
        &self,
        topic: &Topic,
        events: Vec<Outgoing>,
    ) -> Result<Published, BrokerError> {
        if events.is_empty() {
            return Ok(Published { fresh: Vec::new(), position: None });
        }
        let bytes = check_batch(&events)?;
        let admitted = self.0.outstanding.admit(events.len(), bytes).inspect_err(|_| {
            metrics::counter!("carrick_broker_shed_total").increment(events.len() as u64);
        })?;
        let records = events.into_iter().map(record).collect();
        let appended = self.0.store.append(topic, records).await?;
        drop(admitted);
        let fresh: Vec<bool> =
            appended.iter().map(|one| matches!(one, Appended::Stored(_))).collect();
        let stored = fresh.iter().filter(|fresh| **fresh).count();
        metrics::counter!("carrick_broker_published_total").increment(stored as u64);
        metrics::counter!("carrick_broker_duplicates_total")
            .increment((fresh.len() - stored) as u64);
        let last = appended.iter().map(|one| one.seq()).max();
        let epoch = self.0.store.epoch();
        Ok(Published { fresh, position: last.map(|seq| Position { epoch, seq }) })
    }

    async fn lease(
        &self,
        topic: &Topic,
        group: &Group,
        request: LeaseRequest,
    ) -> Result<Vec<Delivery>, BrokerError> {
        request.check()?;
        let until = Instant::now() + request.wait;
        let watch = self.0.groups.watch(topic, group);
        let look = || self.0.look(topic, group, &request, &watch);
        let waiter = self.0.store.waiter(topic);
        // Whoever is woken between a look and a wait must not sleep: both wake-ups are counted from
        // here on, before the look.
        let mut woken = pin!(waiter.woken());
        let mut changed = pin!(watch.changed.notified());
        let mut seen = look().await?;
        if !seen.deliveries.is_empty() || request.wait.is_zero() {
            return Ok(seen.deliveries);
        }
        // Nothing is ready: watch for it, or queue behind those who do.
        let mut seen_is_old = false;
        let _place = match watch.scouts.try_acquire() {
            Ok(place) => place,
            Err(_) => {
                seen_is_old = true;
                tokio::select! {
                    place = watch.scouts.acquire() => place.expect("never closed"),
                    () = sleep_until(until) => return Ok(Vec::new()),
                }
            }
        };
        let mut pause = PAUSE;
        loop {
            if seen_is_old {
                woken.set(waiter.woken());
                changed.set(watch.changed.notified());
                seen = look().await?;
                if !seen.deliveries.is_empty() {
                    return Ok(seen.deliveries);
                }
            }
            let again = Instant::now() + self.0.until_ready(&seen, &mut pause);
            tokio::select! {
                () = &mut woken => pause = PAUSE,
                () = &mut changed => pause = PAUSE,
                () = sleep_until(again.min(until)) => {}
            }
            if Instant::now() >= until {
                return Ok(Vec::new());
            }
            seen_is_old = true;
        }
    }

    async fn settle(
        &self,
        verdicts: Vec<(LeaseId, Verdict)>,
    ) -> Result<Vec<Verdicted>, BrokerError> {
        let mut answers = vec![Verdicted::Stale; verdicts.len()];
        let mut places = Vec::with_capacity(verdicts.len());
        let mut settlements = Vec::with_capacity(verdicts.len());
        let mut moved: Vec<LeaseToken> = Vec::new();
        for (place, (lease, verdict)) in verdicts.into_iter().enumerate() {
            // A text that is no token names a lease that nobody holds: it stays stale.
            let Ok(token) = lease.0.parse::<LeaseToken>() else { continue };
            let extends = matches!(verdict, Verdict::Extend { .. });
            if !extends && moved.last().is_none_or(|last| last.group != token.group) {
                moved.push(token);
            }
            places.push(place);
            settlements.push((token, settlement(verdict)));
        }
        if settlements.is_empty() {
            return Ok(answers);
        }
        let mut settled = Vec::with_capacity(settlements.len());
        while !settlements.is_empty() {
            let rest = settlements.split_off(settlements.len().min(MAX_BATCH));
            settled.extend(self.0.store.settle(settlements).await?);
            settlements = rest;
        }
        for (place, settled) in places.into_iter().zip(settled) {
            answers[place] = match settled {
                Settled::Done => Verdicted::Done,
                Settled::Stale => Verdicted::Stale,
            };
        }
        self.0.tell_scouts(&moved).await;
        Ok(answers)
    }
}

/// What one look at a group brought.
struct Seen {
    deliveries: Vec<Delivery>,
    expired: usize,
    next_ready: Option<jiff::Timestamp>,
}

impl Inner {
    /// Claims what is ready now.
    async fn look(
        &self,
        topic: &Topic,
        group: &Group,
        request: &LeaseRequest,
        watch: &Arc<Watch>,
    ) -> Result<Seen, BrokerError> {
        // Counted from before the claim, so that the lease ends here before it ends there.
        let expires_at = Instant::now() + request.lease;
        let claim = Claim { records: request.max, bytes: request.max_bytes, lease: request.lease };
        let claims = ClaimCall::new(self, topic, group, claim).await?;
        if claims.expired > 0 {
            watch.expired.increment(claims.expired as u64);
        }
        if let Some(first) = claims.claimed.first() {
            self.groups.number(first.token.group, watch);
            watch.leased.increment(claims.claimed.len() as u64);
        }
        let mut deliveries = Vec::with_capacity(claims.claimed.len());
        let mut unreadable = Vec::new();
        for claimed in claims.claimed {
            match delivery(claimed, expires_at) {
                Ok(delivery) => deliveries.push(delivery),
                Err(burial) => unreadable.push(burial),
            }
        }
        if !unreadable.is_empty() {
            watch.unreadable.increment(unreadable.len() as u64);
            self.bury(unreadable);
        }
        Ok(Seen { deliveries, expired: claims.expired, next_ready: claims.next_ready })
    }

    /// How long to wait before the next look, unless woken.
    fn until_ready(&self, seen: &Seen, pause: &mut Duration) -> Duration {
        if seen.expired > 0 {
            return Duration::ZERO; // that look made progress, and there may be more behind it
        }
        let backstop = self.store.backstop();
        let Some(ready) = seen.next_ready else { return backstop };
        let wait = Duration::try_from(ready.duration_since(self.clock.wall())).unwrap_or_default();
        // The store's clock may be behind ours: then "ready now" brings nothing, and without a
        // pause that grows this would spin.
        let wait = wait.max(*pause);
        if wait == *pause {
            *pause = (*pause * 2).min(backstop.max(PAUSE));
        }
        wait.min(backstop)
    }

    /// Buries records that are no events, beside the caller: they must not block their key, and the
    /// caller's other deliveries must not wait for them.
    fn bury(&self, burials: Vec<(LeaseToken, Settle)>) {
        let store = Arc::clone(&self.store);
        self.hand_backs.spawn(async move {
            // If this fails their leases run out, and the next claim tries again.
            if let Err(error) = store.settle(burials).await {
                tracing::warn!(%error, "records that are no events could not be put aside");
            }
        });
    }

    /// Tells scouts that a settlement may have made something ready.
    async fn tell_scouts(&self, moved: &[LeaseToken]) {
        let numbers: Vec<NonZeroU64> = moved.iter().map(|token| token.group).collect();
        for number in self.groups.changed(&numbers) {
            let token = moved.iter().find(|token| token.group == number);
            let token = *token.expect("the numbers are those of these tokens");
            // A hint only: if it fails, the backstop of the scouts stands in for it.
            if let Ok(Some((topic, group))) = self.store.group_of(token).await {
                let watch = self.groups.watch(&topic, &group);
                self.groups.number(number, &watch);
                watch.changed.notify_waiters();
            }
        }
    }
}

/// A claim under way. Dropped before it resolves, it goes on by itself and hands back what it gets.
struct ClaimCall {
    claim: Option<BoxFuture<'static, Result<Claims, StoreError>>>,
    sent: bool,
    store: Arc<dyn Store>,
    hand_backs: TaskTracker,
}

impl ClaimCall {
    fn new(inner: &Inner, topic: &Topic, group: &Group, claim: Claim) -> Self {
        let (store, topic, group) = (Arc::clone(&inner.store), topic.clone(), group.clone());
        Self {
            claim: Some(Box::pin(async move { store.claim(&topic, &group, claim).await })),
            sent: false,
            store: Arc::clone(&inner.store),
            hand_backs: inner.hand_backs.clone(),
        }
    }
}

impl Future for ClaimCall {
    type Output = Result<Claims, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.sent = true;
        let claim = self.claim.as_mut().expect("not polled after it resolved");
        let answer = std::task::ready!(claim.as_mut().poll(cx));
        self.claim = None;
        Poll::Ready(answer)
    }
}

impl Drop for ClaimCall {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take().filter(|_| self.sent) else { return };
        // Without a runtime the process is ending, and the leases run out.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let store = Arc::clone(&self.store);
        let hand_back = async move {
            let Ok(claims) = claim.await else { return };
            // Last first, so that giving back the head of a key does not end the later leases
            // before their own turn.
            let back = claims.claimed.iter().rev();
            let release = || Settle::Release { delay: Duration::ZERO, counted: false };
            let back: Vec<_> = back.map(|claimed| (claimed.token, release())).collect();
            if back.is_empty() {
                return;
            }
            metrics::counter!("carrick_broker_handed_back_total").increment(back.len() as u64);
            if let Err(error) = store.settle(back).await {
                tracing::debug!(%error, "leases of a dropped call run out by themselves");
            }
        };
        self.hand_backs.spawn_on(hand_back, &runtime);
    }
}

impl LeaseRequest {
    fn check(&self) -> Result<(), BrokerError> {
        let invalid = |field, range, value| Err(BrokerError::Invalid { field, range, value });
        if !(1..=MAX_BATCH).contains(&self.max) {
            return invalid("max", "1..=1000", self.max.to_string());
        }
        if self.max_bytes == 0 {
            return invalid("max-bytes", "above zero", "0".to_owned());
        }
        if !(MIN_LEASE..=MAX_LEASE).contains(&self.lease) {
            return invalid("lease", "1s to 12h", format!("{:?}", self.lease));
        }
        if self.wait > MAX_WAIT {
            return invalid("wait", "at most 5m", format!("{:?}", self.wait));
        }
        Ok(())
    }
}

/// The shortest lease: below it, a pause of the network loses leases that are well.
pub(crate) const MIN_LEASE: Duration = Duration::from_secs(1);
/// The longest lease, as in SQS: a holder that died blocks its events for at most this long.
pub(crate) const MAX_LEASE: Duration = Duration::from_secs(12 * 60 * 60);
/// The longest wait of one call: below what proxies on the way give up after.
const MAX_WAIT: Duration = Duration::from_secs(5 * 60);

fn check_batch(events: &[Outgoing]) -> Result<usize, BrokerError> {
    if events.len() > MAX_BATCH {
        return Err(BrokerError::Invalid {
            field: "events",
            range: "at most 1000 in a batch",
            value: events.len().to_string(),
        });
    }
    let mut bytes = 0;
    for outgoing in events {
        let size = outgoing.event.as_json().len();
        if size > HARD_LIMIT {
            return Err(BrokerError::TooLarge { what: "an event", size, limit: HARD_LIMIT });
        }
        bytes += size;
    }
    Ok(bytes)
}

fn record(outgoing: Outgoing) -> NewRecord {
    let Outgoing { event, due } = outgoing;
    NewRecord {
        key: event.partition_key().map(|key| key.to_string()),
        dedupe: Some(event.dedupe_key()),
        due,
        expires: event.expires_at(),
        body: event.as_json().clone(),
    }
}

fn delivery(claimed: Claimed, expires_at: Instant) -> Result<Delivery, (LeaseToken, Settle)> {
    let Claimed { token, attempt, first_claimed_at, record } = claimed;
    match Event::parse(record.body) {
        Ok(event) => Ok(Delivery {
            lease: LeaseId(token.to_string()),
            fence: Some(token.fence),
            attempt,
            first_delivered_at: first_claimed_at,
            expires_at,
            event,
        }),
        Err(error) => Err((token, Settle::Bury { cause: format!("not a CloudEvent: {error}") })),
    }
}

fn settlement(verdict: Verdict) -> Settle {
    match verdict {
        Verdict::Ack => Settle::Ack,
        Verdict::Nack { delay, counted } => Settle::Release { delay, counted },
        Verdict::Extend { lease } => Settle::Extend { lease },
        Verdict::DeadLetter { cause } => Settle::Bury { cause },
    }
}
