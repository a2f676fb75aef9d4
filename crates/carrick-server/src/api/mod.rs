//! The HTTP interface: topics, groups, leases, dead letters.
//!
//! Bodies of events pass through as they are: what a reader gets is joined from the documents that
//! publishers sent. Every error is a problem (RFC 9457) that names what is wrong.

mod answer;
mod auth;
mod dead;
mod fields;
mod groups;
mod openapi;
mod topics;

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, Method, Response, StatusCode},
    response::{Html, IntoResponse},
    routing::{get, post, put},
};
use bytes::Bytes;
use carrick_ops::{drain::Drain, health::Health, telemetry::Metrics};
use tokio::sync::Semaphore;

use self::{
    answer::{Answer, Refusal},
    auth::Guard,
    fields::Fields,
};
use crate::{
    config::{HubConfig, LimitOptions},
    hub::Hub,
};

/// What handlers work with. Clones share it.
#[derive(Clone, Debug)]
pub struct Api(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: Hub,
    guard: Guard,
    limits: LimitOptions,
    max_attempts: u32,
    /// Places for requests that wait.
    waits: Semaphore,
    drain: Drain,
}

impl Api {
    /// The interface of a hub.
    pub fn new(hub: Hub, config: &HubConfig, drain: Drain) -> Self {
        Self(Arc::new(Inner {
            hub,
            guard: Guard::new(config.tokens.clone()),
            limits: config.limits.clone(),
            max_attempts: config.delivery.max_attempts,
            waits: Semaphore::new(config.limits.waits),
            drain,
        }))
    }

    /// Its routes, with those of health and metrics.
    pub fn router(self, health: &Health, metrics: Option<&Metrics>) -> Router {
        let groups = "/v1/topics/{topic}/groups/{group}";
        let of_group = |rest: &str| format!("{groups}{rest}");
        let mut router = Router::new()
            .route("/", get(front_page))
            .route("/openapi.json", get(openapi::document))
            .route("/v1/topics", get(topics::list))
            .route("/v1/topics/{topic}/events", get(topics::read).post(topics::publish))
            .route("/v1/topics/{topic}/groups", get(groups::list))
            .route(groups, put(groups::create))
            .route(&of_group("/lease"), post(groups::lease))
            .route(&of_group("/dead"), get(dead::list))
            .route(&of_group("/dead/redrive"), post(dead::redrive))
            .route(&of_group("/dead/skip"), post(dead::skip))
            .route(&of_group("/dead/purge"), post(dead::purge))
            .route(&of_group("/blocked"), get(dead::blocked))
            .route("/v1/leases/ack", post(groups::ack))
            .route("/v1/leases/nack", post(groups::nack))
            .route("/v1/leases/extend", post(groups::extend))
            .fallback(no_such_route)
            .method_not_allowed_fallback(wrong_method)
            .with_state(self)
            .merge(health.routes());
        if let Some(metrics) = metrics {
            router = router.merge(metrics.routes());
        }
        router
    }

    /// Reads a body that is within its limits of size and time.
    async fn body(&self, request: Request) -> Answer<(HeaderMap, Option<String>, Bytes)> {
        let (parts, body) = request.into_parts();
        let limit = self.0.limits.body;
        let announced = parts.headers.get("content-length").and_then(|value| value.to_str().ok());
        let announced = announced.and_then(|text| text.parse::<u64>().ok());
        let too_large = || {
            let detail = format!("the body may have {limit} bytes (limits.body)");
            Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
        };
        if announced.is_some_and(|length| length > limit as u64) {
            return Err(too_large());
        }
        let reading = axum::body::to_bytes(body, limit);
        match tokio::time::timeout(self.0.limits.receive, reading).await {
            Ok(Ok(bytes)) => Ok((parts.headers, parts.uri.query().map(str::to_owned), bytes)),
            Ok(Err(error)) => {
                let source = std::error::Error::source(&error);
                let is_limit =
                    source.is_some_and(|source| source.is::<http_body_util::LengthLimitError>());
                let cut = || Refusal::new(StatusCode::BAD_REQUEST, "the body ended early");
                Err(if is_limit { too_large() } else { cut() })
            }
            Err(_) => {
                let detail = "the body did not arrive in time (limits.receive)";
                Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, detail))
            }
        }
    }

    async fn fields(&self, request: Request) -> Answer<(HeaderMap, Fields)> {
        let (headers, _, body) = self.body(request).await?;
        Ok((headers, Fields::from_json(&body)?))
    }
}

async fn no_such_route(request: Request) -> Response<Body> {
    let path: String = request.uri().path().chars().take(200).collect();
    let detail = format!("there is nothing at {path}; GET /openapi.json tells what there is");
    Refusal::new(StatusCode::NOT_FOUND, detail).into_response()
}

async fn wrong_method(method: Method) -> Response<Body> {
    let detail = format!("this resource does not answer {method}");
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, detail).into_response()
}

async fn front_page() -> Response<Body> {
    Html(include_str!("front_page.html")).into_response()
}
