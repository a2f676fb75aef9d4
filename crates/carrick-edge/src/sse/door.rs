//! The server's side: from a subscription to bytes on a socket or in a body.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, header};
use http_body_util::StreamBody;
use tokio::{
    io::{AsyncRead, AsyncWriteExt, ReadBuf},
    time::Instant,
};

use super::{BOOKMARK, Frame, RESET};
use crate::{
    feed::{Ended, LOOK, Next, Place, Reader, Subscription},
    socket::{Socket, Unwritten},
};

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
    reader: Reader,
    unnamed: bool,
    opened: bool,
}

impl Frames {
    fn new(subscription: Subscription, place: Place, options: Options) -> Self {
        let Options { unnamed, expires } = options;
        Self { reader: Reader::new(subscription, place, expires), unnamed, opened: false }
    }

    /// What to write next; waits for it.
    ///
    /// # Cancel safety
    /// Safe to drop: nothing is taken from the subscription that is not given back.
    async fn next(&mut self, unwritten: &mut Unwritten) -> Result<(), Ended> {
        if !self.opened {
            self.opened = true;
            unwritten.push(self.opening());
            return Ok(());
        }
        match self.reader.next().await? {
            Next::Items(items) => {
                metrics::counter!("carrick_feed_deliveries_total", "door" => "sse")
                    .increment(items.len() as u64);
                for item in &items {
                    let frame = item.frame();
                    unwritten.push(if self.unnamed { frame.unnamed() } else { frame.named() });
                }
            }
            Next::Reset(topic) => {
                let position = self.reader.position();
                let data = format!(r#"{{"topic":"{}","position":"{position}"}}"#, topic.name());
                unwritten.push(Frame::event(RESET, &position, data.as_bytes()).named());
            }
            Next::Silence { moved: true } => unwritten.push(self.bookmark()),
            Next::Silence { moved: false } => unwritten.push(Bytes::from_static(b":\n\n")),
        }
        Ok(())
    }

    fn opening(&self) -> Bytes {
        let retry = rand::random_range(2000..=8000);
        let mut opening = format!(":\nretry: {retry}\n\n").into_bytes();
        // A position before the reset would let a reader who is cut in between miss it.
        if !self.reader.is_lost() {
            opening.extend_from_slice(&self.bookmark());
        }
        opening.into()
    }

    fn bookmark(&self) -> Bytes {
        Frame::event(BOOKMARK, &self.reader.position(), b"{}").named()
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
    let pieces = (frames, Unwritten::default());
    StreamBody::new(stream::unfold(pieces, |(mut frames, mut unwritten)| async move {
        if unwritten.is_empty() {
            let blocked = frames.reader.told().elapsed();
            let next = match frames.opened && frames.reader.is_slow(0, blocked) {
                true => Err(Ended::Slow),
                false => frames.next(&mut unwritten).await,
            };
            if let Err(ended) = next {
                ended.count("sse");
                return None;
            }
        }
        let bytes = unwritten.take();
        Some((Ok(http_body::Frame::data(bytes)), (frames, unwritten)))
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
    let mut unwritten = Unwritten::default();
    unwritten.push(head);
    let ended = loop {
        if let Err(ended) = write(&mut socket, &mut unwritten, &frames).await {
            break ended;
        }
        let next = tokio::select! {
            biased;
            () = hung_up(&mut socket) => Err(Ended::Gone),
            next = frames.next(&mut unwritten) => next,
        };
        if let Err(ended) = next {
            break ended;
        }
    };
    if ended == Ended::Slow {
        // Whoever still reads is told why; nobody waits for it.
        unwritten.clear();
        unwritten.push(Bytes::from_static(b"\n\n: cut: too slow\n\n"));
        let told = std::future::poll_fn(|cx| unwritten.poll_write(Pin::new(&mut socket), cx));
        futures_util::future::poll_immediate(told).await;
    } else {
        tokio::time::timeout(LOOK, socket.shutdown()).await.ok();
    }
    ended.count("sse");
    ended
}

/// Writes everything, or finds that the reader is too slow.
async fn write(
    socket: &mut Box<dyn Socket>,
    unwritten: &mut Unwritten,
    frames: &Frames,
) -> Result<(), Ended> {
    let since = Instant::now();
    loop {
        let written = std::future::poll_fn(|cx| unwritten.poll_write(Pin::new(&mut *socket), cx));
        match tokio::time::timeout(LOOK, written).await {
            Ok(written) => return written.map_err(|_| Ended::Gone),
            Err(_) if frames.reader.is_slow(unwritten.bytes(), since.elapsed()) => {
                return Err(Ended::Slow);
            }
            Err(_) => {}
        }
    }
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
