//! Wake-ups: of waiters in this process at once, of those in others by `NOTIFY`.
//!
//! A `NOTIFY` in a transaction makes every commit of the database wait in one line, listeners or
//! not (substrate#920: 600 writes a second). So none is sent there: after the commit the stream's
//! name goes into a set, and a task sends what has gathered in a few milliseconds in one statement,
//! on a connection of its own. A notice is a hint; whoever misses it looks at its next poll.
//!
//! The listener proves itself: a connection silent for a while is asked something, for one that
//! died without a word would look the same. After each new connection everybody is woken.

use std::{mem, sync::Arc, time::Duration};

use carrick_core::backoff::Backoff;
use hashbrown::HashSet;
use parking_lot::Mutex;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::session::{Db, Sparse};
use crate::{
    Stream,
    wake::{Waiter, Wakes},
};

/// How long names gather before they are sent: at most 200 notices a second and process.
const GATHER: Duration = Duration::from_millis(5);

/// Streams that may gather; more, and the notice says "all". As many names fill a few payloads.
const GATHERED: usize = 256;

/// Postgres refuses a payload of 8000 bytes and more.
const PAYLOAD: usize = 7900;

/// A listener that heard nothing for so long is asked whether it lives.
const SILENCE: Duration = Duration::from_secs(10);

/// How long it has to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The wait before listening again. Meanwhile everybody polls, so there is no hurry.
const BETWEEN: Backoff = Backoff { base: Duration::from_millis(200), cap: Duration::from_secs(5) };

/// Stands for every stream in a payload; no stream is named so.
const ALL: &str = "*";

/// The wake-ups of a store.
#[derive(Debug)]
pub(super) struct Notices {
    wakes: Wakes,
    /// Streams that moved and that others were not told of; `None` when nobody is to be told.
    moved: Option<Mutex<HashSet<Stream>>>,
    any: Notify,
    channel: String,
    /// Tells our own notices from those of others.
    sender: String,
}

impl Notices {
    pub(super) fn new(schema: &str, tell_others: bool) -> Self {
        Self {
            wakes: Wakes::default(),
            moved: tell_others.then(Mutex::default),
            any: Notify::new(),
            channel: format!("carrick_{schema}"),
            sender: format!("{:016x}", rand::random::<u64>()),
        }
    }

    pub(super) fn waiter(&self, stream: &Stream) -> Waiter {
        self.wakes.waiter(stream)
    }

    /// Wakes those who wait for a stream: here at once, elsewhere soon.
    pub(super) fn moved(&self, stream: &Stream) {
        self.wakes.wake(stream);
        let Some(moved) = &self.moved else { return };
        let mut moved = moved.lock();
        // Beyond the bound the size alone tells that it is to be all of them.
        if moved.len() <= GATHERED && !moved.contains(stream) {
            moved.insert(stream.clone());
        }
        drop(moved);
        self.any.notify_one();
    }

    /// What has gathered, as payloads.
    fn payloads(&self) -> Vec<String> {
        let Some(moved) = &self.moved else { return Vec::new() };
        let moved = mem::take(&mut *moved.lock());
        if moved.len() > GATHERED {
            return vec![format!("{} {ALL}", self.sender)];
        }
        let mut payloads: Vec<String> = Vec::new();
        for stream in &moved {
            match payloads.last_mut() {
                Some(last) if last.len() + 1 + stream.as_str().len() <= PAYLOAD => {
                    last.push(' ');
                    last.push_str(stream.as_str());
                }
                _ => payloads.push(format!("{} {stream}", self.sender)),
            }
        }
        payloads
    }

    /// Wakes whom a notice is for.
    fn heard(&self, payload: &str) {
        let mut words = payload.split(' ');
        if words.next() == Some(self.sender.as_str()) {
            return; // those were woken when it happened
        }
        for word in words {
            match word.parse() {
                Ok(stream) => self.wakes.wake(&stream),
                Err(_) => self.wakes.wake_all(),
            }
        }
    }
}

/// Tells other processes what moved, for as long as the store is open.
pub(super) async fn tell(notices: Arc<Notices>, db: Arc<Db>) {
    let mut sparse = Sparse::default();
    loop {
        notices.any.notified().await;
        sleep(GATHER).await;
        let payloads = notices.payloads();
        if payloads.is_empty() {
            continue;
        }
        // A connection that cannot be had or answers late is no reason to hold anything up: the
        // notices are dropped, and the others find out at their next poll.
        let sent = async {
            let mut session = db.notices().await?;
            db.query("SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload")
                .bind(&notices.channel)
                .bind(payloads)
                .execute(session.conn())
                .await?;
            session.finish().await
        };
        if let Err(failure) = sent.await {
            metrics::counter!("carrick_store_notices_dropped_total").increment(1);
            if let Some(held_back) = sparse.due(Instant::now()) {
                tracing::warn!(error = %failure.told(), held_back, "cannot wake other processes");
            }
            sleep(BETWEEN.base).await;
        }
    }
}

/// Hears what moved elsewhere, for as long as the store is open.
pub(super) async fn listen(notices: Arc<Notices>, url: PgConnectOptions) {
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(url);
    let mut sparse = Sparse::default();
    let mut failed = 0;
    loop {
        let lost = match connect(&notices, &pool).await {
            Ok(mut listener) => {
                failed = 0;
                // What was said while nobody listened is made up for by looking.
                notices.wakes.wake_all();
                hear(&notices, &mut listener).await
            }
            Err(error) => error.to_string(),
        };
        metrics::counter!("carrick_store_listener_lost_total").increment(1);
        if let Some(held_back) = sparse.due(Instant::now()) {
            tracing::warn!(reason = lost, held_back, "not listening for wake-ups: polling");
        }
        let wait = BETWEEN.delay(failed, &mut rand::rng());
        sleep(wait).await;
        failed += 1;
    }
}

async fn connect(notices: &Notices, pool: &PgPool) -> Result<PgListener, sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.eager_reconnect(false);
    listener.listen(&notices.channel).await?;
    Ok(listener)
}

/// Hears notices until the connection is lost; tells how.
async fn hear(notices: &Notices, listener: &mut PgListener) -> String {
    loop {
        match timeout(SILENCE, listener.try_recv()).await {
            Ok(Ok(Some(notice))) => notices.heard(notice.payload()),
            Ok(Ok(None)) => return "the connection ended".to_owned(),
            Ok(Err(error)) => return error.to_string(),
            Err(_silent) => {
                match timeout(ANSWER, sqlx::raw_sql("SELECT 1").execute(&mut *listener)).await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_silent) => return "no answer".to_owned(),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(n: usize) -> Stream {
        Stream::new(&format!("{n}-{}", "x".repeat(190))).unwrap()
    }

    #[test]
    fn names_gather_into_payloads_that_postgres_takes() {
        let notices = Notices::new("carrick", true);
        for n in 0..100 {
            notices.moved(&stream(n % 50));
        }
        let payloads = notices.payloads();
        assert!(payloads.iter().all(|payload| payload.len() < 8000));
        let names: usize = payloads.iter().map(|payload| payload.split(' ').count() - 1).sum();
        assert_eq!(names, 50, "a stream is named once");
        assert!(notices.payloads().is_empty());
    }

    #[test]
    fn too_many_streams_become_all_of_them() {
        let notices = Notices::new("carrick", true);
        for n in 0..10_000 {
            notices.moved(&stream(n));
        }
        assert_eq!(notices.payloads(), [format!("{} *", notices.sender)]);
    }

    #[tokio::test]
    async fn a_notice_wakes_whom_it_names_and_our_own_is_not_heard_twice() {
        let (ours, theirs) = (Notices::new("carrick", true), Notices::new("carrick", true));
        let (orders, parcels) = (Stream::new("orders").unwrap(), Stream::new("parcels").unwrap());
        let (orders_waiter, parcels_waiter) = (ours.waiter(&orders), ours.waiter(&parcels));
        let mut orders_woken = Box::pin(orders_waiter.woken());
        let mut parcels_woken = Box::pin(parcels_waiter.woken());
        let woken = |payload: &str| ours.heard(payload);

        ours.moved.as_ref().unwrap().lock().insert(orders.clone());
        woken(&ours.payloads()[0]);
        assert!(futures_util::poll!(&mut orders_woken).is_pending());
        theirs.moved(&orders);
        woken(&theirs.payloads()[0]);
        assert!(futures_util::poll!(&mut orders_woken).is_ready());
        assert!(futures_util::poll!(&mut parcels_woken).is_pending());
        woken("other *");
        assert!(futures_util::poll!(&mut parcels_woken).is_ready());
    }
}
