//! The server's side: from a subscription to bytes on a socket or in a body.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use carrick_core::backoff::Backoff;
use carrick_store::StoreError;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, header};
use http_body_util::StreamBody;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::{BOOKMARK, Frame, RESET};
use crate::{
    feed::{Batch, Ended, Limit, Place, Subscription},
    socket::Socket,
};

/// What one read takes: what a socket's buffer takes at once.
const LIMIT: Limit = Limit { events: 256, bytes: 64 * 1024 };

/// Between two looks at a reader that takes nothing.
const LOOK: Duration = Duration::from_millis(500);

/// Slices of one write at most.
const SLICES: usize = 64;

/// How a stream is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Leaves the names of events out, so that browsers give all of them to `onmessage`.
    pub unnamed: bool,
    /// When the reader's right to it ends.
    pub expires: Option<Instant>,
}

/// The frames of one reader.
struct Frames {
    subscription: Subscription,
    options: Options,
    _place: Place,
    opened: bool,
    /// The place has moved without the reader having been told a position.
    moved: bool,
    failures: u32,
    written: Instant,
    leave_at: Option<Instant>,
    /// Fires at the next time that something may be due; set anew only when it has fired.
    timer: Pin<Box<Sleep>>,
}

impl Frames {
    fn new(subscription: Subscription, place: Place, options: Options) -> Self {
        let now = Instant::now();
        let keep_alive = subscription.feed().config().options().keep_alive;
        // Readers that came together are not written to together.
        let phase = keep_alive.mul_f64(rand::random_range(0.5..=1.0));
        let due = options.expires.map_or(now + phase, |expires| expires.min(now + phase));
        Self {
            subscription,
            options,
            _place: place,
            opened: false,
            moved: false,
            failures: 0,
            written: now,
            leave_at: None,
            timer: Box::pin(sleep_until(due)),
        }
    }

    /// What to write next; waits for it.
    ///
    /// # Cancel safety
    /// Safe to drop: nothing is taken from the subscription that is not given back.
    async fn next(&mut self) -> Result<VecDeque<Bytes>, Ended> {
        if !self.opened {
            self.opened = true;
            return Ok(self.frames([self.opening()]));
        }
        loop {
            let pause = match self.subscription.read(LIMIT).await {
                Ok(Batch::Events(items)) => {
                    if items.is_empty() {
                        self.moved = true;
                        continue;
                    }
                    let frame = |frame: Frame| match self.options.unnamed {
                        true => frame.unnamed(),
                        false => frame.named(),
                    };
                    let frames: VecDeque<_> =
                        items.iter().map(|item| frame(item.frame())).collect();
                    metrics::counter!("carrick_feed_deliveries_total", "door" => "sse")
                        .increment(frames.len() as u64);
                    return Ok(self.frames(frames));
                }
                Ok(Batch::Reset(topic)) => {
                    let position = self.subscription.position();
                    let data = format!(r#"{{"topic":"{}","position":"{position}"}}"#, topic.name());
                    let frame = Frame::event(RESET, &position, data.as_bytes());
                    return Ok(self.frames([frame.named()]));
                }
                Ok(Batch::UpToDate) => {
                    self.failures = 0;
                    None
                }
                Err(StoreError::Closed) => return Err(Ended::Closed),
                Err(_) => {
                    let pause = Backoff::default().delay(self.failures, &mut rand::rng());
                    self.failures = self.failures.saturating_add(1);
                    Some(pause)
                }
            };
            let changed = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => self.subscription.changed().await,
                }
            };
            let fired = tokio::select! {
                biased;
                () = changed => false,
                () = self.timer.as_mut() => true,
            };
            self.leave(fired);
            if fired && let Some(frame) = self.due()? {
                return Ok(self.frames([frame]));
            }
        }
    }

    fn frames(&mut self, frames: impl Into<VecDeque<Bytes>>) -> VecDeque<Bytes> {
        (self.written, self.moved) = (Instant::now(), false);
        frames.into()
    }

    /// Draws the time to leave, once the feed drains.
    fn leave(&mut self, fired: bool) {
        if self.leave_at.is_some() {
            return;
        }
        if let Some(within) = self.subscription.leave_within() {
            let at = Instant::now() + within.mul_f64(rand::random_range(0.0..=1.0));
            self.leave_at = Some(at);
            if !fired {
                let due = at.min(self.timer.deadline());
                self.timer.as_mut().reset(due);
            }
        }
    }

    /// What the timer found, and sets it anew.
    fn due(&mut self) -> Result<Option<Bytes>, Ended> {
        let now = Instant::now();
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(self.leave_at) {
            return Err(Ended::Drain);
        }
        if is_over(self.options.expires) {
            return Err(Ended::Expired);
        }
        let keep_alive = self.subscription.feed().config().options().keep_alive;
        let silent = now - self.written >= keep_alive;
        let next = if silent { now + keep_alive } else { self.written + keep_alive };
        let ends = [self.leave_at, self.options.expires];
        let next = ends.into_iter().flatten().fold(next, Instant::min);
        self.timer.as_mut().reset(next);
        Ok(silent.then(|| match self.moved {
            true => self.bookmark(),
            false => Bytes::from_static(b":\n\n"),
        }))
    }

    fn opening(&self) -> Bytes {
        let retry = rand::random_range(2000..=8000);
        let mut opening = format!(":\nretry: {retry}\n\n").into_bytes();
        // A position before the reset would let a reader who is cut in between miss it.
        if !self.subscription.is_lost() {
            opening.extend_from_slice(&self.bookmark());
        }
        opening.into()
    }

    fn bookmark(&self) -> Bytes {
        Frame::event(BOOKMARK, &self.subscription.position(), b"{}").named()
    }

    /// Whether the reader is too slow to be kept.
    fn is_slow(&self, frames: &VecDeque<Bytes>, blocked: Duration) -> bool {
        let unwritten: usize = frames.iter().map(Bytes::len).sum();
        let waiting = self.subscription.waiting_bytes().saturating_add(unwritten as u64);
        self.subscription.feed().config().options().is_slow(waiting, blocked)
    }
}

/// The head of an answer that is a stream.
pub fn response_head() -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
    put(header::CONTENT_TYPE, "text/event-stream");
    put(header::CACHE_CONTROL, "no-store");
    // nginx would hold events back until its buffer is full.
    put(header::HeaderName::from_static("x-accel-buffering"), "no");
    headers
}

/// The body for a reader who cannot be let in: `EventSource` gives up for good on any other status,
/// and comes back after this time on a 200.
pub fn busy(retry: Duration, reason: &str) -> Bytes {
    debug_assert!(!reason.contains(['\n', '\r']));
    format!(": {reason}\nretry: {}\n\n", retry.as_millis()).into()
}

/// A stream as the body of an answer, for HTTP/2. Ends where [`stream()`] would.
pub fn body(
    subscription: Subscription,
    place: Place,
    options: Options,
) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static {
    let frames = Frames::new(subscription, place, options);
    StreamBody::new(stream::unfold(frames, |mut frames| async move {
        let blocked = frames.written.elapsed();
        if frames.opened && frames.is_slow(&VecDeque::new(), blocked) {
            end(Ended::Slow);
            return None;
        }
        match frames.next().await {
            Ok(next) => {
                let bytes: Vec<u8> = next.iter().flatten().copied().collect();
                Some((Ok(http_body::Frame::data(bytes.into())), frames))
            }
            Err(ended) => {
                end(ended);
                None
            }
        }
    }))
}

/// Writes a stream to a socket until it ends; `head` is what goes out first.
///
/// # Cancel safety
/// Dropped, the connection is cut.
pub async fn stream(
    mut socket: Box<dyn Socket>,
    head: Bytes,
    subscription: Subscription,
    place: Place,
    options: Options,
) -> Ended {
    let mut frames = Frames::new(subscription, place, options);
    let mut next = VecDeque::from([head]);
    let ended = loop {
        if let Err(ended) = write(&mut socket, &mut next, &frames).await {
            break ended;
        }
        next = tokio::select! {
            biased;
            () = hung_up(&mut socket) => break Ended::Gone,
            next = frames.next() => match next {
                Ok(next) => next,
                Err(ended) => break ended,
            },
        };
    };
    if ended == Ended::Slow {
        // Whoever still reads is told why; nobody waits for it.
        let told = VecDeque::from([Bytes::from_static(b": cut: too slow\n\n")]);
        let mut last = told;
        futures_util::future::poll_immediate(write_some(&mut socket, &mut last)).await;
    } else {
        let shut = socket.shutdown();
        tokio::time::timeout(LOOK, shut).await.ok();
    }
    end(ended);
    ended
}

fn end(ended: Ended) {
    metrics::counter!("carrick_feed_ended_total", "door" => "sse", "reason" => ended.label())
        .increment(1);
}

/// Writes everything, or finds that the reader is too slow.
async fn write(
    socket: &mut Box<dyn Socket>,
    next: &mut VecDeque<Bytes>,
    frames: &Frames,
) -> Result<(), Ended> {
    let since = Instant::now();
    while !next.is_empty() {
        tokio::select! {
            biased;
            written = write_some(socket, next) => {
                if written.is_err() {
                    return Err(Ended::Gone);
                }
            }
            () = tokio::time::sleep(LOOK) => {
                if frames.is_slow(next, since.elapsed()) {
                    return Err(Ended::Slow);
                }
            }
        }
    }
    socket.flush().await.map_err(|_| Ended::Gone)
}

async fn write_some(socket: &mut Box<dyn Socket>, next: &mut VecDeque<Bytes>) -> io::Result<()> {
    std::future::poll_fn(|cx| {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut count = 0;
        for (slice, frame) in slices.iter_mut().zip(next.iter()) {
            *slice = IoSlice::new(frame);
            count += 1;
        }
        let mut written = ready!(Pin::new(&mut *socket).poll_write_vectored(cx, &slices[..count]))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        while let Some(frame) = next.front_mut() {
            if written < frame.len() {
                frame.advance(written);
                break;
            }
            written -= frame.len();
            next.pop_front();
        }
        Poll::Ready(Ok(()))
    })
    .await
}

/// Resolves when the reader has closed its side. What it sends is dropped: a stream of events has
/// nothing to be told.
async fn hung_up(socket: &mut Box<dyn Socket>) {
    std::future::poll_fn(|cx| poll_hung_up(socket, cx)).await;
}

fn poll_hung_up(socket: &mut Box<dyn Socket>, cx: &mut Context<'_>) -> Poll<()> {
    let mut unread = [0; 256];
    loop {
        let mut buffer = ReadBuf::new(&mut unread);
        match ready!(Pin::new(&mut *socket).poll_read(cx, &mut buffer)) {
            Ok(()) if !buffer.filled().is_empty() => {}
            _ => return Poll::Ready(()),
        }
    }
}
