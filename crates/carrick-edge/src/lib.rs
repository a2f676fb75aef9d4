//! Carrick's doors to browsers and clients.
//!
//! * [`feed`]: what a topic's readers share: one tail of the log, one ring, a position each.
//! * [`long_poll`], [`sse`], [`websocket`]: the doors on it. A client may change its door and keep its position.
//! * [`socket`]: how a handler takes its connection over, so that a waiting reader costs a task and
//!   not an HTTP server's buffers.

pub mod feed;
pub mod long_poll;
pub mod socket;
pub mod sse;
pub mod websocket;
