//! How a consumer stands, for metrics, watchdogs and whoever asks.

use std::{sync::Arc, time::Duration};

use carrick_core::name::{Group, Topic};
use jiff::Timestamp;
use metrics::{Counter, Gauge, counter, gauge};
use parking_lot::Mutex;

use super::core::{Core, Tally};

/// What a consumer has done, and how it stands.
///
/// ```
/// use carrick_message::consumer::ConsumerStatus;
///
/// let fresh = ConsumerStatus::default();
/// assert_eq!((fresh.handled, fresh.last_fetch), (0, None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerStatus {
    /// Events that came.
    pub delivered: u64,
    /// Events handled and acknowledged.
    pub handled: u64,
    /// Runs of the handler that failed, panicked or took too long.
    pub failed: u64,
    /// Failures that are tried again.
    pub retried: u64,
    /// Events put aside as dead letters.
    pub dead: u64,
    /// Events dropped because they had expired.
    pub expired: u64,
    /// Leases lost before their verdict reached the broker.
    pub stale: u64,
    /// Events given back untried.
    pub returned: u64,
    /// How often the circuit opened.
    pub circuit_opened: u64,
    /// Whether events flow.
    pub circuit_closed: bool,
    /// Handlers running now.
    pub running: usize,
    /// Events held but not started, those behind their key included.
    pub queued: usize,
    /// Mean handling time of late.
    pub mean_handling: Option<Duration>,
    /// When the broker last answered a fetch, be it with nothing: a watchdog compares it with the
    /// time a fetch may wait.
    pub last_fetch: Option<Timestamp>,
    /// Whether the consumer drains.
    pub draining: bool,
}

/// What a consumer did in its life, told when it ended.
///
/// ```
/// # use carrick_message::consumer::ConsumerReport;
/// fn tell(report: ConsumerReport) {
///     println!("{} handled, {} stopped at the end", report.status.handled, report.gave_up);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerReport {
    /// How it stood at its end.
    pub status: ConsumerStatus,
    /// Handlers that were stopped because the grace was over.
    pub gave_up: usize,
}

/// Reads a consumer's status while it runs; a clone reads the same.
#[derive(Clone, Debug, Default)]
pub struct StatusReader(Arc<Mutex<ConsumerStatus>>);

impl StatusReader {
    /// The status now.
    pub fn read(&self) -> ConsumerStatus {
        *self.0.lock()
    }
}

/// The consumer's own side of its status: shows it, and counts it in metrics.
#[derive(Debug)]
pub(super) struct Gauges {
    reader: StatusReader,
    shown: Tally,
    last_fetch: Option<Timestamp>,
    gave_up: usize,
    counters: [Counter; 9],
    fetch_errors: Counter,
    settle_errors: Counter,
    in_flight: Gauge,
    queued: Gauge,
    circuit_open: Gauge,
    last_fetch_gauge: Gauge,
}

impl Gauges {
    pub(super) fn new(topic: &Topic, group: &Group, reader: StatusReader) -> Self {
        let labels = [("topic", topic.as_str().to_owned()), ("group", group.as_str().to_owned())];
        Self {
            reader,
            shown: Tally::default(),
            last_fetch: None,
            gave_up: 0,
            counters: [
                counter!("carrick_consumer_delivered_total", &labels),
                counter!("carrick_consumer_handled_total", &labels),
                counter!("carrick_consumer_failed_total", &labels),
                counter!("carrick_consumer_retried_total", &labels),
                counter!("carrick_consumer_dead_total", &labels),
                counter!("carrick_consumer_expired_total", &labels),
                counter!("carrick_consumer_stale_total", &labels),
                counter!("carrick_consumer_returned_total", &labels),
                counter!("carrick_consumer_circuit_opened_total", &labels),
            ],
            fetch_errors: counter!("carrick_consumer_fetch_errors_total", &labels),
            settle_errors: counter!("carrick_consumer_settle_errors_total", &labels),
            in_flight: gauge!("carrick_consumer_inflight", &labels),
            queued: gauge!("carrick_consumer_queued", &labels),
            circuit_open: gauge!("carrick_consumer_circuit_open", &labels),
            last_fetch_gauge: gauge!("carrick_consumer_last_fetch_timestamp_seconds", &labels),
        }
    }

    pub(super) fn fetched(&mut self, wall: Timestamp) {
        self.last_fetch = Some(wall);
        self.last_fetch_gauge.set(wall.as_second() as f64);
    }

    pub(super) fn fetch_failed(&self) {
        self.fetch_errors.increment(1);
    }

    pub(super) fn settle_failed(&self) {
        self.settle_errors.increment(1);
    }

    pub(super) fn gave_up(&mut self, running: usize) {
        self.gave_up = running;
    }

    /// Shows how the core stands.
    pub(super) fn show(&mut self, core: &Core) {
        let tally = core.tally();
        let counts = |of: &Tally| {
            [
                of.delivered,
                of.handled,
                of.failed,
                of.retried,
                of.dead,
                of.expired,
                of.stale,
                of.returned,
                of.circuit_opened,
            ]
        };
        if tally != self.shown {
            let (before, after) = (counts(&self.shown), counts(&tally));
            for (counter, (before, after)) in self.counters.iter().zip(before.iter().zip(after)) {
                if after > *before {
                    counter.increment(after - before);
                }
            }
            self.shown = tally;
        }
        self.in_flight.set(core.running() as f64);
        self.queued.set(core.queued() as f64);
        self.circuit_open.set(if core.is_circuit_closed() { 0.0 } else { 1.0 });
        *self.reader.0.lock() = ConsumerStatus {
            delivered: tally.delivered,
            handled: tally.handled,
            failed: tally.failed,
            retried: tally.retried,
            dead: tally.dead,
            expired: tally.expired,
            stale: tally.stale,
            returned: tally.returned,
            circuit_opened: tally.circuit_opened,
            circuit_closed: core.is_circuit_closed(),
            running: core.running(),
            queued: core.queued(),
            mean_handling: core.mean_handling(),
            last_fetch: self.last_fetch,
            draining: core.is_draining(),
        };
    }

    pub(super) fn report(&self) -> ConsumerReport {
        ConsumerReport { status: self.reader.read(), gave_up: self.gave_up }
    }
}
