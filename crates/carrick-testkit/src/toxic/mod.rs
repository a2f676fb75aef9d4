//! Toxic: a TCP proxy that does to connections what networks do to them.
//!
//! A stub in place of a dependency shows what a client makes of an error. It does not show what it
//! makes of a connection that stays open and says nothing, of half an answer, of one that comes byte
//! by byte. [`Toxic`] stands before the real dependency and does that, on real sockets, and is told
//! what to do at run time: [`Toxic::set`] holds for every byte that comes after it, on connections that
//! are there and on those to come, and it never waits.
//!
//! Each direction has a lane (`core.rs`) that decides when which bytes go on; `pump.rs` moves them,
//! `proxy.rs` has the sockets. What a lane holds is bounded, so that a slow reader is felt by the writer
//! through the proxy too.
//!
//! Source: Toxiproxy for the kinds of harm. Differs: within the test's own process, so that nothing is
//! left over when it ends; harm is replaced as a whole, so that no connection sees half of it; a stream
//! that lost bytes is never continued.

mod core;
mod proxy;
mod pump;

use std::{num::NonZeroU64, time::Duration};

pub use self::{
    core::MOST_HELD,
    proxy::{Counts, MOST_CONNECTIONS, Toxic},
};

/// What is done to connections. The default is nothing.
///
/// ```
/// use std::time::Duration;
/// use carrick_testkit::toxic::{Toxics, Way};
///
/// let late = Way { latency: Duration::from_millis(200), ..Way::default() };
/// let toxics = Toxics { down: late, ..Toxics::default() };
/// assert_ne!(toxics, Toxics::default());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Toxics {
    /// What is done to bytes from the client to the server.
    pub up: Way,
    /// What is done to bytes from the server to the client.
    pub down: Way,
    /// Resets connections that are older than this. Default none.
    pub reset: Option<Duration>,
    /// Share of the connections that this is done to, in [0, 1]. 0 is none of them, 1 is all. A
    /// connection keeps the number it drew, so that a greater share includes a lesser one. Default 1.
    pub toxicity: f64,
}

impl Default for Toxics {
    fn default() -> Self {
        Self { up: Way::default(), down: Way::default(), reset: None, toxicity: 1.0 }
    }
}

impl Toxics {
    /// The same in both directions.
    pub fn both(way: Way) -> Self {
        Self { up: way, down: way, ..Self::default() }
    }

    /// Nothing is passed on, in either direction; connections are accepted and stay open.
    pub fn black_hole() -> Self {
        Self::both(Way { black_hole: true, ..Way::default() })
    }
}

/// What is done to one direction of a connection. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// How much later each byte arrives; more than a day is a day. With [`MOST_HELD`] bytes on the way
    /// no more are read, so a long latency also bounds the rate.
    pub latency: Duration,
    /// Up to how much later still, evenly drawn for each piece that is read. Order is kept.
    pub jitter: Duration,
    /// Bytes a second. Default as many as there are.
    pub rate: Option<NonZeroU64>,
    /// Whether bytes are swallowed, and the end with them. A connection that lost bytes this way is
    /// reset when the black hole ends: TCP has no streams with holes.
    pub black_hole: bool,
    /// Closes the connection after so many bytes in this direction, counted from its beginning.
    pub limit: Option<u64>,
    /// How much later the end of the stream is passed on than its last byte.
    pub slow_close: Duration,
}
