//! Health: three questions that must not be mixed.
//!
//! * `/livez`: does the process run? Trivial on purpose. It reads the lag of the event loop and
//!   nothing else: a liveness check that asks the database restarts the whole fleet when the
//!   database blinks, and makes the blink an outage.
//! * `/readyz`: may *this instance* have traffic? It asks only what the instance owns: migrated, not
//!   draining, pool not saturated. A sick shared dependency is no reason either, since all instances
//!   would leave rotation together.
//! * `/debug/deep`: how are the dependencies? For people and dashboards, wired to no probe; it
//!   answers 200 whatever it finds. Each dependency has its own timeout, and the answer is cached,
//!   so that looking costs a sick dependency nothing.
//!
//! Conditions that flap pass through [`Hysteresis`]. [`core`] decides; [`Health`] holds the checks
//! and makes the routes.
//!
//! Source: pattern document, health listings. Differs: its readiness flips at each probe; its deep
//! check asks one dependency after the other, for each caller anew.

pub mod core;
mod deep;
mod routes;

use std::{fmt, future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::{core::Gate, deep::Deep};
pub use self::{
    core::{Band, Hysteresis},
    deep::{DeepReport, DependencyReport},
};
use crate::drain::Drain;

/// How often the event loop is measured and the instance's own conditions are looked at.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);

/// How [`Health`] behaves.
#[derive(Clone, Debug)]
pub struct HealthConfig {
    /// Lag of the event loop at which `/livez` gives up on the process. Default 30 s: three missed
    /// probes of ten seconds.
    pub lag_limit: Duration,
    /// How long an answer of `/debug/deep` is reused. Default 5 s.
    pub deep_cache: Duration,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { lag_limit: Duration::from_secs(30), deep_cache: Duration::from_secs(5) }
    }
}

/// The health of one process. Clones share everything.
///
/// ```
/// use carrick_ops::health::{Health, HealthConfig};
///
/// let health = Health::new(HealthConfig::default());
/// let migrated = health.flag("migrated", "migrations pending");
/// assert_eq!(health.readiness().unready[0].reason, "migrations pending");
/// migrated.raise();
/// assert!(health.readiness().is_ready());
/// ```
#[derive(Clone)]
pub struct Health(Arc<Inner>);

struct Inner {
    config: HealthConfig,
    /// One entry for each registration, made by the program at start: bounded by its source.
    own: Mutex<Vec<Own>>,
    deep: Deep,
    loop_lag: Mutex<LoopLag>,
}

/// A condition of the instance's own.
struct Own {
    name: &'static str,
    check: Check,
    gate: Gate,
    reason: String,
}

type Check = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

#[derive(Default)]
struct LoopLag {
    /// When the sampler should have run next; `None` until it runs.
    due: Option<Instant>,
    last: Duration,
}

impl Health {
    /// A process without any condition: ready.
    pub fn new(config: HealthConfig) -> Self {
        let deep = Deep::new(config.deep_cache);
        Self(Arc::new(Inner { config, own: Mutex::default(), deep, loop_lag: Mutex::default() }))
    }

    /// Registers a fact that starts false, such as "migrated"; readiness follows it at once.
    pub fn flag(&self, name: &'static str, reason: &'static str) -> Flag {
        let flag = Flag::default();
        let raised = flag.clone();
        self.own(name, Hysteresis::NONE, move || {
            if raised.is_raised() { Ok(()) } else { Err(reason.to_owned()) }
        });
        flag
    }

    /// Registers a condition of the instance's own, such as "the writer thread runs".
    ///
    /// * `check` says what is wrong, or `Ok`. It is called twice a second and by each probe: it must
    ///   be quick, and must not ask a shared dependency.
    pub fn own<F>(&self, name: &'static str, hysteresis: Hysteresis, check: F)
    where
        F: Fn() -> Result<(), String> + Send + Sync + 'static,
    {
        self.register(name, hysteresis, Arc::new(check));
    }

    /// Registers a level that must stay in its band, such as "callers waiting for a connection".
    ///
    /// * `level` is called like the check of [`Health::own`].
    pub fn level<F>(&self, name: &'static str, band: Band, hysteresis: Hysteresis, level: F)
    where
        F: Fn() -> f64 + Send + Sync + 'static,
    {
        let was_good = Mutex::new(true);
        self.own(name, hysteresis, move || {
            let level = level();
            let mut was_good = was_good.lock();
            *was_good = band.good(level, *was_good);
            if *was_good { Ok(()) } else { Err(format!("saturated: {level} of {}", band.high)) }
        });
    }

    /// Makes readiness end when the drain begins.
    pub fn follow(&self, drain: &Drain) {
        let drain = drain.clone();
        self.own("drain", Hysteresis::NONE, move || {
            if drain.is_draining() { Err("draining".to_owned()) } else { Ok(()) }
        });
    }

    /// Registers a dependency for `/debug/deep`. No probe ever asks it.
    ///
    /// * `timeout` is this dependency's alone; one that hangs costs the others nothing.
    /// * `check` returns a few words about what it found, or what is wrong.
    pub fn dependency<F, Fut>(&self, name: &'static str, timeout: Duration, check: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<String, String>> + Send + 'static,
    {
        self.0.deep.register(name, timeout, check);
    }

    /// Whether the instance may have traffic, and if not, why.
    pub fn readiness(&self) -> Readiness {
        // The checks run without the lock: one that asks for readiness must not hang it.
        let checks: Vec<_> = self.0.own.lock().iter().map(|own| Arc::clone(&own.check)).collect();
        let found: Vec<_> = checks.iter().map(|check| check()).collect();
        let now = Instant::now();
        let mut own = self.0.own.lock();
        let mut unready = Vec::new();
        for (own, found) in own.iter_mut().zip(found) {
            let good = own.gate.observe(now, found.is_ok());
            if let Err(reason) = found {
                own.reason = reason;
            }
            if !good {
                unready.push(Unready { name: own.name, reason: own.reason.clone() });
            }
        }
        Readiness { unready }
    }

    /// How the dependencies are; at most as old as the configured cache time.
    ///
    /// # Cancel safety
    /// Safe to drop: the checks under way are cancelled, the next caller starts them anew.
    pub async fn deep(&self) -> Arc<DeepReport> {
        self.0.deep.report().await
    }

    /// How late the event loop is: the last measurement, or what has passed since the next one was
    /// due, whichever is more.
    pub fn event_loop_lag(&self) -> Duration {
        let lag = self.0.loop_lag.lock();
        let overdue =
            lag.due.map_or(Duration::ZERO, |due| Instant::now().saturating_duration_since(due));
        overdue.max(lag.last)
    }

    /// Measures the event loop and looks at the own conditions, twice a second, until `stop`.
    ///
    /// Run it as a task of the server: without it `/livez` knows no lag, and hysteresis sees only
    /// what probes see.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn watch(&self, stop: CancellationToken) {
        let mut was_ready = true;
        loop {
            let due = Instant::now() + SAMPLE_EVERY;
            self.0.loop_lag.lock().due = Some(due);
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep_until(due) => {}
            }
            let late = Instant::now().saturating_duration_since(due);
            self.0.loop_lag.lock().last = late;
            metrics::histogram!("carrick_health_event_loop_lag_seconds").record(late.as_secs_f64());

            let readiness = self.readiness();
            metrics::gauge!("carrick_health_ready").set(if readiness.is_ready() {
                1.0
            } else {
                0.0
            });
            if was_ready != readiness.is_ready() {
                was_ready = readiness.is_ready();
                tracing::info!(ready = was_ready, unready = ?readiness.unready, "readiness changed");
            }
        }
        *self.0.loop_lag.lock() = LoopLag::default();
    }

    /// The routes `/livez`, `/readyz` and `/debug/deep`, to merge into a router of any state.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self) -> axum::Router<S> {
        routes::routes(self.clone())
    }

    fn register(&self, name: &'static str, hysteresis: Hysteresis, check: Check) {
        // What is wrong at registration is wrong at once; hysteresis is for changes.
        let found = check();
        let gate = Gate::new(hysteresis, found.is_ok());
        let reason = found.err().unwrap_or_default();
        self.0.own.lock().push(Own { name, check, gate, reason });
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("config", &self.0.config).finish_non_exhaustive()
    }
}

/// A fact that the program states. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Flag(Arc<std::sync::atomic::AtomicBool>);

impl Flag {
    /// It holds from now on.
    pub fn raise(&self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
    }

    /// It does not hold any more.
    pub fn lower(&self) {
        self.0.store(false, std::sync::atomic::Ordering::Release);
    }

    /// Whether it holds.
    pub fn is_raised(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Acquire)
    }
}

/// The answer to "may this instance have traffic".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// What speaks against it; empty if nothing does.
    pub unready: Vec<Unready>,
}

impl Readiness {
    /// Whether nothing speaks against it.
    pub fn is_ready(&self) -> bool {
        self.unready.is_empty()
    }
}

/// A condition that keeps an instance from being ready.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Unready {
    /// Which condition.
    pub name: &'static str,
    /// What is wrong with it.
    pub reason: String,
}
