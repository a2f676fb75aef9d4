//! Taking a connection over: a handler that streams gets the socket itself.
//!
//! An HTTP server keeps its parser, its buffers and the whole of the router's future for as long as an
//! answer lasts: some 10 to 20 KiB for each reader who only waits. A handler that hands itself the
//! socket ([`HandOff::take_over`]) leaves all of that behind; what waits is one small task. HTTP/1.1
//! only: a stream of HTTP/2 shares its connection with others.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
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

/// Slices of one write at most.
const SLICES: usize = 64;

/// What is to go out on a socket, in order; shared bytes are not copied, and go out together.
#[derive(Debug, Default)]
pub(crate) struct Unwritten {
    pieces: VecDeque<Bytes>,
    /// Of the first piece, some is written already.
    begun: bool,
}

impl Unwritten {
    pub(crate) fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.pieces.push_back(piece);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// All of it, as one piece.
    pub(crate) fn take(&mut self) -> Bytes {
        let mut pieces = std::mem::take(&mut self.pieces);
        self.begun = false;
        match pieces.len() {
            1 => pieces.pop_front().unwrap_or_default(),
            _ => pieces.iter().flatten().copied().collect::<Vec<u8>>().into(),
        }
    }

    /// Drops what has not begun to go out.
    pub(crate) fn clear(&mut self) {
        self.pieces.truncate(usize::from(self.begun));
    }

    /// Writes until all is written, or until the socket takes no more.
    pub(crate) fn poll_write(
        &mut self,
        mut socket: Pin<&mut (impl AsyncWrite + ?Sized)>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut count = 0;
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(piece);
                count += 1;
            }
            let written = ready!(socket.as_mut().poll_write_vectored(cx, &slices[..count]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(written);
        }
        if self.pieces.capacity() > SLICES {
            self.pieces.shrink_to(0);
        }
        socket.poll_flush(cx)
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            if written < piece.len() {
                piece.advance(written);
                self.begun |= written > 0;
                return;
            }
            written -= piece.len();
            self.pieces.pop_front();
            self.begun = false;
        }
    }
}
