//! What Carrick's tests are made of, and what users may test their own handlers with.
//!
//! * [`flaky`]: stubs that fail when told to.
//! * [`history`]: a checker that holds what was produced, delivered and applied against the promises:
//!   no loss, order per key, effects once.
//! * [`crash`]: runs a scenario again with a crash after each durable step.
//! * [`fleet`]: hundreds of clients and servers in virtual time, from a seed.
//! * [`servers`]: real servers and child processes.
//! * [`toxic`]: a TCP proxy that delays, cuts and swallows.

pub mod crash;
pub mod flaky;
pub mod fleet;
pub mod history;
pub mod servers;
pub mod toxic;
