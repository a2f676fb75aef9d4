//! Throttle: a client that is refused often asks less.
//!
//! A server that is overloaded spends its time on refusing. So each client keeps count of what it asks
//! and what is accepted, and refuses by itself what would most likely be refused there: with chance
//! `max(0, (requests − K·accepts) / (requests + 1))`. It needs no signal but the answers, and lets as
//! much through as gets accepted, times K.
//!
//! A refusal of its own is no answer of the server: it counts as asked, never as refused there, or the
//! throttle would feed on itself and not let go. However bad it is, a share and a few calls a second
//! go through, so that recovery is seen.
//!
//! Source: Google SRE book, client-side throttling; Finagle for the floor.

mod config;
mod core;

use std::{cell::RefCell, fmt, sync::Arc, time::Duration};

use carrick_core::outcome::Outcome;
use metrics::{Counter, counter};
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::time::Instant;

pub use self::config::{ThrottleConfig, ThrottleOptions};
use self::core::Window;
use crate::{
    Mode, Policy, Refusal,
    classify::AnyError,
    gate::{Gate, GateFuture, GateLayer, GateService},
};

/// Refuses calls that the dependency would most likely refuse.
pub type ThrottleLayer<C = AnyError> = GateLayer<Throttle, C>;

/// A service that is asked less the more it refuses.
pub type ThrottleService<S, C = AnyError> = GateService<S, Throttle, C>;

/// A call that was let through.
pub type ThrottleFuture<F, C = AnyError> = GateFuture<F, Throttle, C>;

thread_local! {
    static RNG: RefCell<SmallRng> = RefCell::new(SmallRng::from_rng(&mut rand::rng()));
}

/// What one client knows of a dependency's patience. Clones share it.
///
/// ```
/// use carrick_call::throttle::{Throttle, ThrottleConfig};
/// use carrick_core::outcome::Outcome;
/// use tokio::time::Instant;
///
/// let throttle = Throttle::new("pricing", ThrottleConfig::default());
/// let (now, mut rng) = (Instant::now(), rand::rng());
/// let mut sent = 0;
/// for _ in 0..1000 {
///     if let Ok(permit) = throttle.admit(now, &mut rng) {
///         permit.settle(Outcome::Overload { retry_after: None }, now);
///         sent += 1;
///     }
/// }
/// assert!(sent < 500);
/// ```
#[derive(Clone)]
pub struct Throttle(Arc<Inner>);

struct Inner {
    mode: Mode,
    start: Instant,
    window: Mutex<Window>,
    refused: Counter,
}

/// Leave to make one call.
#[derive(Debug)]
#[must_use = "what becomes of the call is what the throttle learns from"]
pub struct Permit {
    throttle: Throttle,
}

const LIKELY: Refusal =
    Refusal::new(Policy::Throttle, "the dependency refuses so much that this would be refused too");

impl Throttle {
    /// A throttle for one dependency, whose name labels its metrics.
    pub fn new(name: &str, config: ThrottleConfig) -> Self {
        let options = config.options;
        Self(Arc::new(Inner {
            mode: options.mode,
            start: Instant::now(),
            window: Mutex::new(Window::new(&options)),
            refused: counter!("carrick_throttle_refused_total", "dependency" => name.to_owned()),
        }))
    }

    /// Lets a call through, or refuses it.
    ///
    /// # Errors
    /// The refusal.
    pub fn admit(&self, now: Instant, rng: &mut (impl Rng + ?Sized)) -> Result<Permit, Refusal> {
        let millis = self.millis(now);
        let passes = self.0.window.lock().admit(millis, rng);
        if !passes {
            self.0.refused.increment(1);
            if self.0.mode.enforces() {
                return Err(LIKELY);
            }
        }
        Ok(Permit { throttle: self.clone() })
    }

    /// The chance with which a call is refused now.
    pub fn chance(&self, now: Instant) -> f64 {
        self.0.window.lock().chance(self.millis(now))
    }

    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.0.start).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

impl Permit {
    /// Tells how the call ended. Whatever is not "too much" or no answer in time was accepted; dropping
    /// the permit instead leaves it open, which counts as asked.
    pub fn settle(self, outcome: Outcome, now: Instant) {
        let accepted = match outcome {
            Outcome::Success | Outcome::Permanent | Outcome::Transient => true,
            Outcome::Overload { .. } | Outcome::Expired => false,
            // It never got there, or nobody waited for it.
            Outcome::Rejected | Outcome::Cancelled => {
                let millis = self.throttle.millis(now);
                self.throttle.0.window.lock().take_back(millis);
                return;
            }
        };
        if accepted {
            let millis = self.throttle.millis(now);
            self.throttle.0.window.lock().accepted(millis);
        }
    }
}

impl Gate for Throttle {
    type Permit = Permit;

    fn admit(&self, now: Instant) -> Result<Permit, Refusal> {
        RNG.with(|rng| Self::admit(self, now, &mut *rng.borrow_mut()))
    }

    fn settle(permit: Permit, outcome: Outcome, _elapsed: Duration, now: Instant) {
        permit.settle(outcome, now);
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("mode", &self.0.mode).finish_non_exhaustive()
    }
}
