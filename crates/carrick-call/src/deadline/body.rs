//! Bodies under a deadline.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use metrics::Counter;
use pin_project_lite::pin_project;

use super::watch::Bound;
use crate::early::EarlyBody;

pin_project! {
    /// A body that ends with its deadline: with gRPC's trailers for it, or broken off.
    ///
    /// It is part of its call: what it is made of is dropped when time is over. The last frame of a
    /// body that has no more to give is let through.
    #[derive(Debug)]
    pub struct DeadlineBody<R> {
        #[pin]
        kind: Kind<R>,
        limit: Option<Limit>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum Kind<R> {
        Inner { #[pin] body: EarlyBody<R> },
        Over,
    }
}

/// What ends a body, and how.
#[derive(Debug)]
pub(super) struct Limit {
    pub(super) bound: Bound,
    pub(super) expired: Counter,
    pub(super) enforces: bool,
    /// Whether the end is told in gRPC's trailers.
    pub(super) in_trailers: bool,
}

/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeadlineBodyError<E> {
    /// The deadline passed while it was sent, or a stream was silent or alive for too long.
    #[error("the deadline passed before the end of the body")]
    Expired,
    /// The body itself failed.
    #[error("the body failed")]
    Inner(#[source] E),
}

impl<R> DeadlineBody<R> {
    pub(super) fn new(body: R, limit: Limit) -> Self {
        Self { kind: Kind::Inner { body: EarlyBody::inner(body) }, limit: Some(limit) }
    }

    /// A body of our own, which is there at once.
    pub(super) fn own(body: EarlyBody<R>) -> Self {
        Self { kind: Kind::Inner { body }, limit: None }
    }
}

/// What polling a body gives.
type Polled<R> = Poll<Option<Result<Frame<<R as Body>::Data>, <R as Body>::Error>>>;

impl<R: Body<Data = Bytes>> DeadlineBody<R> {
    /// What the inner body gives, while it may; `None` when time is over.
    fn poll_inner(
        body: Pin<&mut EarlyBody<R>>,
        limit: &mut Option<Limit>,
        cx: &mut Context<'_>,
    ) -> Option<Polled<R>> {
        let mut body = body;
        let polled = body.as_mut().poll_frame(cx);
        let Some(watched) = limit else { return Some(polled) };
        let is_over = match &polled {
            Poll::Ready(Some(Ok(frame))) if !frame.is_trailers() && !body.is_end_stream() => {
                watched.bound.came()
            }
            Poll::Ready(_) => {
                *limit = None;
                return Some(polled);
            }
            Poll::Pending => watched.bound.poll(cx).is_ready(),
        };
        if !is_over {
            return Some(polled);
        }
        watched.expired.increment(1);
        if watched.enforces {
            return None;
        }
        *limit = None; // counted once
        Some(polled)
    }
}

impl<R: Body<Data = Bytes>> Body for DeadlineBody<R> {
    type Data = Bytes;
    type Error = DeadlineBodyError<R::Error>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let mut this = self.project();
        match this.kind.as_mut().project() {
            Projected::Over => Poll::Ready(None),
            Projected::Inner { body } => {
                if let Some(polled) = Self::poll_inner(body, this.limit, cx) {
                    return polled
                        .map(|frame| frame.map(|one| one.map_err(DeadlineBodyError::Inner)));
                }
                this.kind.set(Kind::Over);
                let in_trailers = this.limit.take().is_some_and(|limit| limit.in_trailers);
                if !in_trailers {
                    return Poll::Ready(Some(Err(DeadlineBodyError::Expired)));
                }
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("4"));
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Over => SizeHint::with_exact(0),
        }
    }
}
