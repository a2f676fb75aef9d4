//! Pages of other origins: those that are listed may read what the hub answers (Fetch standard, CORS).

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, Response, StatusCode,
        header::{
            ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
            ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
            ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
        },
    },
    middleware::Next,
};

use super::Api;

/// Answers what a browser asks beforehand, and marks what it may read.
pub(super) async fn apply(State(api): State<Api>, request: Request, next: Next) -> Response<Body> {
    let listed = api.listed(request.headers());
    let asks = request.method() == Method::OPTIONS
        && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    if asks && listed.is_some() {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        mark(headers, listed);
        let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
        put(ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, PUT, DELETE");
        put(ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, last-event-id");
        put(ACCESS_CONTROL_MAX_AGE, "600");
        return response;
    }
    let mut response = next.run(request).await;
    mark(response.headers_mut(), listed);
    response
}

/// Lets a page of this origin read an answer.
pub(super) fn mark(headers: &mut HeaderMap, listed: Option<HeaderValue>) {
    let Some(origin) = listed else { return };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(VARY, HeaderValue::from_static("origin"));
    let exposed = HeaderValue::from_static("carrick-position, retry-after");
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
}

impl Api {
    /// The origin of a request, if it is listed.
    pub(super) fn listed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        origin.to_str().is_ok_and(|text| self.0.guard.is_listed(text)).then(|| origin.clone())
    }
}
