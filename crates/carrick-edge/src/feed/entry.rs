//! An entry: an event as readers get it, encoded once for each wire form whoever asks.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use carrick_core::{event::Event, name::Topic, position::Position, seal::Seal};
use carrick_store::log::{Record, Seq};

use super::Filter;
use crate::{sse::Frame, websocket};

/// What positions of one topic are sealed with.
#[derive(Debug)]
pub(super) struct Scope {
    pub(super) topic: Topic,
    pub(super) epoch: u64,
    pub(super) seal: Seal,
}

impl Scope {
    pub(super) fn position(&self, seq: Seq) -> String {
        Position { epoch: self.epoch, seq }.seal(&self.seal, self.topic.as_str())
    }
}

/// What an event says of itself.
#[derive(Debug)]
struct Head {
    ty: String,
    subject: Option<String>,
}

/// An event of a topic, with the forms in which it goes out.
#[derive(Debug)]
pub struct Entry {
    scope: Arc<Scope>,
    record: Record,
    head: OnceLock<Head>,
    position: OnceLock<Arc<str>>,
    frame: OnceLock<Frame>,
    message: OnceLock<Bytes>,
}

impl Entry {
    pub(super) fn new(scope: Arc<Scope>, record: Record) -> Self {
        let (head, position, frame, message) = Default::default();
        Self { scope, record, head, position, frame, message }
    }

    /// Its number in the topic.
    pub fn seq(&self) -> Seq {
        self.record.seq
    }

    /// The topic.
    pub fn topic(&self) -> &Topic {
        &self.scope.topic
    }

    /// The event, as it was published.
    pub fn body(&self) -> &Bytes {
        &self.record.body
    }

    /// Its type; empty if the record is no event.
    pub fn ty(&self) -> &str {
        &self.head().ty
    }

    /// Whether a filter lets it through.
    pub(super) fn fits(&self, filter: &Filter) -> bool {
        let head = (!filter.is_empty()).then(|| self.head());
        head.is_none_or(|head| filter.fits(&head.ty, head.subject.as_deref()))
    }

    /// The position after it, for a reader of this topic alone.
    pub(super) fn position(&self) -> &Arc<str> {
        self.position.get_or_init(|| self.scope.position(self.record.seq).into())
    }

    /// Its frame of Server-Sent Events, for a reader of this topic alone.
    pub(crate) fn frame(&self) -> &Frame {
        self.frame.get_or_init(|| Frame::event(self.ty(), self.position(), &self.record.body))
    }

    /// Its WebSocket message, for a reader of this topic alone.
    pub(crate) fn message(&self) -> &Bytes {
        self.message.get_or_init(|| websocket::event(self, self.position(), None))
    }

    /// Whether the record is an event.
    pub(crate) fn is_event(&self) -> bool {
        !self.ty().is_empty()
    }

    fn head(&self) -> &Head {
        self.head.get_or_init(|| match Event::parse(self.record.body.clone()) {
            Ok(event) => Head {
                ty: event.ty().into_owned(),
                subject: event.subject().map(std::borrow::Cow::into_owned),
            },
            // Whoever writes to the store by hand may put there what it likes.
            Err(_) => Head { ty: String::new(), subject: None },
        })
    }
}
