//! The dedupe window: which records came lately, in memory.
//!
//! On disk an index over random hashes would dirty a page for each record, which costs more than the
//! records themselves. So the index lives here, in two generations: entries go into the current one;
//! when that is as old as the window, or full, it becomes the previous one, and the one before it is
//! forgotten. An entry is so remembered for the window at least and for twice that at most, unless
//! more records come than two generations hold.

use std::mem;

use hashbrown::HashMap;

use super::Seq;
use crate::lease::core::Micros;

/// Entries of one generation: what a table of 2^19 slots holds. Two are 26 MiB when full.
const FULL: usize = (1 << 19) / 8 * 7;

/// Identity of a record within the store: its dedupe hash, with its stream.
pub(crate) type Identity = [u64; 2];

/// Joins a record's hash with its stream's number, so that streams do not see each other's records.
pub(crate) fn identity(stream: u64, dedupe: u128) -> Identity {
    // An odd factor moves every stream's hashes to another place, and none onto another.
    let mixed = dedupe
        .wrapping_add(u128::from(stream).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
    [(mixed >> 64) as u64, mixed as u64]
}

// With hashbrown's hasher, which is keyed at random: identities come from outside, and many that fall
// into one slot could be made at leisure if it were not.
type Generation = HashMap<Identity, Seq>;

/// Which records came lately.
pub(crate) struct Window {
    length: Micros,
    current: Generation,
    current_since: Micros,
    previous: Generation,
    /// When the last entry of the previous generation came.
    previous_until: Micros,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let entries = self.current.len() + self.previous.len();
        f.debug_struct("Window").field("entries", &entries).finish_non_exhaustive()
    }
}

/// What an insertion did to the generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing.
    None,
    /// The oldest was forgotten; everything before the one that is now previous may go.
    Turned {
        /// It held entries younger than the window.
        shortened: bool,
    },
}

impl Window {
    pub(crate) fn new(length: Micros) -> Self {
        Self {
            length,
            current: Generation::default(),
            current_since: Micros::MIN,
            previous: Generation::default(),
            previous_until: Micros::MIN,
        }
    }

    pub(crate) fn get(&self, identity: &Identity) -> Option<Seq> {
        self.current.get(identity).or_else(|| self.previous.get(identity)).copied()
    }

    pub(crate) fn insert(&mut self, identity: Identity, seq: Seq, now: Micros) -> Turn {
        let turn = self.turn(now);
        self.current.insert(identity, seq);
        turn
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn remove(&mut self, identity: &Identity) {
        self.current.remove(identity);
        self.previous.remove(identity);
    }

    fn turn(&mut self, now: Micros) -> Turn {
        if self.current.is_empty() {
            self.current_since = now;
            return Turn::None;
        }
        let old = now.saturating_sub(self.current_since) >= self.length;
        if !old && self.current.len() < FULL {
            return Turn::None;
        }
        let young = self.previous_until.saturating_add(self.length) > now;
        let shortened = !self.previous.is_empty() && young;
        self.previous = mem::take(&mut self.current);
        self.previous_until = now;
        self.current_since = now;
        Turn::Turned { shortened }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_remembered_for_the_window_and_forgotten_after_two() {
        let mut window = Window::new(100);
        let key = |n| identity(1, n);
        window.insert(key(1), 1, 0);
        window.insert(key(2), 2, 99);
        assert_eq!(window.insert(key(3), 3, 100), Turn::Turned { shortened: false });
        assert_eq!(window.get(&key(2)), Some(2), "one microsecond old");
        assert_eq!(window.insert(key(4), 4, 200), Turn::Turned { shortened: false });
        assert_eq!(window.get(&key(1)), None);
        assert_eq!(window.get(&key(3)), Some(3));
    }

    #[test]
    fn too_many_entries_shorten_the_window_and_say_so() {
        let mut window = Window::new(100);
        let mut shortened = 0;
        for n in 0..3 * FULL as u128 {
            let turned = window.insert(identity(1, n), n as u64, 1);
            shortened += usize::from(turned == Turn::Turned { shortened: true });
        }
        assert_eq!(shortened, 1);
        assert!(window.current.len() + window.previous.len() <= 2 * FULL);
    }

    #[test]
    fn streams_do_not_share_identities() {
        assert_ne!(identity(1, 7), identity(2, 7));
    }
}
