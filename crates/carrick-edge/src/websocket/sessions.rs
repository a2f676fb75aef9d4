//! Sessions: how far a client's sends were acknowledged, for when it comes back.

use carrick_core::seal::Seal;
use hashbrown::HashMap;
use parking_lot::Mutex;

type Id = [u8; 16];

/// What sessions are sealed for.
const PURPOSE: &str = "session";

/// The last acknowledged number of each session that has sent something here. Bounded: of those that
/// were not heard of for longest, half are forgotten at once, and begin again at 0. Nothing depends on
/// it but how much a client sends in vain.
#[derive(Debug)]
pub struct Sessions(Mutex<Generations>);

#[derive(Debug)]
struct Generations {
    young: HashMap<Id, u64>,
    old: HashMap<Id, u64>,
    most: usize,
}

/// A client, across its connections.
#[derive(Clone, Debug)]
pub struct Session {
    id: Id,
    text: String,
}

impl Session {
    /// The session that a client names, or a new one if the text is none of ours.
    pub fn open(seal: &Seal, scope: &str, text: Option<&str>) -> Self {
        let known = text.and_then(|text| {
            let id = seal.open(PURPOSE, scope, text).ok()?.try_into().ok()?;
            Some(Self { id, text: text.to_owned() })
        });
        known.unwrap_or_else(|| {
            let id: Id = rand::random();
            Self { id, text: seal.seal(PURPOSE, scope, &id) }
        })
    }

    /// What the client names it by.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl Sessions {
    /// Remembers so many at most, and at least half of that.
    pub fn new(most: usize) -> Self {
        let (young, old) = Default::default();
        Self(Mutex::new(Generations { young, old, most: most.div_ceil(2).max(1) }))
    }

    /// The last acknowledged number; 0 if none is known.
    pub fn last(&self, session: &Session) -> u64 {
        let generations = self.0.lock();
        let found = generations.young.get(&session.id).or_else(|| generations.old.get(&session.id));
        found.copied().unwrap_or(0)
    }

    /// Remembers an acknowledged number.
    pub fn acknowledged(&self, session: &Session, number: u64) {
        let mut generations = self.0.lock();
        let known = generations.old.remove(&session.id).unwrap_or(0);
        if generations.young.len() >= generations.most
            && !generations.young.contains_key(&session.id)
        {
            generations.old = std::mem::take(&mut generations.young);
        }
        let last = generations.young.entry(session.id).or_insert(0);
        *last = known.max(number).max(*last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_known_again_in_its_scope_only() {
        let seal = Seal::new([7; 32]);
        let session = Session::open(&seal, "acme", None);
        assert_eq!(Session::open(&seal, "acme", Some(session.text())).id, session.id);
        for (scope, text) in [("other", session.text()), ("acme", "junk")] {
            assert_ne!(Session::open(&seal, scope, Some(text)).id, session.id);
        }
    }

    #[test]
    fn numbers_never_fall_and_the_longest_unheard_are_forgotten() {
        let seal = Seal::new([7; 32]);
        let sessions = Sessions::new(4);
        let clients: Vec<_> = (0..5).map(|_| Session::open(&seal, "a", None)).collect();
        for (client, number) in clients.iter().zip(1..) {
            sessions.acknowledged(&clients[0], 9);
            sessions.acknowledged(client, number);
        }
        let known: Vec<_> = clients.iter().map(|client| sessions.last(client)).collect();
        assert_eq!((known[0], known[4]), (9, 5), "{known:?}");
        assert!(known.contains(&0), "it is bounded: {known:?}");
    }
}
