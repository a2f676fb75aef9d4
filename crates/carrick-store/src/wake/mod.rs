//! Wake: tells waiters that a stream has something new. A hint, never the truth: whoever is woken
//! looks into the store, and whoever is not looks again after a while.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::Stream;

/// Waiting for a stream to move.
///
/// # Contract
/// * A waiter made before an append in this process is woken by it at once.
/// * For appends by other processes, a waiter is woken within [`Wake::backstop`].
#[async_trait]
pub trait Wake {
    /// A waiter for a stream. Make it before looking, then look, then wait: nothing is missed.
    fn waiter(&self, stream: &Stream) -> Waiter;

    /// How long to wait at most before looking again.
    fn backstop(&self) -> Duration;
}

/// Waits for one stream.
#[derive(Debug)]
pub struct Waiter {
    notify: Arc<Notify>,
}

impl Waiter {
    /// Resolves at the next wake-up of the stream, counted from the call of this method, not from
    /// the first poll.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.notified()
    }
}

/// The wake-ups of one process.
///
/// The map has an entry for each stream that somebody waits for; entries without a waiter go when
/// the map doubles, so it is bounded by twice the live waiters plus a floor.
#[derive(Debug, Default)]
pub struct Wakes {
    streams: Mutex<HashMap<Stream, Arc<Notify>>>,
}

impl Wakes {
    /// A waiter for a stream.
    pub fn waiter(&self, stream: &Stream) -> Waiter {
        let mut streams = self.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|_, notify| Arc::strong_count(notify) > 1);
        }
        let notify = Arc::clone(streams.entry(stream.clone()).or_default());
        Waiter { notify }
    }

    /// Wakes whoever waits for a stream.
    pub fn wake(&self, stream: &Stream) {
        if let Some(notify) = self.streams.lock().get(stream) {
            notify.notify_waiters();
        }
    }

    /// Wakes everybody, as after a lost connection.
    pub fn wake_all(&self) {
        for notify in self.streams.lock().values() {
            notify.notify_waiters();
        }
    }
}
