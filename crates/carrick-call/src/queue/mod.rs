//! Queue: calls that find no place wait for one, not too many and not too long.
//!
//! A short line smooths a burst; a long one only makes everybody late. So it is bounded twice: by how
//! many wait, and by how long, for sixty-four that wait ten milliseconds each behind one worker are
//! sixty-four that wait two behind five. Who has waited past its deadline is let go before any work is
//! done for it. And while the line does not get shorter, the newest goes first: the oldest are mostly
//! gone already, and serving them in turn means serving nobody in time.
//!
//! [`Queue`] stands before a [`bulkhead`], on the client's side or, as load shedding,
//! on the server's.
//!
//! Source: pattern document, bounded queues; CoDel for "too long"; Facebook's adaptive LIFO. Differs:
//! priorities; the time to come back that a refusal tells is computed from how fast the line moves.

mod config;
mod core;
mod layer;

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use carrick_core::{deadline::Deadline, outcome::Outcome};
use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use rand::RngExt;
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep, sleep_until},
};

pub use self::{
    config::{QueueConfig, QueueOptions},
    core::Line,
    layer::{AtHead, Finish, QueueFuture, QueueLayer, QueueService, Served},
};
use crate::{
    Policy, Refusal,
    bulkhead::{self, Bulkhead, Priority},
};

/// A line before the places of a bulkhead. Clones share it.
///
/// ```
/// use carrick_call::{bulkhead::{Bulkhead, BulkheadConfig, Priority}, queue::{Queue, QueueConfig}};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), carrick_call::Refusal> {
/// let queue = Queue::new("api", QueueConfig::default(), Bulkhead::new("api", BulkheadConfig::default()));
/// let permit = queue.enter(Priority::Default, None).await?;
/// drop(permit); // and whoever waits longest, or came last, is next
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Queue(Arc<Inner>);

struct Inner {
    options: QueueOptions,
    bulkhead: Bulkhead,
    line: Mutex<Line<oneshot::Sender<Permit>>>,
    full: Counter,
    late: Counter,
    displaced: Counter,
    seconds: Histogram,
}

/// A place of the bulkhead; when it goes, the next in line gets one.
#[must_use = "the place is given back when the permit goes"]
pub struct Permit {
    held: Option<bulkhead::Permit>,
    queue: Queue,
}

impl Queue {
    /// A line before a bulkhead; `name` labels its metrics.
    pub fn new(name: &str, config: QueueConfig, bulkhead: Bulkhead) -> Self {
        let refused = |why: &'static str| counter!("carrick_queue_refused_total", "name" => name.to_owned(), "why" => why);
        Self(Arc::new(Inner {
            line: Mutex::new(Line::new(&config)),
            options: config.options,
            bulkhead,
            full: refused("full"),
            late: refused("late"),
            displaced: refused("displaced"),
            seconds: histogram!("carrick_queue_seconds", "name" => name.to_owned()),
        }))
    }

    /// Waits for a place.
    ///
    /// * `deadline`: until when the caller wants to begin; none means the longest wait that is set.
    ///
    /// # Errors
    /// The refusal, if the line is full, if the wait gets too long, or if somebody more important came
    /// to a full line.
    ///
    /// # Cancel safety
    /// Dropping it leaves the line.
    pub fn enter(&self, priority: Priority, deadline: Option<Deadline>) -> Enter {
        let now = Instant::now();
        let longest = now + self.0.options.max_wait;
        let until = deadline.map_or(longest, |deadline| deadline.instant().min(longest));
        let nobody_waits = self.0.line.lock().is_empty();
        if nobody_waits && let Ok(held) = self.0.bulkhead.try_acquire(priority) {
            let permit = Permit { held: Some(held), queue: self.clone() };
            return Enter::of(Told::Now { result: Some(Ok(permit)) });
        }
        let (admit, admitted) = oneshot::channel();
        let joined = {
            let mut line = self.0.line.lock();
            let joined = line.join(priority, until, now, admit);
            joined.map_err(|_| line.time_to_come_back(rand::rng().random_range(1.0..=1.2)))
        };
        let number = match joined {
            Ok((number, displaced)) => {
                if displaced.is_some() {
                    self.0.displaced.increment(1); // whose sender goes here, which tells it
                }
                number
            }
            Err(after) => {
                self.0.full.increment(1);
                if self.0.options.mode.enforces() {
                    return Enter::of(Told::Now {
                        result: Some(Err(FULL.with_retry_after(after))),
                    });
                }
                let held = None;
                let permit = Permit { held, queue: self.clone() };
                return Enter::of(Told::Now { result: Some(Ok(permit)) });
            }
        };
        // A place may have come free between the look and the line.
        self.advance();
        Enter::of(Told::Waiting {
            place: Place { queue: self.clone(), number },
            admitted,
            sleep: sleep_until(until),
            since: now,
        })
    }

    /// The places that are waited for.
    pub fn bulkhead(&self) -> &Bulkhead {
        &self.0.bulkhead
    }

    /// Calls that wait.
    pub fn waiting(&self) -> usize {
        self.0.line.lock().len()
    }

    /// Gives free places to who is next.
    fn advance(&self) {
        loop {
            let now = Instant::now();
            let next = {
                let mut line = self.0.line.lock();
                let Some(priority) = line.next_priority(now) else { return };
                match self.0.bulkhead.try_acquire(priority) {
                    Ok(held) => line.take(now).map(|admit| (admit, held)),
                    Err(_) => return,
                }
            };
            let Some((admit, held)) = next else { return };
            let permit = Permit { held: Some(held), queue: self.clone() };
            match admit.send(permit) {
                Ok(()) => {}
                // It left just now. Its permit must not come back here through its own drop.
                Err(mut permit) => drop(permit.held.take()),
            }
        }
    }
}

const FULL: Refusal = Refusal::new(Policy::Queue, "the queue is full");
const LATE: Refusal = Refusal::new(Policy::Queue, "the wait in the queue was too long");
const DISPLACED: Refusal =
    Refusal::new(Policy::Queue, "something more important came to a full queue");

impl Permit {
    /// Tells how the call ended, and how long it took: what an adaptive limit learns from.
    pub fn settle(mut self, outcome: Outcome, elapsed: Duration, now: Instant) {
        if let Some(held) = self.held.take() {
            held.settle(outcome, elapsed, now);
            self.queue.advance();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            drop(held);
            self.queue.advance();
        }
    }
}

/// A place in the line; leaves it when it goes.
struct Place {
    queue: Queue,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.0.line.lock().leave(self.number);
    }
}

pin_project! {
    /// Waits for a place; see [`Queue::enter`].
    #[must_use = "a place is waited for when it is polled"]
    pub struct Enter {
        #[pin]
        told: Told,
    }
}

pin_project! {
    #[project = Projected]
    enum Told {
        Now { result: Option<Result<Permit, Refusal>> },
        Waiting {
            #[pin]
            sleep: Sleep,
            admitted: oneshot::Receiver<Permit>,
            place: Place,
            since: Instant,
        },
    }
}

impl Enter {
    fn of(told: Told) -> Self {
        Self { told }
    }
}

impl Future for Enter {
    type Output = Result<Permit, Refusal>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().told.project() {
            Projected::Now { result } => {
                Poll::Ready(result.take().expect("polled once when ready"))
            }
            Projected::Waiting { sleep, admitted, place, since } => {
                let queue = &place.queue.0;
                if let Poll::Ready(told) = Pin::new(admitted).poll(cx) {
                    queue.seconds.record(since.elapsed().as_secs_f64());
                    return Poll::Ready(told.map_err(|_| {
                        // Whoever is let go of without an answer was late, or displaced.
                        if sleep.is_elapsed() { LATE } else { DISPLACED }
                    }));
                }
                ready!(sleep.poll(cx));
                queue.late.increment(1);
                let after = queue.line.lock().time_to_come_back(1.0);
                Poll::Ready(Err(LATE.with_retry_after(after)))
            }
        }
    }
}

impl fmt::Debug for Enter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enter").finish_non_exhaustive()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("held", &self.held).finish_non_exhaustive()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("waiting", &self.waiting())
            .field("bulkhead", &self.0.bulkhead)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use futures_util::poll;
    use tokio::time::{advance, sleep};

    use super::*;
    use crate::{
        Mode,
        bulkhead::{BulkheadConfig, BulkheadOptions},
    };

    const MS: Duration = Duration::from_millis(1);

    fn queue(places: u32, change: impl FnOnce(&mut QueueOptions)) -> Queue {
        let mut options = QueueOptions::default();
        change(&mut options);
        let bulkhead = BulkheadOptions { max: places, ..BulkheadOptions::default() };
        let bulkhead = Bulkhead::new("test", BulkheadConfig::try_from(bulkhead).unwrap());
        Queue::new("test", QueueConfig::try_from(options).unwrap(), bulkhead)
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_gets_the_place_that_comes_free_and_the_first_first() {
        let queue = queue(1, |_| {});
        let held = queue.enter(Priority::Default, None).await.unwrap();
        let mut first = Box::pin(queue.enter(Priority::Default, None));
        let mut second = Box::pin(queue.enter(Priority::Default, None));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        drop(held);
        let held = first.await.unwrap();
        assert!(poll!(&mut second).is_pending());
        drop(held);
        drop(second.await.unwrap());
        assert_eq!((queue.waiting(), queue.0.bulkhead.in_flight()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_line_is_bounded_by_length_and_by_time_and_says_when_to_come_back() {
        let queue = queue(1, |options| options.length = 2);
        let _held = queue.enter(Priority::Default, None).await.unwrap();
        let waiting: Vec<_> = (0..2).map(|_| queue.enter(Priority::Default, None)).collect();
        let refusal = queue.enter(Priority::Default, None).await.unwrap_err();
        assert_eq!(
            (refusal.reason.as_ref(), refusal.retry_after.is_some()),
            ("the queue is full", true)
        );
        let start = Instant::now();
        for one in waiting {
            assert_eq!(one.await.unwrap_err().reason, LATE.reason);
        }
        assert!(start.elapsed() >= 500 * MS && start.elapsed() < 510 * MS);
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn scylladb_6428_haproxy_177_nothing_is_done_for_who_has_left_or_is_late() {
        let queue = queue(1, |_| {});
        let held = queue.enter(Priority::Default, None).await.unwrap();
        let soon = Some(Deadline::at(Instant::now() + 10 * MS));
        let mut late = Box::pin(queue.enter(Priority::Default, soon));
        let mut left = Box::pin(queue.enter(Priority::Default, None));
        let mut stays = Box::pin(queue.enter(Priority::Default, None));
        for one in [&mut late, &mut left, &mut stays] {
            assert!(poll!(one).is_pending());
        }
        drop(left);
        advance(20 * MS).await;
        drop(held);
        assert!(stays.await.is_ok(), "the one whom it is of use to");
        assert!(late.await.is_err());
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_that_does_not_get_shorter_is_served_from_its_end() {
        let queue = queue(1, |options| options.max_wait = 5000 * MS);
        let mut held = queue.enter(Priority::Default, None).await.unwrap();
        let mut line: Vec<_> = Vec::new();
        // Two come for each that is served, every ten milliseconds.
        for _ in 0..20 {
            for _ in 0..2 {
                let mut one = Box::pin(queue.enter(Priority::Default, None));
                assert!(poll!(&mut one).is_pending());
                line.push(one);
            }
            sleep(10 * MS).await;
            drop(held);
            let mut served = None;
            for (place, one) in line.iter_mut().enumerate() {
                if let Poll::Ready(permit) = poll!(one) {
                    served = Some((place, permit.unwrap()));
                    break;
                }
            }
            let (place, permit) = served.expect("somebody is next");
            drop(line.remove(place));
            held = permit;
            if line.len() > 15 {
                assert_eq!(place, line.len(), "the newest, once the line has been slow for long");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_important_go_first_and_push_the_lesser_out_of_a_full_line() {
        let queue = queue(1, |options| options.length = 2);
        let held = queue.enter(Priority::Default, None).await.unwrap();
        let mut sheddable = Box::pin(queue.enter(Priority::Sheddable, None));
        let mut default = Box::pin(queue.enter(Priority::Default, None));
        assert!(poll!(&mut sheddable).is_pending() && poll!(&mut default).is_pending());
        let mut critical = Box::pin(queue.enter(Priority::Critical, None));
        assert!(poll!(&mut critical).is_pending());
        assert_eq!(sheddable.await.unwrap_err().reason, DISPLACED.reason);
        assert!(queue.enter(Priority::Sheddable, None).await.is_err(), "nobody is less important");
        drop(held);
        let held = critical.await.unwrap();
        assert!(poll!(&mut default).is_pending());
        drop(held);
        assert!(default.await.is_ok());
    }

    #[tokio::test]
    async fn no_wake_up_is_lost_under_load() {
        let queue = queue(3, |options| {
            options.length = 1000;
            options.max_wait = 60_000 * MS;
        });
        let tasks: Vec<_> = (0..200)
            .map(|_| {
                let queue = queue.clone();
                tokio::spawn(async move {
                    for _ in 0..20 {
                        let permit = queue.enter(Priority::Default, None).await.unwrap();
                        tokio::task::yield_now().await;
                        drop(permit);
                    }
                })
            })
            .collect();
        for task in tasks {
            tokio::time::timeout(Duration::from_secs(30), task).await.expect("no hang").unwrap();
        }
        assert_eq!((queue.waiting(), queue.0.bulkhead.in_flight()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn in_observe_mode_nobody_is_refused_for_a_full_line() {
        let queue = queue(1, |options| (options.length, options.mode) = (1, Mode::Observe));
        let _held = queue.enter(Priority::Default, None).await.unwrap();
        let _waits = queue.enter(Priority::Default, None);
        assert!(queue.enter(Priority::Default, None).await.is_ok());
    }
}
