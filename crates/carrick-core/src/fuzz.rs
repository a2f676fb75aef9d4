//! What the fuzz targets call: each takes any bytes, and panics only on a bug.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::{
    deadline::{Deadline, Limits},
    event::Event,
    outcome::parse_retry_after,
    position::Position,
    seal::Seal,
    trace::TraceContext,
};

/// Decodes an event in every mode; what is accepted must come out as it went in.
pub fn event(input: &[u8]) {
    let body = Bytes::copy_from_slice(input);
    if let Ok(event) = Event::parse(body.clone()) {
        assert_eq!(event.as_json(), input.trim_ascii(), "an untouched event is its bytes");
        read(&event);
    }
    for event in Event::parse_batch(body.clone(), 100).into_iter().flatten() {
        read(&event);
    }
    let (headers, body) = request(&body);
    for event in Event::from_http(&headers, body, 100).into_iter().flatten() {
        read(&event);
    }
}

fn read(event: &Event) {
    let again = Event::parse(event.as_json().clone()).expect("what was read can be read again");
    assert_eq!(again.dedupe_key(), event.dedupe_key());
    let marked = event.with_extension("fuzzed", "yes").map(|event| event.attribute("fuzzed"));
    // Only its size can be in the way of an extension.
    assert!(marked.is_ok_and(|mark| mark.is_some()) || event.as_json().len() > 1_000_000);
    let (headers, body) = event.to_http_binary();
    let _ = (event.data(), event.lints(), event.time(), Event::from_http(&headers, body, 1));
}

/// Reads the headers that callers send us.
pub fn headers(input: &[u8]) {
    let (headers, _) = request(&Bytes::copy_from_slice(input));
    let (now, limits) = (Instant::now(), Limits::default());
    let inbound = Deadline::from_headers(&headers, now, Timestamp::UNIX_EPOCH, &limits);
    assert!(inbound.deadline.remaining(now) <= limits.max, "never longer than our maximum");
    if let Ok(text) = std::str::from_utf8(input) {
        if let Ok(trace) = text.parse::<TraceContext>() {
            assert_eq!(trace.to_string().parse(), Ok(trace));
        }
        let _ = parse_retry_after(text, Timestamp::UNIX_EPOCH);
        let _ = (crate::config::duration::parse(text), crate::config::size::parse(text));
        let _ = text.parse::<crate::name::Topic>();
    }
}

/// Opens what a client hands back as a position; nothing but our own is one.
pub fn position(input: &[u8]) {
    let seal = Seal::new([7; 32]);
    if let Ok(text) = std::str::from_utf8(input) {
        assert!(Position::open(&seal, "default/fuzz", text).is_err(), "nobody guesses a MAC");
    }
    if let Some((number, rest)) = input.split_first_chunk() {
        let position = Position { epoch: u64::from_be_bytes(*number), seq: rest.len() as u64 };
        let text = position.seal(&seal, "default/fuzz");
        assert_eq!(Position::open(&seal, "default/fuzz", &text), Ok(position));
    }
}

/// Lines `name:value` up to an empty line, then the body.
fn request(input: &Bytes) -> (HeaderMap, Bytes) {
    let mut headers = HeaderMap::new();
    let mut rest = input.clone();
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = rest.split_to(end + 1);
        if line.len() == 1 {
            break;
        }
        let mut parts = line[..end].splitn(2, |byte| *byte == b':');
        let name = parts.next().map(HeaderName::from_bytes);
        let value = parts.next().map(HeaderValue::from_bytes);
        if let (Some(Ok(name)), Some(Ok(value))) = (name, value) {
            headers.append(name, value);
        }
    }
    (headers, rest)
}
