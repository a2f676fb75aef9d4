//! Does what the core decides: reads, publishes and marks, each without waiting for the others.

use std::{sync::Arc, time::Duration};

use carrick_store::fence::FenceToken;
use futures_util::{
    FutureExt, StreamExt,
    future::{BoxFuture, Fuse, FusedFuture},
    stream::FuturesUnordered,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    config::RelayConfig,
    core::{Batch, Bucket, Core, Fetched, Heading, Marks, Page, Read, Refusal, RefusalKind},
    leases::Holdings,
    status::Progress,
};
use crate::{
    broker::{Broker, BrokerError},
    consumer::log_limit::LogLimit,
    outbox::{OutboxError, Waker, error::chain, store::OutboxStore},
};

/// The longest that a call to the database may take, above its own timeouts.
const CALL: Duration = Duration::from_secs(30);
/// Between two reports of progress.
const REPORT: Duration = Duration::from_secs(1);

/// What a read found.
enum Answer {
    Scan(Page),
    Lanes(Fetched),
    Sweep(Vec<Heading>),
}

type Reading = Fuse<BoxFuture<'static, (Read, Result<Answer, OutboxError>)>>;
type Marking = Fuse<BoxFuture<'static, (Marks, Result<usize, OutboxError>)>>;
type Publishing = BoxFuture<'static, (Batch, Result<(), Refusal>)>;

pub(super) struct Service {
    store: Arc<dyn OutboxStore>,
    broker: Arc<dyn Broker>,
    config: RelayConfig,
    waker: Waker,
    held: watch::Receiver<Holdings>,
    quiet: mpsc::Sender<(Bucket, FenceToken)>,
    progress: watch::Sender<Progress>,
    core: Core,
    published: u64,
    failed: u64,
    logs: Logs,
}

/// One for each kind of trouble.
#[derive(Default)]
struct Logs {
    read: LogLimit,
    publish: LogLimit,
    mark: LogLimit,
}

impl Service {
    pub(super) fn new(
        store: Arc<dyn OutboxStore>,
        broker: Arc<dyn Broker>,
        config: RelayConfig,
        waker: Waker,
        held: watch::Receiver<Holdings>,
        quiet: mpsc::Sender<(Bucket, FenceToken)>,
        progress: watch::Sender<Progress>,
    ) -> Self {
        let core = Core::new(config.limits.clone(), Instant::now());
        Self {
            store,
            broker,
            config,
            waker,
            held,
            quiet,
            progress,
            core,
            published: 0,
            failed: 0,
            logs: Logs::default(),
        }
    }

    /// Runs until it is stopped, then finishes what is under way.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut reading: Reading = Fuse::terminated();
        let mut marking: Marking = Fuse::terminated();
        let mut publishing: FuturesUnordered<Publishing> = FuturesUnordered::new();
        let waker = self.waker.clone();
        let mut reports = interval(REPORT);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut end: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if let Some(end) = end {
                if self.core.is_settled() && publishing.is_empty() && marking.is_terminated() {
                    return self.report();
                }
                if now >= end {
                    warn!("stopped before everything was marked; it is published again");
                    return self.report();
                }
            } else {
                while let Some(batch) = self.core.next_batch(now) {
                    publishing.push(self.publish(batch));
                }
                if reading.is_terminated()
                    && let Some(read) = self.core.next_read(now)
                {
                    reading = self.read(read);
                }
            }
            if marking.is_terminated()
                && let Some(marks) = self.core.next_marks(now)
            {
                marking = self.mark(marks);
            }
            self.let_go();
            // A moment at least: while it stops, what is due is not done any more.
            let next = self.core.next_time(now).max(now + Duration::from_millis(1));
            tokio::select! {
                (read, answer) = &mut reading => self.on_read(&read, answer),
                (marks, answer) = &mut marking => self.on_marked(marks, answer),
                Some((batch, answer)) = publishing.next() => self.on_published(&batch, answer),
                Ok(()) = self.held.changed() => {
                    let held = self.held.borrow_and_update().clone();
                    self.core.set_holdings(held, Instant::now());
                }
                () = waker.woken() => self.core.wake(Instant::now()),
                _ = reports.tick() => self.report(),
                () = sleep_until(next) => {}
                () = stop.cancelled(), if end.is_none() => {
                    end = Some(Instant::now() + self.config.grace);
                    reading = Fuse::terminated();
                }
            }
        }
    }

    fn read(&self, read: Read) -> Reading {
        let store = Arc::clone(&self.store);
        let call = async move {
            let answer = match &read {
                Read::Scan(scan) => in_time(store.scan(scan)).await.map(Answer::Scan),
                Read::Lanes(fetch) => in_time(store.fetch(fetch)).await.map(Answer::Lanes),
                Read::Sweep(sweep) => in_time(store.sweep(sweep)).await.map(Answer::Sweep),
            };
            (read, answer)
        };
        call.boxed().fuse()
    }

    fn mark(&self, marks: Marks) -> Marking {
        let store = Arc::clone(&self.store);
        let call = async move {
            let answer = in_time(store.mark(&marks)).await;
            (marks, answer)
        };
        call.boxed().fuse()
    }

    fn publish(&self, mut batch: Batch) -> Publishing {
        let broker = Arc::clone(&self.broker);
        let patience = self.config.publish_timeout;
        let events = std::mem::take(&mut batch.events);
        let call = async move {
            let answer = match timeout(patience, broker.publish(&batch.topic, events)).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(refusal(&error)),
                Err(_) => Err(Refusal {
                    error: format!("the broker did not answer within {patience:?}"),
                    kind: RefusalKind::Transient,
                }),
            };
            (batch, answer)
        };
        call.boxed()
    }

    fn on_read(&mut self, read: &Read, answer: Result<Answer, OutboxError>) {
        let now = Instant::now();
        match (read, answer) {
            (_, Ok(Answer::Scan(page))) => self.core.scanned(page, now),
            (Read::Lanes(fetch), Ok(Answer::Lanes(rows))) => self.core.fetched(fetch, rows, now),
            (Read::Sweep(sweep), Ok(Answer::Sweep(rows))) => self.core.swept(sweep, rows, now),
            (_, Ok(_)) => {} // an answer has the form of its question
            (_, Err(error)) => {
                metrics::counter!("carrick_outbox_read_errors_total").increment(1);
                if let Some(more) = self.logs.read.pass(now) {
                    warn!(error = chain(&error), more, "the outbox cannot be read");
                }
                if matches!(error, OutboxError::Disconnected(_)) {
                    self.core.start_over();
                }
                self.core.read_failed(read, now, &mut rand::rng());
            }
        }
    }

    fn on_published(&mut self, batch: &Batch, answer: Result<(), Refusal>) {
        let now = Instant::now();
        match answer {
            Ok(()) => self.core.published(batch.id, now),
            Err(refusal) => {
                metrics::counter!("carrick_outbox_publish_errors_total").increment(1);
                if let Some(more) = self.logs.publish.pass(now) {
                    let topic = &batch.topic;
                    warn!(%topic, error = refusal.error, more, "the broker refused a batch");
                }
                self.core.refused(batch.id, refusal, now, &mut rand::rng());
            }
        }
    }

    fn on_marked(&mut self, marks: Marks, answer: Result<usize, OutboxError>) {
        let now = Instant::now();
        let (accepted, failed) = (marks.accepted.len() as u64, marks.failed.len() as u64);
        match answer {
            Ok(marked) => {
                self.core.marked(&marks, marked, now);
                self.published += accepted;
                self.failed += failed;
                self.progress.send_modify(|progress| {
                    (progress.published, progress.failed) = (self.published, self.failed);
                    progress.blocked = self.core.blocked();
                });
                metrics::counter!("carrick_outbox_published_total").increment(accepted);
                metrics::counter!("carrick_outbox_failed_total").increment(failed);
                let stale = (accepted + failed).saturating_sub(marked as u64);
                metrics::counter!("carrick_outbox_stale_marks_total").increment(stale);
                if failed > 0 {
                    for row in marks.failed.iter().take(3) {
                        info!(seq = row.seq, error = row.error, "a row cannot be published");
                    }
                }
            }
            Err(error) => {
                metrics::counter!("carrick_outbox_mark_errors_total").increment(1);
                if let Some(more) = self.logs.mark.pass(now) {
                    warn!(error = chain(&error), more, "published rows cannot be marked");
                }
                self.core.mark_failed(marks, now, &mut rand::rng());
            }
        }
    }

    /// Gives leases up whose buckets are to have another relay, once nothing is under way in them.
    fn let_go(&self) {
        for (bucket, holding) in self.held.borrow().iter().filter(|(_, holding)| holding.leaving) {
            if self.core.is_quiet(*bucket) {
                // Full: all of them are on their way already.
                let _ = self.quiet.try_send((*bucket, holding.token));
            }
        }
    }

    fn report(&mut self) {
        metrics::gauge!("carrick_outbox_blocked_keys").set(self.core.blocked() as f64);
        metrics::gauge!("carrick_outbox_rows_in_memory").set(self.core.held() as f64);
        self.progress.send_replace(Progress {
            floor: self.core.floor(),
            in_memory: self.core.held(),
            blocked: self.core.blocked(),
            published: self.published,
            failed: self.failed,
        });
    }
}

async fn in_time<T>(call: impl Future<Output = Result<T, OutboxError>>) -> Result<T, OutboxError> {
    timeout(CALL, call).await.unwrap_or(Err(OutboxError::TimedOut))
}

fn refusal(error: &BrokerError) -> Refusal {
    let kind = match error {
        BrokerError::Overloaded { retry_after } => RefusalKind::Overload(*retry_after),
        BrokerError::Closed => RefusalKind::Transient,
        error if error.is_transient() => RefusalKind::Transient,
        _ => RefusalKind::Permanent,
    };
    Refusal { error: chain(error), kind }
}
