//! Where hosts come from: a list, a watched value, or a name that is looked up again and again.
//!
//! A fixed list is [`Balancer::update`] once. The others run in a task whose owner is a
//! [`Discovery`]: when that is dropped the task ends, and the balancer keeps the last set.

use std::{io, net::SocketAddr, time::Duration};

use carrick_core::backoff::Backoff;
use rand::RngExt;
use tokio::{
    net::lookup_host,
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::warn;

use super::{Balancer, Endpoint};

/// A lookup that takes longer has failed: resolvers try for 5 to 10 s.
const PATIENCE: Duration = Duration::from_secs(15);

/// The shortest interval; a server of names is not to be asked in a loop.
const SHORTEST: Duration = Duration::from_millis(100);

/// Keeps a balancer's hosts up to date until it is dropped.
///
/// ```
/// # use carrick_call::balance::{BalanceConfig, Balancer, Endpoint, discovery};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let balancer = Balancer::new("pricing", BalanceConfig::default());
/// let (hosts, watched) = tokio::sync::watch::channel(vec![Endpoint::new("a:80")]);
/// let discovery = discovery::watch(&balancer, watched);
/// tokio::task::yield_now().await;
/// assert_eq!(balancer.hosts().len(), 1);
/// discovery.stop().await;
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping it ends the discovery"]
pub struct Discovery(JoinHandle<()>);

impl Discovery {
    /// Ends the task and waits until it has ended.
    ///
    /// # Cancel safety
    /// Dropped half-way, the task still ends.
    pub async fn stop(mut self) {
        self.0.abort();
        // An error is the abort itself, or a panic of the caller's lookup that the runtime has told.
        let _ = (&mut self.0).await;
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows a watched list: its present value at once, and each one after. When the sender is gone the
/// last set stays. An empty list is taken at its word.
///
/// # Panics
/// Outside a tokio runtime.
pub fn watch<T: Send + Sync + 'static>(
    balancer: &Balancer<T>,
    mut endpoints: watch::Receiver<Vec<Endpoint>>,
) -> Discovery {
    let balancer = balancer.clone();
    Discovery(tokio::spawn(async move {
        loop {
            let told = endpoints.borrow_and_update().clone();
            balancer.update(told, Instant::now());
            if endpoints.changed().await.is_err() {
                return;
            }
        }
    }))
}

/// Looks a name up every `interval` (give or take a tenth), by the system's resolver.
///
/// A failed lookup or an empty answer keeps the hosts that are known, and is tried again after a
/// second, then two, up to the interval.
///
/// # Panics
/// Outside a tokio runtime.
pub fn dns<T: Send + Sync + 'static>(
    balancer: &Balancer<T>,
    host: impl Into<String>,
    port: u16,
    interval: Duration,
) -> Discovery {
    let host = host.into();
    poll(balancer, interval, move || {
        let host = host.clone();
        async move { Ok(lookup_host((host, port)).await?.map(of_address).collect()) }
    })
}

/// Asks `lookup` every `interval`, in the manner of [`dns`]. One lookup is given 15 s.
///
/// # Panics
/// Outside a tokio runtime.
pub fn poll<T, F, A>(balancer: &Balancer<T>, interval: Duration, lookup: F) -> Discovery
where
    T: Send + Sync + 'static,
    F: Fn() -> A + Send + 'static,
    A: Future<Output = io::Result<Vec<Endpoint>>> + Send,
{
    let (balancer, interval) = (balancer.clone(), interval.max(SHORTEST));
    Discovery(tokio::spawn(async move {
        let mut failures = 0;
        loop {
            let wait = match timeout(PATIENCE, lookup()).await {
                Ok(Ok(found)) if !found.is_empty() => {
                    failures = 0;
                    balancer.update(found, Instant::now());
                    interval.mul_f64(rand::rng().random_range(0.9..1.1))
                }
                failed => {
                    let error = match failed {
                        Ok(Ok(_)) => "the answer is empty".to_owned(),
                        Ok(Err(error)) => error.to_string(),
                        Err(_) => "no answer".to_owned(),
                    };
                    warn!(error, failures, "lookup failed: the known hosts stay");
                    balancer.shared().metrics.lookup_failures.increment(1);
                    let wait = after_failure(failures, interval);
                    failures = failures.saturating_add(1);
                    wait
                }
            };
            sleep(wait).await;
        }
    }))
}

/// An address found by a lookup, as a host of weight 1.
pub fn of_address(address: SocketAddr) -> Endpoint {
    Endpoint::new(address.to_string())
}

fn after_failure(failures: u32, interval: Duration) -> Duration {
    let backoff = Backoff { base: Duration::from_secs(1).min(interval), cap: interval };
    backoff.delay(failures, &mut rand::rng()).max(SHORTEST)
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use super::*;
    use crate::balance::BalanceConfig;

    fn addresses(balancer: &Balancer) -> Vec<String> {
        balancer.hosts().iter().map(|host| host.endpoint().address.to_string()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_or_empty_lookup_keeps_the_hosts_and_is_soon_tried_again() {
        let balancer = Balancer::new("test", BalanceConfig::default());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let discovery = poll(&balancer, Duration::from_secs(30), move || {
            let n = count.fetch_add(1, Relaxed);
            async move {
                match n {
                    0 => Ok(vec![Endpoint::new("a"), Endpoint::new("b")]),
                    1 => Err(io::Error::other("no such name")),
                    2 => Ok(vec![]),
                    3 => std::future::pending().await,
                    _ => Ok(vec![Endpoint::new("b"), Endpoint::new("c")]),
                }
            }
        });
        sleep(Duration::from_millis(1)).await;
        assert_eq!(addresses(&balancer), ["a", "b"]);
        sleep(Duration::from_secs(33)).await;
        assert!(asked.load(Relaxed) >= 2);
        assert_eq!(addresses(&balancer), ["a", "b"]);
        sleep(Duration::from_secs(2 + 15 + 8)).await;
        assert_eq!(addresses(&balancer), ["b", "c"]);
        discovery.stop().await;
        let before = asked.load(Relaxed);
        sleep(Duration::from_secs(300)).await;
        assert_eq!(asked.load(Relaxed), before, "a stopped discovery asks nobody");
    }

    #[tokio::test(start_paused = true)]
    async fn linkerd2_2550_hosts_change_without_a_call() {
        let balancer = Balancer::new("test", BalanceConfig::default());
        let (sender, receiver) = tokio::sync::watch::channel(vec![Endpoint::new("dead")]);
        let discovery = watch(&balancer, receiver);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(addresses(&balancer), ["dead"]);
        sender.send(vec![Endpoint::new("alive")]).unwrap();
        sleep(Duration::from_millis(1)).await;
        assert_eq!(addresses(&balancer), ["alive"]);
        drop(discovery);
        sleep(Duration::from_millis(1)).await;
        assert!(sender.send(vec![]).is_err(), "nobody listens any more");
    }

    #[tokio::test]
    async fn a_name_is_looked_up() {
        let balancer = Balancer::new("test", BalanceConfig::default());
        let _discovery = dns(&balancer, "localhost", 80, Duration::from_secs(1));
        let found = async {
            while balancer.hosts().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(10), found).await.unwrap();
        assert!(addresses(&balancer).iter().all(|address| address.ends_with(":80")));
    }
}
