//! Retries for a service that speaks HTTP.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{deadline::Deadline, outcome::Outcome};
use http::{HeaderValue, Request, Response};
use http_body::Body;
use metrics::{Counter, counter};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};
use tower_layer::Layer;
use tower_service::Service;

use super::{Attempt, Decision, RETRIED, Repeat, ReplayBody, RetryConfig, Stop, decide};
use crate::{
    CallError, Classify, Policy, Refusal,
    budget::{Budget, Deposit, Paid},
    classify::{Hints, Http},
    explain::{self, Explain},
    stack::Call,
};

/// The longest that a call may take, whatever its caller says: a moment further away may not be one.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Tries the calls of one dependency again.
///
/// A layer value has one budget: every service it makes, and every clone, shares it. A service is
/// given requests with any body and hands them on with a [`ReplayBody`].
///
/// A [`Deadline`] in a request's extensions wins over that of the context in scope. Either bounds all
/// attempts, the waits between them and the time until the service is ready; it ends with the head
/// of the answer. It needs a runtime with time.
///
/// ```
/// # use std::convert::Infallible;
/// # use carrick_call::{budget::{Budget, BudgetConfig}, retry::{ReplayBody, RetryConfig, RetryLayer, RETRIED}};
/// # use bytes::Bytes;
/// # use http::{Request, Response};
/// # use http_body_util::Empty;
/// # use tower::{ServiceBuilder, ServiceExt, service_fn};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
/// let budget = Budget::new("pricing", BudgetConfig::default());
/// let retry = RetryLayer::new("pricing", RetryConfig::default(), budget);
/// let service = ServiceBuilder::new().layer(retry).service(service_fn(
///     |request: Request<ReplayBody<Empty<Bytes>>>| async move {
///         let is_first = request.headers()["x-carrick-attempt"] == "1";
///         let status = if is_first { 503 } else { 200 };
///         Ok::<_, Infallible>(Response::builder().status(status).body(()).unwrap())
///     },
/// ));
/// let answer = service.oneshot(Request::get("/prices").body(Empty::new()).unwrap()).await.unwrap();
/// assert_eq!(answer.status(), 200);
/// assert_eq!(answer.headers()[RETRIED], "1");
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryLayer<C = Http> {
    shared: Arc<Shared>,
    classify: C,
}

#[derive(Clone)]
struct Shared {
    config: RetryConfig,
    budget: Budget,
    timeout: Duration,
    per_try_timeout: Option<Duration>,
    retries: Counter,
    expired: Counter,
}

impl RetryLayer {
    /// Retries for a dependency, whose name labels the metrics; a call takes 2 s at most.
    pub fn new(name: &str, config: RetryConfig, budget: Budget) -> Self {
        let label = || name.to_owned();
        let shared = Shared {
            config,
            budget,
            timeout: Duration::from_secs(2),
            per_try_timeout: None,
            retries: counter!("carrick_retry_attempts_total", "dependency" => label()),
            expired: counter!("carrick_deadline_expired_total", "dependency" => label()),
        };
        Self { shared: Arc::new(shared), classify: Http }
    }
}

impl<C> RetryLayer<C> {
    /// How long a call may take if its caller has no earlier deadline, at most a year. Default 2 s.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        Arc::make_mut(&mut self.shared).timeout = timeout.min(FOREVER);
        self
    }

    /// How long one attempt may take until the head of its answer. The last that is allowed may take
    /// what is left. Default: as long as the call.
    #[must_use]
    pub fn with_per_try_timeout(mut self, timeout: Duration) -> Self {
        Arc::make_mut(&mut self.shared).per_try_timeout = Some(timeout.min(FOREVER));
        self
    }

    /// Lets `classify` judge how an attempt ended. Over a service with policies of its own that is
    /// [`Guarded`](crate::classify::Guarded), which knows a refusal from a failure.
    pub fn with_classify<D>(self, classify: D) -> RetryLayer<D> {
        RetryLayer { shared: self.shared, classify }
    }
}

impl<S, C: Clone> Layer<S> for RetryLayer<C> {
    type Service = RetryService<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        RetryService { inner, layer: self.clone() }
    }
}

/// A service whose calls are tried again; clones share the budget.
#[derive(Clone, Debug)]
pub struct RetryService<S, C = Http> {
    inner: S,
    layer: RetryLayer<C>,
}

impl<S, C, B, T> Service<Request<B>> for RetryService<S, C>
where
    S: Service<Request<ReplayBody<B>>, Response = Response<T>> + Clone,
    C: Classify<Response<T>, S::Error> + Clone,
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    type Response = Response<T>;
    type Error = CallError<S::Error>;
    type Future = RetryFuture<S, S::Future, B, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(CallError::Inner)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let unready = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, unready);
        let RetryLayer { shared, classify } = self.layer.clone();
        let request = request.map(|body| ReplayBody::new(body, shared.config.replay()));
        let own = Deadline::at(Instant::now() + shared.timeout);
        let deadline = request.deadline().map_or(own, |asked| asked.earlier(own));
        RetryFuture {
            service: ready,
            classify,
            deadline,
            explain: request.explain().cloned(),
            next: Some(request),
            n: 0,
            backoff: 0,
            began: own.instant(),
            ends: deadline.instant(),
            deposit: None,
            paid: None,
            sleep: None,
            state: State::Readying,
            shared,
        }
    }
}

pin_project! {
    /// A call that may be tried again.
    ///
    /// Dropping it drops the attempt that is under way and gives back what it holds of the budget;
    /// what was sent may still take effect.
    #[must_use = "a call is made when it is polled"]
    pub struct RetryFuture<S, F, B, C> {
        service: S,
        classify: C,
        shared: Arc<Shared>,
        deadline: Deadline,
        explain: Option<Explain>,
        // What the next attempt sends; nothing while the last is under way.
        next: Option<Request<ReplayBody<B>>>,
        // Attempts that were sent.
        n: u32,
        backoff: u32,
        began: Instant,
        ends: Instant,
        deposit: Option<Deposit>,
        paid: Option<Paid>,
        // The end of what is awaited; armed only if something is.
        #[pin]
        sleep: Option<Sleep>,
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = Projected]
    enum State<F> {
        Readying,
        Calling { #[pin] future: F },
        Waiting,
        Done,
    }
}

impl<S, F, B, C, T, E> Future for RetryFuture<S, F, B, C>
where
    S: Service<Request<ReplayBody<B>>, Response = Response<T>, Error = E, Future = F>,
    F: Future<Output = Result<Response<T>, E>>,
    C: Classify<Response<T>, E>,
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    type Output = Result<Response<T>, CallError<E>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let mut this = self.as_mut().project();
            let over = match this.state.as_mut().project() {
                Projected::Readying => match this.service.poll_ready(cx) {
                    Poll::Ready(Ok(())) => self.as_mut().send(),
                    // Whoever is not ready for good is not to be asked again.
                    Poll::Ready(Err(error)) => Some(Err(CallError::Inner(error))),
                    Poll::Pending => {
                        ready!(arm(this.sleep, *this.ends).poll(cx));
                        Some(self.as_mut().late(Duration::ZERO))
                    }
                },
                Projected::Calling { future } => match future.poll(cx) {
                    Poll::Ready(result) => self.as_mut().ended(Some(result)),
                    Poll::Pending => {
                        ready!(arm(this.sleep, *this.ends).poll(cx));
                        self.as_mut().ended(None)
                    }
                },
                Projected::Waiting => {
                    ready!(arm(this.sleep.as_mut(), *this.ends).poll(cx));
                    this.sleep.set(None);
                    *this.ends = this.deadline.instant();
                    this.state.set(State::Readying);
                    None
                }
                Projected::Done => panic!("polled after it was over"),
            };
            if let Some(result) = over {
                let mut this = self.as_mut().project();
                this.state.set(State::Done);
                // What is held of the budget is given back at once, not with the future.
                (*this.deposit, *this.paid, *this.next) = (None, None, None);
                return Poll::Ready(result);
            }
        }
    }
}

/// The timer of what is awaited; made when something is, for mostly nothing has to be.
fn arm(mut sleep: Pin<&mut Option<Sleep>>, ends: Instant) -> Pin<&mut Sleep> {
    if sleep.is_none() {
        sleep.set(Some(sleep_until(ends)));
    }
    sleep.as_pin_mut().expect("just set")
}

type Over<T, E> = Option<Result<Response<T>, CallError<E>>>;

impl<S, F, B, C, T, E> RetryFuture<S, F, B, C>
where
    S: Service<Request<ReplayBody<B>>, Response = Response<T>, Error = E, Future = F>,
    C: Classify<Response<T>, E>,
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    /// Sends an attempt to a service that is ready.
    fn send(mut self: Pin<&mut Self>) -> Over<T, E> {
        let mut this = self.as_mut().project();
        let (config, now) = (&this.shared.config, Instant::now());
        let left = this.deadline.remaining(now);
        if left < config.min_useful() {
            return Some(self.late(left));
        }
        if *this.n == 0 {
            *this.deposit = Some(this.shared.budget.deposit(now));
        }
        *this.n += 1;
        let mut request = this.next.take().expect("kept for each attempt that is made");
        let is_last = *this.n >= config.max_attempts();
        // Also of an unsafe request: that it was never sent shows only later.
        *this.next = (!is_last).then(|| request.copy());
        *this.began = now;
        *this.ends = match this.shared.per_try_timeout {
            Some(span) if !is_last => this.deadline.instant().min(now + span),
            _ => this.deadline.instant(),
        };
        request.prepare(*this.n, Deadline::at(*this.ends), now);
        let future = this.service.call(request);
        this.sleep.set(None);
        this.state.set(State::Calling { future });
        None
    }

    /// Too little time is left for an attempt.
    fn late(self: Pin<&mut Self>, left: Duration) -> Result<Response<T>, CallError<E>> {
        let this = self.project();
        this.shared.expired.increment(1);
        if let Some(explain) = this.explain {
            let (n, useful) = (*this.n + 1, this.shared.config.min_useful());
            let (left, useful) = (left.as_millis(), useful.as_millis());
            explain.note(Policy::Deadline, || {
                format!("attempt {n} not made: {left} ms left < {useful} ms")
            });
        }
        // A refusal says that nothing was sent.
        Err(if *this.n == 0 { TOO_LATE.into() } else { CallError::Expired })
    }

    /// An attempt ended, by itself or (`None`) by our timer.
    fn ended(self: Pin<&mut Self>, result: Option<Result<Response<T>, E>>) -> Over<T, E> {
        let mut this = self.project();
        // What is under way is dropped before anything else: it must not go on beside a retry.
        this.state.set(State::Waiting);
        this.sleep.set(None);
        *this.paid = None;
        let (shared, n) = (&*this.shared, *this.n);
        let outcome = match &result {
            Some(result) => this.classify.classify(result.as_ref()),
            None => Outcome::Expired,
        };
        shared.budget.settle(outcome);
        tell(this.explain, n, outcome, *this.began);
        if outcome == Outcome::Success {
            return Some(answer(result, n));
        }
        let hints = match &result {
            Some(result) => this.classify.hints(result.as_ref()),
            None => {
                shared.expired.increment(1);
                Hints { is_local: true, ..Hints::default() }
            }
        };
        let now = Instant::now();
        let attempt = Attempt {
            n,
            outcome,
            timed_out_here: result.is_none(),
            repeat: repeat(this.next.as_ref(), hints),
            answered: false,
            retried_below: hints.retried_below,
            pushback: hints.pushback,
            backoff: *this.backoff,
            deadline: *this.deadline,
        };
        let pay = || shared.budget.withdraw(now);
        match decide(&attempt, &shared.config, now, &mut rand::rng(), pay) {
            Decision::Retry { delay, asked, paid } => {
                let left = || shared.budget.balance(now);
                tell_retry(this.explain, n, delay, left);
                shared.retries.increment(1);
                *this.backoff = if asked { 0 } else { this.backoff.saturating_add(1) };
                (*this.paid, *this.ends) = (Some(paid), now + delay);
                None
            }
            Decision::Stop(stop) => {
                tell_stop(this.explain, n, stop);
                Some(answer(result, n))
            }
        }
    }
}

const TOO_LATE: Refusal = Refusal::new(Policy::Deadline, "too little time is left");

/// Whether the request that was kept may be sent again.
fn repeat<R: Call>(kept: Option<&R>, hints: Hints) -> Repeat {
    match kept {
        Some(request) if !request.is_replayable() => Repeat::BodyGone,
        Some(request) if request.is_idempotent() => Repeat::Idempotent,
        _ if hints.never_sent => Repeat::NeverSent,
        _ => Repeat::Unsafe,
    }
}

/// What the caller gets; whoever sees the mark does not try again on top of our attempts.
fn answer<T, E>(
    result: Option<Result<Response<T>, E>>,
    attempts: u32,
) -> Result<Response<T>, CallError<E>> {
    let mut answer = result.ok_or(CallError::Expired)?.map_err(CallError::Inner)?;
    if attempts > 1 {
        answer.headers_mut().insert(RETRIED, HeaderValue::from(attempts - 1));
    }
    Ok(answer)
}

fn tell(explain: &Option<Explain>, n: u32, outcome: Outcome, began: Instant) {
    if let Some(explain) = explain {
        let elapsed = Instant::now().saturating_duration_since(began);
        let outcome = explain::word(outcome);
        explain.attempt(explain::Attempt { n, host: None, outcome, elapsed });
    }
}

fn tell_retry(explain: &Option<Explain>, n: u32, delay: Duration, left: impl FnOnce() -> u64) {
    if let Some(explain) = explain {
        let millis = delay.as_millis();
        explain.add("retry", || {
            format!("attempt {} in {millis} ms; the budget has {} more", n + 1, left())
        });
    }
}

fn tell_stop(explain: &Option<Explain>, n: u32, stop: Stop) {
    if let Some(explain) = explain {
        explain.add("retry", || format!("no attempt {}: {stop}", n + 1));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl<S, F, B, C> fmt::Debug for RetryFuture<S, F, B, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryFuture").field("attempts", &self.n).finish_non_exhaustive()
    }
}
