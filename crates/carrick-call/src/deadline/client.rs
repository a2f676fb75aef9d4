//! Deadlines of a client: what remains is sent, and what takes longer is ended.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
};

use bytes::Bytes;
use carrick_core::{context::Context, deadline::Deadline};
use http::{Request, Response};
use http_body::Body;
use metrics::{Counter, counter};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    ClientDeadlineConfig, ClientDeadlineOptions, DeadlineBody, Streaming, Timer,
    body::Limit,
    core::Span,
    is_stream,
    watch::{Bound, Watch},
    wire::{has_trace, write_deadline, write_trace},
};
use crate::{CallError, Policy, Refusal};

const TOO_LATE: Refusal = Refusal::new(Policy::Deadline, "too little time is left");

/// Keeps the deadlines of calls to one dependency, and tells it what remains.
///
/// For any service of HTTP requests that is not in a [`stack`](crate::stack), which keeps deadlines
/// itself. The deadline is a [`Deadline`] in the request's extensions, else that of the [`Context`] in
/// scope, and our own `timeout` if it comes sooner. Also a new span of the context's trace is sent,
/// unless the request has one. The context's idempotency key is not: a handler that makes two different
/// calls has two effects, and the second would be taken for a repeat of the first.
///
/// The answer's body and trailers are part of the call, unless it is a stream ([`Streaming`]), which has
/// limits of its own from its head on. Expiry drops what is under way and gives
/// [`CallError::Expired`]; a body breaks off.
///
/// A layer value is one dependency: its services share the timer.
///
/// ```
/// # use bytes::Bytes;
/// # use carrick_call::{CallError, deadline::{ClientDeadlineConfig, DeadlineLayer}};
/// # use http::{Request, Response};
/// # use http_body_util::Empty;
/// # use tower::{ServiceBuilder, ServiceExt, service_fn};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let service = ServiceBuilder::new()
///     .layer(DeadlineLayer::new("pricing", ClientDeadlineConfig::default()))
///     .service(service_fn(|request: Request<()>| async move {
///         assert_eq!(request.headers()["x-request-timeout-ms"], "2000");
///         std::future::pending::<Result<Response<Empty<Bytes>>, ()>>().await
///     }));
/// let error = service.oneshot(Request::new(())).await.unwrap_err();
/// assert!(matches!(error, CallError::Expired));
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeadlineLayer(Arc<Client>);

struct Client {
    options: ClientDeadlineOptions,
    timer: Timer,
    refused: Counter,
    expired: Counter,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("options", &self.options).finish_non_exhaustive()
    }
}

impl DeadlineLayer {
    /// A layer for one dependency, whose name labels its metrics.
    pub fn new(name: &str, config: ClientDeadlineConfig) -> Self {
        Self(Arc::new(Client {
            options: config.options,
            timer: Timer::new(),
            refused: counter!("carrick_deadline_refused_total", "dependency" => name.to_owned()),
            expired: counter!("carrick_deadline_expired_total", "dependency" => name.to_owned()),
        }))
    }

    /// Deadlines that are armed: those of calls that wait.
    pub fn armed(&self) -> usize {
        self.0.timer.armed()
    }
}

impl<S> Layer<S> for DeadlineLayer {
    type Service = DeadlineService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        DeadlineService { inner, client: Arc::clone(&self.0) }
    }
}

/// A dependency whose calls end in time; see [`DeadlineLayer`]. Clones share the timer.
#[derive(Clone, Debug)]
pub struct DeadlineService<S> {
    inner: S,
    client: Arc<Client>,
}

impl<S, B, R> Service<Request<B>> for DeadlineService<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    type Response = Response<DeadlineBody<R>>;
    type Error = CallError<S::Error>;
    type Future = DeadlineFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        // Never refuse here: an `Err` tells the caller to throw the service away.
        self.inner.poll_ready(cx).map_err(CallError::Inner)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let now = Instant::now();
        let ClientDeadlineOptions { timeout, min_useful, stream, mode } = self.client.options;
        let context = Context::current();
        let explicit = request.extensions().get::<Deadline>().copied();
        let asked = explicit.or_else(|| context.as_ref().map(Context::deadline));
        let own = Deadline::at(now + timeout);
        let deadline = asked.map_or(own, |asked| asked.earlier(own));
        let stream = stream.ends(asked, now);
        let is_streaming = request.extensions().get::<Streaming>().is_some();
        if deadline.remaining(now) < min_useful {
            self.client.refused.increment(1);
            if mode.enforces() {
                // The inner readiness stays unspent; this clone's next call uses it.
                return DeadlineFuture { state: State::Over { refusal: Some(TOO_LATE) } };
            }
        }
        let headers = request.headers_mut();
        write_deadline(headers, if is_streaming { stream } else { deadline }, now);
        if let Some(context) = context
            && !has_trace(headers)
        {
            write_trace(headers, &context);
        }
        let ends = Ends { head: deadline.instant(), stream: stream.instant(), is_streaming };
        let watch = Some(Watch::new(self.client.timer.clone(), ends.head));
        let inner = self.inner.call(request);
        DeadlineFuture {
            state: State::Sent { inner, ends, watch, client: Arc::clone(&self.client) },
        }
    }
}

/// Until when a call may go on.
#[derive(Clone, Copy, Debug)]
struct Ends {
    /// Its head, and its body if that is no stream.
    head: Instant,
    /// Its body if it is one.
    stream: Instant,
    /// Whether that is known before the head.
    is_streaming: bool,
}

pin_project! {
    /// A call under its deadline. Dropping it ends the call; what was sent may still take effect.
    #[derive(Debug)]
    #[must_use = "a call is made when it is polled"]
    pub struct DeadlineFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum State<F> {
        Sent {
            #[pin]
            inner: F,
            ends: Ends,
            // None: it has expired, and that is only counted.
            watch: Option<Watch>,
            client: Arc<Client>,
        },
        Over { refusal: Option<Refusal> },
    }
}

impl<F, R, E> Future for DeadlineFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<DeadlineBody<R>>, CallError<E>>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        match state.as_mut().project() {
            Projected::Over { refusal } => {
                let refusal = refusal.take().expect("polled after it was over");
                return Poll::Ready(Err(refusal.into()));
            }
            Projected::Sent { inner, ends, watch, client } => {
                if let Poll::Ready(result) = inner.poll(cx) {
                    let watch = watch.take();
                    let result = result.map_err(CallError::Inner).map(|answer| {
                        let span = if ends.is_streaming || is_stream(&answer) {
                            Span::stream(Instant::now(), &client.options.stream, ends.stream)
                        } else {
                            Span::Whole(ends.head)
                        };
                        let limit = Limit {
                            bound: Bound::new(span, client.timer.clone()),
                            // What has been counted is not counted again.
                            expired: match watch {
                                Some(_) => client.expired.clone(),
                                None => Counter::noop(),
                            },
                            enforces: client.options.mode.enforces(),
                            in_trailers: false,
                        };
                        answer.map(|body| DeadlineBody::new(body, limit))
                    });
                    state.set(State::Over { refusal: None });
                    return Poll::Ready(result);
                }
                let Some(waits) = watch else { return Poll::Pending };
                ready!(waits.poll(ends.head, cx));
                client.expired.increment(1);
                if !client.options.mode.enforces() {
                    *watch = None;
                    return Poll::Pending;
                }
            }
        }
        // The exchange ends here, before anybody is answered.
        state.set(State::Over { refusal: None });
        Poll::Ready(Err(CallError::Expired))
    }
}
