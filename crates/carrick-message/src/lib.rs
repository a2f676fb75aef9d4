//! From a row that commits to an effect that happens once.
//!
//! * [`broker`]: topics, consumer groups, leases; one trait and its backends.
pub mod broker;
