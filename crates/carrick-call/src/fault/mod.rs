//! Fault injection: delays and failures on purpose, where real ones would come from.
//!
//! A timeout that was never seen to fire is a guess. Faults are injected *inside the attempt*, so that
//! they look to every policy above like the dependency's own: a delay runs into the timeout of a try,
//! an abort is retried and counted by the breaker. They touch only requests that match, at most so many
//! at a time, and only the share that is set.
//!
//! Delay and abort are drawn apart: a delay of 100 % with an abort of 10 % makes every call late, and a
//! tenth of them late and failed. A header may ask for less than is set, and never for more.
//!
//! Source: pattern document, fault injection; Envoy's fault filter and gRFC A33 for headers and caps.
//! Differs: inside the attempt (istio#13705).

mod config;

use std::{
    cell::RefCell,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use metrics::{Counter, counter};
use pin_project_lite::pin_project;
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::{Sleep, sleep};
use tower_layer::Layer;
use tower_service::Service;

pub use self::config::{AbortOptions, DelayOptions, FaultConfig, FaultOptions};
use crate::{Policy, explain::Explain};

/// Asks for a delay with a lower share than is set, in millionths.
pub const DELAY_SHARE: HeaderName = HeaderName::from_static("x-carrick-fault-delay-share");

/// Asks for an abort with a lower share than is set, in millionths.
pub const ABORT_SHARE: HeaderName = HeaderName::from_static("x-carrick-fault-abort-share");

/// What a million means: always.
const MILLION: u32 = 1_000_000;

/// What is done to a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Injected {
    /// It waits.
    pub delay: Option<Duration>,
    /// It is answered without being sent.
    pub abort: Option<StatusCode>,
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { delay, abort } = self;
        if let Some(delay) = delay {
            write!(f, "made late by {} ms", delay.as_millis())?;
        }
        if let Some(status) = abort {
            let and = if delay.is_some() { ", and " } else { "" };
            write!(f, "{and}answered with {} without being sent", status.as_u16())?;
        }
        Ok(())
    }
}

/// The faults of one dependency. Clones share the count of those under way.
///
/// ```
/// use carrick_call::fault::{AbortOptions, Fault, FaultConfig, FaultOptions};
/// let abort = Some(AbortOptions { share: 1.0, status: 503 });
/// let options = FaultOptions { abort, ..FaultOptions::default() };
/// let fault = Fault::new("pricing", FaultConfig::try_from(options)?);
/// let injected = fault.draw(&http::HeaderMap::new(), &mut rand::rng()).expect("always");
/// assert_eq!(injected.injected().abort, Some(http::StatusCode::SERVICE_UNAVAILABLE));
/// # Ok::<(), carrick_core::config::InvalidConfig>(())
/// ```
#[derive(Clone)]
pub struct Fault(Arc<Inner>);

struct Inner {
    config: FaultConfig,
    active: AtomicU32,
    delayed: Counter,
    aborted: Counter,
    capped: Counter,
    junk: Counter,
}

/// A fault that is under way for as long as this lives.
#[derive(Debug)]
#[must_use = "a fault counts only while this lives"]
pub struct Active {
    fault: Fault,
    injected: Injected,
}

impl Active {
    /// What is done.
    pub fn injected(&self) -> Injected {
        self.injected
    }
}

impl Fault {
    /// Faults for calls to one dependency, whose name labels their metrics.
    pub fn new(name: &str, config: FaultConfig) -> Self {
        let count = |kind: &'static str| counter!("carrick_fault_total", "dependency" => name.to_owned(), "kind" => kind);
        Self(Arc::new(Inner {
            config,
            active: AtomicU32::new(0),
            delayed: count("delay"),
            aborted: count("abort"),
            capped: count("capped"),
            junk: count("junk"),
        }))
    }

    /// Draws what is done to a call; `None` for nothing.
    pub fn draw(&self, headers: &HeaderMap, rng: &mut (impl Rng + ?Sized)) -> Option<Active> {
        let FaultOptions { delay, abort, header, max_active } = self.0.config.options();
        if let Some((name, value)) = header
            && headers.get(name.as_str()).is_none_or(|found| found != value.as_str())
        {
            return None;
        }
        let mut share = |set: f64, asks: &HeaderName| {
            let set = (set * f64::from(MILLION)) as u32;
            let share = match headers.get(asks) {
                None => set,
                Some(asked) => {
                    match asked.to_str().ok().and_then(|text| text.parse::<u32>().ok()) {
                        Some(asked) => asked.min(set),
                        None => {
                            self.0.junk.increment(1);
                            set
                        }
                    }
                }
            };
            rng.random_range(0..MILLION) < share
        };
        let is_delayed = delay.as_ref().is_some_and(|delay| share(delay.share, &DELAY_SHARE));
        let is_aborted = abort.as_ref().is_some_and(|abort| share(abort.share, &ABORT_SHARE));
        if !is_delayed && !is_aborted {
            return None;
        }
        let one_more = |active: u32| (active < *max_active).then_some(active + 1);
        if self.0.active.fetch_update(Relaxed, Relaxed, one_more).is_err() {
            self.0.capped.increment(1);
            return None;
        }
        let delay = delay.as_ref().filter(|_| is_delayed).map(|delay| {
            let most = u64::try_from(delay.jitter.as_nanos()).unwrap_or(u64::MAX);
            delay.time + Duration::from_nanos(rng.random_range(0..=most))
        });
        let abort = abort.as_ref().filter(|_| is_aborted).map(AbortOptions::code);
        self.0.delayed.increment(u64::from(delay.is_some()));
        self.0.aborted.increment(u64::from(abort.is_some()));
        Some(Active { fault: self.clone(), injected: Injected { delay, abort } })
    }

    /// Faults under way.
    pub fn active(&self) -> u32 {
        self.0.active.load(Relaxed)
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.fault.0.active.fetch_sub(1, Relaxed);
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault").field("active", &self.active()).finish_non_exhaustive()
    }
}

/// Injects faults into calls of HTTP; put it inside of every policy that is to be tried.
///
/// A layer value is one set of faults: its services share the cap.
#[derive(Clone, Debug)]
pub struct FaultLayer(Fault);

impl FaultLayer {
    /// Injects these.
    pub fn new(fault: Fault) -> Self {
        Self(fault)
    }
}

impl<S> Layer<S> for FaultLayer {
    type Service = FaultService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        FaultService { inner, fault: Some(self.0.clone()) }
    }
}

/// A service some calls of which go wrong on purpose.
#[derive(Clone, Debug)]
pub struct FaultService<S> {
    inner: S,
    fault: Option<Fault>,
}

impl<S> FaultService<S> {
    /// A service that goes wrong only if there are faults.
    #[cfg(feature = "client")]
    pub(crate) fn maybe(inner: S, fault: Option<Fault>) -> Self {
        Self { inner, fault }
    }
}

thread_local! {
    static RNG: RefCell<SmallRng> = RefCell::new(SmallRng::from_rng(&mut rand::rng()));
}

impl<S, B, R> Service<Request<B>> for FaultService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = FaultFuture<S, B>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let active = self.fault.as_ref().and_then(|fault| {
            RNG.with(|rng| fault.draw(request.headers(), &mut *rng.borrow_mut()))
        });
        if let (Some(active), Some(explain)) = (&active, request.extensions().get::<Explain>()) {
            explain.note(Policy::Fault, || active.injected.to_string());
        }
        let state = match &active {
            None => State::Sent { inner: self.inner.call(request) },
            Some(active) => {
                // The service that was ready goes along; the clone in its place has to become so.
                let clone = self.inner.clone();
                let service = std::mem::replace(&mut self.inner, clone);
                let sleep = active.injected.delay.map(sleep);
                State::Late { sleep, next: Some((service, request)) }
            }
        };
        FaultFuture { active, state }
    }
}

pin_project! {
    /// A call that may go wrong on purpose. Dropping it ends the fault.
    #[must_use = "a call is made when it is polled"]
    pub struct FaultFuture<S: Service<Request<B>>, B> {
        active: Option<Active>,
        #[pin]
        state: State<S, B, S::Future>,
    }
}

pin_project! {
    #[project = Projected]
    enum State<S, B, F> {
        Sent { #[pin] inner: F },
        Late { #[pin] sleep: Option<Sleep>, next: Option<(S, Request<B>)> },
    }
}

impl<S, B, R> Future for FaultFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Default,
{
    type Output = Result<Response<R>, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let mut this = self.as_mut().project();
            match this.state.as_mut().project() {
                Projected::Sent { inner } => return inner.poll(cx),
                Projected::Late { sleep, next } => {
                    if let Some(sleep) = sleep.as_pin_mut() {
                        ready!(sleep.poll(cx));
                    }
                    let (mut service, request) = next.take().expect("polled once after the wait");
                    let abort = this.active.take().and_then(|active| active.injected.abort);
                    if let Some(status) = abort {
                        let mut answer = Response::new(R::default());
                        *answer.status_mut() = status;
                        return Poll::Ready(Ok(answer));
                    }
                    let inner = service.call(request);
                    this.state.set(State::Sent { inner });
                }
            }
        }
    }
}

impl<S: Service<Request<B>>, B> fmt::Debug for FaultFuture<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultFuture").field("active", &self.active).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use tokio::time::Instant;
    use tower::{ServiceExt, service_fn};

    use super::*;

    fn fault(options: FaultOptions) -> Fault {
        Fault::new("test", FaultConfig::try_from(options).unwrap())
    }

    fn delay(share: f64) -> Option<DelayOptions> {
        Some(DelayOptions { share, time: Duration::from_secs(1), jitter: Duration::ZERO })
    }

    fn abort(share: f64) -> Option<AbortOptions> {
        Some(AbortOptions { share, status: 503 })
    }

    #[test]
    fn delay_and_abort_are_drawn_apart() {
        let fault =
            fault(FaultOptions { delay: delay(1.0), abort: abort(0.1), ..Default::default() });
        let mut rng = SmallRng::seed_from_u64(1);
        let drawn: Vec<_> = (0..10_000)
            .map(|_| fault.draw(&HeaderMap::new(), &mut rng).expect("always late").injected())
            .collect();
        assert!(drawn.iter().all(|one| one.delay.is_some()));
        let aborted = drawn.iter().filter(|one| one.abort.is_some()).count();
        assert!((900..1100).contains(&aborted), "{aborted}");
        assert_eq!(fault.active(), 0);
    }

    #[test]
    fn a_header_asks_for_less_and_never_for_more_and_junk_for_nothing() {
        let fault = fault(FaultOptions { abort: abort(0.5), ..Default::default() });
        let count = |asked: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(asked) = asked {
                headers.insert(ABORT_SHARE, asked.parse().unwrap());
            }
            let mut rng = SmallRng::seed_from_u64(2);
            (0..10_000).filter(|_| fault.draw(&headers, &mut rng).is_some()).count()
        };
        assert!((4800..5200).contains(&count(None)));
        assert!((900..1100).contains(&count(Some("100000"))));
        assert_eq!(count(Some("0")), 0);
        assert!((4800..5200).contains(&count(Some("1000000"))));
        assert!((4800..5200).contains(&count(Some("-1"))));
    }

    #[test]
    fn only_what_matches_goes_wrong_and_at_most_so_many_at_a_time() {
        let header = Some(("x-canary".to_owned(), "yes".to_owned()));
        let fault =
            fault(FaultOptions { abort: abort(1.0), header, max_active: 2, ..Default::default() });
        let mut rng = SmallRng::seed_from_u64(3);
        assert!(fault.draw(&HeaderMap::new(), &mut rng).is_none());
        let mut headers = HeaderMap::new();
        headers.insert("x-canary", "yes".parse().unwrap());
        let held: Vec<_> = (0..5).filter_map(|_| fault.draw(&headers, &mut rng)).collect();
        assert_eq!((held.len(), fault.active()), (2, 2));
        drop(held);
        assert_eq!(fault.active(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn istio_13705_a_fault_is_within_the_attempt_and_ends_with_it() {
        let fault = fault(FaultOptions { delay: delay(1.0), ..Default::default() });
        let service = FaultLayer::new(fault.clone()).layer(service_fn(|_: Request<()>| async {
            Ok::<_, ()>(Response::new("answer".to_owned()))
        }));
        let start = Instant::now();
        let answer = service.clone().oneshot(Request::new(())).await.unwrap();
        assert_eq!((answer.into_body().as_str(), start.elapsed().as_secs()), ("answer", 1));
        // A timeout around it fires, and leaves nothing behind.
        let late =
            tokio::time::timeout(Duration::from_millis(100), service.oneshot(Request::new(())));
        assert!(late.await.is_err());
        assert_eq!(fault.active(), 0);
    }

    #[tokio::test]
    async fn an_abort_looks_like_the_dependencys_own_answer() {
        let fault = fault(FaultOptions { abort: abort(1.0), ..Default::default() });
        let service = FaultLayer::new(fault).layer(service_fn(|_: Request<()>| async {
            panic!("never reached");
            #[expect(unreachable_code, reason = "for its type")]
            Ok::<Response<String>, ()>(Response::default())
        }));
        assert_eq!(service.oneshot(Request::new(())).await.unwrap().status(), 503);
    }
}
