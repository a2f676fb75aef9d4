//! Patterns put together, through their public interfaces.

mod balance;
mod client;
mod server;
mod stack;
