//! The server's side of a call: what stands before handlers, in its one right order.
//!
//! Span → deadline → shedding → handler. Each request gets a span of its caller's trace and is counted;
//! a [`Context`](carrick_core::context::Context) with its deadline, its trace and its idempotency key is
//! in scope for the handler, and calls made from there carry it on. A request that finds no place waits
//! for one, not too long, and otherwise is told so at once, with the time to come back. Refusal and
//! expiry are a problem (RFC 9457), or gRPC's own status.
//!
//! [`ServerLayer`] is all of it, for axum, tonic, or any service of HTTP requests; [`ShedLayer`] and
//! [`ServerDeadlineLayer`] are its parts.
//!
//! Source: pattern document, deadlines and load shedding. Differs: a place is held until the body has
//! been sent; the limit learns from requests that ran out of time.

mod body;
mod config;
mod observe;
mod shed;
#[cfg(all(test, not(carrick_loom)))]
mod tests;

use http::request::Parts;
use tower_layer::Layer;

use self::observe::ObserveLayer;
pub use self::{
    body::ShedBody,
    config::{ServerConfig, ServerOptions},
    observe::{Observed, ObservedFuture},
    shed::{Shed, ShedFuture, ShedLayer},
};
use crate::{
    bulkhead::{Bulkhead, Priority},
    deadline::{ServerDeadline, ServerDeadlineLayer},
    queue::Queue,
};

/// Everything that stands before a handler.
///
/// A layer value is one server: what it makes shares the places, the line, the timer and the counts.
///
/// ```
/// use axum::{Router, routing::get};
/// use carrick_call::server::{ServerConfig, ServerLayer};
/// use carrick_core::context::Context;
/// use http::Request;
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let handler = get(|| async {
///     let left = Context::current().unwrap().deadline().remaining(tokio::time::Instant::now());
///     format!("{left:?}")
/// });
/// let server = ServerLayer::new("shop", ServerConfig::default());
/// let app: Router = Router::new().route("/", handler).layer(server);
/// let request = Request::get("/").header("x-request-timeout-ms", "500");
/// let answer = app.oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
/// assert_eq!(axum::body::to_bytes(answer.into_body(), 99).await.unwrap(), "500ms");
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ServerLayer {
    observe: ObserveLayer,
    deadline: ServerDeadlineLayer,
    shed: ShedLayer,
}

impl ServerLayer {
    /// A server, whose name labels its metrics.
    pub fn new(name: &str, config: ServerConfig) -> Self {
        let bulkhead = Bulkhead::new(name, config.bulkhead);
        Self {
            observe: ObserveLayer::new(name),
            deadline: ServerDeadlineLayer::new(config.deadline),
            shed: ShedLayer::new(Queue::new(name, config.queue, bulkhead)),
        }
    }

    /// Says which requests go first, and which are let go of first. By default all are alike.
    #[must_use]
    pub fn with_priority(
        self,
        priority: impl Fn(&Parts) -> Priority + Send + Sync + 'static,
    ) -> Self {
        Self { shed: self.shed.with_priority(priority), ..self }
    }

    /// The line before the handlers, and through it their places.
    pub fn queue(&self) -> &Queue {
        self.shed.queue()
    }
}

impl<S> Layer<S> for ServerLayer {
    type Service = Observed<ServerDeadline<Shed<S>>>;

    fn layer(&self, inner: S) -> Self::Service {
        self.observe.layer(self.deadline.layer(self.shed.layer(inner)))
    }
}
