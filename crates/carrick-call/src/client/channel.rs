//! The client as a service: of HTTP requests, and as generated gRPC clients take it.

use std::{
    convert::Infallible,
    fmt,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    deadline::{Deadline, Limits, Said},
};
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body;
use tokio::time::Instant;
use tower_service::Service;

use super::{AnswerBody, BoxError, Client, TransportError};
use crate::{
    CallError, Policy,
    early::{self, EarlyBody},
};

/// `UNAVAILABLE`.
const UNAVAILABLE: u8 = 14;

impl<B> Service<Request<B>> for Client
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<AnswerBody>;
    type Error = CallError<TransportError>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Whether a call may be made is decided within it, under its deadline.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let client = self.clone();
        Box::pin(async move { Self::call(&client, request).await })
    }
}

/// A [`Client`] as generated gRPC clients take it (`PricingClient::new(client.channel())` with tonic).
///
/// What the policies decide comes as gRPC has it, in a status: `DEADLINE_EXCEEDED` when time ran out,
/// `RESOURCE_EXHAUSTED` from bulkhead, queue and throttle, `UNAVAILABLE` from the others and if no host
/// gave an answer. A refusal says in `grpc-retry-pushback-ms` when another try makes sense.
///
/// The timeout of a request (`grpc-timeout`, which `Request::set_timeout` writes) is its deadline. A
/// request with [`Streaming`](crate::deadline::Streaming) in its extensions may be answered for longer
/// than the dependency's timeout, and one with [`Idempotent`](crate::retry::Idempotent) is tried again
/// and hedged as a GET is: of gRPC's own, which are all POST, nothing tells.
#[derive(Clone)]
pub struct Channel(Client);

impl Client {
    /// The client as generated gRPC clients take it. The dependency's `pool.http2` is to be on.
    pub fn channel(&self) -> Channel {
        Channel(self.clone())
    }
}

/// The body of an answer, or of a status of our own.
pub type ChannelBody = EarlyBody<AnswerBody>;

impl<B> Service<Request<B>> for Channel
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<ChannelBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let client = self.0.clone();
        if request.extensions().get::<Deadline>().is_none()
            && let Some(deadline) = said(request.headers(), Instant::now())
        {
            request.extensions_mut().insert(deadline);
        }
        Box::pin(async move {
            Ok(match client.call(request).await {
                Ok(answer) => answer.map(EarlyBody::inner),
                Err(error) => status(&error),
            })
        })
    }
}

/// The deadline that a generated client wrote.
fn said(headers: &HeaderMap, now: Instant) -> Option<Deadline> {
    let limits = Limits { max: Duration::from_secs(86_400), ..Limits::default() };
    let inbound = Deadline::from_headers(headers, now, SystemClock.wall(), &limits);
    matches!(inbound.said, Said::Deadline).then_some(inbound.deadline)
}

fn status(error: &CallError<TransportError>) -> Response<ChannelBody> {
    let (code, after) = match error {
        CallError::Expired => (early::LATE, None),
        CallError::Inner(_) => (UNAVAILABLE, None),
        CallError::Refused(refusal) => {
            let code = match refusal.policy {
                Policy::Deadline => early::LATE,
                Policy::Bulkhead | Policy::Queue | Policy::Throttle => early::EXHAUSTED,
                _ => UNAVAILABLE,
            };
            (code, refusal.retry_after)
        }
    };
    let why = match error {
        CallError::Inner(inner) => inner.to_string(),
        _ => error.to_string(),
    };
    early::answer(true, StatusCode::OK, code, &why, after)
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Channel").field(&self.0).finish()
    }
}
