//! Real servers and child processes, for tests that a stub would make worthless.

mod postgres;
mod process;

use std::io;

pub use self::{
    postgres::{POSTGRES_VARIABLE, PostgresDatabase},
    process::{ChildProcess, Exited, Ready, SpawnError},
};

/// A port of the loopback address that was free a moment ago.
///
/// Somebody else may take it before you do. Where a program can, let it listen on port 0 and say
/// which port it got; this is for programs that cannot.
///
/// # Errors
/// The system has no port left.
pub fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
