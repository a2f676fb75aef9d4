//! Metrics for Prometheus, on a route of our own.

use std::time::Duration;

use ::metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use axum::{Router, response::IntoResponse, routing::get};
use hashbrown::HashSet;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use super::{TelemetryError, process};

/// Bounds of histograms of seconds: from an in-process call to the longest deadline that anybody
/// sets, about four to a decade.
const SECONDS: [f64; 21] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3_600.0,
];
/// Bounds of histograms of bytes: from an empty event to the hard limit.
const BYTES: [f64; 9] =
    [64.0, 256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0, 102_400.0, 262_144.0, 1_048_576.0];
/// Bounds of every other histogram: counts, such as the size of a batch.
const COUNTS: [f64; 11] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 10_000.0];

/// Series kept at most. Labels name topics and groups, which users make: without a bound a script
/// that publishes to random topics would fill the memory. Ten thousand take about 10 MB.
const MAX_SERIES: usize = 10_000;

/// Samples of histograms wait in memory until they are put into buckets: a second of them at most.
const UPKEEP_EVERY: Duration = Duration::from_secs(1);

/// The metrics of this process. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    handle: PrometheusHandle,
}

impl Metrics {
    /// Makes this process's `metrics` macros count here.
    ///
    /// # Errors
    /// [`TelemetryError::AlreadyStarted`] if they already count elsewhere.
    pub fn install() -> Result<Self, TelemetryError> {
        let (recorder, metrics) = Self::recorder(MAX_SERIES);
        ::metrics::set_global_recorder(recorder).map_err(|_| TelemetryError::AlreadyStarted)?;
        ::metrics::describe_counter!(
            "carrick_telemetry_series_refused_total",
            "Updates of metrics that were not counted, because the bound of series is reached."
        );
        Ok(metrics)
    }

    fn recorder(max_series: usize) -> (impl Recorder + Send + Sync + 'static, Self) {
        let builder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
            .and_then(|builder| {
                builder.set_buckets_for_metric(Matcher::Suffix("_bytes".to_owned()), &BYTES)
            })
            .and_then(|builder| builder.set_buckets(&COUNTS))
            .expect("the bounds are not empty");
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        (Bounded::new(recorder, max_series), Self { handle })
    }

    /// All metrics as Prometheus text, those of the operating system about this process included.
    pub fn render(&self) -> String {
        let mut text = self.handle.render();
        process::render(&mut text);
        text
    }

    /// Puts waiting samples into their buckets, once a second, until `stop`.
    ///
    /// Run it as a task of the server: without it histograms grow until somebody scrapes.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn upkeep(&self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(UPKEEP_EVERY) => self.handle.run_upkeep(),
            }
        }
    }

    /// The route `/metrics`, to merge into a router of any state.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        let metrics = self.clone();
        Router::new().route("/metrics", get(async move || scrape(metrics).await))
    }
}

async fn scrape(metrics: Metrics) -> impl IntoResponse + use<> {
    // Ten thousand series take some milliseconds, and so do the files of /proc.
    let text = tokio::task::spawn_blocking(move || metrics.render()).await;
    let headers =
        [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"), (CACHE_CONTROL, "no-store")];
    match text {
        Ok(text) => (headers, text).into_response(),
        // Only at the end of the runtime, or if rendering panicked.
        Err(_) => http::StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Refuses new series past a bound, and counts the refusals.
struct Bounded<R> {
    inner: R,
    max: usize,
    known: RwLock<Known>,
    refused: Counter,
}

/// The series there are. Whole keys: their own 64-bit hashes collide for labels that differ little.
#[derive(Default)]
struct Known {
    /// By [`Kind`].
    keys: [HashSet<Key>; 3],
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Known {
    fn contains(&self, kind: Kind, key: &Key) -> bool {
        self.keys[kind as usize].contains(key)
    }

    fn len(&self) -> usize {
        self.keys.iter().map(HashSet::len).sum()
    }
}

static OURS: Metadata<'static> =
    Metadata::new(module_path!(), ::metrics::Level::INFO, Some(module_path!()));

impl<R: Recorder> Bounded<R> {
    fn new(inner: R, max: usize) -> Self {
        let key = Key::from_static_name("carrick_telemetry_series_refused_total");
        let refused = inner.register_counter(&key, &OURS);
        Self { inner, max, known: RwLock::default(), refused }
    }

    fn admits(&self, kind: Kind, key: &Key) -> bool {
        if self.known.read().contains(kind, key) {
            return true;
        }
        let mut known = self.known.write();
        // Somebody else may have been quicker.
        if known.len() < self.max || known.contains(kind, key) {
            known.keys[kind as usize].insert(key.clone());
            return true;
        }
        drop(known);
        self.refused.increment(1);
        false
    }
}

impl<R: Recorder> Recorder for Bounded<R> {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.inner.describe_counter(key, unit, description);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.inner.describe_gauge(key, unit, description);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.inner.describe_histogram(key, unit, description);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        match self.admits(Kind::Counter, key) {
            true => self.inner.register_counter(key, metadata),
            false => Counter::noop(),
        }
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        match self.admits(Kind::Gauge, key) {
            true => self.inner.register_gauge(key, metadata),
            false => Gauge::noop(),
        }
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        match self.admits(Kind::Histogram, key) {
            true => self.inner.register_histogram(key, metadata),
            false => Histogram::noop(),
        }
    }
}
