//! HTTP requests in the stack.

use std::error::Error as StdError;

use bytes::Bytes;
use carrick_core::{context::Context, deadline::Deadline};
use http::{HeaderValue, Request};
use http_body::Body;
use tokio::time::Instant;

use super::{Call, Tried};
use crate::{
    bulkhead::Priority,
    deadline::{
        Streaming,
        wire::{has_trace, write_deadline, write_trace},
    },
    explain::Explain,
    retry::{ATTEMPT, Idempotent, ReplayBody, is_idempotent_request},
};

/// A [`Deadline`] in the extensions wins over that of the context in scope; an [`Explain`] and a
/// [`Priority`] are found there too, and [`Streaming`] if the answer is a stream.
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
        self.extensions().get::<Idempotent>().is_some()
            || is_idempotent_request(self.method(), self.headers())
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

    fn is_streaming(&self) -> bool {
        self.extensions().get::<Streaming>().is_some()
    }

    fn prepare(&mut self, attempt: u32, deadline: Deadline, now: Instant) {
        let context = Context::current();
        let headers = self.headers_mut();
        write_deadline(headers, deadline, now);
        headers.insert(ATTEMPT, HeaderValue::from(attempt));
        // Each attempt is a span of its own, so that a trace shows which of them did what.
        if let Some(context) = context
            && (!has_trace(headers) || attempt > 1)
        {
            write_trace(headers, &context);
        }
    }

    fn explain(&self) -> Option<&Explain> {
        self.extensions().get()
    }

    fn priority(&self) -> Priority {
        self.extensions().get().copied().unwrap_or_default()
    }

    fn keep_apart(&mut self) {
        self.extensions_mut().insert(Tried::default());
    }

    fn tried(&self) -> Option<&Tried> {
        self.extensions().get()
    }
}

#[cfg(feature = "client")]
/// The verdict of gRPC's trailers, or of a head that is all there is; `None` without a status.
pub(crate) fn grpc_outcome(headers: &http::HeaderMap) -> Option<carrick_core::outcome::Outcome> {
    let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    Some(carrick_core::outcome::Outcome::from_grpc(code, None))
}
