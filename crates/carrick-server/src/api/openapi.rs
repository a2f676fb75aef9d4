//! The interface, described: `GET /openapi.json`.

use axum::{
    body::Body,
    http::{Response, StatusCode},
};

use super::answer::json;

/// The document; a test holds it against the routes.
pub(super) const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document() -> Response<Body> {
    json(StatusCode::OK, DOCUMENT)
}
