//! Scatter-gather: one question to many, and an answer that says what is missing.
//!
//! A search over ten shards of which one is down is either an error or nine tenths of an answer, and
//! the caller must know which. [`scatter`] asks all at once, so many at a time, until a deadline that
//! leaves time to merge, and tells of each shard how it ended. Its [`Partial`] gives values only to a
//! caller that says what it takes: [`Partial::complete`], [`Partial::quorum`] or
//! [`Partial::accept_partial`].
//!
//! Shards live in the future that asks: when that is dropped, or a shard fails fatally, the others end
//! with it, and none is left running.
//!
//! Source: pattern document, scatter-gather. Differs: a shard that was late never counts as done
//! (OpenSearch#21087), and the others are ended after a fatal failure instead of left behind.

use std::{fmt, time::Duration};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use futures_util::{StreamExt, future::Either, stream::FuturesUnordered};
use metrics::counter;
use tokio::time::{Instant, timeout_at};

use crate::CallError;

/// How one shard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It answered.
    Ok,
    /// It answered that it has nothing.
    Empty,
    /// No answer came in time.
    Timeout,
    /// It failed.
    Failed,
    /// It was ended, for another failed fatally.
    Cancelled,
    /// Its circuit is open: it was not asked.
    Skipped,
    /// Another policy refused: it was not asked.
    Rejected,
}

/// What a shard says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shard<T> {
    /// A value.
    Value(T),
    /// Nothing, which is an answer.
    Empty,
}

/// How to ask.
#[derive(Clone, Debug)]
pub struct ScatterConfig {
    /// Shards asked at a time, at least 1. Default 32.
    pub width: usize,
    /// What is left of the deadline for merging. Default 20 ms.
    pub merge_reserve: Duration,
    /// Whether a failure that is no answer from the shard's side ends the others. Default: they go on.
    pub first_failure_ends: bool,
}

impl Default for ScatterConfig {
    fn default() -> Self {
        Self { width: 32, merge_reserve: Duration::from_millis(20), first_failure_ends: false }
    }
}

/// What came of asking: values, and for each shard how it ended.
#[derive(Clone, Debug)]
#[must_use = "shards may be missing: say what is accepted"]
pub struct Partial<T> {
    shards: Vec<(Status, Option<T>)>,
}

/// Less came than was asked for.
#[derive(Clone, Debug)]
pub struct Incomplete<T>(pub Partial<T>);

impl<T> fmt::Display for Incomplete<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answered = self.0.answered();
        write!(f, "{answered} of {} shards answered", self.0.shards.len())
    }
}

impl<T: fmt::Debug> std::error::Error for Incomplete<T> {}

impl<T> Partial<T> {
    /// How each shard ended, in the order of the shards.
    pub fn statuses(&self) -> Vec<Status> {
        self.shards.iter().map(|(status, _)| *status).collect()
    }

    /// Shards that answered, also those that have nothing.
    pub fn answered(&self) -> usize {
        let done = |status: &Status| matches!(status, Status::Ok | Status::Empty);
        self.shards.iter().filter(|(status, _)| done(status)).count()
    }

    /// The share of shards that answered, in [0, 1]; 1 of none.
    pub fn completeness(&self) -> f64 {
        if self.shards.is_empty() { 1.0 } else { self.answered() as f64 / self.shards.len() as f64 }
    }

    /// The values, if every shard answered.
    ///
    /// # Errors
    /// What there is, if one did not.
    pub fn complete(self) -> Result<Vec<T>, Incomplete<T>> {
        let all = self.shards.len();
        self.quorum(all, &[])
    }

    /// The values, if so many shards answered and these among them.
    ///
    /// # Errors
    /// What there is, if not.
    pub fn quorum(self, min_ok: usize, required: &[usize]) -> Result<Vec<T>, Incomplete<T>> {
        let has = |shard: &usize| {
            let status = self.shards.get(*shard).map(|(status, _)| *status);
            matches!(status, Some(Status::Ok | Status::Empty))
        };
        if self.answered() >= min_ok && required.iter().all(has) {
            Ok(self.values())
        } else {
            Err(Incomplete(self))
        }
    }

    /// The values, if the caller takes what is there: it is told how each shard ended.
    ///
    /// # Errors
    /// What there is, if it does not.
    pub fn accept_partial(
        self,
        accepts: impl FnOnce(&[Status]) -> bool,
    ) -> Result<Vec<T>, Incomplete<T>> {
        if accepts(&self.statuses()) { Ok(self.values()) } else { Err(Incomplete(self)) }
    }

    fn values(self) -> Vec<T> {
        self.shards.into_iter().filter_map(|(_, value)| value).collect()
    }
}

/// Asks every shard, and waits until all have answered or the deadline, less what merging needs, has
/// passed. The order of shards is kept.
///
/// * `ask`: makes a shard's call; it is not called before there is room for one more.
///
/// ```
/// # use carrick_call::{CallError, scatter::{ScatterConfig, Shard, scatter}};
/// # use carrick_core::deadline::Deadline;
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let deadline = Deadline::at(tokio::time::Instant::now() + Duration::from_secs(1));
/// let config = ScatterConfig::default();
/// let found = scatter([1, 2, 3], &config, deadline, async |shard| {
///     if shard == 2 {
///         std::future::pending::<()>().await; // it hangs
///     }
///     Ok::<_, CallError<std::io::Error>>(Shard::Value(shard * 10))
/// })
/// .await;
/// assert!(found.clone().complete().is_err());
/// assert_eq!(found.quorum(2, &[0])?, [10, 30]);
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// Dropping it drops every shard's call; what was sent may still take effect.
pub async fn scatter<K, T, E, F>(
    shards: impl IntoIterator<Item = K>,
    config: &ScatterConfig,
    deadline: Deadline,
    ask: impl Fn(K) -> F,
) -> Partial<T>
where
    F: Future<Output = Result<Shard<T>, CallError<E>>>,
{
    let start = Instant::now();
    let until = deadline.instant().checked_sub(config.merge_reserve).unwrap_or(start);
    let mut waiting = shards.into_iter().enumerate();
    let mut ended = Vec::new();
    let mut running = FuturesUnordered::new();
    let mut is_over = false;
    loop {
        while !is_over
            && running.len() < config.width.max(1)
            && let Some((place, shard)) = waiting.next()
        {
            if ended.len() <= place {
                ended.resize_with(place + 1, || None);
            }
            if Instant::now() >= until {
                ended[place] = Some((Status::Timeout, None));
                continue;
            }
            let call = ask(shard);
            running.push(async move {
                let result = timeout_at(until, call).await;
                (place, result.map_or_else(|_| Either::Left(()), Either::Right))
            });
        }
        let Some((place, result)) = running.next().await else { break };
        let outcome = match result {
            Either::Left(()) => (Status::Timeout, None),
            Either::Right(Ok(Shard::Value(value))) => (Status::Ok, Some(value)),
            Either::Right(Ok(Shard::Empty)) => (Status::Empty, None),
            Either::Right(Err(error)) => (status(&error), None),
        };
        let is_fatal = outcome.0 == Status::Failed && config.first_failure_ends;
        ended[place] = Some(outcome);
        if is_fatal {
            is_over = true;
            break;
        }
    }
    // The calls that are left end here, before anybody is answered.
    drop(running);
    let rest = waiting.map(|_| None).collect::<Vec<_>>();
    let left = if is_over { Status::Cancelled } else { Status::Timeout };
    let shards: Vec<_> =
        ended.into_iter().chain(rest).map(|one| one.unwrap_or((left, None))).collect();
    let partial = Partial { shards };
    counter!("carrick_scatter_shards_total").increment(partial.shards.len() as u64);
    let missing = partial.shards.len() - partial.answered();
    counter!("carrick_scatter_missing_total").increment(missing as u64);
    partial
}

fn status<E>(error: &CallError<E>) -> Status {
    match error {
        CallError::Refused(refusal) if refusal.policy == crate::Policy::Breaker => Status::Skipped,
        CallError::Refused(_) => Status::Rejected,
        CallError::Expired => Status::Timeout,
        CallError::Inner(_) => Status::Failed,
    }
}

/// The verdict on a whole scatter, for the policies above: it succeeded if all shards answered.
pub fn outcome<T>(partial: &Partial<T>) -> Outcome {
    if partial.answered() == partial.shards.len() { Outcome::Success } else { Outcome::Transient }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use futures_util::poll;
    use tokio::time::sleep;

    use super::*;
    use crate::{Policy, Refusal};

    const MS: Duration = Duration::from_millis(1);

    fn within(span: Duration) -> Deadline {
        Deadline::at(Instant::now() + span)
    }

    type Said = Result<Shard<u32>, CallError<&'static str>>;

    async fn shard(n: u32) -> Said {
        sleep(10 * MS).await;
        match n {
            0 => Ok(Shard::Empty),
            1 => Err(CallError::Inner("down")),
            2 => std::future::pending().await,
            3 => Err(Refusal::new(Policy::Breaker, "open").into()),
            4 => Err(Refusal::new(Policy::Bulkhead, "full").into()),
            5 => Err(CallError::Expired),
            n => Ok(Shard::Value(n)),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn opensearch_21087_fess_3440_each_shard_tells_how_it_ended() {
        let start = Instant::now();
        let config = ScatterConfig::default();
        let partial = scatter([7, 0, 1, 2, 3, 4, 5, 8], &config, within(500 * MS), shard).await;
        use Status::{Empty, Failed, Ok, Rejected, Skipped, Timeout};
        assert_eq!(
            partial.statuses(),
            [Ok, Empty, Failed, Timeout, Skipped, Rejected, Timeout, Ok]
        );
        assert_eq!((partial.answered(), partial.completeness()), (3, 0.375));
        assert!(start.elapsed() >= 480 * MS && start.elapsed() < 490 * MS, "time is left to merge");
        assert!(partial.clone().complete().is_err());
        assert_eq!(partial.clone().quorum(3, &[0, 1]).unwrap(), [7, 8]);
        let missing = partial.clone().quorum(3, &[2]).unwrap_err();
        assert_eq!(missing.to_string(), "3 of 8 shards answered");
        assert!(
            partial.clone().quorum(4, &[]).is_err() && partial.clone().quorum(1, &[99]).is_err()
        );
        assert!(partial.accept_partial(|shards| shards.contains(&Timeout)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_fatal_failure_ends_the_others_if_that_is_wished() {
        let config = ScatterConfig { first_failure_ends: true, ..ScatterConfig::default() };
        let partial = scatter([2, 1, 2], &config, within(500 * MS), shard).await;
        assert_eq!(partial.statuses(), [Status::Cancelled, Status::Failed, Status::Cancelled]);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_run_at_a_time_than_may_and_none_is_left_behind() {
        struct Running<'a>(&'a AtomicUsize);
        impl Drop for Running<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let (running, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let ask = |n: u32| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                let _running = Running(&running);
                most.fetch_max(now, Ordering::SeqCst);
                sleep(10 * MS).await;
                Said::Ok(Shard::Value(n))
            }
        };
        let config = ScatterConfig { width: 3, ..ScatterConfig::default() };
        let whole = scatter(0..20, &config, within(1000 * MS), ask).await.complete().unwrap();
        assert_eq!(whole, (0..20).collect::<Vec<_>>(), "in the order of the shards");
        assert_eq!(most.load(Ordering::SeqCst), 3);
        for polls in 0..5 {
            let mut half = Box::pin(scatter(0..20, &config, within(1000 * MS), ask));
            for _ in 0..polls {
                assert!(poll!(&mut half).is_pending());
                tokio::time::advance(7 * MS).await;
            }
            drop(half);
            assert_eq!(running.load(Ordering::SeqCst), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn elasticsearch_150075_past_the_deadline_nobody_is_asked() {
        let asked = AtomicUsize::new(0);
        let config = ScatterConfig { width: 1, ..ScatterConfig::default() };
        let ask = |n: u32| {
            asked.fetch_add(1, Ordering::SeqCst);
            async move {
                sleep(60 * MS).await;
                Said::Ok(Shard::Value(n))
            }
        };
        let partial = scatter(0..10, &config, within(100 * MS), ask).await;
        assert_eq!((partial.answered(), partial.statuses().len()), (1, 10));
        assert_eq!(asked.load(Ordering::SeqCst), 2, "the second was under way");
    }
}
