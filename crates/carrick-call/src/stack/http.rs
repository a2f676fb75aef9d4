//! HTTP requests in the stack.

use std::error::Error as StdError;

use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    context::Context,
    deadline::{Deadline, GRPC},
};
use http::{HeaderName, HeaderValue, Request, header::CONTENT_TYPE};
use http_body::Body;
use tokio::time::Instant;

use super::Call;
use crate::{
    explain::Explain,
    retry::{ATTEMPT, ReplayBody, is_idempotent_request},
};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// A [`Deadline`] and an [`Explain`] in the extensions win over the context in scope.
impl<B> Call for Request<ReplayBody<B>>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    fn deadline(&self) -> Option<Deadline> {
        let explicit = self.extensions().get::<Deadline>().copied();
        explicit.or_else(|| Context::current().map(|context| context.deadline()))
    }

    fn is_idempotent(&self) -> bool {
        is_idempotent_request(self.method(), self.headers())
    }

    fn copy(&self) -> Self {
        let mut copy = Self::new(self.body().repeat());
        *copy.method_mut() = self.method().clone();
        *copy.uri_mut() = self.uri().clone();
        *copy.version_mut() = self.version();
        *copy.headers_mut() = self.headers().clone();
        *copy.extensions_mut() = self.extensions().clone();
        copy
    }

    fn is_replayable(&self) -> bool {
        self.body().is_replayable()
    }

    fn prepare(&mut self, attempt: u32, deadline: Deadline, now: Instant) {
        let context = Context::current();
        let is_grpc = is_grpc(self.headers());
        let headers = self.headers_mut();
        if is_grpc {
            if let Ok(value) = HeaderValue::try_from(deadline.to_grpc(now)) {
                headers.insert(GRPC, value);
            }
        } else {
            deadline.to_headers(headers, now, SystemClock.wall());
        }
        headers.insert(ATTEMPT, HeaderValue::from(attempt));
        let Some(context) = context else { return };
        // Each attempt is a span of its own, so that a trace shows which of them did what.
        if !headers.contains_key(TRACEPARENT) || attempt > 1 {
            let child = context.trace().child();
            if let Ok(value) = HeaderValue::try_from(child.to_string()) {
                headers.insert(TRACEPARENT, value);
            }
            if let Some(Ok(state)) = child.state().map(HeaderValue::from_str) {
                headers.insert(TRACESTATE, state);
            }
        }
    }

    fn explain(&self) -> Option<&Explain> {
        self.extensions().get()
    }
}

/// Whether a message is gRPC's.
pub(crate) fn is_grpc(headers: &http::HeaderMap) -> bool {
    let content = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    content.is_some_and(|content| content.starts_with(b"application/grpc"))
}

#[cfg(feature = "client")]
/// The verdict of gRPC's trailers, or of a head that is all there is; `None` without a status.
pub(crate) fn grpc_outcome(headers: &http::HeaderMap) -> Option<carrick_core::outcome::Outcome> {
    let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    Some(carrick_core::outcome::Outcome::from_grpc(code, None))
}
