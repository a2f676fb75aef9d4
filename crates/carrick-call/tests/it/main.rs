//! Patterns put together, through their public interfaces.

mod balance;
mod client;
mod deadline;
mod egress;
mod grpc;
mod retry;
mod server;
mod stack;
mod stream;
