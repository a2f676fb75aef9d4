//! Holds what happened against what was promised.
//!
//! A test records three lists, each in the order in which it happened: events that a producer
//! committed or tried to, events that a consumer was handed, and effects that were committed.
//! [`History::check`] finds the first thing that must not be:
//!
//! * nothing acknowledged is lost: it was delivered, and its effect was applied;
//! * effects happen once;
//! * within a key, effects happen in the order of versions, and so do first deliveries (a
//!   redelivery of something older is allowed: at least once);
//! * nothing is delivered or applied that nobody produced, or with another key or version.
//!
//! What was not acknowledged may be there or not, but if it is there, it obeys the rest.

use std::{collections::HashMap, fmt};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// An event, as far as the promises go.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fact {
    /// Unique among all events.
    pub id: String,
    /// Ordering key; `None` for an event without order.
    pub key: Option<String>,
    /// Ascending within its key, in the order in which its producer committed.
    pub version: u64,
}

impl Fact {
    /// An event with a key.
    pub fn new(id: impl Into<String>, key: impl Into<String>, version: u64) -> Self {
        Self { id: id.into(), key: Some(key.into()), version }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            Some(key) => write!(f, "event {} (key {key}, version {})", self.id, self.version),
            None => write!(f, "event {} (no key)", self.id),
        }
    }
}

/// What happened in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// What producers tried, and whether they were told that it is durable.
    pub produced: Vec<(Fact, Acknowledged)>,
    /// What consumers were handed.
    pub delivered: Vec<Fact>,
    /// What was committed as an effect.
    pub applied: Vec<Fact>,
}

/// Whether a producer was told that its event is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Acknowledged {
    /// It was: the event must have its effect.
    Yes,
    /// It was not, or the answer was lost: the event may have its effect.
    Unknown,
}

/// What a history that keeps its promises amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Events acknowledged.
    pub acknowledged: usize,
    /// Deliveries, repeats included.
    pub deliveries: usize,
    /// Effects.
    pub effects: usize,
    /// Keys.
    pub keys: usize,
}

/// The first promise that a history breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Two events were produced under one id: the test is wrong, not what it tests.
    #[error("the test itself: two events were produced under the id {0}")]
    AmbiguousId(String),
    /// Acknowledged and never handed to anybody.
    #[error("lost: {0} was acknowledged and never delivered")]
    NeverDelivered(Fact),
    /// Acknowledged, and its effect is missing.
    #[error("lost: {0} was acknowledged and never applied")]
    NeverApplied(Fact),
    /// Its effect is there more than once.
    #[error("doubled: {fact} was applied as effect {first} and again as effect {again}")]
    AppliedTwice {
        /// Which event.
        fact: Fact,
        /// Place of its first effect in the list.
        first: usize,
        /// Place of the repeat.
        again: usize,
    },
    /// Something later of the same key came first.
    #[error("out of order: {what} {at} is {fact}, but {after} came before it")]
    OutOfOrder {
        /// `delivery` or `effect`.
        what: &'static str,
        /// Place in the list.
        at: usize,
        /// What came too late.
        fact: Box<Fact>,
        /// What had come too early.
        after: Box<Fact>,
    },
    /// Nobody produced it, or not like this.
    #[error("invented: {what} {at} is {fact}, but {produced}")]
    Invented {
        /// `delivery` or `effect`.
        what: &'static str,
        /// Place in the list.
        at: usize,
        /// What is there.
        fact: Fact,
        /// What was produced under that id.
        produced: String,
    },
}

impl History {
    /// Finds the first broken promise.
    ///
    /// # Errors
    /// [`Violation`], made to be read: it names the event and the places in the lists.
    pub fn check(&self) -> Result<Summary, Violation> {
        let mut produced = HashMap::with_capacity(self.produced.len());
        for (fact, _) in &self.produced {
            if produced.insert(fact.id.as_str(), fact).is_some() {
                return Err(Violation::AmbiguousId(fact.id.clone()));
            }
        }
        no_inventions("delivery", &self.delivered, &produced)?;
        no_inventions("effect", &self.applied, &produced)?;

        let delivered = first_places(&self.delivered);
        let applied = first_places(&self.applied);
        for (at, fact) in self.applied.iter().enumerate() {
            let first = applied[fact.id.as_str()];
            if first != at {
                return Err(Violation::AppliedTwice { fact: fact.clone(), first, again: at });
            }
        }
        in_order("delivery", &self.delivered, &delivered)?;
        in_order("effect", &self.applied, &applied)?;

        let mut acknowledged = 0;
        for (fact, told) in &self.produced {
            if *told == Acknowledged::Unknown {
                continue;
            }
            acknowledged += 1;
            if !delivered.contains_key(fact.id.as_str()) {
                return Err(Violation::NeverDelivered(fact.clone()));
            }
            if !applied.contains_key(fact.id.as_str()) {
                return Err(Violation::NeverApplied(fact.clone()));
            }
        }
        let mut keys: Vec<_> =
            self.produced.iter().filter_map(|(fact, _)| fact.key.as_deref()).collect();
        keys.sort_unstable();
        keys.dedup();
        Ok(Summary {
            acknowledged,
            deliveries: self.delivered.len(),
            effects: self.applied.len(),
            keys: keys.len(),
        })
    }
}

fn no_inventions(
    what: &'static str,
    facts: &[Fact],
    produced: &HashMap<&str, &Fact>,
) -> Result<(), Violation> {
    for (at, fact) in facts.iter().enumerate() {
        let produced = match produced.get(fact.id.as_str()) {
            Some(original) if *original == fact => continue,
            Some(original) => format!("{original} was produced"),
            None => "nobody produced it".to_owned(),
        };
        return Err(Violation::Invented { what, at, fact: fact.clone(), produced });
    }
    Ok(())
}

/// Where each id stands first.
fn first_places(facts: &[Fact]) -> HashMap<&str, usize> {
    let mut places = HashMap::with_capacity(facts.len());
    for (at, fact) in facts.iter().enumerate() {
        places.entry(fact.id.as_str()).or_insert(at);
    }
    places
}

/// Within each key, things stand in the order of their versions; repeats are left out.
fn in_order(
    what: &'static str,
    facts: &[Fact],
    first: &HashMap<&str, usize>,
) -> Result<(), Violation> {
    let mut latest: HashMap<&str, &Fact> = HashMap::new();
    for (at, fact) in facts.iter().enumerate() {
        let Some(key) = fact.key.as_deref() else { continue };
        if first[fact.id.as_str()] != at {
            continue;
        }
        if let Some(before) = latest.insert(key, fact)
            && before.version >= fact.version
        {
            let (fact, after) = (Box::new(fact.clone()), Box::new(before.clone()));
            return Err(Violation::OutOfOrder { what, at, fact, after });
        }
    }
    Ok(())
}

/// Collects a history from many tasks.
///
/// ```
/// use carrick_testkit::history::{Acknowledged, Fact, Recorder};
///
/// let recorder = Recorder::default();
/// recorder.produced(Fact::new("1", "A-4471", 1), Acknowledged::Yes);
/// recorder.produced(Fact::new("2", "A-4471", 2), Acknowledged::Yes);
/// recorder.delivered(Fact::new("1", "A-4471", 1));
/// recorder.applied(Fact::new("1", "A-4471", 1));
/// let violation = recorder.history().check().unwrap_err();
/// assert_eq!(
///     violation.to_string(),
///     "lost: event 2 (key A-4471, version 2) was acknowledged and never delivered"
/// );
/// ```
#[derive(Debug, Default)]
pub struct Recorder(Mutex<History>);

impl Recorder {
    /// A producer tried an event. Within a key, call it in the order of the versions.
    pub fn produced(&self, fact: Fact, told: Acknowledged) {
        self.0.lock().produced.push((fact, told));
    }

    /// A consumer was handed an event.
    pub fn delivered(&self, fact: Fact) {
        self.0.lock().delivered.push(fact);
    }

    /// An effect was committed.
    pub fn applied(&self, fact: Fact) {
        self.0.lock().applied.push(fact);
    }

    /// What was recorded so far.
    pub fn history(&self) -> History {
        self.0.lock().clone()
    }
}
