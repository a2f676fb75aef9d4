//! The consumer's spans: roots that link to the event's trace.
//!
//! The producer's span ended long ago, and one that is retried for a day would keep its trace open
//! for a day. So a handler's span starts a trace of its own and names the event's as a link, in the
//! field `link.traceparent`; only a first attempt on a young event may continue the producer's trace
//! (field `traceparent`), if asked for. The event's own `traceparent` is never rewritten
//! (defects.md M5).

use std::time::Duration;

use carrick_core::{
    context::Context,
    deadline::Deadline,
    name::{Group, Topic},
    trace::TraceContext,
};
use jiff::Timestamp;
use tokio::time::Instant;
use tracing::Span;

use crate::broker::Delivery;

/// Opens spans for one consumer.
#[derive(Debug)]
pub(super) struct Spans {
    topic: Topic,
    group: Group,
    /// First attempts on events younger than this join.
    join: Duration,
}

impl Spans {
    pub(super) fn new(topic: &Topic, group: &Group, join: Duration) -> Self {
        Self { topic: topic.clone(), group: group.clone(), join }
    }

    /// Opens the span of a handler, and makes its context.
    pub(super) fn open(
        &self,
        delivery: &Delivery,
        deadline: Instant,
        wall: Timestamp,
    ) -> (Span, Context) {
        let Delivery { event, attempt, .. } = delivery;
        let origin = event.traceparent().and_then(|text| text.parse::<TraceContext>().ok());
        let state = event.tracestate();
        let origin = match state {
            Some(state) => origin.map(|origin| origin.with_state(&state)),
            None => origin,
        };
        let joined = origin.as_ref().filter(|_| self.joins(delivery, wall));
        let trace = joined.map_or_else(TraceContext::new, TraceContext::child);
        let span = tracing::info_span!(
            parent: None,
            "consume",
            otel.kind = "consumer",
            otel.status_code = tracing::field::Empty,
            topic = %self.topic,
            group = %self.group,
            event.id = %event.id(),
            event.r#type = %event.ty(),
            attempt,
            traceparent = joined.map(tracing::field::display),
            link.traceparent = tracing::field::Empty,
        );
        if let Some(origin) = origin.as_ref().filter(|_| joined.is_none()) {
            span.record("link.traceparent", tracing::field::display(origin));
        }
        // What the handler sends on continues the span that is recorded of it.
        let recorded = span.in_scope(carrick_core::trace::recorded);
        let trace = recorded.unwrap_or(trace);
        let context = Context::new(Deadline::at(deadline), trace);
        (span, context.with_attempt(*attempt))
    }

    fn joins(&self, delivery: &Delivery, wall: Timestamp) -> bool {
        let age = delivery.event.time().map(|time| Duration::try_from(wall.duration_since(time)));
        // An event from the future comes from a clock that is ahead: it is young.
        let young = age.is_some_and(|age| age.is_ok_and(|age| age < self.join));
        delivery.attempt == 1 && young
    }
}
