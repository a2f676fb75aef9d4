//! An event on its way into the outbox.

use carrick_core::{event::Event, name::Topic};

use super::AppendError;

/// An event to append, with where it goes.
///
/// The event's `partitionkey` is the key: events of one key reach every consumer group in the order
/// of their appends. `traceparent` is taken from the current context if the event has none, so that
/// the consumer's trace leads back to here.
///
/// ```
/// # use carrick_core::{event::Event, name::Topic};
/// # use carrick_message::outbox::OutboxEvent;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let event = Event::builder("order.placed.v1").source("/shop").id("A-4471-placed").build()?;
/// let event = OutboxEvent::new(Topic::new("orders")?, event).key("A-4471")?.version(1);
/// assert_eq!(event.event().partition_key().as_deref(), Some("A-4471"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct OutboxEvent {
    topic: Topic,
    event: Event,
    version: Option<i64>,
}

impl OutboxEvent {
    /// An event for a topic.
    pub fn new(topic: Topic, event: Event) -> Self {
        Self { topic, event, version: None }
    }

    /// Sets the key, which becomes the event's `partitionkey`; 1..=500 bytes.
    ///
    /// # Errors
    /// [`AppendError::Invalid`] if the event has another key already, or the key is empty or long.
    pub fn key(mut self, key: &str) -> Result<Self, AppendError> {
        check_key(key)?;
        match self.event.partition_key() {
            Some(own) if own == key => return Ok(self),
            Some(own) => {
                return Err(AppendError::Invalid {
                    field: "key",
                    range: "the event's partitionkey, if it has one",
                    value: format!("{key:?} beside {own:?}"),
                });
            }
            None => {}
        }
        self.event = self.event.with_extension("partitionkey", key).map_err(|error| {
            AppendError::Invalid {
                field: "key",
                range: "a text that an attribute may hold",
                value: super::error::chain(&error),
            }
        })?;
        Ok(self)
    }

    /// Sets the version of the entity that the key names: of one key and topic, a version can be
    /// appended once, so that of two writers who read the same state one is told.
    pub fn version(mut self, version: i64) -> Self {
        self.version = Some(version);
        self
    }

    /// Where it goes.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// The event itself.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// What is written into the row.
    pub(crate) fn fields(&self) -> Result<Fields, AppendError> {
        let key = self.event.partition_key().map(|key| key.to_string());
        if let Some(key) = &key {
            check_key(key)?;
        } else if let Some(version) = self.version {
            return Err(AppendError::Invalid {
                field: "version",
                range: "left out for an event without a key",
                value: version.to_string(),
            });
        }
        let event = traced(&self.event);
        let size = event.as_json().len();
        if size > carrick_core::event::HARD_LIMIT {
            return Err(AppendError::Invalid {
                field: "event",
                range: "at most 1 MiB",
                value: format!("{size} bytes"),
            });
        }
        Ok(Fields { topic: self.topic.as_str().to_owned(), key, version: self.version, event })
    }
}

/// The columns that an append writes; the rest have defaults.
#[derive(Debug)]
pub(crate) struct Fields {
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) version: Option<i64>,
    pub(crate) event: Event,
}

impl Fields {
    pub(crate) fn document(&self) -> &str {
        std::str::from_utf8(self.event.as_json()).expect("an event is JSON, which is UTF-8")
    }

    pub(crate) fn version_taken(&self) -> AppendError {
        AppendError::VersionTaken {
            topic: self.topic.clone(),
            key: self.key.clone().unwrap_or_default(),
            version: self.version.unwrap_or_default(),
        }
    }
}

/// The event with the current context's trace, unless it has one: a trace names where an event
/// comes from, and is never overwritten.
fn traced(event: &Event) -> Event {
    if event.traceparent().is_some() {
        return event.clone();
    }
    let Some(context) = carrick_core::context::Context::current() else { return event.clone() };
    let trace = context.trace();
    let with = |event: &Event, name, value: &str| event.with_extension(name, value).ok();
    let parent = with(event, "traceparent", &trace.to_string());
    let traced = parent.and_then(|event| match trace.state() {
        Some(state) => with(&event, "tracestate", state),
        None => Some(event),
    });
    // An event that has no room for it goes without.
    traced.unwrap_or_else(|| event.clone())
}

const MAX_KEY: usize = 500;

fn check_key(key: &str) -> Result<(), AppendError> {
    if (1..=MAX_KEY).contains(&key.len()) {
        return Ok(());
    }
    Err(AppendError::Invalid {
        field: "key",
        range: "1 to 500 bytes",
        value: format!("{} bytes", key.len()),
    })
}
