//! The body of an answer: the end of an attempt.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use carrick_core::outcome::Outcome;
use http::{HeaderValue, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::{RequestBody, pool::PooledBody, service::Hosted};
use crate::{
    deadline::{Bound, is_grpc, is_stream},
    retry::RETRIED,
    stack::{Finish, Held, grpc_outcome},
};

/// Why the body of an answer ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The deadline passed while it came, or a stream was silent or alive for too long.
    #[error("the deadline passed before the end of the answer")]
    Expired,
    /// The connection broke.
    #[error("the answer broke off")]
    Broken(#[source] hyper::Error),
}

/// The body of an answer, under the deadline of its call, or under the limits of streams if it is one:
/// of type `text/event-stream`, or what a request with [`Streaming`](crate::deadline::Streaming) in its
/// extensions is answered.
///
/// It holds the call's place at its host and in the bulkhead until it has been read to its end, or is
/// dropped. What it ends with is the verdict on the call: a gRPC status comes only there.
pub struct AnswerBody {
    body: PooledBody<RequestBody>,
    held: Option<(Held<Hosted>, Bound)>,
    is_grpc: bool,
    is_stream: bool,
    outcome: Option<Outcome>,
}

/// Keeps what an attempt holds until its answer has been read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AtEnd;

impl Finish<Hosted, Response<PooledBody<RequestBody>>> for AtEnd {
    type Output = Response<AnswerBody>;

    fn finish(
        &self,
        answer: Response<PooledBody<RequestBody>>,
        held: Held<Hosted>,
    ) -> Response<AnswerBody> {
        let is_stream = held.is_streaming() || is_stream(&answer);
        let (mut parts, body) = answer.into_parts();
        if held.attempts() > 1 {
            parts.headers.insert(RETRIED, HeaderValue::from(held.attempts() - 1));
        }
        let is_grpc = is_grpc(&parts.headers);
        // A head that is all there is has been judged.
        let held = if body.is_end_stream() {
            held.settle_as_judged();
            None
        } else {
            let bound = held.bound(is_stream);
            Some((held, bound))
        };
        let body = AnswerBody { body, held, is_grpc, is_stream, outcome: None };
        Response::from_parts(parts, body)
    }
}

impl AnswerBody {
    fn end(&mut self, outcome: Option<Outcome>) {
        if let Some((held, _)) = self.held.take() {
            match outcome.or(self.outcome) {
                outcome if self.is_stream => held.settle_stream(outcome, Instant::now()),
                Some(outcome) => held.settle(outcome, Instant::now()),
                None => held.settle_as_judged(),
            }
        }
    }

    fn expire(&mut self) -> AnswerError {
        let is_aged = self.held.as_ref().is_some_and(|(_, bound)| bound.is_aged(Instant::now()));
        // A stream that lived for as long as it may was well.
        self.end((!is_aged).then_some(Outcome::Expired));
        AnswerError::Expired
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let this = self.get_mut();
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Pending => {
                let Some((_, bound)) = &mut this.held else { return Poll::Pending };
                ready!(bound.poll(cx));
                Poll::Ready(Some(Err(this.expire())))
            }
            Poll::Ready(None) => {
                this.end(None);
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref().filter(|_| this.is_grpc) {
                    this.outcome = grpc_outcome(trailers);
                }
                if this.body.is_end_stream() {
                    this.end(None);
                } else if this.held.as_mut().is_some_and(|(_, bound)| bound.came()) {
                    return Poll::Ready(Some(Err(this.expire())));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.end(Some(Outcome::Transient));
                Poll::Ready(Some(Err(AnswerError::Broken(error))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl fmt::Debug for AnswerBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerBody").field("held", &self.held).finish_non_exhaustive()
    }
}
