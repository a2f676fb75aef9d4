//! The HTTP interface: topics, groups, leases, dead letters.
//!
//! Bodies of events pass through as they are: what a reader gets is joined from the documents that
//! publishers sent. Every error is a problem (RFC 9457) that names what is wrong.

mod answer;
mod auth;
mod cors;
mod dead;
mod feed;
mod fields;
mod grant;
mod groups;
mod openapi;
mod topics;
mod websocket;

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Request, State, rejection::PathRejection},
    http::{HeaderMap, Method, Response, StatusCode, header::CONTENT_TYPE, request::Parts},
    middleware::{self, Next},
    response::{Html, IntoResponse},
    routing::{get, post, put},
};
use bytes::Bytes;
use carrick_core::problem::Problem;
use carrick_edge::{feed::Feed, websocket::Sessions};
use carrick_ops::{drain::Drain, health::Health, telemetry::Metrics};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use self::{
    answer::{Answer, Refusal},
    auth::Guard,
    fields::Fields,
};
use crate::{
    config::{HubConfig, LimitOptions, Scope},
    hub::Hub,
};

/// What handlers work with. Clones share it.
#[derive(Clone, Debug)]
pub struct Api(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: Hub,
    feed: Feed,
    sessions: Arc<Sessions>,
    guard: Guard,
    limits: LimitOptions,
    max_attempts: u32,
    /// Places for requests that wait.
    waits: Semaphore,
    drain: Drain,
}

/// Clients whose acknowledgements are remembered: some 5 MiB.
const SESSIONS: usize = 100_000;

impl Api {
    /// The interface of a hub.
    pub fn new(hub: Hub, config: &HubConfig, drain: Drain) -> Self {
        Self(Arc::new(Inner {
            feed: Feed::new(hub.store().clone(), hub.seal.clone(), config.feed.clone()),
            guard: Guard::new(config, config.listen.ip().is_loopback(), hub.seal.clone()),
            sessions: Arc::new(Sessions::new(SESSIONS)),
            hub,
            limits: config.limits.clone(),
            max_attempts: config.delivery.max_attempts,
            waits: Semaphore::new(config.limits.waits),
            drain,
        }))
    }

    /// Tells the readers to leave once the drain begins, spread over its window.
    ///
    /// # Cancel safety
    /// Safe to drop: the readers stay until the drain forces them.
    pub async fn farewell(self) {
        self.0.drain.announced().cancelled().await;
        self.0.feed.drain(self.0.drain.window_left());
    }

    /// Its routes, with those of health and metrics.
    pub fn router(self, health: &Health, metrics: Option<&Metrics>) -> Router {
        let groups = "/v1/topics/{topic}/groups/{group}";
        let of_group = |rest: &str| format!("{groups}{rest}");
        let mut router = Router::new()
            .route("/", get(front_page))
            .route("/openapi.json", get(openapi::document))
            .route("/v1/topics", get(topics::list))
            .route("/v1/topics/{topic}/events", get(feed::read).post(topics::publish))
            .route("/v1/topics/{topic}/groups", get(groups::list))
            .route(groups, put(groups::create))
            .route(&of_group("/lease"), post(groups::lease))
            .route(&of_group("/dead"), get(dead::list))
            .route(&of_group("/dead/redrive"), post(dead::redrive))
            .route(&of_group("/dead/skip"), post(dead::skip))
            .route(&of_group("/dead/purge"), post(dead::purge))
            .route(&of_group("/blocked"), get(dead::blocked))
            .route("/v1/subscriptions/token", post(grant::mint))
            .route("/v1/leases/ack", post(groups::ack))
            .route("/v1/leases/nack", post(groups::nack))
            .route("/v1/leases/extend", post(groups::extend))
            .fallback(no_such_route)
            .method_not_allowed_fallback(wrong_method)
            .with_state(self.clone())
            .merge(health.routes().layer(middleware::from_fn_with_state(self.clone(), inner_view)));
        if let Some(metrics) = metrics {
            let routes = metrics.routes();
            router = router
                .merge(routes.layer(middleware::from_fn_with_state(self.clone(), inner_view)));
        }
        router.layer(middleware::from_fn_with_state(self, cors::apply))
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
            // A client that is still sending when the connection closes never sees the answer.
            let patience = self.0.limits.receive;
            let discarded = tokio::time::timeout(patience, discard(body, DISCARDED * limit)).await;
            drop(discarded);
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
        check_json(&headers, &body)?;
        Ok((headers, Fields::from_json(&body)?))
    }

    /// A place among the requests that wait, given back when it is dropped.
    fn place(
        &self,
        headers: &HeaderMap,
    ) -> Answer<(Option<OwnedSemaphorePermit>, SemaphorePermit<'_>)> {
        let own = self.0.guard.caller(headers)?.place()?;
        let place = self.0.waits.try_acquire();
        Ok((own, place.map_err(|_| Refusal::busy("too many requests wait", 5))?))
    }
}

/// How many times the limit of a body is read and dropped before the connection is closed on it.
const DISCARDED: usize = 4;

/// Reads and drops a body, up to so many bytes.
async fn discard(mut body: Body, most: usize) {
    let mut seen = 0;
    while let Some(Ok(frame)) = body.frame().await {
        seen += frame.data_ref().map_or(0, Bytes::len);
        if seen > most {
            return;
        }
    }
}

/// What a form of a web page could send without asking is refused: a page that somebody visits must
/// not reach their hub.
fn check_json(headers: &HeaderMap, body: &[u8]) -> Answer<()> {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = value.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let is_json = essence.eq_ignore_ascii_case("application/json")
        || essence.to_ascii_lowercase().ends_with("+json");
    if is_json || (body.is_empty() && essence.is_empty()) {
        return Ok(());
    }
    let found: String = essence.chars().take(80).collect();
    let range = "application/json";
    let problem = Problem::invalid("content-type", range, format!("{found:?}"));
    Err(problem.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE).into())
}

/// Metrics and the report on dependencies name topics and groups of every tenant: where there are
/// tokens, they are for operators. Probes need none.
async fn inner_view(State(api): State<Api>, request: Request, next: Next) -> Answer {
    if matches!(request.uri().path(), "/metrics" | "/debug/deep") {
        api.0.guard.caller(request.headers())?.any(Scope::Admin)?;
    }
    Ok(next.run(request).await)
}

/// The names in a path; one that is not UTF-8 is a problem like any other.
#[derive(Debug)]
struct Named<T>(T);

impl<S, T> FromRequestParts<S> for Named<T>
where
    S: Send + Sync,
    axum::extract::Path<T>: FromRequestParts<S, Rejection = PathRejection>,
{
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let names = axum::extract::Path::from_request_parts(parts, state).await;
        names
            .map(|axum::extract::Path(names)| Self(names))
            .map_err(|rejection| Refusal::new(rejection.status(), rejection.body_text()))
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
