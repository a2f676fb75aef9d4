//! The HTTP binding: binary, structured and batch mode.

use std::fmt::Write;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use super::{BATCH, Event, EventError, HARD_LIMIT, STRUCTURED, builder, error::cut, parse};

/// What the binding says to escape in a header: all but printable ASCII, and these three.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

impl Event {
    /// Reads what an HTTP request or answer carries: one event in binary or structured mode, or a
    /// batch of at most `most`.
    ///
    /// # Errors
    /// [`EventError`]; [`EventError::ContentType`] if the headers name no mode.
    pub fn from_http(
        headers: &HeaderMap,
        body: Bytes,
        most: usize,
    ) -> Result<Vec<Self>, EventError> {
        let content_type = match headers.get(CONTENT_TYPE) {
            Some(value) => value.to_str().map_err(|_| content_type("visible ASCII"))?,
            None => "",
        };
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        if essence.eq_ignore_ascii_case(STRUCTURED) {
            check_charset(content_type)?;
            return Ok(vec![Self::parse(body)?]);
        }
        if essence.eq_ignore_ascii_case(BATCH) {
            check_charset(content_type)?;
            return Self::parse_batch(body, most);
        }
        if starts_with(essence, "application/cloudevents") {
            return Err(EventError::ContentType { expected: MODES, found: cut(essence) });
        }
        if headers.contains_key("ce-specversion") {
            return Ok(vec![binary(headers, &body, content_type)?]);
        }
        Err(EventError::ContentType { expected: MODES, found: cut(essence) })
    }

    /// This event in binary mode: headers, and the data as the body.
    pub fn to_http_binary(&self) -> (HeaderMap, Bytes) {
        let mut headers = HeaderMap::new();
        for (name, value) in self.attributes() {
            if name == "datacontenttype" {
                continue;
            }
            let text = value.to_text();
            let escaped = utf8_percent_encode(&text, ESCAPED).to_string();
            let name =
                HeaderName::try_from(format!("ce-{name}")).expect("an attribute's name is a-z 0-9");
            let value = HeaderValue::try_from(escaped).expect("escaped to printable ASCII");
            headers.insert(name, value);
        }
        let Some(data) = self.data() else { return (headers, Bytes::new()) };
        // A media type that no header can carry is left out rather than failing the event.
        if let Ok(value) = HeaderValue::try_from(data.content_type) {
            headers.insert(CONTENT_TYPE, value);
        }
        (headers, data.bytes)
    }
}

const MODES: &str = "application/cloudevents+json, application/cloudevents-batch+json, or any other \
                     together with a ce-specversion header";

fn content_type(expected: &'static str) -> EventError {
    EventError::ContentType { expected, found: "something else".to_owned() }
}

fn starts_with(text: &str, start: &str) -> bool {
    text.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start))
}

fn check_charset(content_type: &str) -> Result<(), EventError> {
    let parameters = content_type.split(';').skip(1).map(str::trim);
    let charset =
        parameters.filter_map(|parameter| parameter.split_once('=')).find_map(|(name, value)| {
            name.eq_ignore_ascii_case("charset").then(|| value.trim_matches('"'))
        });
    match charset {
        Some(other) if !other.eq_ignore_ascii_case("utf-8") => {
            Err(EventError::ContentType { expected: "in charset utf-8", found: cut(other) })
        }
        _ => Ok(()),
    }
}

fn binary(headers: &HeaderMap, body: &Bytes, content_type: &str) -> Result<Event, EventError> {
    if body.len() > HARD_LIMIT {
        return Err(EventError::TooLarge { size: body.len(), limit: HARD_LIMIT });
    }
    let mut document = String::with_capacity(body.len() + 512);
    document.push('{');
    for name in headers.keys() {
        let Some(attribute) = name.as_str().strip_prefix("ce-") else { continue };
        parse::check_name(attribute)?;
        let mut values = headers.get_all(name).iter();
        let value = values.next().expect("a header that is there has a value");
        if values.next().is_some() {
            return Err(EventError::attribute(attribute, "sent once", "several headers"));
        }
        if attribute == "datacontenttype" {
            let rule = "in the content-type header in binary mode";
            return Err(EventError::attribute(attribute, rule, "a ce- header"));
        }
        let value = unescape(attribute, value)?;
        let comma = if document.len() > 1 { "," } else { "" };
        write!(document, "{comma}\"{attribute}\":{}", builder::json_string(&value))
            .expect("a String takes all");
    }
    if !content_type.is_empty() {
        write!(document, ",\"datacontenttype\":{}", builder::json_string(content_type))
            .expect("a String takes all");
    }
    if !body.is_empty() {
        // Without a media type the data could be anything: base64 keeps it.
        builder::push_data(&mut document, body, content_type);
    }
    document.push('}');
    Event::parse(document)
}

/// One round of unquoting and one of percent-decoding, as the binding says.
fn unescape(name: &str, value: &HeaderValue) -> Result<String, EventError> {
    let wrong =
        |rule| EventError::attribute(name, rule, &String::from_utf8_lossy(value.as_bytes()));
    let text = std::str::from_utf8(value.as_bytes()).map_err(|_| wrong("UTF-8"))?;
    let quoted = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let plain = match quoted {
        Some(inner) => {
            let mut plain = String::with_capacity(inner.len());
            let mut characters = inner.chars();
            while let Some(character) = characters.next() {
                let escaped = (character == '\\').then(|| characters.next()).flatten();
                plain.push(escaped.unwrap_or(character));
            }
            plain
        }
        None => text.to_owned(),
    };
    let decoded = percent_decode_str(&plain).decode_utf8().map_err(|_| wrong("UTF-8"))?;
    Ok(decoded.into_owned())
}
