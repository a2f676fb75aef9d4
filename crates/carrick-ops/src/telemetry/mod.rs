//! Telemetry: logs with trace ids, metrics for Prometheus, traces for a collector.
//!
//! [`Telemetry::start`] sets all three up for a process, once. Libraries never call it: they use
//! `tracing` and `metrics`, and say what belongs together in fields that any crate can set without
//! knowing this one:
//!
//! | span field | meaning |
//! |---|---|
//! | `traceparent` | this span continues that trace (W3C text) |
//! | `link.traceparent` | this span is the root of its own trace and links to that one; several are separated by commas |
//! | `otel.kind` | `server`, `client`, `producer`, `consumer` |
//! | `otel.name` | the span's name, when it is made at run time |
//! | `otel.status_code` | `OK` or `ERROR` |
//!
//! Every log line inside such a span has its `trace_id`. With the feature `otlp` and an endpoint,
//! the spans are sent to an OpenTelemetry collector.
//!
//! A consumer's span is a root with a link, not a child (M5): it may run hours later, several times,
//! and for several producers at once, and a trace that is still growing tomorrow can be read by
//! nobody.
//!
//! Source: pattern document, tracing listings. Differs (M5): its consumer passes the extracted
//! context as the parent.

mod limit;
mod logs;
pub mod metrics;
#[cfg(feature = "otlp")]
mod otlp;
mod process;
mod trace;
mod writer;

use std::{io::IsTerminal, time::Duration};

use serde::{Deserialize, Serialize};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

pub use self::{
    limit::{RateLimit, Repeat},
    metrics::Metrics,
};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Pretty,
}

/// What telemetry a process has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct TelemetryOptions {
    /// Name of the service in traces. Default `carrick`.
    pub service: String,
    /// How log lines look. Default: pretty on a terminal, JSON otherwise.
    pub format: LogFormat,
    /// Which log lines there are, as in `RUST_LOG`: `info,carrick_store=debug`. Default `info`.
    pub filter: String,
    /// Where traces go: the base address of an OTLP collector that speaks HTTP, such as
    /// `http://127.0.0.1:4318`. None by default. Needs the feature `otlp`.
    pub otlp: Option<String>,
    /// Share of new traces that are recorded, in [0, 1]; a trace that came in keeps its own
    /// decision. Default 1.
    pub otlp_sample: f64,
}

impl Default for TelemetryOptions {
    fn default() -> Self {
        Self {
            service: "carrick".to_owned(),
            format: LogFormat::Auto,
            filter: "info".to_owned(),
            otlp: None,
            otlp_sample: 1.0,
        }
    }
}

/// Why telemetry could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// The filter cannot be read.
    #[error("log filter `{filter}` cannot be read")]
    Filter {
        /// As given.
        filter: String,
        /// What is wrong with it.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The process already has a subscriber for logs or a recorder for metrics.
    #[error("telemetry was already started in this process")]
    AlreadyStarted,
    /// An endpoint for traces was given, and this build has no feature `otlp`.
    #[error("traces need a build with the feature `otlp`")]
    NoOtlp,
    /// The trace exporter cannot work with its settings.
    #[error("trace exporter: {0}")]
    Otlp(String),
    /// The thread that writes log lines could not be started.
    #[error("log writer could not be started")]
    Writer(#[source] std::io::Error),
}

/// The telemetry of a process; ends with what [`Telemetry::stop`] or its drop flushes.
#[derive(Debug)]
pub struct Telemetry {
    /// The metrics, to be served by [`Metrics::routes`].
    pub metrics: Metrics,
    #[cfg(feature = "otlp")]
    traces: Option<otlp::Traces>,
    /// Last, so that what the others log while they end is still written.
    writer: writer::LogWriter,
}

impl Telemetry {
    /// Starts logs (to standard error), metrics and traces of this process.
    ///
    /// # Errors
    /// [`TelemetryError`]; what was started by then stays, so the process should give up.
    pub fn start(options: &TelemetryOptions) -> Result<Self, TelemetryError> {
        let filter = EnvFilter::try_new(&options.filter)
            .map_err(|source| TelemetryError::Filter { filter: options.filter.clone(), source })?;
        #[cfg(not(feature = "otlp"))]
        if options.otlp.is_some() {
            return Err(TelemetryError::NoOtlp);
        }
        #[cfg(feature = "otlp")]
        let traces = options
            .otlp
            .as_deref()
            .map(|endpoint| otlp::Traces::start(endpoint, &options.service, options.otlp_sample))
            .transpose()?;

        let writer = writer::LogWriter::start(std::io::stderr()).map_err(TelemetryError::Writer)?;
        let ids = trace::TraceIds::default();
        let on_terminal = std::io::stderr().is_terminal();
        let logs = match options.format {
            LogFormat::Pretty => logs::pretty(&writer, ids.clone(), on_terminal).boxed(),
            LogFormat::Auto if on_terminal => logs::pretty(&writer, ids.clone(), true).boxed(),
            LogFormat::Auto | LogFormat::Json => logs::json(&writer, ids.clone()).boxed(),
        };

        let subscriber = tracing_subscriber::registry().with(filter);
        #[cfg(feature = "otlp")]
        let subscriber = subscriber.with(traces.as_ref().map(otlp::Traces::layer));
        subscriber.with(ids).with(logs).try_init().map_err(|_| TelemetryError::AlreadyStarted)?;

        #[cfg(feature = "otlp")]
        if traces.is_some() {
            carrick_core::trace::set_recorder(trace::recorder);
        }
        let metrics = Metrics::install()?;
        Ok(Self {
            metrics,
            #[cfg(feature = "otlp")]
            traces,
            writer,
        })
    }

    /// Sends what is still waiting, and waits for it at most `patience`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the sending to a background thread.
    pub async fn stop(self, patience: Duration) {
        let Self {
            metrics: _,
            #[cfg(feature = "otlp")]
            traces,
            writer,
        } = self;
        // Blocking on purpose: the exporter and the writer are threads of their own.
        let stopped = tokio::task::spawn_blocking(move || {
            #[cfg(feature = "otlp")]
            if let Some(traces) = traces {
                traces.stop(patience);
            }
            writer.flush(patience);
        });
        if stopped.await.is_err() {
            eprintln!("telemetry did not end well: what was still waiting may be lost");
        }
    }
}

/// The `traceparent` of the current span, to be stored with an outgoing event.
///
/// With traces running, it names the current span; otherwise it is what the nearest span around has
/// as `traceparent`. `None` outside of any trace.
pub fn current_traceparent() -> Option<String> {
    trace::current()
}
