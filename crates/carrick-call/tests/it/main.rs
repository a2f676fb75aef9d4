//! Patterns put together, through their public interfaces.

mod balance;
mod client;
mod deadline;
mod egress;
mod server;
mod stack;
