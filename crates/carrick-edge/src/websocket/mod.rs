//! WebSocket: a topic both ways, under the subprotocol [`SUBPROTOCOL`].
//!
//! Every message is a JSON text with one member that names its kind. The hub begins:
//!
//! ```json
//! {"open":{"session":"…","position":"…","last_client_seq":0,"ping":"25s","max_bytes":1048576}}
//! {"event":{…},"position":"…"}
//! {"bookmark":{"position":"…"}}
//! {"reset":{"topic":"orders","position":"…"}}
//! ```
//!
//! and the client says, with ids of its own that rise:
//!
//! ```json
//! {"send":{…},"id":1}        → {"ack":{"id":1,"duplicate":false}} or {"refused":{"id":1,"problem":{…}}}
//! {"ping":7}                 → {"pong":7}
//! ```
//!
//! What is sent is published in its order, one batch after the other; an ack says that it is durable.
//! A client that comes back sends what was not acknowledged once more, with the same events: their
//! ids make it harmless, wherever it comes to. `session` in its address lets the hub tell it how far
//! its acknowledgements went.
//!
//! Source: pattern document, WebSocket listing; Centrifugo for close codes and memory. Differs: a
//! position is part of the opening, and live events wait in the log until the replay meets them;
//! defects.md E7–E11.

mod door;
mod sessions;
mod wire;

pub(crate) use self::wire::event;
pub use self::{
    door::{Options, Publish, serve},
    sessions::{Session, Sessions},
    wire::accept_key,
};

/// The subprotocol's name.
pub const SUBPROTOCOL: &str = "carrick.v1";

/// A message of a client at most: an event, and what is around it.
pub const MAX_MESSAGE: usize = carrick_core::event::HARD_LIMIT + 1024;

/// Codes with which the hub closes, and what a client is to do then.
pub mod code {
    /// The hub drains: come back, to another one.
    pub const AWAY: u16 = 1001;
    /// The client broke the protocol: coming back would end the same way.
    pub const PROTOCOL: u16 = 1002;
    /// A message that is no text. As above.
    pub const UNSUPPORTED: u16 = 1003;
    /// A text that is not UTF-8. As above.
    pub const INVALID: u16 = 1007;
    /// A message over [`super::MAX_MESSAGE`]. As above.
    pub const TOO_LARGE: u16 = 1009;
    /// The store is gone: come back later.
    pub const RESTART: u16 = 1012;
    /// What was sent cannot be published now: come back later, and send it again.
    pub const AGAIN: u16 = 1013;
    /// The client's right has ended: come back with a new token.
    pub const EXPIRED: u16 = 3005;
    /// The client read too slowly: come back to the position in the reason.
    pub const SLOW: u16 = 3008;
}
