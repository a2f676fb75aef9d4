//! The signals that ask a process to end.

use std::io;

use super::Trigger;

/// SIGTERM and SIGINT, taken over from their default of ending the process.
#[derive(Debug)]
pub struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Takes the signals over. Needs a tokio runtime.
    ///
    /// # Errors
    /// The operating system refuses.
    #[cfg(unix)]
    pub fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Takes the signals over. Needs a tokio runtime.
    ///
    /// # Errors
    /// None here; on Unix the operating system may refuse.
    #[cfg(not(unix))]
    pub fn new() -> io::Result<Self> {
        Ok(Self {})
    }

    /// The next signal.
    ///
    /// # Cancel safety
    /// Safe to drop: a signal is not lost, though several of one kind may become one.
    pub async fn next(&mut self) -> Trigger {
        #[cfg(unix)]
        let trigger = tokio::select! {
            Some(()) = self.terminate.recv() => Trigger::Terminate,
            Some(()) = self.interrupt.recv() => Trigger::Interrupt,
            else => std::future::pending().await,
        };
        #[cfg(not(unix))]
        let trigger = match tokio::signal::ctrl_c().await {
            Ok(()) => Trigger::Interrupt,
            Err(_) => std::future::pending().await,
        };
        trigger
    }
}
