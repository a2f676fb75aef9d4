//! Server-Sent Events: a topic as a stream that a browser reads by itself.
//!
//! The first bytes go out at once: a `retry:` of the connection's own between 2 and 8 s, and the
//! position from which it starts, so that a reader who has seen nothing yet can come back to the same
//! place. Then `id:` is the position after each event, `event:` its type, `data:` the event. Three
//! names are ours: `reset` says that what came before is gone, `bookmark` carries a position without
//! an event, and comments keep proxies from thinking that the line is dead.
//!
//! No content can break a frame or panic: line ends of every kind begin a new `data:` line, and a type
//! that holds one is left out.
//!
//! Source: WHATWG HTML, server-sent events; pattern document. Differs: defects.md E4–E6.

mod door;

use bytes::{BufMut, Bytes, BytesMut};

pub use self::door::{Options, body, busy, response_head, stream};

/// The name of an event that tells of a gap.
pub const RESET: &str = "reset";

/// The name of an event that only carries a position.
pub const BOOKMARK: &str = "bookmark";

/// An event as bytes, encoded once for all who read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    bytes: Bytes,
    /// Length of the line that names it.
    name: usize,
}

impl Frame {
    /// An event with its type as its name.
    pub fn event(name: &str, position: &str, data: &[u8]) -> Self {
        let mut bytes = BytesMut::with_capacity(name.len() + position.len() + data.len() + 64);
        let is_line = !name.is_empty() && !name.contains(['\n', '\r', '\0']);
        if is_line {
            bytes.put_slice(b"event: ");
            bytes.put_slice(name.as_bytes());
            bytes.put_u8(b'\n');
        }
        let named = bytes.len();
        debug_assert!(!position.contains(['\n', '\r', '\0']), "positions are base64");
        bytes.put_slice(b"id: ");
        bytes.put_slice(position.as_bytes());
        bytes.put_u8(b'\n');
        put_data(&mut bytes, data);
        bytes.put_u8(b'\n');
        Self { bytes: bytes.freeze(), name: named }
    }

    /// With the line that names it.
    pub fn named(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Without: browsers give it to `onmessage`.
    pub fn unnamed(&self) -> Bytes {
        self.bytes.slice(self.name..)
    }
}

/// Writes data, a `data:` line for each of its lines.
fn put_data(bytes: &mut BytesMut, mut data: &[u8]) {
    loop {
        bytes.put_slice(b"data: ");
        let Some(end) = data.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
            bytes.put_slice(data);
            bytes.put_u8(b'\n');
            return;
        };
        bytes.put_slice(&data[..end]);
        bytes.put_u8(b'\n');
        let pair = data[end..].starts_with(b"\r\n");
        data = &data[end + 1 + usize::from(pair)..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_of_every_kind_stay_within_the_event() {
        let frame = Frame::event("a.v1", "p", b"{\n\"a\":\r\n1,\r\"b\":2}\n");
        let expected =
            "event: a.v1\nid: p\ndata: {\ndata: \"a\":\ndata: 1,\ndata: \"b\":2}\ndata: \n\n";
        assert_eq!(frame.named(), expected.as_bytes());
        assert_eq!(frame.unnamed(), expected.strip_prefix("event: a.v1\n").unwrap().as_bytes());
    }

    #[test]
    fn a_type_that_would_break_the_frame_is_left_out() {
        for name in ["", "a\nid: x", "a\rb", "a\0"] {
            assert_eq!(Frame::event(name, "p", b"{}").named(), "id: p\ndata: {}\n\n".as_bytes());
        }
    }
}
