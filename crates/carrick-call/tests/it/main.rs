//! Patterns put together, through their public interfaces.

mod balance;
mod client;
mod retry;
mod server;
mod stack;
