//! Deadlines of calls: until when an answer is of use, kept on both sides.
//!
//! A client sends what remains, and a server that has no time left does not begin: work for somebody
//! who has left is the load that keeps an overloaded system down. [`ServerDeadlineLayer`] keeps the
//! deadlines that callers send; on the client's side they are the [`stack`](crate::stack)'s.
//!
//! A timer of the runtime for each call costs as much as the whole rest of the policies, and almost
//! every one is taken back unused. So there is one coarse [`Timer`]: one task that ticks while any
//! deadline is armed, and a call leaves its waker in a slot of the tick in which it would expire. A
//! deadline is noticed up to one tick late, and never early.
//!
//! Source: pattern document, deadlines; Finagle's deadline filter for the cap on what is refused, and
//! for observing first.

mod server;
mod timer;

pub use self::{
    server::{
        DeadlineBody, DeadlineBodyError, DeadlineConfig, DeadlineOptions, ServerDeadline,
        ServerDeadlineFuture, ServerDeadlineLayer,
    },
    timer::{Armed, TICK, Timer},
};
