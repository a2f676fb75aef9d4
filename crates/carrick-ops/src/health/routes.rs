//! The three routes.

use axum::{
    Router,
    response::{IntoResponse, Response},
    routing::get,
};
use http::{
    StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde_json::json;

use super::Health;

pub(super) fn routes<S: Clone + Send + Sync + 'static>(health: Health) -> Router<S> {
    let (live, ready, deep) = (health.clone(), health.clone(), health);
    Router::new()
        .route("/livez", get(async move || livez(&live)))
        .route("/readyz", get(async move || readyz(&ready)))
        .route("/debug/deep", get(async move || debug_deep(&deep).await))
}

fn livez(health: &Health) -> Response {
    let lag = health.event_loop_lag();
    let lag_ms = lag.as_secs_f64() * 1e3;
    if lag < health.0.config.lag_limit {
        return answer(json!({ "status": "alive", "event_loop_lag_ms": lag_ms }));
    }
    let detail = format!("the event loop is {lag:?} late");
    problem("not alive", &detail, json!({ "event_loop_lag_ms": lag_ms }))
}

fn readyz(health: &Health) -> Response {
    let readiness = health.readiness();
    if readiness.is_ready() {
        return answer(json!({ "status": "ready" }));
    }
    let reasons: Vec<_> = readiness.unready.iter().map(|own| own.reason.as_str()).collect();
    problem("not ready", &reasons.join("; "), json!({ "conditions": readiness.unready }))
}

/// Always 200: it is a report and no verdict, so that nobody can hang a probe on it.
async fn debug_deep(health: &Health) -> Response {
    let report = health.deep().await;
    let healthy = report.dependencies.values().all(|dependency| dependency.ok);
    let status = if healthy { "healthy" } else { "degraded" };
    answer(json!({ "status": status, "dependencies": report.dependencies }))
}

fn answer(body: serde_json::Value) -> Response {
    let headers = [(CACHE_CONTROL, "no-store"), (CONTENT_TYPE, "application/json")];
    (headers, body.to_string()).into_response()
}

/// RFC 9457, with the members of `more` beside the standard ones.
fn problem(title: &str, detail: &str, more: serde_json::Value) -> Response {
    let mut body =
        json!({ "type": "about:blank", "title": title, "status": 503, "detail": detail });
    if let (Some(body), serde_json::Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    let headers = [(CACHE_CONTROL, "no-store"), (CONTENT_TYPE, "application/problem+json")];
    (StatusCode::SERVICE_UNAVAILABLE, headers, body.to_string()).into_response()
}
