//! Making an event.

use std::fmt::Write;

use base64::{Engine, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use serde::Serialize;

use super::{Event, EventError, is_json, parse};

/// The value of a context attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribute {
    /// A string; also URIs, times and binary values, which CloudEvents writes as strings.
    String(String),
    /// A boolean.
    Boolean(bool),
    /// An integer of 32 bits, which is what CloudEvents has.
    Integer(i32),
    /// An integer past 32 bits, as it was written; only ever read, to be passed on unharmed.
    Number(String),
}

impl Attribute {
    /// The canonical text of the value, as HTTP headers carry it.
    pub fn to_text(&self) -> String {
        match self {
            Self::String(text) | Self::Number(text) => text.clone(),
            Self::Boolean(value) => value.to_string(),
            Self::Integer(value) => value.to_string(),
        }
    }

    pub(super) fn to_json(&self) -> String {
        match self {
            Self::String(text) => json_string(text),
            other => other.to_text(),
        }
    }
}

impl From<&str> for Attribute {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for Attribute {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}

impl From<bool> for Attribute {
    fn from(value: bool) -> Self {
        Self::Boolean(value)
    }
}

impl From<i32> for Attribute {
    fn from(value: i32) -> Self {
        Self::Integer(value)
    }
}

/// Times are strings in CloudEvents, RFC 3339.
impl From<Timestamp> for Attribute {
    fn from(time: Timestamp) -> Self {
        Self::String(time.to_string())
    }
}

/// An event in the making; [`EventBuilder::build`] checks it as if it had come from outside.
#[derive(Clone, Debug)]
pub struct EventBuilder {
    attributes: Vec<(String, Attribute)>,
    data: Payload,
}

#[derive(Clone, Debug)]
enum Payload {
    None,
    Json(Result<String, String>),
    Bytes(Vec<u8>, String),
}

impl EventBuilder {
    pub(super) fn new(ty: String) -> Self {
        Self { attributes: vec![("type".to_owned(), ty.into())], data: Payload::None }
    }

    /// Identity within the source; a random UUID if not given.
    #[must_use]
    pub fn id(self, id: impl Into<String>) -> Self {
        self.extension("id", id.into())
    }

    /// Where it happened: a URI reference such as `/shop`. Required.
    #[must_use]
    pub fn source(self, source: impl Into<String>) -> Self {
        self.extension("source", source.into())
    }

    /// What it happened to, within the source.
    #[must_use]
    pub fn subject(self, subject: impl Into<String>) -> Self {
        self.extension("subject", subject.into())
    }

    /// When its producer recorded it.
    #[must_use]
    pub fn time(self, time: Timestamp) -> Self {
        self.extension("time", time)
    }

    /// Sets an extension; the last value of a name counts.
    #[must_use]
    pub fn extension(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> Self {
        let name = name.into();
        self.attributes.retain(|(earlier, _)| *earlier != name);
        self.attributes.push((name, value.into()));
        self
    }

    /// A payload of JSON.
    #[must_use]
    pub fn data_json(mut self, data: &(impl Serialize + ?Sized)) -> Self {
        self.data = Payload::Json(serde_json::to_string(data).map_err(|error| error.to_string()));
        self
    }

    /// A payload of any media type, kept to the byte.
    #[must_use]
    pub fn data(mut self, bytes: impl Into<Vec<u8>>, content_type: impl Into<String>) -> Self {
        self.data = Payload::Bytes(bytes.into(), content_type.into());
        self
    }

    /// Makes the event.
    ///
    /// # Errors
    /// [`EventError`] if an attribute is missing or wrong, the payload cannot be written as JSON, or
    /// the event is too large.
    pub fn build(self) -> Result<Event, EventError> {
        let Self { mut attributes, data } = self;
        if !attributes.iter().any(|(name, _)| name == "id") {
            attributes.push(("id".to_owned(), uuid::Uuid::new_v4().to_string().into()));
        }
        let mut document = String::with_capacity(256);
        document.push_str("{\"specversion\":\"1.0\"");
        let place = |name: &str| match name {
            "id" => 0,
            "source" => 1,
            "type" => 2,
            _ => 3,
        };
        attributes.sort_by_key(|(name, _)| place(name));
        for (name, value) in &attributes {
            parse::check_name(name)?;
            write!(document, ",\"{name}\":{}", value.to_json()).expect("a String takes all");
        }
        match data {
            Payload::None => {}
            Payload::Json(json) => {
                let json = json.map_err(|error| {
                    EventError::attribute("data", "something that JSON can say", &error)
                })?;
                write!(document, ",\"datacontenttype\":\"application/json\",\"data\":{json}")
                    .expect("a String takes all");
            }
            Payload::Bytes(bytes, content_type) => {
                write!(document, ",\"datacontenttype\":{}", json_string(&content_type))
                    .expect("a String takes all");
                push_data(&mut document, &bytes, &content_type);
            }
        }
        document.push('}');
        Event::parse(document)
    }
}

/// Adds the payload in the form that gives the same bytes back.
pub(super) fn push_data(document: &mut String, bytes: &[u8], content_type: &str) {
    let text = std::str::from_utf8(bytes).ok();
    let is_value = |text: &&str| serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok();
    let raw = text.filter(|_| is_json(content_type)).filter(is_value);
    // White space around a JSON value would be lost: such data is kept in base64.
    if let Some(json) = raw.filter(|json| json.trim_ascii().len() == json.len()) {
        document.push_str(",\"data\":");
        document.push_str(json);
    } else if let Some(text) = text.filter(|_| is_text(content_type)) {
        document.push_str(",\"data\":");
        document.push_str(&json_string(text));
    } else {
        document.push_str(",\"data_base64\":\"");
        BASE64_STANDARD.encode_string(bytes, document);
        document.push('"');
    }
}

fn is_text(content_type: &str) -> bool {
    let text = content_type.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("text/"));
    text && !is_json(content_type)
}

pub(super) fn json_string(text: &str) -> String {
    serde_json::to_string(text).expect("any string can be JSON")
}
