//! The client of one dependency: every policy in its one right order, over connections of its own.

mod config;
mod connect;
mod pool;

pub use self::{
    config::{PoolConfig, PoolOptions},
    connect::{AnyAddress, Dial, tls_config},
    pool::TransportError,
};
