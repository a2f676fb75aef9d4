//! Deadlines of calls: one coarse timer for all of them.
//!
//! A timer of the runtime for each call costs as much as the whole rest of the policies, and almost
//! every one is taken back unused. A [`Timer`] has one task that ticks while any deadline is armed,
//! and a call leaves its waker in a slot of the tick in which it would expire. A deadline is noticed
//! up to one tick late, and never early.

mod timer;

pub use self::timer::{Armed, TICK, Timer};
