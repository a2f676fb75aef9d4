//! Traces to an OpenTelemetry collector. The only module that knows OpenTelemetry, whose crates
//! change with every release.
//!
//! `tracing-opentelemetry` turns spans into OpenTelemetry's. Parents and links are not set through
//! its span extension, since then each crate that continues a trace would depend on it: they come as
//! plain fields, and [`Linking`] takes them out of the span's attributes as the span is started.

use std::time::Duration;

use carrick_core::trace::TraceContext;
use opentelemetry::{
    Context,
    trace::{
        Link, SpanBuilder, SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
        Tracer, TracerProvider,
    },
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider},
};
use tracing::{Dispatch, Subscriber, span};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;

use super::{
    TelemetryError,
    trace::{Ids, LINK, PARENT},
};

/// Spans that may wait for the exporter. At about 1 KiB each they take 2 MiB at most; beyond that
/// they are dropped, as traces are a help and no record.
const WAITING: usize = 2_048;
/// Spans sent at once.
const BATCH: usize = 512;
/// How long a span waits for others to be sent with.
const SEND_EVERY: Duration = Duration::from_secs(2);
/// How long the collector may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Links of one span; what a batch of more would link to is cut, as OpenTelemetry does by default.
const MAX_LINKS: usize = 128;

/// The running exporter.
#[derive(Debug)]
pub(super) struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// Starts a thread that sends spans to the collector at `endpoint`.
    pub(super) fn start(
        endpoint: &str,
        service: &str,
        sample: f64,
    ) -> Result<Self, TelemetryError> {
        if !(0.0..=1.0).contains(&sample) {
            return Err(TelemetryError::Otlp(format!("otlp-sample = {sample} is not in [0, 1]")));
        }
        // Without TLS on purpose: a collector runs on this machine or in this pod.
        if !endpoint.starts_with("http://") {
            let text =
                format!("otlp = \"{endpoint}\" is not an http:// address; use a local collector");
            return Err(TelemetryError::Otlp(text));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            .with_timeout(SEND_TIMEOUT)
            .build()
            .map_err(|error| TelemetryError::Otlp(error.to_string()))?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(WAITING)
            .with_max_export_batch_size(BATCH)
            .with_scheduled_delay(SEND_EVERY)
            .build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(
                BatchSpanProcessor::builder(exporter).with_batch_config(batches).build(),
            )
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample))))
            .with_resource(Resource::builder().with_service_name(service.to_owned()).build())
            .build();
        Ok(Self { provider })
    }

    /// The layer that records spans.
    pub(super) fn layer<S>(&self) -> OpenTelemetryLayer<S, Linking<SdkTracer>>
    where
        S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(Linking(self.provider.tracer("carrick")))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
    }

    /// Sends what waits, within `patience`.
    pub(super) fn stop(self, patience: Duration) {
        if let Err(error) = self.provider.shutdown_with_timeout(patience) {
            tracing::warn!(%error, "the last spans may not have reached the collector");
        }
    }
}

/// A tracer that takes parent and links from a span's attributes.
#[derive(Clone, Debug)]
pub(super) struct Linking<T>(T);

impl<T: Tracer> Tracer for Linking<T> {
    type Span = T::Span;

    fn build_with_context(&self, mut builder: SpanBuilder, parent: &Context) -> T::Span {
        let mut take = |name: &str| {
            let attributes = builder.attributes.as_mut()?;
            let at = attributes.iter().position(|attribute| attribute.key.as_str() == name)?;
            Some(attributes.swap_remove(at).value.as_str().into_owned())
        };
        let (parent_text, link_text) = (take(PARENT), take(LINK));

        let links: Vec<_> = link_text
            .iter()
            .flat_map(|text| super::trace::split(text).take(MAX_LINKS))
            .map(|trace| Link::with_context(remote(&trace)))
            .collect();
        let has_links = !links.is_empty();
        builder.links.get_or_insert_default().extend(links);

        if let Some(trace) = parent_text.and_then(|text| text.parse().ok()) {
            let parent = parent.with_remote_span_context(remote(&trace));
            return self.0.build_with_context(builder, &parent);
        }
        if has_links {
            // A root: neither the span around it nor what it links to is its parent (M5).
            return self.0.build_with_context(builder, &Context::new());
        }
        self.0.build_with_context(builder, parent)
    }
}

fn remote(trace: &TraceContext) -> SpanContext {
    let flags = if trace.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
    let (trace, span) = (TraceId::from(trace.trace_id().0), SpanId::from(trace.span_id().0));
    SpanContext::new(trace, span, flags, true, TraceState::NONE)
}

fn context(id: &span::Id, dispatch: &Dispatch) -> Option<SpanContext> {
    let context = tracing_opentelemetry::get_otel_context(id, dispatch)?;
    let span = context.span().span_context().clone();
    span.is_valid().then_some(span)
}

/// The ids under which a span is recorded.
pub(super) fn ids(id: &span::Id, dispatch: &Dispatch) -> Option<Ids> {
    let span = context(id, dispatch)?;
    Some(Ids { trace: span.trace_id().to_string(), span: span.span_id().to_string() })
}

/// A span as W3C text.
pub(super) fn traceparent(id: &span::Id, dispatch: &Dispatch) -> Option<String> {
    let span = context(id, dispatch)?;
    let flags = span.trace_flags().to_u8();
    Some(format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id()))
}
