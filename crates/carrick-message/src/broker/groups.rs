//! The groups that somebody waits for in this process.
//!
//! Waiters of one group do not stampede: a few scouts watch the store, and the others queue behind
//! them. A scout that finds something leaves its place to the next in line, who looks before it
//! watches. So one wake-up costs at most [`SCOUTS`] looks, however many wait.

use std::{num::NonZeroU64, sync::Arc};

use carrick_core::name::{Group, Topic};
use hashbrown::HashMap;
use metrics::Counter;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

/// How many waiters of a group watch the store at a time. More than one, so that a burst of single
/// events is not handed out one store round trip after another; few, because each of them looks at
/// every wake-up.
pub(super) const SCOUTS: usize = 4;

/// How many groups are remembered; beyond that, those without a waiter are forgotten. Bounds the
/// memory to a few MiB, and a forgotten group costs one look-up.
const REMEMBERED: usize = 10_000;

/// What this process knows of one group.
#[derive(Debug)]
pub(super) struct Watch {
    /// Places of the scouts.
    pub(super) scouts: Semaphore,
    /// A settlement may have made something ready: a key moved on, a delivery came back.
    pub(super) changed: Notify,
    /// Events handed out.
    pub(super) leased: Counter,
    /// Events dropped because they had expired.
    pub(super) expired: Counter,
    /// Records that are no events.
    pub(super) unreadable: Counter,
}

impl Watch {
    fn new(topic: &Topic, group: &Group) -> Self {
        let labels = [("topic", topic.as_str().to_owned()), ("group", group.as_str().to_owned())];
        Self {
            scouts: Semaphore::new(SCOUTS),
            changed: Notify::new(),
            leased: metrics::counter!("carrick_broker_leased_total", &labels),
            expired: metrics::counter!("carrick_broker_expired_total", &labels),
            unreadable: metrics::counter!("carrick_broker_unreadable_total", &labels),
        }
    }
}

/// The groups of a broker, by name and by the number that its lease tokens carry.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<Maps>);

#[derive(Debug, Default)]
struct Maps {
    by_name: HashMap<(Topic, Group), Arc<Watch>>,
    by_number: HashMap<NonZeroU64, Arc<Watch>>,
}

impl Groups {
    /// The watch of a group.
    pub(super) fn watch(&self, topic: &Topic, group: &Group) -> Arc<Watch> {
        let mut maps = self.0.lock();
        // The key is two reference counts, cheaper than a borrowed pair with its own hash.
        let key = (topic.clone(), group.clone());
        if let Some(watch) = maps.by_name.get(&key) {
            return Arc::clone(watch);
        }
        if maps.by_name.len() >= REMEMBERED {
            maps.by_number.clear();
            maps.by_name.retain(|_, watch| Arc::strong_count(watch) > 1);
        }
        let watch = Arc::new(Watch::new(topic, group));
        maps.by_name.insert(key, Arc::clone(&watch));
        watch
    }

    /// Remembers which number the lease tokens of a group carry.
    pub(super) fn number(&self, number: NonZeroU64, watch: &Arc<Watch>) {
        let mut maps = self.0.lock();
        if !maps.by_number.contains_key(&number) {
            if maps.by_number.len() >= REMEMBERED {
                maps.by_number.clear();
            }
            maps.by_number.insert(number, Arc::clone(watch));
        }
    }

    /// Tells the scouts of these groups to look again; returns the numbers that nobody knows.
    pub(super) fn changed(&self, numbers: &[NonZeroU64]) -> Vec<NonZeroU64> {
        let maps = self.0.lock();
        let mut unknown = Vec::new();
        for number in numbers {
            match maps.by_number.get(number) {
                Some(watch) => watch.changed.notify_waiters(),
                None => unknown.push(*number),
            }
        }
        unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_nobody_waits_for_do_not_pile_up() {
        let groups = Groups::default();
        let group = Group::new("g").unwrap();
        let held = groups.watch(&Topic::new("held").unwrap(), &group);
        for n in 0..2 * REMEMBERED {
            groups.watch(&Topic::new(&format!("t{n}")).unwrap(), &group);
        }
        assert!(groups.0.lock().by_name.len() <= REMEMBERED);
        let again = groups.watch(&Topic::new("held").unwrap(), &group);
        assert!(Arc::ptr_eq(&held, &again), "a watch that is waited on must not be replaced");
    }

    #[test]
    fn a_forgotten_number_is_reported_so_that_it_can_be_looked_up() {
        let groups = Groups::default();
        let watch = groups.watch(&Topic::new("t").unwrap(), &Group::new("g").unwrap());
        let (known, unknown) = (NonZeroU64::MIN, NonZeroU64::new(9).unwrap());
        groups.number(known, &watch);
        assert_eq!(groups.changed(&[known, unknown]), [unknown]);
    }
}
