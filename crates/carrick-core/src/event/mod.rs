//! The event envelope: CloudEvents 1.0, lossless.
//!
//! An [`Event`] is the JSON document that came in, byte for byte, and a note of where in it the
//! attributes are. Parsing into a model and writing it out again would lose what the model cannot
//! say: integers past 2⁵³, the order of members, duplicates, members that a later version adds. So
//! nothing is ever written again: an untouched event leaves as the bytes that arrived, and
//! [`Event::with_extension`] splices in the one member that it changes.
//!
//! An event that arrives in HTTP's binary mode is put into such a document once, with its data
//! embedded as it is (JSON), as a string (text) or in base64 (anything else), so that binary mode
//! gives the same data bytes back.
//!
//! Source: CloudEvents 1.0.2, its JSON format and HTTP binding; defects.md E19 and M7.

mod builder;
mod error;
mod http;
mod lint;
mod parse;

use std::{borrow::Cow, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use jiff::Timestamp;

pub use self::{
    builder::{Attribute, EventBuilder},
    error::EventError,
    lint::Lint,
};

/// Above this an event is linted: brokers and consumers do better with a claim check.
pub const SOFT_LIMIT: usize = 100 * 1024;

/// Above this an event is refused: the least that the usual brokers take is 1 MiB.
pub const HARD_LIMIT: usize = 1024 * 1024;

/// Media type of one event in structured mode.
pub const STRUCTURED: &str = "application/cloudevents+json";

/// Media type of several events in batch mode.
pub const BATCH: &str = "application/cloudevents-batch+json";

/// A CloudEvents event; cheap to clone.
///
/// ```
/// # use carrick_core::event::Event;
/// let document = r#"{ "specversion":"1.0", "id":"7", "source":"/shop", "type":"order.placed.v1",
///                    "data":{"total":18446744073709551616, "total":1} }"#;
/// let event = Event::parse(document)?;
/// assert_eq!(event.id(), "7");
/// assert_eq!(event.as_json(), document);
/// # Ok::<(), carrick_core::event::EventError>(())
/// ```
#[derive(Clone)]
pub struct Event {
    document: Bytes,
    members: Members,
}

/// Where the values of well-known members are, as they stand in the document.
#[derive(Clone, Debug, Default)]
struct Members {
    id: Span,
    source: Span,
    ty: Span,
    subject: Option<Span>,
    time: Option<Span>,
    datacontenttype: Option<Span>,
    partitionkey: Option<Span>,
    traceparent: Option<Span>,
    data: Option<Span>,
    data_base64: Option<Span>,
    expires_at: Option<Timestamp>,
}

/// A part of a document: events have at most 1 MiB, so 32 bits are enough.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    fn of(self, document: &[u8]) -> &str {
        let bytes = &document[self.start as usize..self.end as usize];
        std::str::from_utf8(bytes).expect("a span covers a JSON value of a document that is UTF-8")
    }

    fn range(self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// The payload of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// The bytes as binary mode would send them.
    pub bytes: Bytes,
    /// Media type; `application/json` if the event names none.
    pub content_type: String,
}

impl Event {
    /// Reads an event in structured mode.
    ///
    /// # Errors
    /// [`EventError`] if it is not JSON, lacks an attribute or has a wrong one, or is over
    /// [`HARD_LIMIT`].
    pub fn parse(document: impl Into<Bytes>) -> Result<Self, EventError> {
        parse::event(document.into())
    }

    /// Reads a JSON array of at most `most` events; each shares the memory of `body`.
    ///
    /// # Errors
    /// [`EventError::InBatch`] for the first event that is wrong, [`EventError::TooMany`].
    pub fn parse_batch(body: impl Into<Bytes>, most: usize) -> Result<Vec<Self>, EventError> {
        parse::batch(&body.into(), most)
    }

    /// Starts an event of a type, such as `order.placed.v1`.
    pub fn builder(ty: impl Into<String>) -> EventBuilder {
        EventBuilder::new(ty.into())
    }

    /// Identity within the source.
    pub fn id(&self) -> Cow<'_, str> {
        self.text(self.members.id)
    }

    /// Where it happened.
    pub fn source(&self) -> Cow<'_, str> {
        self.text(self.members.source)
    }

    /// What happened.
    pub fn ty(&self) -> Cow<'_, str> {
        self.text(self.members.ty)
    }

    /// What it happened to, within the source.
    pub fn subject(&self) -> Option<Cow<'_, str>> {
        Some(self.text(self.members.subject?))
    }

    /// When its producer recorded it (defects.md M7).
    pub fn time(&self) -> Option<Timestamp> {
        let text = self.text(self.members.time?);
        Some(text.parse().expect("checked when the event was read"))
    }

    /// The ordering key: extension `partitionkey`.
    pub fn partition_key(&self) -> Option<Cow<'_, str>> {
        Some(self.text(self.members.partitionkey?))
    }

    /// The span in which it was made: extension `traceparent`, never rewritten on the way.
    pub fn traceparent(&self) -> Option<Cow<'_, str>> {
        Some(self.text(self.members.traceparent?))
    }

    /// Extension `tracestate`.
    pub fn tracestate(&self) -> Option<Cow<'_, str>> {
        self.text_attribute("tracestate")
    }

    /// The producer's own order: extension `sequence`.
    pub fn sequence(&self) -> Option<Cow<'_, str>> {
        self.text_attribute("sequence")
    }

    /// Where its data is kept: extension `dataref`.
    pub fn dataref(&self) -> Option<Cow<'_, str>> {
        self.text_attribute("dataref")
    }

    /// When it is of no use any more: extension `expirytime`.
    pub fn expires_at(&self) -> Option<Timestamp> {
        self.members.expires_at
    }

    /// A context attribute by name; `None` also for `data`, which is none.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        parse::find(&self.document, name).and_then(|span| parse::attribute(span.of(&self.document)))
    }

    /// The attributes in the order of the document; of duplicates the last, at its place.
    pub fn attributes(&self) -> Vec<(String, Attribute)> {
        parse::attributes(&self.document)
    }

    fn text_attribute(&self, name: &str) -> Option<Cow<'_, str>> {
        let span = parse::find(&self.document, name)?;
        span.of(&self.document).starts_with('"').then(|| self.text(span))
    }

    /// The document: a CloudEvents JSON object, as it came in.
    pub fn as_json(&self) -> &Bytes {
        &self.document
    }

    /// The payload.
    pub fn data(&self) -> Option<Data> {
        let declared = self.members.datacontenttype.map(|span| self.text(span).into_owned());
        let content_type = declared.unwrap_or_else(|| "application/json".to_owned());
        let bytes = if let Some(span) = self.members.data_base64 {
            let text = self.text(span);
            BASE64_STANDARD.decode(text.as_bytes()).expect("checked when the event was read").into()
        } else {
            let span = self.members.data?;
            let raw = self.document.slice(span.range());
            if raw.starts_with(b"\"") && !is_json(&content_type) {
                self.text(span).into_owned().into()
            } else {
                raw
            }
        };
        Some(Data { bytes, content_type })
    }

    /// This event with one extension set; every other byte stays as it is.
    ///
    /// # Errors
    /// [`EventError`] if the name or the value is not allowed, or the event becomes too large.
    pub fn with_extension(
        &self,
        name: &str,
        value: impl Into<Attribute>,
    ) -> Result<Self, EventError> {
        const CORE: [&str; 6] = ["specversion", "id", "source", "type", "data", "data_base64"];
        if CORE.contains(&name) {
            return Err(EventError::attribute(name, "an extension", "part of the event itself"));
        }
        parse::check_name(name)?;
        let value = value.into().to_json();
        let document = &self.document;
        let mut spliced = Vec::with_capacity(document.len() + name.len() + value.len() + 8);
        if let Some(span) = parse::find(document, name) {
            spliced.extend_from_slice(&document[..span.start as usize]);
            spliced.extend_from_slice(value.as_bytes());
            spliced.extend_from_slice(&document[span.end as usize..]);
        } else {
            // The document is an object with members, so its last byte but white space is a brace.
            let brace = document.iter().rposition(|byte| *byte == b'}').expect("an object ends");
            let end = document[..brace].trim_ascii_end().len();
            spliced.extend_from_slice(&document[..end]);
            spliced.extend_from_slice(format!(",\"{name}\":{value}").as_bytes());
            spliced.extend_from_slice(&document[end..]);
        }
        Self::parse(spliced)
    }

    /// A stable 128-bit hash of `(source, id)`, which names an event.
    pub fn dedupe_key(&self) -> u128 {
        let (source, id) = (self.source(), self.id());
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        // With its length, so that no other split of the same text has this hash.
        hash.update(&(source.len() as u64).to_le_bytes());
        hash.update(source.as_bytes());
        hash.update(id.as_bytes());
        hash.digest128()
    }

    /// What could be better about this event; never a reason to refuse it.
    pub fn lints(&self) -> Vec<Lint> {
        lint::lints(self)
    }

    fn text(&self, span: Span) -> Cow<'_, str> {
        parse::text(span.of(&self.document)).expect("checked when the event was read")
    }
}

/// Two events are equal if their bytes are.
impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.document == other.document
    }
}

impl Eq for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without its data, which may be long and may be secret.
        let mut event = f.debug_struct("Event");
        event.field("id", &self.id()).field("source", &self.source()).field("type", &self.ty());
        event.finish_non_exhaustive()
    }
}

/// Whether a media type is JSON: `application/json`, `text/json` or anything `+json`.
fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    let Some((_, subtype)) = essence.split_once('/') else { return false };
    subtype.eq_ignore_ascii_case("json")
        || subtype.len() > 5 && subtype[subtype.len() - 5..].eq_ignore_ascii_case("+json")
}
