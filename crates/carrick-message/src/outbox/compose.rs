//! From a row's columns to its event, as one structured CloudEvents document.
//!
//! `data` goes into the document byte for byte, so that big integers, member order and duplicate
//! members survive (defects.md E19). What cannot become a valid event is a finding about one row,
//! told in words for whoever wrote it, and never an error of the relay.

use bytes::Bytes;
use carrick_core::{event::Event, name::Topic};
use serde_json::value::RawValue;

use super::error::chain;

/// What a relay needs of a row to make its event.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) id: String,
    pub(crate) ty: Option<String>,
    pub(crate) source: Option<String>,
    pub(crate) subject: Option<String>,
    /// RFC 3339.
    pub(crate) time: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) schema: Option<String>,
    pub(crate) traceparent: Option<String>,
    pub(crate) tracestate: Option<String>,
    pub(crate) extensions: Option<String>,
    pub(crate) data: Option<String>,
    pub(crate) data_binary: Option<Vec<u8>>,
    pub(crate) event: Option<String>,
}

/// Makes a row's event and checks its topic; the error is a sentence about the row.
pub(crate) fn compose(mut columns: Columns) -> Result<(Topic, Event), String> {
    let topic = columns.topic.parse::<Topic>().map_err(|error| error.to_string())?;
    let key = columns.key.take();
    let document = match columns.event.take() {
        Some(document) => Bytes::from(document),
        None => Bytes::from(document(&columns)?),
    };
    let event = Event::parse(document).map_err(|error| chain(&error))?;
    let event = match (&key, event.partition_key()) {
        (None, _) => event,
        (Some(key), Some(own)) if own == key.as_str() => event,
        (Some(key), Some(own)) => {
            return Err(format!(
                "the column key is {key:?} and the event's partitionkey is {own:?}: \
                 they must be the same, or one of them left out"
            ));
        }
        (Some(key), None) => {
            event.with_extension("partitionkey", key.as_str()).map_err(|error| chain(&error))?
        }
    };
    Ok((topic, event))
}

/// Attributes that a column of their own holds, and the members of the JSON format.
const RESERVED: [&str; 12] = [
    "specversion",
    "id",
    "type",
    "source",
    "subject",
    "time",
    "datacontenttype",
    "dataschema",
    "traceparent",
    "tracestate",
    "data",
    "data_base64",
];

fn document(columns: &Columns) -> Result<Vec<u8>, String> {
    let payload = columns.data.as_ref().map_or(0, String::len)
        + columns.data_binary.as_ref().map_or(0, |data| data.len() * 4 / 3);
    let mut out = Vec::with_capacity(payload + 512);
    out.extend_from_slice(b"{\"specversion\":\"1.0\"");
    let ty = columns.ty.as_deref().ok_or("the column type is empty")?;
    let source = columns.source.as_deref().ok_or("the column source is empty")?;
    text(&mut out, "id", &columns.id);
    text(&mut out, "source", source);
    text(&mut out, "type", ty);
    for (name, value) in [
        ("subject", &columns.subject),
        ("time", &columns.time),
        ("dataschema", &columns.schema),
        ("traceparent", &columns.traceparent),
        ("tracestate", &columns.tracestate),
        ("datacontenttype", &columns.content_type),
    ] {
        if let Some(value) = value {
            text(&mut out, name, value);
        }
    }
    if let Some(extensions) = &columns.extensions {
        extend(&mut out, extensions)?;
    }
    if let Some(data) = &columns.data {
        out.extend_from_slice(b",\"data\":");
        out.extend_from_slice(data.as_bytes());
    } else if let Some(data) = &columns.data_binary {
        binary(&mut out, data, columns.content_type.as_deref());
    }
    out.push(b'}');
    Ok(out)
}

fn text(out: &mut Vec<u8>, name: &str, value: &str) {
    out.push(b',');
    quote(out, name);
    out.push(b':');
    quote(out, value);
}

fn quote(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a text is written to memory");
}

/// Members of the extensions, as they are written.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> serde::Deserialize<'de> for Members<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Vec<(String, &'de RawValue)>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(Visitor).map(Members)
    }
}

fn extend(out: &mut Vec<u8>, extensions: &str) -> Result<(), String> {
    let Members(members) = serde_json::from_str(extensions)
        .map_err(|error| format!("the column extensions is not a JSON object: {error}"))?;
    for (name, value) in members {
        let is_a_name =
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !is_a_name {
            return Err(format!(
                "extensions: {name:?} is no name of an attribute: only a-z and 0-9 may be in it"
            ));
        }
        if RESERVED.contains(&name.as_str()) {
            return Err(format!("extensions: {name:?} has a column of its own"));
        }
        match value.get().as_bytes().first() {
            Some(b'"' | b't' | b'f' | b'-' | b'0'..=b'9') => {}
            Some(b'n') => continue, // absent, as the JSON format has it
            _ => return Err(format!("extensions: {name:?} must be a text, a number or a boolean")),
        }
        out.push(b',');
        quote(out, &name);
        out.push(b':');
        out.extend_from_slice(value.get().as_bytes());
    }
    Ok(())
}

/// The same choice as for a payload that comes in by HTTP: JSON as JSON, text as text, and
/// everything else in base 64.
fn binary(out: &mut Vec<u8>, data: &[u8], content_type: Option<&str>) {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let media = content_type.unwrap_or("").split(';').next().unwrap_or("").trim();
    let media = media.to_ascii_lowercase();
    let is_json = media == "application/json" || media == "text/json" || media.ends_with("+json");
    match std::str::from_utf8(data) {
        Ok(json) if is_json && serde_json::from_str::<&RawValue>(json).is_ok() => {
            out.extend_from_slice(b",\"data\":");
            out.extend_from_slice(json.as_bytes());
        }
        Ok(plain) if media.starts_with("text/") && !is_json => {
            out.extend_from_slice(b",\"data\":");
            quote(out, plain);
        }
        _ => {
            out.extend_from_slice(b",\"data_base64\":\"");
            out.extend_from_slice(STANDARD.encode(data).as_bytes());
            out.push(b'"');
        }
    }
}
