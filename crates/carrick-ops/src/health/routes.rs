//! The three routes.

use axum::{
    Router,
    response::{IntoResponse, Response},
    routing::get,
};
use carrick_core::problem::{PROBLEM, Problem};
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
    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail);
    refusal(&problem.with("event_loop_lag_ms", lag_ms))
}

fn readyz(health: &Health) -> Response {
    let readiness = health.readiness();
    if readiness.is_ready() {
        return answer(json!({ "status": "ready" }));
    }
    let reasons: Vec<_> = readiness.unready.iter().map(|own| own.reason.as_str()).collect();
    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, reasons.join("; "));
    refusal(&problem.with("conditions", json!(readiness.unready)))
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

fn refusal(problem: &Problem) -> Response {
    let headers = [(CACHE_CONTROL, "no-store"), (CONTENT_TYPE, PROBLEM)];
    let body = serde_json::to_string(problem).expect("a problem has string keys");
    (StatusCode::SERVICE_UNAVAILABLE, headers, body).into_response()
}
