//! Policies for calls to a dependency: one pattern a folder, decisions apart from doing.
//!
//! Each pattern's `core.rs` takes time and randomness as arguments, so the same code runs in a tower
//! layer, in the assembled client, in the sidecar and in a simulator. What every pattern shares is
//! here: who refused and why ([`Refusal`]), how an attempt ended ([`Classify`]), and whether a policy
//! acts or only watches ([`Mode`]).

pub mod balance;
pub mod breaker;
pub mod budget;
pub mod bulkhead;
pub mod classify;
#[cfg(feature = "client")]
pub mod client;
pub mod deadline;
mod early;
pub mod egress;
pub mod error;
pub mod explain;
pub mod fault;
pub mod gate;
pub mod hedge;
pub mod mode;
pub mod outlier;
pub mod queue;
pub mod retry;
pub mod scatter;
pub mod server;
pub mod stack;
pub mod throttle;

pub use self::{
    classify::Classify,
    error::{CallError, Policy, Refusal},
    mode::Mode,
};
