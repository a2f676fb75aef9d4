//! A body that can be sent again.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// The body itself failed.
    #[error("the body of the request failed")]
    Inner(#[source] Box<dyn StdError + Send + Sync>),
    /// A later attempt has taken the body over.
    #[error("another attempt sends the body now")]
    Superseded,
    /// More came than is kept, and what this attempt would begin with is gone.
    #[error("the body was too large to be kept")]
    TooLarge,
}

/// A request's body, kept while it is sent so that it can be sent again: byte for byte, with its
/// trailers.
///
/// At most `cap` bytes are kept; a body that turns out larger is sent once and cannot be repeated.
/// A copy that is made while the first is under way begins at the start, goes on where the first had
/// come to, and ends it.
///
/// ```
/// # use carrick_call::retry::ReplayBody;
/// # use http_body_util::{BodyExt, Full};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let first = ReplayBody::new(Full::from("an order"), 1024);
/// let again = first.repeat();
/// assert_eq!(first.collect().await?.to_bytes(), "an order");
/// assert_eq!(again.collect().await?.to_bytes(), "an order");
/// # Ok(())
/// # }
/// ```
pub struct ReplayBody<B>(Kind<B>);

enum Kind<B> {
    /// Nothing, or one piece: a repeat is a clone.
    Whole {
        bytes: Bytes,
        is_sent: bool,
    },
    Stream(Copy<B>),
}

/// The number of a copy that nobody has read from.
const NOT_YET: u64 = u64::MAX;

type Polled = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

struct Copy<B> {
    shared: Arc<Mutex<Shared<B>>>,
    /// Which copy this is; only the newest reads.
    number: u64,
    /// Frames of the kept ones that it has sent.
    sent: usize,
    trailers_sent: bool,
}

struct Shared<B> {
    /// What is not read yet; taken out while somebody polls it, so that no lock is held meanwhile.
    rest: Option<B>,
    kept: Vec<Bytes>,
    bytes: usize,
    cap: usize,
    trailers: Option<HeaderMap>,
    state: State,
    newest: u64,
    /// The newest copy, if it waits for an older one to put the rest back.
    waits: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// There may be more.
    Reading,
    /// All is kept.
    Ended,
    /// More came than is kept. Whoever was sent it all until then may have the rest, and nobody else:
    /// a copy that went on from there would lack its beginning.
    TooLarge { sent_by: u64 },
    /// It failed.
    Failed,
}

impl<B> ReplayBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    /// Keeps at most `cap` bytes of a body.
    pub fn new(body: B, cap: usize) -> Self {
        if body.is_end_stream() {
            return Self::whole(Bytes::new());
        }
        let shared = Shared {
            rest: Some(body),
            kept: Vec::new(),
            bytes: 0,
            cap,
            trailers: None,
            state: State::Reading,
            newest: 0,
            waits: None,
        };
        let shared = Arc::new(Mutex::new(shared));
        Self(Kind::Stream(Copy { shared, number: 0, sent: 0, trailers_sent: false }))
    }

    /// A body in one piece.
    pub fn whole(bytes: Bytes) -> Self {
        Self(Kind::Whole { is_sent: bytes.is_empty(), bytes })
    }

    /// The body once more, from its start. It takes over when it is first read.
    #[must_use]
    pub fn repeat(&self) -> Self {
        match &self.0 {
            Kind::Whole { bytes, .. } => Self::whole(bytes.clone()),
            Kind::Stream(copy) => {
                let copy = Copy {
                    shared: Arc::clone(&copy.shared),
                    number: NOT_YET,
                    sent: 0,
                    trailers_sent: false,
                };
                Self(Kind::Stream(copy))
            }
        }
    }

    /// Whether the whole body can still be sent from its start.
    pub fn is_replayable(&self) -> bool {
        match &self.0 {
            Kind::Whole { .. } => true,
            Kind::Stream(copy) => {
                matches!(copy.shared.lock().state, State::Reading | State::Ended)
            }
        }
    }
}

impl<B> Copy<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        let mut shared = self.shared.lock();
        if let State::TooLarge { sent_by } = shared.state
            && sent_by != self.number
        {
            // Before it takes over, so that the attempt that is under way goes on.
            return Poll::Ready(Some(Err(BodyError::TooLarge)));
        }
        if self.number == NOT_YET {
            shared.newest += 1;
            self.number = shared.newest;
        }
        if self.number != shared.newest {
            return Poll::Ready(Some(Err(BodyError::Superseded)));
        }
        if let Some(frame) = shared.kept.get(self.sent) {
            self.sent += 1;
            return Poll::Ready(Some(Ok(Frame::data(frame.clone()))));
        }
        match shared.state {
            State::Reading | State::TooLarge { .. } => {}
            State::Failed => return Poll::Ready(Some(Err(BodyError::Superseded))),
            State::Ended => {
                let trailers = shared.trailers.clone().filter(|_| !self.trailers_sent);
                self.trailers_sent = true;
                return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
            }
        }
        let Some(mut rest) = shared.rest.take() else {
            if shared.state != State::Reading {
                return Poll::Ready(None); // it was too large, and was sent to its end
            }
            // An older copy is just polling it; it will see that it is not the newest.
            shared.waits = Some(cx.waker().clone());
            return Poll::Pending;
        };
        drop(shared);
        let polled = Pin::new(&mut rest).poll_frame(cx);
        let polled = polled.map_err(|error| BodyError::Inner(error.into()));
        let is_over = match &polled {
            Poll::Pending => false,
            Poll::Ready(None | Some(Err(_))) => true,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers() || rest.is_end_stream(),
        };
        let rest = if is_over { None } else { Some(rest) };
        // No waker is woken, and no body dropped, under the lock.
        if let Some(waiter) = self.keep(&polled, rest) {
            waiter.wake();
        }
        // What an older copy read is kept for the newest, and of no use to itself.
        match polled {
            Poll::Ready(Some(Ok(_))) if !self.is_newest() => {
                Poll::Ready(Some(Err(BodyError::Superseded)))
            }
            polled => polled,
        }
    }

    /// Takes note of what came, and puts back what is left. Returns who waits for that.
    fn keep(&mut self, polled: &Polled, rest: Option<B>) -> Option<Waker> {
        let mut shared = self.shared.lock();
        let is_over = rest.is_none();
        shared.rest = rest;
        if let Poll::Ready(Some(Ok(frame))) = polled {
            if let Some(data) = frame.data_ref() {
                shared.keep(data, self.number);
                self.sent = shared.kept.len();
            }
            if let Some(trailers) = frame.trailers_ref() {
                shared.trailers = Some(trailers.clone());
                self.trailers_sent = true;
            }
        }
        if is_over && shared.state == State::Reading {
            let has_failed = matches!(polled, Poll::Ready(Some(Err(_))));
            shared.state = if has_failed { State::Failed } else { State::Ended };
        }
        shared.waits.take()
    }

    fn is_newest(&self) -> bool {
        self.number == self.shared.lock().newest
    }
}

impl<B> Shared<B> {
    fn keep(&mut self, data: &Bytes, number: u64) {
        if self.state != State::Reading {
            return;
        }
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes > self.cap {
            self.state = State::TooLarge { sent_by: number };
            self.kept = Vec::new();
        } else if !data.is_empty() {
            self.kept.push(data.clone());
        }
    }
}

impl<B> Body for ReplayBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.get_mut().0 {
            Kind::Whole { bytes, is_sent } => {
                let is_left = !std::mem::replace(is_sent, true);
                Poll::Ready(is_left.then(|| Ok(Frame::data(bytes.clone()))))
            }
            Kind::Stream(copy) => copy.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole { is_sent, .. } => *is_sent,
            Kind::Stream(copy) => {
                let shared = copy.shared.lock();
                match shared.state {
                    State::Reading => false,
                    State::Ended => {
                        let trailers_left = shared.trailers.is_some() && !copy.trailers_sent;
                        copy.sent >= shared.kept.len() && !trailers_left
                    }
                    State::TooLarge { sent_by } => sent_by == copy.number && shared.rest.is_none(),
                    // It has an error to tell, and must not pass for an empty body.
                    State::Failed => false,
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole { bytes, is_sent } => {
                SizeHint::with_exact(if *is_sent { 0 } else { bytes.len() as u64 })
            }
            Kind::Stream(copy) => {
                let shared = copy.shared.lock();
                let ours: usize = shared.kept.iter().skip(copy.sent).map(Bytes::len).sum();
                let rest = shared.rest.as_ref().map(Body::size_hint);
                let known = shared.state != State::Reading || rest.is_some();
                let rest = rest.unwrap_or_else(|| SizeHint::with_exact(0));
                let mut hint = SizeHint::new();
                hint.set_lower(ours as u64 + rest.lower());
                if let Some(upper) = rest.upper().filter(|_| known) {
                    hint.set_upper(ours as u64 + upper);
                }
                hint
            }
        }
    }
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
