//! Taking a connection over: a handler that streams gets the socket itself.
//!
//! An HTTP server keeps its parser, its buffers and the whole of the router's future for as long as an
//! answer lasts: some 10 to 20 KiB for each reader who only waits. A handler that hands itself the
//! socket ([`HandOff::take_over`]) leaves all of that behind; what waits is one small task. HTTP/1.1
//! only: a stream of HTTP/2 shares its connection with others.

use std::{convert::Infallible, future, pin::Pin, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
};

/// A connection, whatever it is made of.
pub trait Socket: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Socket for T {}

/// What goes on with a connection: gets the socket, and what the server had read beyond the request.
pub type Takeover =
    Box<dyn FnOnce(Box<dyn Socket>, Bytes) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send>;

/// Between the handler of a request and the server of its connection; in the request's extensions
/// where a connection can be taken over. Clones are the same.
#[derive(Clone, Default)]
pub struct HandOff(Arc<Slot>);

#[derive(Default)]
struct Slot {
    takeover: Mutex<Option<Takeover>>,
    asked: Notify,
}

impl std::fmt::Debug for HandOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandOff").field("asked", &self.0.takeover.lock().is_some()).finish()
    }
}

impl HandOff {
    /// Has the connection taken over. Never resolves: the server drops the request's future, and
    /// whatever is held by it.
    ///
    /// # Cancel safety
    /// Dropped before the server has seen it, the connection ends.
    pub async fn take_over(self, takeover: Takeover) -> Infallible {
        *self.0.takeover.lock() = Some(takeover);
        self.0.asked.notify_one();
        future::pending().await
    }

    /// For the server of the connection: resolves when a handler wants the socket.
    ///
    /// # Cancel safety
    /// Safe to drop: nothing is lost while the handler waits.
    pub async fn asked(&self) -> Takeover {
        loop {
            if let Some(takeover) = self.0.takeover.lock().take() {
                return takeover;
            }
            self.0.asked.notified().await;
        }
    }
}
