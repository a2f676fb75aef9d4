//! A service whose slow calls are made twice.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::{Fare, Hedge};
use crate::{Classify, classify::AnyError, deadline::Armed, stack::Call};

/// Makes slow calls a second time, and hands the first answer on.
///
/// A layer value is one dependency: its services share what is known of latencies.
#[derive(Clone, Debug)]
pub struct HedgeLayer<C = AnyError> {
    hedge: Hedge,
    classify: C,
}

impl HedgeLayer {
    /// Takes every error of the service for one that may pass.
    pub fn new(hedge: Hedge) -> Self {
        Self { hedge, classify: AnyError }
    }
}

impl<C> HedgeLayer<C> {
    /// Lets `classify` judge how a call ended.
    pub fn with_classify<D>(self, classify: D) -> HedgeLayer<D> {
        HedgeLayer { hedge: self.hedge, classify }
    }
}

impl<S, C: Clone> Layer<S> for HedgeLayer<C> {
    type Service = HedgeService<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        HedgeService { inner, hedge: Some(self.hedge.clone()), classify: self.classify.clone() }
    }
}

/// A service whose slow calls are made twice, on a clone of it.
#[derive(Clone, Debug)]
pub struct HedgeService<S, C = AnyError> {
    inner: S,
    hedge: Option<Hedge>,
    classify: C,
}

impl<S, C> HedgeService<S, C> {
    /// A service that is hedged only if there is a hedge.
    #[cfg(feature = "client")]
    pub(crate) fn maybe(inner: S, hedge: Option<Hedge>, classify: C) -> Self {
        Self { inner, hedge, classify }
    }

    /// The service within.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S, C, R> Service<R> for HedgeService<S, C>
where
    S: Service<R> + Clone,
    R: Call,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = HedgeFuture<S, R, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: R) -> Self::Future {
        let hedged = self.hedge.as_ref().filter(|_| request.is_idempotent()).map(|hedge| {
            let now = Instant::now();
            hedge.begin(now);
            let at = hedge.delay(now).map(|delay| now + delay);
            // No hedge that would only begin when nobody waits any more.
            let at = at.filter(|at| request.deadline().is_none_or(|end| end > Deadline::at(*at)));
            request.keep_apart();
            Hedged { hedge: hedge.clone(), start: now, at, copy: Some(request.copy()) }
        });
        HedgeFuture {
            second_service: hedged.as_ref().map(|_| self.inner.clone()),
            first: self.inner.call(request),
            first_result: None,
            hedged,
            second: Second::None,
            armed: None,
            fare: None,
            classify: self.classify.clone(),
        }
    }
}

/// What is kept of a call that may be hedged.
struct Hedged<R> {
    hedge: Hedge,
    start: Instant,
    /// When the second goes; never, if too little is known.
    at: Option<Instant>,
    /// The request once more, until it is sent.
    copy: Option<R>,
}

pin_project! {
    /// A call that may be made twice. Dropping it drops both.
    #[must_use = "a call is made when it is polled"]
    pub struct HedgeFuture<S: Service<R>, R, C> {
        #[pin]
        first: S::Future,
        // How the first ended, if that did not end the call.
        first_result: Option<Result<S::Response, S::Error>>,
        #[pin]
        second: Second<S::Future>,
        second_service: Option<S>,
        hedged: Option<Hedged<R>>,
        armed: Option<Armed>,
        fare: Option<Fare>,
        classify: C,
    }
}

pin_project! {
    #[project = Projected]
    enum Second<F> {
        None,
        Readying,
        Running { #[pin] future: F },
        Over,
    }
}

impl<S, R, C> Future for HedgeFuture<S, R, C>
where
    S: Service<R>,
    R: Call,
    C: Classify<S::Response, S::Error>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if this.first_result.is_none()
            && let Poll::Ready(result) = this.first.as_mut().poll(cx)
        {
            let outcome = this.classify.classify(result.as_ref());
            let Some(hedged) = this.hedged else { return Poll::Ready(result) };
            let is_running = matches!(*this.second, Second::Readying | Second::Running { .. });
            // What may pass is worth the second's answer; what is for good is told at once.
            let waits = outcome.is_retryable() && (is_running || launch(hedged, this.fare));
            if !waits {
                if outcome == Outcome::Success {
                    let now = Instant::now();
                    hedged.hedge.record(now.saturating_duration_since(hedged.start), now);
                }
                if is_running {
                    hedged.hedge.ended(false);
                }
                // The loser ends before the winner is handed on.
                this.second.set(Second::Over);
                return Poll::Ready(result);
            }
            *this.first_result = Some(result);
            if !is_running {
                this.second.set(Second::Readying);
            }
        }
        let Some(hedged) = this.hedged else { return Poll::Pending };
        if matches!(*this.second, Second::None)
            && let Some(at) = hedged.at
            && hedged.hedge.timer().poll_at(at, this.armed, cx.waker()).is_ready()
        {
            *this.armed = None;
            hedged.at = None;
            if launch(hedged, this.fare) {
                this.second.set(Second::Readying);
            }
        }
        loop {
            match this.second.as_mut().project() {
                Projected::None | Projected::Over => return Poll::Pending,
                Projected::Readying => {
                    let service = this.second_service.as_mut().expect("there for a hedge");
                    let ready = match service.poll_ready(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(ready) => ready,
                    };
                    if let Err(error) = ready {
                        this.second.set(Second::Over);
                        // The first is still worth waiting for.
                        return match this.first_result.take() {
                            Some(first) => Poll::Ready(first),
                            None => {
                                drop(error);
                                Poll::Pending
                            }
                        };
                    }
                    let request = hedged.copy.take().expect("sent once");
                    let future = service.call(request);
                    this.second.set(Second::Running { future });
                }
                Projected::Running { future } => {
                    let Poll::Ready(result) = future.poll(cx) else { return Poll::Pending };
                    this.second.set(Second::Over);
                    *this.fare = None;
                    let outcome = this.classify.classify(result.as_ref());
                    let won = outcome == Outcome::Success;
                    hedged.hedge.ended(won);
                    if won {
                        let now = Instant::now();
                        hedged.hedge.record(now.saturating_duration_since(hedged.start), now);
                    }
                    if won || outcome == Outcome::Permanent {
                        return Poll::Ready(result);
                    }
                    // It says nothing for good, or was never made: what the first says counts.
                    return this.first_result.take().map_or(Poll::Pending, Poll::Ready);
                }
            }
        }
    }
}

/// Pays for the second, if it can still be sent.
fn launch<R: Call>(hedged: &Hedged<R>, fare: &mut Option<Fare>) -> bool {
    let can = hedged.copy.as_ref().is_some_and(Call::is_replayable);
    if !can {
        return false;
    }
    *fare = hedged.hedge.pay(Instant::now());
    fare.is_some()
}

impl<S: Service<R>, R, C> fmt::Debug for HedgeFuture<S, R, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HedgeFuture").field("fare", &self.fare).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        time::Duration,
    };

    use futures_util::{FutureExt, future::BoxFuture, poll};
    use tokio::time::sleep;
    use tower::ServiceExt;

    use super::{
        super::{HedgeConfig, HedgeOptions},
        *,
    };
    use crate::{Mode, deadline::Timer};

    const MS: Duration = Duration::from_millis(1);

    /// Answers each call after so long, and with that.
    #[derive(Clone, Debug)]
    struct Script {
        calls: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
        script: Arc<Vec<(Duration, Result<usize, &'static str>)>>,
    }

    impl Script {
        fn new(script: &[(Duration, Result<usize, &'static str>)]) -> Self {
            Self {
                calls: Arc::default(),
                running: Arc::default(),
                script: Arc::new(script.to_vec()),
            }
        }
    }

    struct Running(Arc<AtomicUsize>);

    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Service<()> for Script {
        type Response = usize;
        type Error = &'static str;
        type Future = BoxFuture<'static, Result<usize, &'static str>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, (): ()) -> Self::Future {
            let call = self.calls.fetch_add(1, Ordering::SeqCst);
            let (span, result) = self.script[call.min(self.script.len() - 1)];
            self.running.fetch_add(1, Ordering::SeqCst);
            let running = Running(Arc::clone(&self.running));
            async move {
                let _running = running;
                sleep(span).await;
                result
            }
            .boxed()
        }
    }

    /// A hedge that knows that calls take about ten milliseconds.
    fn hedge(change: impl FnOnce(&mut HedgeOptions), gate: Option<bool>) -> Hedge {
        let mut options = HedgeOptions { share: 1.0, ..HedgeOptions::default() };
        change(&mut options);
        let config = HedgeConfig::try_from(options).unwrap();
        let gate =
            gate.map(|is_well| Box::new(move || is_well) as Box<dyn Fn() -> bool + Send + Sync>);
        let hedge = Hedge::with("test", config, Timer::new(), None, gate);
        (0..100).for_each(|_| hedge.record(10 * MS, Instant::now()));
        hedge
    }

    fn classify(result: Result<&usize, &&'static str>) -> Outcome {
        match result {
            Ok(_) => Outcome::Success,
            Err(&"for good") => Outcome::Permanent,
            Err(&"refused") => Outcome::Rejected,
            Err(_) => Outcome::Transient,
        }
    }

    async fn call(hedge: &Hedge, script: &Script) -> (Result<usize, &'static str>, Duration) {
        let layer = HedgeLayer::new(hedge.clone()).with_classify(classify);
        let start = Instant::now();
        let result = layer.layer(script.clone()).oneshot(()).await;
        assert_eq!(
            script.running.load(Ordering::SeqCst),
            0,
            "tower-resilience#369: no loser runs on"
        );
        (result, start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_call_is_made_twice_and_the_first_answer_wins() {
        let hedge = hedge(|_| {}, None);
        let script = Script::new(&[(1000 * MS, Ok(1)), (5 * MS, Ok(2))]);
        let (result, took) = call(&hedge, &script).await;
        assert_eq!(result, Ok(2));
        assert!(took < 25 * MS, "{took:?}");
        let script = Script::new(&[(30 * MS, Ok(1)), (1000 * MS, Ok(2))]);
        let (result, took) = call(&hedge, &script).await;
        assert_eq!((result, script.calls.load(Ordering::SeqCst)), (Ok(1), 2));
        assert!(took < 40 * MS, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_fast_call_is_made_once() {
        let script = Script::new(&[(5 * MS, Ok(1))]);
        assert_eq!(call(&hedge(|_| {}, None), &script).await.0, Ok(1));
        assert_eq!(script.calls.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_may_pass_lets_the_second_go_at_once_and_one_for_good_ends_both() {
        let hedge = hedge(|_| {}, None);
        let script = Script::new(&[(MS, Err("down")), (2 * MS, Ok(2))]);
        let (result, took) = call(&hedge, &script).await;
        assert_eq!(result, Ok(2));
        assert!(took < 8 * MS, "{took:?}");
        let script = Script::new(&[(30 * MS, Err("for good")), (1000 * MS, Ok(2))]);
        assert_eq!(call(&hedge, &script).await.0, Err("for good"));
        let script = Script::new(&[(1000 * MS, Ok(1)), (MS, Err("for good"))]);
        assert_eq!(call(&hedge, &script).await.0, Err("for good"));
        let script = Script::new(&[(100 * MS, Ok(1)), (MS, Err("down"))]);
        assert_eq!(call(&hedge, &script).await.0, Ok(1), "the first is still worth waiting for");
        let script = Script::new(&[(100 * MS, Ok(1)), (MS, Err("refused"))]);
        assert_eq!(call(&hedge, &script).await.0, Ok(1), "that no second was made says nothing");
        let script = Script::new(&[(MS, Err("first")), (MS, Err("refused"))]);
        assert_eq!(call(&hedge, &script).await.0, Err("first"), "the one that was sent");
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_java_7222_a_hedge_that_is_not_paid_leaves_nobody_waiting() {
        for hedge in [
            hedge(|options| options.share = 0.0, None),
            hedge(|options| options.mode = Mode::Observe, None),
            hedge(|_| {}, Some(false)),
        ] {
            while hedge.0.own.withdraw(Instant::now()).is_some() && hedge.0.options.share == 0.0 {}
            let script = Script::new(&[(MS, Err("down")), (MS, Ok(2))]);
            let (result, took) = call(&hedge, &script).await;
            assert_eq!(result, Err("down"));
            assert!(took < 5 * MS, "{took:?}");
            assert_eq!(script.calls.load(Ordering::SeqCst), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn kevlar_14_nothing_is_launched_after_the_caller_left_at_whatever_poll() {
        let hedge = hedge(|_| {}, None);
        for polls in 0..6 {
            let script = Script::new(&[(1000 * MS, Ok(1)), (1000 * MS, Ok(2))]);
            let layer = HedgeLayer::new(hedge.clone()).with_classify(classify);
            let mut call = Box::pin(layer.layer(script.clone()).oneshot(()));
            for _ in 0..polls {
                assert!(poll!(&mut call).is_pending());
                sleep(4 * MS).await;
            }
            let before = script.calls.load(Ordering::SeqCst);
            drop(call);
            sleep(100 * MS).await;
            assert_eq!(script.calls.load(Ordering::SeqCst), before);
            assert_eq!((script.running.load(Ordering::SeqCst), hedge.timer().armed()), (0, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_its_share_of_calls_is_hedged() {
        let hedge = hedge(|options| options.share = 0.05, None);
        let mut hedges = 0;
        for _ in 0..1000 {
            let script = Script::new(&[(15 * MS, Ok(1))]);
            call(&hedge, &script).await.0.unwrap();
            hedges += script.calls.load(Ordering::SeqCst) - 1;
        }
        // A twentieth, and one a second of the fifteen that it took.
        assert!(hedges <= 50 + 17, "{hedges}");
    }
}
