//! Finding the members of a document, without a model of it.

use std::{borrow::Cow, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{Attribute, Event, EventError, HARD_LIMIT, Members, Span};

/// Reads one event.
pub(super) fn event(document: Bytes) -> Result<Event, EventError> {
    let size = document.len();
    if size > HARD_LIMIT {
        return Err(EventError::TooLarge { size, limit: HARD_LIMIT });
    }
    let text = std::str::from_utf8(&document).map_err(EventError::Utf8)?;
    let trimmed = text.trim_ascii();
    if trimmed.len() < size {
        // What follows the object is no part of the event, and a batch must be able to join events.
        let start = text.len() - text.trim_ascii_start().len();
        return event(document.slice(start..start + trimmed.len()));
    }
    let members = members(text)?;
    Ok(Event { document, members })
}

/// Reads an array of events.
pub(super) fn batch(body: &Bytes, most: usize) -> Result<Vec<Event>, EventError> {
    let text = std::str::from_utf8(body).map_err(EventError::Utf8)?;
    let json = |source| EventError::Json { expected: "a JSON array of events", source };
    let Elements(raws) = serde_json::from_str(text).map_err(json)?;
    if raws.len() > most {
        return Err(EventError::TooMany { limit: most });
    }
    let read = |(index, raw): (usize, &RawValue)| {
        event(body.slice_ref(raw.get().as_bytes()))
            .map_err(|source| EventError::InBatch { index, source: Box::new(source) })
    };
    raws.into_iter().enumerate().map(read).collect()
}

/// The elements of an array as they stand.
struct Elements<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for Elements<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Elements<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of events")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut raws = Vec::new();
                while let Some(raw) = seq.next_element()? {
                    raws.push(raw);
                }
                Ok(Elements(raws))
            }
        }
        deserializer.deserialize_seq(Collect)
    }
}

/// Calls back for each member of an object, in order, with its name and its value as it stands.
struct Walk<F>(F);

impl<'de, F: FnMut(Cow<'de, str>, &'de RawValue) -> Result<(), String>> Visitor<'de> for Walk<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key()? {
            (self.0)(name, map.next_value()?).map_err(A::Error::custom)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        // Without this serde's message would show the content of the array.
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Err(A::Error::custom("an array where an object is expected"))
    }
}

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

fn walk<'a>(
    text: &'a str,
    each: impl FnMut(Cow<'a, str>, &'a RawValue) -> Result<(), String>,
) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_map(Walk(each))?;
    deserializer.end()
}

fn span(document: &str, part: &str) -> Span {
    let start = part.as_ptr().addr() - document.as_ptr().addr();
    let narrow = |offset: usize| u32::try_from(offset).expect("an event has at most 1 MiB");
    Span { start: narrow(start), end: narrow(start + part.len()) }
}

/// Finds and checks the members of an event.
fn members(document: &str) -> Result<Members, EventError> {
    let mut found = Found::default();
    let mut wrong = None;
    let walked = walk(document, |name, raw| {
        found.take(document, &name, raw.get()).map_err(|error| {
            wrong = Some(error);
            String::new()
        })
    });
    if let Some(wrong) = wrong {
        return Err(wrong);
    }
    walked.map_err(|source| EventError::Json { expected: "a JSON object", source })?;
    found.check(document)
}

#[derive(Default)]
struct Found {
    specversion: bool,
    id: Option<Span>,
    source: Option<Span>,
    ty: Option<Span>,
    members: Members,
}

impl Found {
    /// Notes one member; of duplicates the last counts, as in the usual JSON parsers.
    fn take(&mut self, document: &str, name: &str, raw: &str) -> Result<(), EventError> {
        // A null is as good as absent (JSON format, 2.2).
        let here = (raw != "null").then(|| span(document, raw));
        let members = &mut self.members;
        match name {
            "specversion" => {
                self.specversion = here.is_some();
                if here.is_some() && text(raw).as_deref() != Some("1.0") {
                    return Err(EventError::attribute(name, "\"1.0\"", raw));
                }
            }
            "id" => self.id = required(name, raw, here)?,
            "source" => self.source = required(name, raw, here)?,
            "type" => self.ty = required(name, raw, here)?,
            "subject" => members.subject = string(name, raw, here)?,
            "time" => {
                members.time = string(name, raw, here)?;
                timestamp(name, raw, here)?;
            }
            "datacontenttype" => members.datacontenttype = string(name, raw, here)?,
            "partitionkey" => {
                members.partitionkey = string(name, raw, here)?;
                if here.is_some() && raw.len() > MAX_KEY + 2 {
                    return Err(EventError::attribute(name, "at most 1024 bytes", raw));
                }
            }
            "traceparent" => members.traceparent = string(name, raw, here)?,
            "expirytime" => {
                string(name, raw, here)?;
                members.expires_at = timestamp(name, raw, here)?;
            }
            "data" => members.data = Some(span(document, raw)),
            "data_base64" => {
                members.data_base64 = string(name, raw, here)?;
                if let Some(text) = here.and_then(|_| text(raw))
                    && BASE64_STANDARD.decode(text.as_bytes()).is_err()
                {
                    return Err(EventError::attribute(name, "base64", raw));
                }
            }
            _ => {
                check_name(name)?;
                if here.is_some() && attribute(raw).is_none() {
                    let rule = "a string, a boolean or an integer";
                    return Err(EventError::attribute(name, rule, raw));
                }
            }
        }
        Ok(())
    }

    fn check(self, document: &str) -> Result<Members, EventError> {
        let Self { specversion, id, source, ty, mut members } = self;
        let missing = |name| EventError::attribute(name, "present", "absent");
        if !specversion {
            return Err(missing("specversion"));
        }
        members.id = id.ok_or_else(|| missing("id"))?;
        members.source = source.ok_or_else(|| missing("source"))?;
        members.ty = ty.ok_or_else(|| missing("type"))?;
        if let (Some(_), Some(base64)) = (members.data, members.data_base64) {
            let rule = "absent when there is `data`";
            return Err(EventError::attribute("data_base64", rule, base64.of(document.as_bytes())));
        }
        Ok(members)
    }
}

/// The longest ordering key, in bytes: it is stored with every event and every lease.
const MAX_KEY: usize = 1024;

fn string(name: &str, raw: &str, here: Option<Span>) -> Result<Option<Span>, EventError> {
    if here.is_some() && text(raw).is_none() {
        return Err(EventError::attribute(name, "a string", raw));
    }
    Ok(here)
}

fn required(name: &str, raw: &str, here: Option<Span>) -> Result<Option<Span>, EventError> {
    if here.is_some() && text(raw).is_none_or(|text| text.is_empty()) {
        return Err(EventError::attribute(name, "a string that is not empty", raw));
    }
    Ok(here)
}

fn timestamp(
    name: &str,
    raw: &str,
    here: Option<Span>,
) -> Result<Option<jiff::Timestamp>, EventError> {
    if here.is_none() {
        return Ok(None);
    }
    let parsed = text(raw).and_then(|text| text.parse().ok());
    match parsed {
        Some(time) => Ok(Some(time)),
        None => Err(EventError::attribute(name, "an RFC 3339 time", raw)),
    }
}

/// Checks the name of an attribute: lower-case letters and digits.
pub(super) fn check_name(name: &str) -> Result<(), EventError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if !name.is_empty() && name.bytes().all(allowed) {
        return Ok(());
    }
    Err(EventError::attribute(name, "named with the characters a-z 0-9", name))
}

/// The content of a JSON string; `None` if it is none, or has half a surrogate pair.
pub(super) fn text(raw: &str) -> Option<Cow<'_, str>> {
    let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') {
        serde_json::from_str(raw).ok().map(Cow::Owned)
    } else {
        Some(Cow::Borrowed(inner))
    }
}

/// The value of an attribute as it stands in the document.
pub(super) fn attribute(raw: &str) -> Option<Attribute> {
    match raw {
        "true" => Some(Attribute::Boolean(true)),
        "false" => Some(Attribute::Boolean(false)),
        _ if raw.starts_with('"') => text(raw).map(|text| Attribute::String(text.into_owned())),
        // CloudEvents has 32 bits; a larger integer is kept as it stands.
        _ if raw.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') => {
            Some(raw.parse().map_or_else(|_| Attribute::Number(raw.to_owned()), Attribute::Integer))
        }
        _ => None,
    }
}

/// Where the value of a member is; of duplicates the last.
pub(super) fn find(document: &[u8], wanted: &str) -> Option<Span> {
    let document = std::str::from_utf8(document).expect("an event is UTF-8");
    let mut found = None;
    let walked = walk(document, |name, raw| {
        if name == wanted {
            found = (raw.get() != "null").then(|| span(document, raw.get()));
        }
        Ok(())
    });
    walked.expect("an event is a JSON object");
    found
}

/// All attributes in order.
pub(super) fn attributes(document: &[u8]) -> Vec<(String, Attribute)> {
    let document = std::str::from_utf8(document).expect("an event is UTF-8");
    let mut attributes: Vec<(String, Attribute)> = Vec::new();
    let walked = walk(document, |name, raw| {
        if name != "data" && name != "data_base64" {
            attributes.retain(|(earlier, _)| *earlier != name);
            attributes.extend(attribute(raw.get()).map(|value| (name.into_owned(), value)));
        }
        Ok(())
    });
    walked.expect("an event is a JSON object");
    attributes
}
