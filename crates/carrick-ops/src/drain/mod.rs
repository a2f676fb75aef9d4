//! Drain: from the first signal to the last request, without dropping one.
//!
//! On SIGTERM or SIGINT readiness fails at once, but work is still accepted for a window: load
//! balancers look every few seconds, and until they have looked they send. Then nothing new is
//! accepted, and what runs may finish within the grace. What outstays it is cut off. A second signal
//! cuts at once, a third does not wait for anything.
//!
//! [`core`] decides; [`Drain`] holds the state, hands out a token for each phase and counts the work
//! under way. Parts of a process that need no load balancer (consumers, relays) stop at
//! [`Drain::announced`]; listeners stop at [`Drain::closing`]; everything ends at [`Drain::forced`].
//!
//! Source: pattern document, probes listing (`preStop`). Differs (S10): its hook only sleeps, so that
//! readiness still says "ready" all the while; here the process flips it by itself.

mod config;
pub mod core;
mod signal;

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use self::core::Core;
pub use self::{
    config::{DrainConfig, DrainOptions},
    core::Phase,
    signal::Signals,
};

/// Who asked for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// SIGTERM: an orchestrator, with a load balancer that must notice first.
    Terminate,
    /// SIGINT: somebody at a terminal.
    Interrupt,
    /// The program itself.
    Requested,
}

/// The drain of one process. Clones share everything.
///
/// ```
/// use carrick_ops::drain::{Drain, DrainConfig, Trigger};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let drain = Drain::new(DrainConfig::default());
/// let requests = drain.work("request");
///
/// let request = requests.begin(); // held while one request is served
/// drain.trigger(Trigger::Terminate);
/// assert!(drain.is_draining() && !drain.closing().is_cancelled(), "unready, yet accepting");
///
/// let finished = tokio::spawn({
///     let closing = drain.closing();
///     async move {
///         closing.cancelled().await;
///         drop(request);
///     }
/// });
/// let report = drain.finished().await;
/// assert!(!report.forced);
/// # finished.await.unwrap();
/// # }
/// ```
#[derive(Clone)]
pub struct Drain(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    in_flight: AtomicUsize,
    /// Told at each trigger, and when the count of work falls to zero.
    changed: Notify,
    announced: CancellationToken,
    closing: CancellationToken,
    forced: CancellationToken,
}

struct State {
    core: Core,
    began: Option<(Instant, Trigger)>,
    /// One counter for each kind of work; kinds are registered by the program at start.
    kinds: BTreeMap<&'static str, Arc<AtomicUsize>>,
}

impl Drain {
    /// A process that serves.
    pub fn new(config: DrainConfig) -> Self {
        let state = State { core: Core::new(config), began: None, kinds: BTreeMap::new() };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            in_flight: AtomicUsize::new(0),
            changed: Notify::new(),
            announced: CancellationToken::new(),
            closing: CancellationToken::new(),
            forced: CancellationToken::new(),
        }))
    }

    /// A kind of work that the drain waits for, such as "connection". The same name is the same
    /// counter.
    pub fn work(&self, kind: &'static str) -> Work {
        let of_kind = Arc::clone(self.0.state.lock().kinds.entry(kind).or_default());
        Work { drain: Arc::clone(&self.0), of_kind }
    }

    /// Cancelled as soon as the drain begins: stop fetching work that would come by itself.
    pub fn announced(&self) -> CancellationToken {
        self.0.announced.clone()
    }

    /// Cancelled when the window is over: close the listeners, finish what runs.
    pub fn closing(&self) -> CancellationToken {
        self.0.closing.clone()
    }

    /// Cancelled when the grace is over, when somebody insisted, or when nothing is left to wait for:
    /// end what still runs.
    pub fn forced(&self) -> CancellationToken {
        self.0.forced.clone()
    }

    /// Whether an end was asked for.
    pub fn is_draining(&self) -> bool {
        self.0.announced.is_cancelled()
    }

    /// How far the drain is.
    pub fn phase(&self) -> Phase {
        self.0.state.lock().core.phase()
    }

    /// How long work is still accepted: zero unless the drain has just begun.
    pub fn window_left(&self) -> Duration {
        let state = self.0.state.lock();
        let until = state.core.until().filter(|_| state.core.phase() == Phase::Announcing);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// How much work is under way.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Acquire)
    }

    /// Asks for an end; asked again, it means now.
    pub fn trigger(&self, trigger: Trigger) {
        let now = Instant::now();
        let phase = {
            let mut state = self.0.state.lock();
            state.began.get_or_insert((now, trigger));
            state.core.trigger(now, trigger)
        };
        tracing::info!(?trigger, ?phase, in_flight = self.in_flight(), "asked to stop");
        self.0.show(phase);
        self.0.changed.notify_waiters();
    }

    /// Waits for a trigger and then for the end of the drain, moving it on as time passes.
    ///
    /// Somebody must wait here (or in [`Drain::run`]) for the phases to follow each other.
    ///
    /// # Cancel safety
    /// Safe to drop; the drain stays where it is until somebody waits again.
    pub async fn finished(&self) -> DrainReport {
        loop {
            // Made before looking, so that what changes after the look is not missed.
            let changed = self.0.changed.notified();
            let (phase, until) = {
                let mut state = self.0.state.lock();
                let phase = state.core.tick(Instant::now(), self.in_flight());
                (phase, state.core.until())
            };
            self.0.show(phase);
            if phase == Phase::Done {
                return self.report();
            }
            match until {
                Some(until) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(until) => {}
                },
                None => changed.await,
            }
        }
    }

    /// Takes over SIGTERM and SIGINT, and returns the wait for the end of the drain.
    ///
    /// The signals are taken over by this call, not by the first poll, and stay so: after the future
    /// is dropped they do nothing.
    ///
    /// # Errors
    /// The operating system does not let the process have the signals.
    pub fn run(&self) -> io::Result<impl Future<Output = DrainReport> + Send + 'static> {
        let mut signals = Signals::new()?;
        let drain = self.clone();
        Ok(async move {
            let finished = drain.finished();
            tokio::pin!(finished);
            loop {
                tokio::select! {
                    report = &mut finished => return report,
                    trigger = signals.next() => drain.trigger(trigger),
                }
            }
        })
    }

    fn report(&self) -> DrainReport {
        let state = self.0.state.lock();
        let left: BTreeMap<_, _> = state
            .kinds
            .iter()
            .map(|(kind, count)| (*kind, count.load(Ordering::Acquire)))
            .filter(|(_, count)| *count > 0)
            .collect();
        for (kind, count) in &left {
            metrics::counter!("carrick_drain_abandoned_total", "work" => *kind)
                .increment(*count as u64);
        }
        let (began, trigger) = state.began.expect("no drain is done that has not begun");
        DrainReport { trigger, took: began.elapsed(), forced: state.core.was_forced(), left }
    }
}

impl Inner {
    /// Cancels the tokens of every phase that is reached.
    fn show(&self, phase: Phase) {
        metrics::gauge!("carrick_drain_phase").set(f64::from(phase as u8));
        for (token, from) in [
            (&self.announced, Phase::Announcing),
            (&self.closing, Phase::Finishing),
            (&self.forced, Phase::Forcing),
        ] {
            if phase >= from {
                token.cancel();
            }
        }
    }
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain")
            .field("phase", &self.phase())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// How a drain went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// What began it.
    pub trigger: Trigger,
    /// From the trigger to the end.
    pub took: Duration,
    /// Whether work was cut off.
    pub forced: bool,
    /// What had not ended even then, by kind.
    pub left: BTreeMap<&'static str, usize>,
}

/// One kind of work that a drain waits for.
#[derive(Clone)]
pub struct Work {
    drain: Arc<Inner>,
    of_kind: Arc<AtomicUsize>,
}

impl Work {
    /// Counts one piece of work until the guard is dropped.
    ///
    /// Whoever accepts work (a listener, a consumer) holds a guard itself until it has stopped;
    /// otherwise the drain may end between its last acceptance and the guard for that.
    pub fn begin(&self) -> WorkGuard {
        self.drain.in_flight.fetch_add(1, Ordering::AcqRel);
        self.of_kind.fetch_add(1, Ordering::AcqRel);
        WorkGuard { work: self.clone() }
    }

    /// How much of this kind is under way.
    pub fn in_flight(&self) -> usize {
        self.of_kind.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// A piece of work under way; dropping it ends it.
#[derive(Debug)]
#[must_use = "work counts only while its guard lives"]
pub struct WorkGuard {
    work: Work,
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        self.work.of_kind.fetch_sub(1, Ordering::AcqRel);
        if self.work.drain.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.work.drain.changed.notify_waiters();
        }
    }
}
