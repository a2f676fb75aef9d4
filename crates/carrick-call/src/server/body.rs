//! The body of a handler's answer: the end of its work.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{
    deadline::is_stream,
    early::EarlyBody,
    queue::{Finish, Served},
};

pin_project! {
    /// The body of an answer, which keeps its handler's place until it has been sent or dropped.
    #[derive(Debug)]
    pub struct ShedBody<R> {
        #[pin]
        body: EarlyBody<R>,
        served: Option<Served>,
    }
}

impl<R> ShedBody<R> {
    /// A body of our own, for which nobody has a place.
    pub(super) fn own(body: EarlyBody<R>) -> Self {
        Self { body, served: None }
    }
}

/// Keeps a place until the body has been sent. A stream may go on for hours, and gives it back at its
/// head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ToEnd;

impl<R: Body> Finish<Response<R>> for ToEnd {
    type Output = Response<ShedBody<R>>;

    fn finish(&self, answer: Response<R>, served: Served) -> Response<ShedBody<R>> {
        let is_over = answer.body().is_end_stream() || is_stream(&answer);
        let served = Some(served).filter(|_| !is_over);
        answer.map(|body| ShedBody { body: EarlyBody::inner(body), served })
    }
}

impl<R: Body<Data = Bytes>> Body for ShedBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        let mut this = self.project();
        let polled = this.body.as_mut().poll_frame(cx);
        let is_over = match &polled {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(_))) => this.body.is_end_stream(),
            Poll::Ready(_) => true,
        };
        if is_over {
            *this.served = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
