//! Which trace a log line belongs to.

use std::sync::{Arc, OnceLock};

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
struct Traceparent {
    parent: Option<String>,
    link: Option<String>,
}

impl Traceparent {
    /// The trace that a reader of logs would look for: the one it continues, else the one it links to.
    fn text(&self) -> Option<&str> {
        self.parent.as_deref().or(self.link.as_deref())
    }
}

impl Visit for Traceparent {
    fn record_str(&mut self, field: &Field, value: &str) {
        let slot = match field.name() {
            PARENT => &mut self.parent,
            LINK => &mut self.link,
            _ => return,
        };
        // The first of several links stands for all; what is not W3C text is not shown as such.
        let first = value.split(',').next().unwrap_or_default().trim();
        *slot = is_traceparent(first).then(|| first.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if matches!(field.name(), PARENT | LINK) {
            // `%value` arrives here; its `Debug` is its `Display`.
            self.record_str(field, &format!("{value:?}"));
        }
    }
}

/// `00-<32 hex>-<16 hex>-<2 hex>`, lower case, and no id of zeros; later versions may add fields.
pub(super) fn is_traceparent(text: &str) -> bool {
    let mut parts = text.split('-');
    let mut part = |len: usize| {
        let part = parts.next()?;
        let is_hex = part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        (part.len() == len && is_hex).then_some(part)
    };
    let (Some(version), Some(trace), Some(span), Some(_)) = (part(2), part(32), part(16), part(2))
    else {
        return false;
    };
    let more = parts.next().is_some();
    version != "ff"
        && !(version == "00" && more)
        && trace.bytes().any(|b| b != b'0')
        && span.bytes().any(|b| b != b'0')
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
            if let Some(text) = extensions.get::<Traceparent>().and_then(Traceparent::text) {
                return Some(Ids { trace: text[3..35].to_owned(), span: text[36..52].to_owned() });
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
        let mut found = Traceparent::default();
        attributes.record(&mut found);
        if found.text().is_some() {
            let span = ctx.span(id).expect("a span exists while it is announced");
            span.extensions_mut().insert(found);
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, ctx: Context<'_, S>) {
        let span = ctx.span(id).expect("a span exists while it is recorded");
        let mut found = span.extensions().get::<Traceparent>().cloned().unwrap_or_default();
        values.record(&mut found);
        if found.text().is_some() {
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
            span.extensions().get::<Traceparent>().and_then(|found| found.parent.clone())
        })
    })
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_w3c_text_passes() {
        for (text, passes) in [
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", true),
            ("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes-later", true),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", false),
            ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", false),
            ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", false),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", false),
            ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", false),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", false),
            ("00-äbf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01", false),
            ("", false),
        ] {
            assert_eq!(is_traceparent(text), passes, "{text}");
        }
    }
}
