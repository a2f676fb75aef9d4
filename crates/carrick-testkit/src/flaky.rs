//! Stubs that fail when told to, and count what reaches them.

use std::{
    collections::VecDeque,
    future::{Future, pending},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

/// What one call meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The effect happens, and the caller hears of it.
    Pass,
    /// Nothing happens, and the caller gets an error.
    Fail,
    /// The effect happens, but its answer is lost: the caller gets an error.
    LoseAnswer,
    /// Nothing happens, and no answer comes either.
    Hang,
}

/// The error of a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected failure of call {call}")]
pub struct Injected {
    /// Which call, from 1.
    pub call: u64,
}

/// A dependency that fails when told to. Clones are the same dependency.
///
/// ```
/// use carrick_testkit::flaky::Flaky;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let flaky = Flaky::failing_first(2);
/// let mut tries = 0;
/// while flaky.call(async || "written").await.is_err() {
///     tries += 1;
/// }
/// assert_eq!((tries, flaky.calls(), flaky.effects()), (2, 3, 1));
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Flaky(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    script: VecDeque<(Step, Duration)>,
    rest: (Step, Duration),
    calls: u64,
    effects: u64,
    running: u64,
    most_running: u64,
}

impl Flaky {
    /// Never fails.
    pub fn passing() -> Self {
        Self::script([], Step::Pass)
    }

    /// Always fails.
    pub fn failing() -> Self {
        Self::script([], Step::Fail)
    }

    /// Fails the first `n` calls.
    pub fn failing_first(n: usize) -> Self {
        Self::script(std::iter::repeat_n(Step::Fail, n), Step::Pass)
    }

    /// Follows a script, one step a call, and then does `rest`.
    pub fn script(steps: impl IntoIterator<Item = Step>, rest: Step) -> Self {
        let script = steps.into_iter().map(|step| (step, Duration::ZERO)).collect();
        let rest = (rest, Duration::ZERO);
        Self(Arc::new(Mutex::new(State {
            script,
            rest,
            calls: 0,
            effects: 0,
            running: 0,
            most_running: 0,
        })))
    }

    /// Makes every call take `delay`, by tokio's clock.
    #[must_use]
    pub fn with_delay(self, delay: Duration) -> Self {
        {
            let mut state = self.0.lock();
            state.rest.1 = delay;
            state.script.iter_mut().for_each(|step| step.1 = delay);
        }
        self
    }

    /// Changes what calls meet from now on.
    pub fn set(&self, rest: Step) {
        let mut state = self.0.lock();
        state.script.clear();
        state.rest.0 = rest;
    }

    /// Calls the dependency; `effect` is what it does when it works.
    ///
    /// # Errors
    /// [`Injected`], as the script says.
    ///
    /// # Cancel safety
    /// The call is counted; its effect may have happened.
    pub async fn call<T, F, Fut>(&self, effect: F) -> Result<T, Injected>
    where
        F: FnOnce() -> Fut,
        Fut: Future<Output = T>,
    {
        let running = Running::begin(&self.0);
        let (call, (step, delay)) = (running.call, running.step);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match step {
            Step::Fail => Err(Injected { call }),
            Step::Hang => pending().await,
            Step::Pass | Step::LoseAnswer => {
                let result = effect().await;
                self.0.lock().effects += 1;
                if step == Step::Pass { Ok(result) } else { Err(Injected { call }) }
            }
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.0.lock().calls
    }

    /// Effects so far.
    pub fn effects(&self) -> u64 {
        self.0.lock().effects
    }

    /// The most calls that ran at once.
    pub fn most_at_once(&self) -> u64 {
        self.0.lock().most_running
    }
}

/// Counts a running call; its drop ends it, so that a cancelled call does not run for ever.
struct Running<'a> {
    state: &'a Mutex<State>,
    call: u64,
    step: (Step, Duration),
}

impl<'a> Running<'a> {
    fn begin(state: &'a Mutex<State>) -> Self {
        let mut locked = state.lock();
        locked.calls += 1;
        locked.running += 1;
        locked.most_running = locked.most_running.max(locked.running);
        let rest = locked.rest;
        let step = locked.script.pop_front().unwrap_or(rest);
        Self { state, call: locked.calls, step }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.state.lock().running -= 1;
    }
}
