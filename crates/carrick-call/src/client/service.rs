//! One host's service, and the verdict on what it answers.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use carrick_core::{
    clock::{Clock, SystemClock},
    outcome::Outcome,
};
use futures_util::future::BoxFuture;
use http::{
    HeaderValue, Request, Response, Uri, Version,
    header::HOST,
    uri::{PathAndQuery, Scheme},
};
use tower_service::Service;

use super::{
    AnswerBody, RequestBody, TransportError,
    pool::{Pool, PooledBody},
};
use crate::{
    CallError, Classify,
    classify::{Hints, Http, call_error},
    fault::FaultService,
    retry::{RETRIED, pushback},
};

/// One host, where faults are injected into its attempts.
pub(super) type Hosted = FaultService<HostService>;

/// The connections to one host.
#[derive(Clone, Debug)]
pub(super) struct HostService {
    pub(super) pool: Pool<RequestBody>,
    pub(super) name: Arc<Named>,
}

/// The dependency as requests name it, whichever host they go to.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) scheme: Scheme,
    pub(super) authority: http::uri::Authority,
    pub(super) host: HeaderValue,
}

impl Service<Request<RequestBody>> for HostService {
    type Response = Response<PooledBody<RequestBody>>;
    type Error = TransportError;
    type Future = BoxFuture<'static, Result<Self::Response, TransportError>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        // Connections are made when they are needed, within the call and under its deadline.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<RequestBody>) -> Self::Future {
        let (pool, name) = (self.pool.clone(), Arc::clone(&self.name));
        if pool.speaks_http2() {
            name.make_absolute(&mut request);
        } else {
            name.make_relative(&mut request);
        }
        Box::pin(async move { pool.send(request, &name).await })
    }
}

impl Named {
    /// As HTTP/2 has it: the whole URI goes on the wire.
    pub(super) fn make_absolute<B>(&self, request: &mut Request<B>) {
        let mut uri = http::uri::Parts::default();
        uri.scheme = Some(self.scheme.clone());
        uri.authority = Some(self.authority.clone());
        uri.path_and_query = Some(path(request.uri()));
        *request.uri_mut() = Uri::from_parts(uri).expect("the parts of a URI");
        *request.version_mut() = Version::HTTP_2;
        request.headers_mut().remove(HOST);
    }

    /// As HTTP/1.1 has it: the path, and the authority in a header.
    fn make_relative<B>(&self, request: &mut Request<B>) {
        *request.uri_mut() = path(request.uri()).into();
        *request.version_mut() = Version::HTTP_11;
        request.headers_mut().insert(HOST, self.host.clone());
    }
}

fn path(uri: &Uri) -> PathAndQuery {
    uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"))
}

/// Judges answers by status and `grpc-status`, and failed exchanges as transient.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Judge;

type Answer = Response<PooledBody<RequestBody>>;

impl Classify<Answer, TransportError> for Judge {
    fn classify(&self, result: Result<&Answer, &TransportError>) -> Outcome {
        match result {
            // Nearly always: no need to ask what time it is.
            Ok(answer)
                if answer.status().is_success()
                    && !answer.headers().contains_key("grpc-status") =>
            {
                Outcome::Success
            }
            Ok(answer) => Http::verdict(answer, SystemClock.wall()),
            // What must not be reached must not be reached the next time either.
            Err(TransportError::Connect { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                Outcome::Permanent
            }
            Err(_) => Outcome::Transient,
        }
    }

    fn hints(&self, result: Result<&Answer, &TransportError>) -> Hints {
        match result {
            Ok(answer) => Hints {
                is_gateway: matches!(answer.status().as_u16(), 502..=504),
                retried_below: answer.headers().contains_key(RETRIED),
                pushback: pushback(answer.headers()),
                ..Hints::default()
            },
            Err(error) => {
                Hints { never_sent: error.was_never_sent(), is_local: true, ..Hints::default() }
            }
        }
    }
}

/// Judges a whole call, its attempts behind it: what hedging goes by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Whole;

impl Classify<Response<AnswerBody>, CallError<TransportError>> for Whole {
    fn classify(
        &self,
        result: Result<&Response<AnswerBody>, &CallError<TransportError>>,
    ) -> Outcome {
        match result {
            Ok(answer) if answer.status().is_success() => Outcome::Success,
            Ok(answer) => Http::verdict(answer, SystemClock.wall()),
            Err(error) => call_error(error, |_| Outcome::Transient),
        }
    }
}
