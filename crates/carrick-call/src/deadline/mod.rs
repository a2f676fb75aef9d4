//! Deadlines of calls: until when an answer is of use, kept on both sides.
//!
//! A client sends what remains, and a server that has no time left does not begin: work for somebody
//! who has left is the load that keeps an overloaded system down. [`DeadlineLayer`] stands before a
//! dependency, [`ServerDeadlineLayer`] before a handler; the [`stack`](crate::stack) keeps deadlines
//! itself, for it knows of attempts.
//!
//! A timer of the runtime for each call costs as much as the whole rest of the policies, and almost
//! every one is taken back unused. So there is one coarse [`Timer`]: one task that ticks while any
//! deadline is armed, and a call leaves its waker in a slot of the tick in which it would expire. A
//! deadline is noticed up to one tick late, and never early; a service that is ready at once arms none.
//!
//! `core` decides whom a server refuses and when a body is over; the rest applies it.
//!
//! Source: pattern document, deadlines; Finagle's deadline filter for the cap on what is refused, and
//! for observing first; linkerd2-proxy for the limits of streams.

mod body;
mod client;
mod config;
mod core;
mod duty;
mod server;
#[cfg(all(test, not(carrick_loom)))]
mod tests;
mod timer;
mod watch;
pub(crate) mod wire;

pub use self::{
    body::{DeadlineBody, DeadlineBodyError},
    client::{DeadlineFuture, DeadlineLayer, DeadlineService},
    config::{
        ClientDeadlineConfig, ClientDeadlineOptions, DeadlineConfig, DeadlineOptions, StreamConfig,
        StreamOptions,
    },
    server::{ServerDeadline, ServerDeadlineFuture, ServerDeadlineLayer, Streaming},
    timer::{Armed, TICK, Timer},
};
#[cfg(feature = "client")]
pub(crate) use self::{core::Span, watch::Bound};
pub(crate) use self::{server::is_stream, wire::is_grpc};
