//! Answers of our own, where a service was not asked or not waited for.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::problem::{PROBLEM, Problem};
use http::{
    HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::retry::PUSHBACK;

/// `RESOURCE_EXHAUSTED`.
pub(crate) const EXHAUSTED: u8 = 8;

/// `DEADLINE_EXCEEDED`.
pub(crate) const LATE: u8 = 4;

pin_project! {
    /// The body of a service's answer, or of one of our own.
    #[derive(Debug)]
    pub struct EarlyBody<R> {
        #[pin]
        kind: Kind<R>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum Kind<R> {
        Inner { #[pin] body: R },
        Own { bytes: Option<Bytes> },
    }
}

impl<R> EarlyBody<R> {
    /// The body of a service's answer.
    pub(crate) fn inner(body: R) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    fn own(bytes: Bytes) -> Self {
        Self { kind: Kind::Own { bytes: Some(bytes).filter(|all| !all.is_empty()) } }
    }
}

impl<R: Body<Data = Bytes>> Body for EarlyBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            Projected::Inner { body } => body.poll_frame(cx),
            Projected::Own { bytes } => Poll::Ready(bytes.take().map(|one| Ok(Frame::data(one)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Own { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Own { bytes } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
        }
    }
}

/// An answer of our own: a problem of this status, or gRPC's status in a head that is all there is.
///
/// * `retry_after`: when another try makes sense; whole seconds rounded up, and gRPC's milliseconds.
pub(crate) fn answer<R>(
    is_grpc: bool,
    status: StatusCode,
    grpc: u8,
    why: &str,
    retry_after: Option<Duration>,
) -> Response<EarlyBody<R>> {
    if is_grpc {
        let mut answer = Response::new(EarlyBody::own(Bytes::new()));
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from(u16::from(grpc)));
        if let Ok(why) = HeaderValue::from_str(why) {
            headers.insert("grpc-message", why);
        }
        if let Some(after) = retry_after {
            let millis = u32::try_from(after.as_millis()).unwrap_or(u32::MAX);
            headers.insert(PUSHBACK, HeaderValue::from(millis));
        }
        return answer;
    }
    let body = serde_json::to_vec(&Problem::new(status, why)).unwrap_or_default();
    let mut answer = Response::new(EarlyBody::own(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
    if let Some(after) = retry_after {
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}
