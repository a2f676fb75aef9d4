//! A call through the stack.

use std::{
    cell::RefCell,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use pin_project_lite::pin_project;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, Sleep, sleep_until};
use tower_service::Service;

use super::{Call, Ended, Finish, Held, Open, Place, Shared, Tried};
use crate::{
    CallError, Classify, Policy, Refusal,
    balance::HostId,
    budget::{Deposit, Paid},
    bulkhead::Priority,
    classify::Hints,
    deadline::Armed,
    explain::{self, Explain},
    outlier::{Origin, Verdict},
    queue::{self, Enter},
    retry::{Attempt, Decision, Repeat, decide},
};

thread_local! {
    static RNG: RefCell<SmallRng> = RefCell::new(SmallRng::from_rng(&mut rand::rng()));
}

/// Nothing else borrows it meanwhile: what `use_it` does is ours, and short.
fn with_rng<T>(use_it: impl FnOnce(&mut SmallRng) -> T) -> T {
    RNG.with(|rng| use_it(&mut rng.borrow_mut()))
}

pin_project! {
    /// A call through a [`Stack`](super::Stack).
    ///
    /// Dropping it gives back whatever it holds; what was sent may still take effect.
    #[must_use = "a call is made when it is polled"]
    pub struct StackFuture<S: Service<R>, R, C, F> {
        shared: Arc<Shared<S>>,
        classify: C,
        finish: F,
        now: Instant,
        deadline: Deadline,
        // What the caller said, and whether it wants a stream.
        asked: Option<Deadline>,
        is_streaming: bool,
        // To be sent next, and kept for another attempt.
        next: Option<R>,
        kept: Option<R>,
        explain: Option<Explain>,
        n: u32,
        backoff: u32,
        avoid: Option<HostId>,
        open: Option<Open<S>>,
        deposit: Option<Deposit>,
        paid: Option<Paid>,
        ends: Instant,
        is_last: bool,
        armed: Option<Armed>,
        waited: bool,
        // Whether the dependency may have seen an attempt.
        sent: bool,
        #[pin]
        state: State<S, S::Future>,
    }

    impl<S: Service<R>, R, C, F> PinnedDrop for StackFuture<S, R, C, F> {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if let Some(open) = this.open.take() {
                let now = Instant::now();
                this.shared.close(open, None, now, now);
            }
        }
    }
}

pin_project! {
    #[project = Projected]
    enum State<S, F> {
        Begin,
        // Boxed, as is what waits for a retry: every call is moved about, and few come here.
        Queuing { enter: Pin<Box<Enter>> },
        Readying { service: Option<S> },
        Calling { #[pin] future: F },
        Waiting { sleep: Pin<Box<Sleep>> },
        Done,
    }
}

impl<S: Service<R>, R: Call, C, F> StackFuture<S, R, C, F> {
    pub(super) fn new(
        shared: Arc<Shared<S>>,
        classify: C,
        finish: F,
        request: R,
        now: Instant,
    ) -> Self {
        let own = Deadline::at(now + shared.policies.timeout);
        let asked = request.deadline();
        let deadline = asked.map_or(own, |asked| asked.earlier(own));
        Self {
            is_streaming: request.is_streaming(),
            asked,
            explain: request.explain().cloned(),
            shared,
            classify,
            finish,
            now,
            deadline,
            next: Some(request),
            kept: None,
            n: 0,
            backoff: 0,
            avoid: None,
            open: None,
            deposit: None,
            paid: None,
            ends: now,
            is_last: false,
            armed: None,
            waited: false,
            sent: false,
            state: State::Begin,
        }
    }
}

/// What comes of a moment's work.
enum Step<T> {
    /// There is more to do.
    On,
    /// The call is over.
    Over(T),
}

impl<S, R, C, F> Future for StackFuture<S, R, C, F>
where
    S: Service<R> + Clone,
    R: Call,
    C: Classify<S::Response, S::Error>,
    F: Finish<S, S::Response>,
{
    type Output = Result<F::Output, CallError<S::Error>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let this = self.as_mut().project();
            let step = match this.state.project() {
                Projected::Begin => self.as_mut().begin(),
                Projected::Queuing { enter } => {
                    let entered = match enter.as_mut().poll(cx) {
                        Poll::Pending => {
                            *this.waited = true;
                            return Poll::Pending; // its place is kept until the deadline at most
                        }
                        Poll::Ready(entered) => entered,
                    };
                    if *this.waited {
                        *this.now = Instant::now();
                    }
                    match entered {
                        Ok(permit) => self.as_mut().open(Some(permit)),
                        Err(refusal) => refuse(this.explain, *this.n, *this.sent, refusal),
                    }
                }
                Projected::Readying { service } => {
                    let service = service.as_mut().expect("there until it is called");
                    match service.poll_ready(cx) {
                        Poll::Pending => {
                            ready!(self.as_mut().poll_deadline(cx));
                            self.as_mut().expire()
                        }
                        Poll::Ready(Ok(())) => self.as_mut().send(),
                        Poll::Ready(Err(error)) => self.as_mut().ended(Err(error)),
                    }
                }
                Projected::Calling { future } => match future.poll(cx) {
                    Poll::Pending => {
                        ready!(self.as_mut().poll_deadline(cx));
                        self.as_mut().expire()
                    }
                    Poll::Ready(result) => self.as_mut().ended(result),
                },
                Projected::Waiting { sleep } => {
                    ready!(sleep.as_mut().poll(cx));
                    *this.now = Instant::now();
                    self.as_mut().begin()
                }
                Projected::Done => panic!("polled after it was over"),
            };
            if let Step::Over(result) = step {
                let mut this = self.as_mut().project();
                this.state.set(State::Done);
                // What a call in flight or a retry held is given back at once, not with the future.
                (*this.deposit, *this.paid, *this.kept, *this.armed) = (None, None, None, None);
                return Poll::Ready(result);
            }
        }
    }
}

type Answered<S, R, F> = Result<
    <F as Finish<S, <S as Service<R>>::Response>>::Output,
    CallError<<S as Service<R>>::Error>,
>;

impl<S, R, C, F> StackFuture<S, R, C, F>
where
    S: Service<R> + Clone,
    R: Call,
    C: Classify<S::Response, S::Error>,
    F: Finish<S, S::Response>,
{
    /// Begins an attempt, in line if there is one.
    fn begin(mut self: Pin<&mut Self>) -> Step<Answered<S, R, F>> {
        let mut this = self.as_mut().project();
        let policies = &this.shared.policies;
        let now = *this.now;
        *this.n += 1;
        let left = this.deadline.remaining(now);
        if left < policies.retry.min_useful() {
            let refusal = Refusal { sent: *this.sent, ..TOO_LATE };
            note(this.explain, Policy::Deadline, || {
                let useful = policies.retry.min_useful().as_millis();
                format!("attempt {} not made: {} ms left < {useful} ms", this.n, left.as_millis())
            });
            return Step::Over(Err(refusal.into()));
        }
        if *this.n == 1 {
            *this.deposit = Some(policies.budget.deposit(now));
        }
        let Some(queue) = &this.shared.queue else { return self.open(None) };
        // Whoever would get its turn too late for an answer is let go before that.
        let latest = this.deadline.instant() - policies.retry.min_useful();
        let enter = queue.enter(priority(this.next), Some(Deadline::at(latest)));
        this.state.set(State::Queuing { enter: Box::pin(enter) });
        Step::On
    }

    /// Asks everybody else, and gets the host's service.
    fn open(self: Pin<&mut Self>, queued: Option<queue::Permit>) -> Step<Answered<S, R, F>> {
        let mut this = self.project();
        let now = *this.now;
        let opened = with_rng(|rng| this.shared.open(this.next, *this.avoid, queued, now, rng));
        let open = match opened {
            Ok(open) => open,
            Err(refusal) => return refuse(this.explain, *this.n, *this.sent, refusal),
        };
        let policies = &this.shared.policies;
        let service = open.pick.host().value().clone();
        *this.open = Some(open);
        *this.is_last = *this.n >= policies.retry.max_attempts();
        *this.ends = match policies.per_try_timeout {
            Some(span) if !*this.is_last => this.deadline.instant().min(now + span),
            _ => this.deadline.instant(),
        };
        this.shared.attempts.increment(1);
        this.state.set(State::Readying { service: Some(service) });
        Step::On
    }

    /// Sends the request to a service that is ready.
    fn send(self: Pin<&mut Self>) -> Step<Answered<S, R, F>> {
        let mut this = self.project();
        let mut request = this.next.take().expect("there for each attempt");
        // Also of an unsafe request: that it was never sent shows only later.
        *this.kept = (!*this.is_last).then(|| request.copy());
        let told = if *this.is_streaming {
            this.shared.policies.stream.options().ends(*this.asked, *this.now)
        } else {
            Deadline::at(*this.ends)
        };
        request.prepare(*this.n, told, *this.now);
        let Projected::Readying { service } = this.state.as_mut().project() else {
            unreachable!("called while it is being readied")
        };
        let mut service = service.take().expect("there until it is called");
        let future = service.call(request);
        this.state.set(State::Calling { future });
        Step::On
    }

    /// Ready when the attempt's time is over.
    fn poll_deadline(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        *this.waited = true;
        this.shared.policies.timer.poll_at(*this.ends, this.armed, cx.waker())
    }

    /// The attempt's time is over.
    fn expire(self: Pin<&mut Self>) -> Step<Answered<S, R, F>> {
        let mut this = self.project();
        *this.sent |= matches!(*this.state, State::Calling { .. });
        // What is under way is dropped before anything else: it must not go on beside a retry.
        this.state.set(State::Begin);
        *this.armed = None;
        let now = Instant::now();
        *this.now = now;
        let Some(open) = this.open.take() else { return Step::Over(Err(CallError::Expired)) };
        let verdict = Verdict::local(Outcome::Expired);
        let in_all = now >= this.deadline.instant();
        tell(this.explain, *this.n, &open, Outcome::Expired, now);
        *this.avoid = Some(open.pick.host().id());
        this.shared.close(open, Some(Ended { outcome: Outcome::Expired, verdict }), now, now);
        this.shared.expired.increment(1);
        if in_all {
            note(this.explain, Policy::Deadline, || "the deadline passed".to_owned());
            return Step::Over(Err(CallError::Expired));
        }
        let hints = Hints { is_local: true, ..Hints::default() };
        let failed = Failed {
            n: *this.n,
            backoff: *this.backoff,
            deadline: *this.deadline,
            outcome: Outcome::Expired,
            timed_out_here: true,
            hints,
        };
        match failed.again(this.kept.as_ref(), this.shared, this.explain.as_ref(), now) {
            None => Step::Over(Err(CallError::Expired)),
            Some(again) => {
                (*this.backoff, *this.paid) = (again.backoff, Some(again.paid));
                *this.next = this.kept.take();
                this.state.set(State::Waiting { sleep: Box::pin(sleep_until(now + again.delay)) });
                Step::On
            }
        }
    }

    /// An attempt ended.
    fn ended(
        self: Pin<&mut Self>,
        result: Result<S::Response, S::Error>,
    ) -> Step<Answered<S, R, F>> {
        let mut this = self.project();
        // A service that was ready at once took no time that the clock would tell.
        if *this.waited {
            *this.now = Instant::now();
        }
        let now = *this.now;
        *this.armed = None;
        let outcome = this.classify.classify(result.as_ref());
        let Some(open) = this.open.take() else { return Step::Over(Err(CallError::Expired)) };
        tell(this.explain, *this.n, &open, outcome, now);
        let hints = match outcome {
            Outcome::Success => Hints::default(),
            _ => this.classify.hints(result.as_ref()),
        };
        *this.sent |= !hints.never_sent;
        let origin = if hints.is_local { Origin::Local } else { Origin::Peer };
        let ended =
            Ended { outcome, verdict: Verdict { outcome, origin, gateway: hints.is_gateway } };
        if outcome != Outcome::Success {
            let failed = Failed {
                n: *this.n,
                backoff: *this.backoff,
                deadline: *this.deadline,
                outcome,
                timed_out_here: false,
                hints,
            };
            let again = failed.again(this.kept.as_ref(), this.shared, this.explain.as_ref(), now);
            if let Some(again) = again {
                *this.avoid = Some(open.pick.host().id());
                this.shared.close(open, Some(ended), now, now);
                drop(result); // its connection is free before the next attempt looks for one
                (*this.backoff, *this.paid) = (again.backoff, Some(again.paid));
                *this.next = this.kept.take();
                this.state.set(State::Waiting { sleep: Box::pin(sleep_until(now + again.delay)) });
                return Step::On;
            }
        }
        let elapsed = now.saturating_duration_since(open.pick.started());
        this.shared.seconds.record(elapsed.as_secs_f64());
        match result {
            Ok(answer) => {
                let held = Held {
                    shared: Arc::clone(this.shared),
                    open: Some(open),
                    ended,
                    attempts: *this.n,
                    deadline: *this.deadline,
                    #[cfg(feature = "client")]
                    asked: *this.asked,
                    is_streaming: *this.is_streaming,
                    now,
                };
                Step::Over(Ok(this.finish.finish(answer, held)))
            }
            Err(error) => {
                this.shared.close(open, Some(ended), now, now);
                Step::Over(Err(CallError::Inner(error)))
            }
        }
    }
}

fn priority<R: Call>(next: &Option<R>) -> Priority {
    next.as_ref().map_or(Priority::Default, Call::priority)
}

impl<S> Shared<S> {
    /// Asks whoever may refuse an attempt; what was taken before a refusal is given back.
    fn open<R: Call>(
        &self,
        next: &Option<R>,
        avoid: Option<HostId>,
        queued: Option<queue::Permit>,
        now: Instant,
        rng: &mut SmallRng,
    ) -> Result<Open<S>, Refusal> {
        let policies = &self.policies;
        let throttle = policies.throttle.as_ref().map(|throttle| throttle.admit(now, rng));
        let throttle = throttle.transpose()?;
        let others = || {
            let tried = next.as_ref().and_then(Call::tried);
            let avoid = avoid.or_else(|| tried.and_then(Tried::host));
            let pick = policies.balancer.pick(now, rng, avoid)?;
            let place = match queued {
                Some(permit) => Place::Queued(permit),
                None => Place::Taken(policies.bulkhead.enter(priority(next))?),
            };
            let breaker = match policies.breaker.enter(now) {
                Ok(ticket) => ticket,
                Err(refusal) => {
                    self.vacate(place, None, now);
                    return Err(refusal);
                }
            };
            if let Some(tried) = tried {
                tried.set(pick.host().id());
            }
            Ok((pick, place, breaker))
        };
        match others() {
            Ok((pick, place, breaker)) => Ok(Open { pick, place, breaker, throttle }),
            Err(refusal) => {
                if let Some(permit) = throttle {
                    permit.settle(Outcome::Rejected, now);
                }
                Err(refusal)
            }
        }
    }
}

const TOO_LATE: Refusal = Refusal::new(Policy::Deadline, "too little time is left");

struct Again {
    delay: Duration,
    backoff: u32,
    paid: Paid,
}

/// An attempt that failed.
struct Failed {
    n: u32,
    backoff: u32,
    deadline: Deadline,
    outcome: Outcome,
    timed_out_here: bool,
    hints: Hints,
}

impl Failed {
    /// Whether, and when, to try again.
    fn again<S, R: Call>(
        &self,
        kept: Option<&R>,
        shared: &Shared<S>,
        explain: Option<&Explain>,
        now: Instant,
    ) -> Option<Again> {
        let Self { n, backoff, deadline, outcome, timed_out_here, hints } = *self;
        let policies = &shared.policies;
        let repeat = match kept {
            Some(request) if !request.is_replayable() => Repeat::BodyGone,
            Some(request) if request.is_idempotent() => Repeat::Idempotent,
            _ if hints.never_sent => Repeat::NeverSent,
            _ => Repeat::Unsafe,
        };
        let attempt = Attempt {
            n,
            outcome,
            timed_out_here,
            repeat,
            answered: false,
            retried_below: hints.retried_below,
            pushback: hints.pushback,
            backoff,
            deadline,
        };
        let pay = || policies.budget.withdraw(now);
        match with_rng(|rng| decide(&attempt, &policies.retry, now, rng, pay)) {
            Decision::Retry { delay, asked, paid } => {
                if let Some(explain) = explain {
                    let left = policies.budget.balance(now);
                    explain.add("retry", || {
                        let millis = delay.as_millis();
                        format!("attempt {} in {millis} ms; the budget has {left} more", n + 1)
                    });
                }
                shared.retries.increment(1);
                Some(Again { delay, backoff: if asked { 0 } else { backoff + 1 }, paid })
            }
            Decision::Stop(stop) => {
                if let Some(explain) = explain {
                    explain.add("retry", || format!("no attempt {}: {stop}", n + 1));
                }
                None
            }
        }
    }
}

fn refuse<T, E>(
    explain: &Option<Explain>,
    n: u32,
    sent: bool,
    refusal: Refusal,
) -> Step<Result<T, CallError<E>>> {
    note(explain, refusal.policy, || format!("attempt {n} not made: {}", refusal.reason));
    Step::Over(Err(Refusal { sent, ..refusal }.into()))
}

fn note(explain: &Option<Explain>, policy: Policy, text: impl FnOnce() -> String) {
    if let Some(explain) = explain {
        explain.note(policy, text);
    }
}

fn tell<S>(explain: &Option<Explain>, n: u32, open: &Open<S>, outcome: Outcome, now: Instant) {
    if let Some(explain) = explain {
        explain.attempt(explain::Attempt {
            n,
            host: Some(open.pick.host().endpoint().address.to_string()),
            outcome: explain::word(outcome),
            elapsed: now.saturating_duration_since(open.pick.started()),
        });
    }
}

impl<S: Service<R>, R, C, F> fmt::Debug for StackFuture<S, R, C, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackFuture").field("attempt", &self.n).finish_non_exhaustive()
    }
}
