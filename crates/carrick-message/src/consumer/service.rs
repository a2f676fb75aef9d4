//! The consumer at work: fetches, starts handlers, extends leases and settles, all in one task.
//!
//! One loop asks the [`core`](super::core) what to do, does it, and waits for the first thing to
//! happen. Broker calls are held as futures beside each other, so a slow acknowledgement delays
//! neither an extension nor a fetch. Handlers run as tasks that the loop owns: dropping the loop
//! aborts them, and their leases run out.

use std::{
    future::Future, panic::AssertUnwindSafe, pin::pin, sync::Arc, task::Poll, time::Duration,
};

use carrick_core::{
    backoff::Backoff,
    clock::Clock,
    name::{Group, Topic},
};
use futures_util::{FutureExt, future::BoxFuture};
use hashbrown::HashMap;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::{
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::{
    ConsumerConfig, ConsumerError, ConsumerReport, Handler, HandlerErrorKind, Incoming,
    core::{Begin, Core, Ending, SlotId},
    log_limit::LogLimit,
    status::Gauges,
    trace::Spans,
};
use crate::broker::{Broker, BrokerError, Delivery, LeaseId, LeaseRequest, Verdict, Verdicted};

/// Pause after failed broker calls: short at first, since most faults are a connection that comes
/// back; capped, so that a recovered broker is noticed within half a minute.
const TROUBLE: Backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(30) };

/// Verdicts are sent again sooner: they are worth nothing once their leases have run out.
const SETTLE_TROUBLE: Backoff =
    Backoff { base: Duration::from_millis(50), cap: Duration::from_secs(2) };

/// How long the last verdicts may take after handlers have been stopped.
const FLUSH: Duration = Duration::from_secs(5);

type Fetched = Result<Vec<Delivery>, BrokerError>;
type Answered = Result<Vec<Verdicted>, BrokerError>;

/// What a consumer is made of.
pub(super) struct Parts<H> {
    pub(super) broker: Arc<dyn Broker>,
    pub(super) topic: Topic,
    pub(super) group: Group,
    pub(super) config: ConsumerConfig,
    pub(super) handler: Arc<H>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) gauges: Gauges,
}

/// The loop's state.
pub(super) struct Service<H> {
    parts: Parts<H>,
    core: Core,
    spans: Spans,
    handlers: JoinSet<(SlotId, Ending)>,
    cancels: HashMap<SlotId, CancellationToken>,
    fetching: Option<BoxFuture<'static, Fetched>>,
    settling: Option<BoxFuture<'static, Answered>>,
    extending: Option<(Instant, BoxFuture<'static, Answered>)>,
    fetch_trouble: Trouble,
    settle_trouble: Trouble,
    failure_log: LogLimit,
    /// When running handlers are stopped, once the consumer drains.
    grace_ends: Option<Instant>,
    gave_up: bool,
    fatal: Option<BrokerError>,
    rng: SmallRng,
}

/// Consecutive failures of one kind of call.
#[derive(Debug, Default)]
struct Trouble {
    failures: u32,
    not_before: Option<Instant>,
    log: LogLimit,
}

impl Trouble {
    fn over(&mut self) {
        (self.failures, self.not_before) = (0, None);
    }

    /// How long to leave the broker alone after one more failure.
    fn more(
        &mut self,
        backoff: Backoff,
        error: &BrokerError,
        now: Instant,
        rng: &mut SmallRng,
    ) -> Duration {
        // Half of the pause is certain: full jitter may draw zero, and a loop must never spin.
        let floor = backoff.base / 2;
        let pause = backoff.delay(self.failures, rng).max(floor);
        let pause = pause.max(error.retry_after().unwrap_or_default());
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pause);
        pause
    }
}

/// What the loop was woken by.
enum Event {
    Stop,
    Ended(Result<(SlotId, Ending), JoinError>),
    Fetched(Fetched),
    Settled(Answered),
    Extended(Instant, Answered),
    Time,
}

impl<H: Handler> Service<H> {
    pub(super) fn new(parts: Parts<H>) -> Self {
        let rules = parts.config.rules();
        Self {
            core: Core::new(rules, parts.broker.capabilities(), rand::random()),
            spans: Spans::new(&parts.topic, &parts.group, parts.config.trace_join()),
            handlers: JoinSet::new(),
            cancels: HashMap::new(),
            fetching: None,
            settling: None,
            extending: None,
            fetch_trouble: Trouble::default(),
            settle_trouble: Trouble::default(),
            failure_log: LogLimit::default(),
            grace_ends: None,
            gave_up: false,
            fatal: None,
            rng: SmallRng::seed_from_u64(rand::random()),
            parts,
        }
    }

    /// Consumes until `stop`, then drains.
    pub(super) async fn run(
        mut self,
        stop: CancellationToken,
    ) -> Result<ConsumerReport, ConsumerError> {
        // One timer for the life of the loop: moving it is cheaper than making one a turn.
        let mut timer = pin!(sleep_until(Instant::now()));
        loop {
            let now = Instant::now();
            self.act(now);
            if self.is_over(now) {
                return self.finish();
            }
            let wake = self.wake(now);
            if let Some(wake) = wake.filter(|wake| *wake != timer.deadline()) {
                timer.as_mut().reset(wake);
            }
            let event = tokio::select! {
                () = stop.cancelled(), if !self.core.is_draining() => Event::Stop,
                Some(ended) = self.handlers.join_next() => Event::Ended(ended),
                fetched = resolved(&mut self.fetching) => Event::Fetched(fetched),
                answered = resolved(&mut self.settling) => Event::Settled(answered),
                (sent, answered) = extended(&mut self.extending) => Event::Extended(sent, answered),
                () = &mut timer, if wake.is_some() => Event::Time,
            };
            self.take_in(event, Instant::now());
        }
    }

    /// Does all that may be done now.
    fn act(&mut self, now: Instant) {
        if self.grace_ends.is_some_and(|ends| ends <= now) && !self.gave_up {
            self.give_up(now);
        }
        let lapsed = self.core.lapse(now);
        self.stop_handlers(&lapsed);
        if self.core.may_begin(now) {
            let wall = self.parts.clock.wall();
            while let Some(begin) = self.core.start(now, wall) {
                self.begin(begin, now);
            }
        }
        if self.settling.is_none()
            && let Some(verdicts) = self.core.settle(now)
        {
            self.settling = Some(self.settle_call(verdicts));
        }
        if self.extending.is_none()
            && let Some(extensions) = self.core.extend(now)
        {
            let extend = |lease| Verdict::Extend { lease };
            let verdicts =
                extensions.into_iter().map(|one| (one.lease_id, extend(one.lease))).collect();
            self.extending = Some((now, self.settle_call(verdicts)));
        }
        let left_alone = self.fetch_trouble.not_before.is_some_and(|until| now < until);
        if self.fetching.is_none()
            && !left_alone
            && let Some(fetch) = self.core.fetch(now)
        {
            self.fetching = Some(self.fetch_call(fetch.max, fetch.max_bytes));
        }
        self.parts.gauges.show(&self.core);
    }

    fn wake(&self, now: Instant) -> Option<Instant> {
        let fetch = self.fetch_trouble.not_before.filter(|at| *at > now);
        let grace = self.grace_ends.map(|ends| if self.gave_up { ends + FLUSH } else { ends });
        [self.core.next_wake(now), fetch, grace].into_iter().flatten().min()
    }

    fn take_in(&mut self, event: Event, now: Instant) {
        match event {
            Event::Time => {}
            Event::Stop => self.drain(now),
            Event::Ended(ended) => {
                self.handler_ended(ended, now);
                while let Some(ended) = self.handlers.try_join_next() {
                    self.handler_ended(ended, now);
                }
            }
            Event::Fetched(Ok(deliveries)) => {
                self.fetch_trouble.over();
                self.parts.gauges.fetched(self.parts.clock.wall());
                self.core.delivered(deliveries, now);
            }
            Event::Fetched(Err(error)) => self.fetch_failed(error, now),
            Event::Settled(Ok(answers)) => {
                self.settle_trouble.over();
                self.core.settled(Ok(answers), now);
            }
            Event::Settled(Err(error)) => {
                let pause = self.settle_failed(&error, now);
                // What the broker will always refuse is not sent again: its leases run out.
                let again = if error.is_transient() { Err(pause) } else { Ok(Vec::new()) };
                self.core.settled(again, now);
            }
            Event::Extended(sent, Ok(answers)) => {
                let lost = self.core.extended(Some(answers), sent, now);
                self.stop_handlers(&lost);
            }
            Event::Extended(sent, Err(error)) => {
                self.settle_failed(&error, now);
                self.core.extended(None, sent, now);
            }
        }
    }

    fn begin(&mut self, begin: Begin, now: Instant) {
        let Begin { slot, delivery, deadline } = begin;
        let cancelled = CancellationToken::new();
        let (span, context) = self.spans.open(&delivery, deadline, self.parts.clock.wall());
        let Delivery { fence, attempt, first_delivered_at, event, .. } = delivery;
        let incoming = Incoming {
            event,
            context,
            fence,
            attempt,
            first_delivered_at,
            cancelled: cancelled.clone(),
        };
        self.cancels.insert(slot, cancelled);
        let handler = Arc::clone(&self.parts.handler);
        let allowed = deadline - now;
        let attended = async move { (slot, attend(&*handler, incoming, deadline, allowed).await) };
        self.handlers.spawn(attended.instrument(span));
    }

    fn handler_ended(&mut self, ended: Result<(SlotId, Ending), JoinError>, now: Instant) {
        // Panics are caught inside, and nobody else aborts them: an error comes after `give_up`.
        let Ok((slot, ending)) = ended else { return };
        self.cancels.remove(&slot);
        if let Ending::Failed(kind, error) = &ending
            && let Some(suppressed) = self.failure_log.pass(now)
        {
            let Parts { topic, group, .. } = &self.parts;
            tracing::warn!(%topic, %group, ?kind, %error, suppressed, "a handler failed");
        }
        self.core.ended(slot, ending, now, self.parts.clock.wall());
    }

    fn stop_handlers(&self, slots: &[SlotId]) {
        for slot in slots {
            if let Some(cancelled) = self.cancels.get(slot) {
                cancelled.cancel();
            }
        }
    }

    fn fetch_failed(&mut self, error: BrokerError, now: Instant) {
        self.parts.gauges.fetch_failed();
        let trouble = &mut self.fetch_trouble;
        let pause = trouble.more(TROUBLE, &error, now, &mut self.rng);
        let Parts { topic, group, .. } = &self.parts;
        if !error.is_transient() {
            tracing::error!(%topic, %group, %error, "the broker refused: the consumer ends");
            self.fatal = Some(error);
            self.drain(now);
        } else if let Some(suppressed) = trouble.log.pass(now) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%topic, %group, error, ?pause, suppressed, "fetching failed");
        }
    }

    fn settle_failed(&mut self, error: &BrokerError, now: Instant) -> Duration {
        self.parts.gauges.settle_failed();
        let trouble = &mut self.settle_trouble;
        let pause = trouble.more(SETTLE_TROUBLE, error, now, &mut self.rng);
        if let Some(suppressed) = trouble.log.pass(now) {
            let Parts { topic, group, .. } = &self.parts;
            let error = error as &dyn std::error::Error;
            tracing::warn!(%topic, %group, error, ?pause, suppressed, "settling failed");
        }
        pause
    }

    fn drain(&mut self, now: Instant) {
        // A fetch under way is dropped: the broker hands back what it had claimed, or lets it run
        // out. Waiting for it could take as long as its long poll.
        self.fetching = None;
        self.core.drain(now);
        self.grace_ends = Some(now + self.parts.config.grace());
    }

    /// Stops the handlers that still run, and gives their events back.
    fn give_up(&mut self, now: Instant) {
        self.gave_up = true;
        for cancelled in self.cancels.values() {
            cancelled.cancel();
        }
        self.parts.gauges.gave_up(self.core.running());
        self.core.give_up(now);
    }

    fn is_over(&self, now: Instant) -> bool {
        let flushed = self.core.is_drained() && self.settling.is_none();
        let out_of_time = self.gave_up && self.grace_ends.is_some_and(|ends| ends + FLUSH <= now);
        // Handlers that were told to stop are awaited, so that none outlives the consumer; one that
        // blocks its thread is not, beyond the time for the last verdicts.
        (flushed && self.handlers.is_empty()) || out_of_time
    }

    fn finish(self) -> Result<ConsumerReport, ConsumerError> {
        let report = self.parts.gauges.report();
        let Parts { topic, group, .. } = self.parts;
        match self.fatal {
            Some(source) => Err(ConsumerError::Broker { topic, group, source }),
            None => Ok(report),
        }
    }

    fn fetch_call(&self, max: usize, max_bytes: usize) -> BoxFuture<'static, Fetched> {
        let Parts { broker, topic, group, config, .. } = &self.parts;
        let (broker, topic, group) = (Arc::clone(broker), topic.clone(), group.clone());
        let request = LeaseRequest { max, max_bytes, lease: config.lease(), wait: config.wait() };
        Box::pin(async move { broker.lease(&topic, &group, request).await })
    }

    fn settle_call(&self, verdicts: Vec<(LeaseId, Verdict)>) -> BoxFuture<'static, Answered> {
        let broker = Arc::clone(&self.parts.broker);
        Box::pin(async move { broker.settle(verdicts).await })
    }
}

/// Runs a handler to its end, or until it is cancelled or out of time.
async fn attend<H: Handler>(
    handler: &H,
    incoming: Incoming,
    deadline: Instant,
    allowed: Duration,
) -> Ending {
    let cancelled = incoming.cancelled.clone();
    let context = incoming.context.clone();
    // The call itself is inside, because it may panic before there is a future.
    let work = async move { handler.handle(incoming).await };
    let mut work = pin!(context.scope(AssertUnwindSafe(work).catch_unwind()));
    let out_of_time = tokio::select! {
        biased;
        ended = &mut work => return ending(ended),
        () = cancelled.cancelled() => false,
        () = sleep_until(deadline) => true,
    };
    cancelled.cancel();
    // Once more, so that a handler that watches the token may end by itself.
    if let Some(ended) = work.as_mut().now_or_never() {
        return ending(ended);
    }
    tracing::Span::current().record("otel.status_code", "ERROR");
    if out_of_time {
        Ending::Failed(HandlerErrorKind::Transient, format!("not done within {allowed:?}"))
    } else {
        Ending::Lost
    }
}

type Ended = std::thread::Result<Result<(), super::HandlerError>>;

fn ending(ended: Ended) -> Ending {
    if !matches!(ended, Ok(Ok(()))) {
        tracing::Span::current().record("otel.status_code", "ERROR");
    }
    match ended {
        Ok(Ok(())) => Ending::Done,
        Ok(Err(error)) => Ending::Failed(error.kind(), error.to_string()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .copied()
                .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
                .unwrap_or("without a text");
            Ending::Failed(HandlerErrorKind::Transient, format!("the handler panicked: {text}"))
        }
    }
}

/// Resolves with a call under way; never, if there is none. Safe to drop: the call stays.
fn resolved<T>(call: &mut Option<BoxFuture<'static, T>>) -> impl Future<Output = T> {
    std::future::poll_fn(move |cx| {
        let Some(running) = call else { return Poll::Pending };
        let answer = std::task::ready!(running.as_mut().poll(cx));
        *call = None;
        Poll::Ready(answer)
    })
}

fn extended(
    call: &mut Option<(Instant, BoxFuture<'static, Answered>)>,
) -> impl Future<Output = (Instant, Answered)> {
    std::future::poll_fn(move |cx| {
        let Some((sent, running)) = call else { return Poll::Pending };
        let answer = std::task::ready!(running.as_mut().poll(cx));
        let sent = *sent;
        *call = None;
        Poll::Ready((sent, answer))
    })
}
