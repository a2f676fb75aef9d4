//! What is outstanding between publishers and the store, bounded by count and by bytes.
//!
//! A publisher over HTTP cannot be pushed back, so what exceeds the bound is refused at once: a
//! queue would only move the wait to where nobody sees it. The guard gives its share back when it
//! is dropped, because a publish may be dropped at any await.

use parking_lot::Mutex;

use super::error::{BrokerError, RETRY_AFTER};

/// How much may be outstanding at a time.
///
/// ```
/// use carrick_message::broker::PublishLimits;
///
/// let small = PublishLimits { events: 100, bytes: 1024 * 1024 };
/// assert!(small.events < PublishLimits::default().events);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishLimits {
    /// Events whose publish has not resolved, at least 1. Default 20 000: at the 25 000 a second
    /// that one machine takes, a publisher waits less than a second.
    pub events: usize,
    /// Their bytes, at least 1. Default 32 MiB: the buffers of a hub stay below 80 MiB in all.
    pub bytes: usize,
}

impl Default for PublishLimits {
    fn default() -> Self {
        Self { events: 20_000, bytes: 32 * 1024 * 1024 }
    }
}

/// Counts what is outstanding.
#[derive(Debug)]
pub(crate) struct Outstanding {
    limits: PublishLimits,
    now: Mutex<Load>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    events: usize,
    bytes: usize,
}

impl Outstanding {
    pub(crate) fn new(limits: PublishLimits) -> Self {
        Self { limits, now: Mutex::default() }
    }

    /// Admits a batch, or refuses it. An idle broker takes any batch, so that one which alone
    /// exceeds the bound is slow and not impossible.
    pub(crate) fn admit(&self, events: usize, bytes: usize) -> Result<Admitted<'_>, BrokerError> {
        let mut now = self.now.lock();
        let fits = now.events + events <= self.limits.events
            && now.bytes.saturating_add(bytes) <= self.limits.bytes;
        if !fits && now.events > 0 {
            return Err(BrokerError::Overloaded { retry_after: RETRY_AFTER });
        }
        now.events += events;
        now.bytes += bytes;
        Ok(Admitted { outstanding: self, events, bytes })
    }
}

/// A batch on its way; gives its share back when dropped.
#[derive(Debug)]
pub(crate) struct Admitted<'a> {
    outstanding: &'a Outstanding,
    events: usize,
    bytes: usize,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        let mut now = self.outstanding.now.lock();
        now.events -= self.events;
        now.bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outstanding() -> Outstanding {
        Outstanding::new(PublishLimits { events: 10, bytes: 100 })
    }

    #[test]
    fn what_exceeds_the_count_or_the_bytes_is_refused_until_something_ends() {
        let outstanding = outstanding();
        let first = outstanding.admit(9, 50).unwrap();
        let last = outstanding.admit(1, 50).unwrap();
        for (events, bytes) in [(1, 0), (0, 1), (1, 1)] {
            let refused = outstanding.admit(events, bytes).unwrap_err();
            assert_eq!(refused.retry_after(), Some(RETRY_AFTER), "{events} events, {bytes} bytes");
        }
        drop(last);
        drop(outstanding.admit(1, 50).unwrap());
        drop(first);
        assert_eq!(outstanding.now.lock().events, 0, "every share was given back");
    }

    #[test]
    fn an_idle_broker_takes_a_batch_that_alone_exceeds_the_bound() {
        let outstanding = outstanding();
        let huge = outstanding.admit(11, 1000).unwrap();
        assert!(outstanding.admit(1, 1).is_err());
        drop(huge);
        assert!(outstanding.admit(1, 1).is_ok());
    }
}
