//! Which trace a log line belongs to.

use std::sync::{Arc, OnceLock};

use carrick_core::trace::TraceContext;
use tracing::{
    Dispatch, Subscriber,
    dispatcher::WeakDispatch,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    Layer,
    layer::Context,
    registry::{LookupSpan, SpanRef},
};

/// The field by which a span continues a trace.
pub(super) const PARENT: &str = "traceparent";
/// The field by which a span links to other traces.
pub(super) const LINK: &str = "link.traceparent";

/// What a span's fields say about its trace.
#[derive(Clone, Debug, Default)]
struct Traces {
    parent: Option<TraceContext>,
    link: Option<TraceContext>,
}

impl Traces {
    /// The trace that a reader of logs would look for: the one it continues, else the one it links to.
    fn main(&self) -> Option<&TraceContext> {
        self.parent.as_ref().or(self.link.as_ref())
    }
}

impl Visit for Traces {
    fn record_str(&mut self, field: &Field, value: &str) {
        // The first of several links stands for all. What is not W3C text is not shown as such.
        match field.name() {
            PARENT => self.parent = value.parse().ok(),
            LINK => self.link = split(value).next(),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if matches!(field.name(), PARENT | LINK) {
            // `%value` arrives here; its `Debug` is its `Display`.
            self.record_str(field, &format!("{value:?}"));
        }
    }
}

/// The traces of a text that has several, separated by commas.
pub(super) fn split(text: &str) -> impl Iterator<Item = TraceContext> {
    text.split(',').filter_map(|one| one.trim().parse().ok())
}

/// Remembers the trace of each span, for the log lines inside it.
#[derive(Clone, Default)]
pub(super) struct TraceIds {
    /// Set when the subscriber is installed; the exporter's own ids are found through it.
    dispatch: Arc<OnceLock<WeakDispatch>>,
}

/// The ids of a log line, in hex.
pub(super) struct Ids {
    pub(super) trace: String,
    pub(super) span: String,
}

impl TraceIds {
    /// The ids of the innermost span around that has any.
    pub(super) fn of<'a, S>(&self, spans: impl Iterator<Item = SpanRef<'a, S>>) -> Option<Ids>
    where
        S: Subscriber + for<'lookup> LookupSpan<'lookup> + 'a,
    {
        let dispatch = self.dispatch.get().and_then(WeakDispatch::upgrade);
        for span in spans {
            if let Some(ids) = dispatch.as_ref().and_then(|dispatch| recorded(&span.id(), dispatch))
            {
                return Some(ids);
            }
            let extensions = span.extensions();
            if let Some(found) = extensions.get::<Traces>().and_then(Traces::main) {
                let (trace, span) = (found.trace_id().to_string(), found.span_id().to_string());
                return Some(Ids { trace, span });
            }
        }
        None
    }
}

impl<S> Layer<S> for TraceIds
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        _ = self.dispatch.set(dispatch.downgrade());
    }

    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, ctx: Context<'_, S>) {
        let mut found = Traces::default();
        attributes.record(&mut found);
        if found.main().is_some() {
            let span = ctx.span(id).expect("a span exists while it is announced");
            span.extensions_mut().insert(found);
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, ctx: Context<'_, S>) {
        let span = ctx.span(id).expect("a span exists while it is recorded");
        let mut found = span.extensions().get::<Traces>().cloned().unwrap_or_default();
        values.record(&mut found);
        if found.main().is_some() {
            span.extensions_mut().replace(found);
        }
    }
}

/// The ids under which the exporter records a span.
#[cfg(feature = "otlp")]
fn recorded(id: &span::Id, dispatch: &Dispatch) -> Option<Ids> {
    super::otlp::ids(id, dispatch)
}

#[cfg(not(feature = "otlp"))]
fn recorded(_: &span::Id, _: &Dispatch) -> Option<Ids> {
    None
}

/// The traceparent of the current span: the exporter's, else what the nearest span around continues.
pub(super) fn current() -> Option<String> {
    let span = tracing::Span::current();
    span.with_subscriber(|(id, dispatch)| {
        #[cfg(feature = "otlp")]
        if let Some(text) = super::otlp::traceparent(id, dispatch) {
            return Some(text);
        }
        let registry = dispatch.downcast_ref::<tracing_subscriber::Registry>()?;
        registry.span(id)?.scope().find_map(|span| {
            span.extensions()
                .get::<Traces>()
                .and_then(|found| found.parent.as_ref().map(ToString::to_string))
        })
    })
    .flatten()
}

/// The span that the exporter records around the caller.
#[cfg(feature = "otlp")]
pub(super) fn recorder() -> Option<TraceContext> {
    let span = tracing::Span::current();
    span.with_subscriber(|(id, dispatch)| super::otlp::traceparent(id, dispatch))
        .flatten()?
        .parse()
        .ok()
}
