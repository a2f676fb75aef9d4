//! The vocabulary that every Carrick crate shares. Nothing here does I/O or spawns a task.
//!
//! * [`event`]: the envelope, CloudEvents 1.0, lossless.
//! * [`context`], [`deadline`], [`trace`]: what entered at the edge and must still be there at the end.
//! * [`outcome`], [`backoff`]: what became of an attempt, and when to try again.
//! * [`clock`]: time as an argument.
//! * [`position`], [`seal`]: opaque texts that clients hold for us.
//! * [`problem`], [`config`]: how we say what is wrong, on the wire and at start.
//! * [`name`]: tenants, topics and groups.

pub mod backoff;
pub mod clock;
pub mod config;
pub mod context;
pub mod deadline;
pub mod event;
#[doc(hidden)]
pub mod fuzz;
pub mod name;
pub mod outcome;
pub mod position;
pub mod problem;
pub mod seal;
pub mod trace;
