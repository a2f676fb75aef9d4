//! What a call says of its context on the wire.

use carrick_core::{
    clock::{Clock, SystemClock},
    context::Context,
    deadline::{Deadline, GRPC},
    trace::recorded,
};
use http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};
use tokio::time::Instant;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Whether a message is gRPC's.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let content = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    content.is_some_and(|content| content.starts_with(b"application/grpc"))
}

/// Writes what remains, in the form of the request's protocol.
pub(crate) fn write_deadline(headers: &mut HeaderMap, deadline: Deadline, now: Instant) {
    if is_grpc(headers) {
        if let Ok(value) = HeaderValue::try_from(deadline.to_grpc(now)) {
            headers.insert(GRPC, value);
        }
    } else {
        // It would be read first; a request that is passed on may have somebody else's.
        headers.remove(GRPC);
        deadline.to_headers(headers, now, SystemClock.wall());
    }
}

/// Writes a new span of the context's trace.
pub(crate) fn write_trace(headers: &mut HeaderMap, context: &Context) {
    // A span of the caller's own that is recorded is the parent; else one of the context's trace is.
    let recorded = recorded().filter(|span| span.trace_id() == context.trace().trace_id());
    let child = match (recorded, context.trace().state()) {
        (Some(recorded), Some(state)) => recorded.with_state(state),
        (Some(recorded), None) => recorded,
        (None, _) => context.trace().child(),
    };
    if let Ok(value) = HeaderValue::try_from(child.to_string()) {
        headers.insert(TRACEPARENT, value);
    }
    match child.state().map(HeaderValue::from_str) {
        Some(Ok(state)) => {
            headers.insert(TRACESTATE, state);
        }
        // Never one trace's state with another's parent.
        _ => {
            headers.remove(TRACESTATE);
        }
    }
}

/// Whether a request says a span already.
pub(crate) fn has_trace(headers: &HeaderMap) -> bool {
    headers.contains_key(TRACEPARENT)
}
