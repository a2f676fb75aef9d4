//! What the hub answers: bodies of JSON, and problems.

use axum::{
    body::Body,
    http::{
        HeaderValue, Response, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
    response::IntoResponse,
};
use bytes::Bytes;
use carrick_core::{
    event::EventError,
    name::InvalidName,
    problem::{PROBLEM, Problem},
};
use carrick_edge::feed::Refused;
use carrick_message::broker::BrokerError;
use carrick_store::StoreError;

/// An answer, or the problem that is one.
pub(super) type Answer<T = Response<Body>> = Result<T, Refusal>;

/// Why a request was not done.
#[derive(Debug)]
pub(super) struct Refusal {
    /// Boxed: every answer that is none passes through many hands.
    problem: Box<Problem>,
    retry_after: Option<u64>,
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self { problem: Box::new(problem), retry_after: None }
    }
}

impl Refusal {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Problem::new(status, detail).into()
    }

    /// Too much to do: come back in a while.
    pub(super) fn busy(detail: &str, seconds: u64) -> Self {
        metrics::counter!("carrick_hub_shed_total").increment(1);
        Self {
            problem: Box::new(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)),
            retry_after: Some(seconds),
        }
    }

    /// When to come back, if that is told.
    pub(super) fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    /// The status that it is answered with.
    pub(super) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    pub(super) fn problem(self) -> Problem {
        *self.problem
    }
}

impl From<BrokerError> for Refusal {
    fn from(error: BrokerError) -> Self {
        match error {
            BrokerError::Invalid { field, range, value } => {
                Problem::invalid(field, range, value).into()
            }
            BrokerError::TooLarge { .. } => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, error.to_string())
            }
            BrokerError::Overloaded { retry_after } => {
                Self::busy("too many events are being published", retry_after.as_secs().max(1))
            }
            BrokerError::Closed => Self::busy("the hub is closing", 1),
            BrokerError::Unavailable(source) => {
                tracing::warn!(error = &*source as &dyn std::error::Error, "the store failed");
                Self::busy("the store cannot do it now; whether it was done is unknown", 1)
            }
            other => {
                tracing::error!(error = &other as &dyn std::error::Error, "the store refused");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the store refused")
            }
        }
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        Self::busy(&refused.to_string(), refused.retry_after().as_secs().max(1))
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        BrokerError::from(error).into()
    }
}

impl From<InvalidName> for Refusal {
    fn from(error: InvalidName) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error.to_string())
    }
}

impl From<EventError> for Refusal {
    fn from(error: EventError) -> Self {
        Problem::from(&error).into()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response<Body> {
        let status = self.status();
        let body = serde_json::to_vec(&*self.problem).expect("a problem is JSON");
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(axum::http::header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

/// An answer whose body is JSON already.
pub(super) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}
