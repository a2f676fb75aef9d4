//! The two forms of log lines. Both name the trace that a line belongs to.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    fmt::{
        FmtContext, FormatEvent, FormatFields, FormattedFields,
        format::{self, Compact, DefaultFields, Format, JsonFields, Writer},
        time::FormatTime,
    },
    registry::LookupSpan,
};

use super::{trace::TraceIds, writer::LogWriter};

pub(super) fn json<S>(writer: &LogWriter, ids: TraceIds) -> impl Layer<S> + Send + Sync + use<S>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    tracing_subscriber::fmt::layer()
        .fmt_fields(JsonFields::new())
        .event_format(Json { ids })
        .with_writer(writer.clone())
}

pub(super) fn pretty<S>(
    writer: &LogWriter,
    ids: TraceIds,
    colours: bool,
) -> impl Layer<S> + Send + Sync + use<S>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    let line = format::format().with_timer(Rfc3339).with_ansi(colours).compact();
    tracing_subscriber::fmt::layer()
        .fmt_fields(DefaultFields::new())
        .event_format(Pretty { line, ids })
        .with_ansi(colours)
        .with_writer(writer.clone())
}

/// UTC with microseconds, as `2026-12-01T09:27:00.123456Z`.
struct Rfc3339;

impl FormatTime for Rfc3339 {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        use carrick_core::clock::{Clock, SystemClock};
        write!(writer, "{:.6}", SystemClock.wall())
    }
}

struct Pretty {
    line: Format<Compact, Rfc3339>,
    ids: TraceIds,
}

impl<S, N> FormatEvent<S, N> for Pretty
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.line.format_event(ctx, Writer::new(&mut line), event)?;
        writer.write_str(line.trim_end_matches('\n'))?;
        if let Some(ids) = ctx.event_scope().and_then(|scope| self.ids.of(scope)) {
            write!(writer, " trace_id={}", ids.trace)?;
        }
        writeln!(writer)
    }
}

/// One object a line: `timestamp`, `level`, `target`, `message`, `trace_id`, `span_id`, then
/// `fields` and `spans` (outermost first).
struct Json {
    ids: TraceIds,
}

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);

        writer.write_str("{\"timestamp\":\"")?;
        Rfc3339.format_time(&mut writer)?;
        write!(
            writer,
            "\",\"level\":\"{}\",\"target\":{}",
            metadata.level(),
            json!(metadata.target())
        )?;
        if let Some(message) = fields.message {
            write!(writer, ",\"message\":{}", Value::String(message))?;
        }
        if let Some(ids) = ctx.event_scope().and_then(|scope| self.ids.of(scope)) {
            write!(writer, ",\"trace_id\":\"{}\",\"span_id\":\"{}\"", ids.trace, ids.span)?;
        }
        if !fields.others.is_empty() {
            write!(writer, ",\"fields\":{}", Value::Object(fields.others))?;
        }
        if let Some(scope) = ctx.event_scope() {
            writer.write_str(",\"spans\":[")?;
            for (n, span) in scope.from_root().enumerate() {
                if n > 0 {
                    writer.write_char(',')?;
                }
                write!(writer, "{{\"name\":{}", json!(span.name()))?;
                let extensions = span.extensions();
                if let Some(fields) = extensions.get::<FormattedFields<N>>()
                    && !fields.is_empty()
                {
                    // `JsonFields` wrote an object.
                    write!(writer, ",\"fields\":{}", fields.fields)?;
                }
                writer.write_char('}')?;
            }
            writer.write_char(']')?;
        }
        writer.write_str("}\n")
    }
}

/// The fields of one event.
#[derive(Default)]
struct Fields {
    message: Option<String>,
    others: serde_json::Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.others.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = Some(text);
        } else {
            self.put(field, Value::String(text));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = Some(value.to_owned());
        } else {
            self.put(field, Value::from(value));
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, Value::from(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, Value::from(value));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut chain = value.to_string();
        let mut cause = value.source();
        while let Some(error) = cause {
            _ = write!(chain, ": {error}");
            cause = error.source();
        }
        self.put(field, Value::String(chain));
    }
}
