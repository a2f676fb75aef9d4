//! Messages, from and to their bytes.

use bytes::Bytes;
use carrick_core::problem::Problem;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::feed::Entry;

/// The value of `sec-websocket-accept` for a client's key.
pub fn accept_key(key: &[u8]) -> String {
    tokio_tungstenite::tungstenite::handshake::derive_accept_key(key)
}

/// What a client says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// To publish an event.
    Send { id: u64, event: Bytes },
    /// To be answered.
    Ping(u64),
}

/// What a message must be, for whoever sent another.
pub(super) const SHAPE: &str = r#"a message is {"send":{event},"id":1} or {"ping":1}"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    #[serde(borrow)]
    send: Option<&'a RawValue>,
    id: Option<u64>,
    ping: Option<u64>,
}

/// Reads a message; `None` if it is none of ours.
pub(super) fn read(text: &Bytes) -> Option<Said> {
    match serde_json::from_slice(text).ok()? {
        Fields { send: Some(event), id: Some(id), ping: None } => {
            Some(Said::Send { id, event: text.slice_ref(event.get().as_bytes()) })
        }
        Fields { send: None, id: None, ping: Some(number) } => Some(Said::Ping(number)),
        Fields { .. } => None,
    }
}

/// A ping of the protocol, without a payload.
pub(super) const PING: &[u8] = &[0x89, 0];

/// A text as a frame from a server, which masks nothing.
pub(super) fn text(payload: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(payload.len() + 10);
    frame.push(0x81);
    let length = payload.len();
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(length @ ..126), _) => frame.push(length),
        (_, Ok(length)) => {
            frame.push(126);
            frame.extend_from_slice(&length.to_be_bytes());
        }
        _ => {
            frame.push(127);
            frame.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(payload);
    frame.into()
}

/// An event; its topic is named where there are several.
pub(crate) fn event(entry: &Entry, position: &str, topic: Option<&str>) -> Bytes {
    let body = entry.body();
    let mut payload = Vec::with_capacity(body.len() + position.len() + 64);
    payload.push(b'{');
    if let Some(topic) = topic {
        payload.extend_from_slice(b"\"topic\":\"");
        payload.extend_from_slice(topic.as_bytes());
        payload.extend_from_slice(b"\",");
    }
    payload.extend_from_slice(b"\"event\":");
    if entry.is_event() {
        payload.extend_from_slice(body);
    } else {
        // Somebody wrote it into the store by hand: as a text it breaks nothing.
        let body = String::from_utf8_lossy(body);
        payload.extend_from_slice(serde_json::Value::from(body).to_string().as_bytes());
    }
    payload.extend_from_slice(b",\"position\":\"");
    payload.extend_from_slice(position.as_bytes());
    payload.extend_from_slice(b"\"}");
    text(&payload)
}

pub(super) fn bookmark(position: &str) -> Bytes {
    text(format!(r#"{{"bookmark":{{"position":"{position}"}}}}"#).as_bytes())
}

pub(super) fn reset(topic: &str, position: &str) -> Bytes {
    text(format!(r#"{{"reset":{{"topic":"{topic}","position":"{position}"}}}}"#).as_bytes())
}

pub(super) fn ack(id: u64, duplicate: bool) -> Bytes {
    text(format!(r#"{{"ack":{{"id":{id},"duplicate":{duplicate}}}}}"#).as_bytes())
}

pub(super) fn refused(id: u64, problem: &Problem) -> Bytes {
    let problem = serde_json::to_string(problem).expect("a problem is JSON");
    text(format!(r#"{{"refused":{{"id":{id},"problem":{problem}}}}}"#).as_bytes())
}

pub(super) fn pong(number: u64) -> Bytes {
    text(format!(r#"{{"pong":{number}}}"#).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_of_two_shapes_and_its_event_keeps_its_bytes() {
        let said = |text: &str| read(&Bytes::copy_from_slice(text.as_bytes()));
        let event = "{ \"a\" : 1e400,\"a\":2}";
        let sent = Said::Send { id: 3, event: event.into() };
        assert_eq!(said(&format!(r#"{{"id":3,"send": {event}}}"#)), Some(sent));
        assert_eq!(said(r#"{"ping":7}"#), Some(Said::Ping(7)));
        for junk in [
            "",
            "{}",
            "7",
            r#"{"ping":-1}"#,
            r#"{"ping":1,"id":1}"#,
            r#"{"send":{}}"#,
            r#"{"id":1}"#,
            r#"{"send":{},"id":1,"x":1}"#,
            r#"{"send":{,"id":1}"#,
        ] {
            assert_eq!(said(junk), None, "{junk}");
        }
    }

    #[test]
    fn lengths_of_frames_are_written_in_the_fewest_bytes() {
        for (length, head) in [
            (0, &[0x81, 0][..]),
            (125, &[0x81, 125]),
            (126, &[0x81, 126, 0, 126]),
            (65_535, &[0x81, 126, 255, 255]),
            (65_536, &[0x81, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
        ] {
            let frame = text(&vec![b'x'; length]);
            assert_eq!((&frame[..head.len()], frame.len()), (head, head.len() + length));
        }
    }
}
