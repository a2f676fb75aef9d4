//! The server's side of a connection.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{config::duration, event::Event, problem::Problem};
use futures_util::{Stream, future::BoxFuture};
use http::StatusCode;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message,
        protocol::{CloseFrame, Role, WebSocketConfig},
    },
};

use super::{
    MAX_MESSAGE, Session, Sessions, code,
    wire::{self, Said},
};
use crate::{
    feed::{Ended, LOOK, Next, Place, Reader, Subscription},
    socket::{Socket, Unwritten},
};

/// Publishes events in order; for each, whether it was new.
pub type Publish =
    Arc<dyn Fn(Vec<Event>) -> BoxFuture<'static, Result<Vec<bool>, Problem>> + Send + Sync>;

/// What a connection may do, and for whom it is.
pub struct Options {
    /// When the client's right ends.
    pub expires: Option<Instant>,
    /// Where what it sends goes; `None` if it may not send.
    pub publish: Option<Publish>,
    /// The client.
    pub session: Session,
    /// Where its acknowledgements are remembered.
    pub sessions: Arc<Sessions>,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Between two pings; most proxies cut a line that is silent for longer than 30 s.
const PING: Duration = Duration::from_secs(25);

/// How long a pong, or anything else, may take.
const PONG: Duration = Duration::from_secs(10);

/// How long a farewell may take.
const FAREWELL: Duration = Duration::from_secs(2);

/// Sends that wait for those before them; nothing more is read then.
const MAX_WAITING: usize = 64;

/// Bytes of the same.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// Control frames that may wait to be written; a client that only asks for more is not read.
const MAX_CONTROL: usize = 4096;

/// A socket whose writes are collected, so that frames which are shared among readers, and those of
/// the protocol, go out together and in order.
struct Line {
    socket: Box<dyn Socket>,
    unwritten: Unwritten,
    /// Bytes of the protocol's own in `unwritten`.
    control: usize,
}

impl Line {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let drained = self.unwritten.poll_write(Pin::new(&mut self.socket), cx);
        if self.unwritten.is_empty() {
            self.control = 0;
        }
        drained
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.control >= MAX_CONTROL {
            // The connection's task is woken by the socket, and asks again.
            return Poll::Pending;
        }
        self.control += bytes.len();
        self.unwritten.push(Bytes::copy_from_slice(bytes));
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_drain(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// Why a connection ends, as the client is told it.
struct Close {
    ended: Ended,
    code: u16,
    reason: String,
}

impl Close {
    fn new(ended: Ended, code: u16, reason: impl Into<String>) -> Self {
        Self { ended, code, reason: reason.into() }
    }
}

/// What happens next on the line.
enum Turn {
    Written,
    Message(Option<Result<Message, Error>>),
}

/// Sends that wait, and those that are being published.
#[derive(Default)]
struct Sends {
    waiting: Vec<(u64, Event)>,
    bytes: usize,
    publishing: Option<Publishing>,
}

struct Publishing {
    ids: Vec<u64>,
    published: BoxFuture<'static, Result<Vec<bool>, Problem>>,
}

impl Sends {
    fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING || self.bytes >= MAX_WAITING_BYTES
    }

    /// Resolves when a batch is published; never while there is none.
    async fn published(&mut self) -> Result<Vec<bool>, Problem> {
        match &mut self.publishing {
            Some(publishing) => (&mut publishing.published).await,
            None => std::future::pending().await,
        }
    }

    /// Begins with the next batch when the last one is done.
    fn go_on(&mut self, publish: Option<&Publish>) {
        if self.publishing.is_some() || self.waiting.is_empty() {
            return;
        }
        let Some(publish) = publish else { return };
        self.bytes = 0;
        let (ids, events) = std::mem::take(&mut self.waiting).into_iter().unzip();
        self.publishing = Some(Publishing { ids, published: publish(events) });
    }
}

struct Door {
    line: WebSocketStream<Line>,
    reader: Reader,
    options: Options,
    sends: Sends,
    ping: Pin<Box<Sleep>>,
    /// A ping is out, and the timer is for what comes of it.
    pinged: bool,
    /// Nothing came since the ping.
    awaits_pong: bool,
    /// Since when the socket takes nothing, and when to look at it again.
    blocked: Option<(Instant, Instant)>,
}

/// Serves a connection to its end; `head` is what goes out first, `read` what came in already.
///
/// # Cancel safety
/// Dropped, the connection is cut; what was sent may still be published.
pub async fn serve(
    socket: Box<dyn Socket>,
    head: Bytes,
    read: Bytes,
    subscription: Subscription,
    place: Place,
    options: Options,
) -> Ended {
    let mut line = Line { socket, unwritten: Unwritten::default(), control: 0 };
    line.unwritten.push(head);
    let config = WebSocketConfig::default()
        .read_buffer_size(1024)
        // Written through at once: what is to go out waits in the line.
        .write_buffer_size(0)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let line =
        WebSocketStream::from_partially_read(line, read.to_vec(), Role::Server, Some(config)).await;
    let phase = PING.mul_f64(rand::random_range(0.5..=1.0));
    let mut door = Door {
        line,
        reader: Reader::new(subscription, place, options.expires),
        options,
        sends: Sends::default(),
        ping: Box::pin(sleep(phase)),
        pinged: false,
        awaits_pong: false,
        blocked: None,
    };
    let Close { ended, code, reason } = door.run().await;
    if ended != Ended::Gone {
        let frame = CloseFrame { code: code.into(), reason: reason.into() };
        // What has not begun to go out is passed over: the client comes back for it.
        door.line.get_mut().unwritten.clear();
        door.line.get_mut().control = 0;
        timeout(FAREWELL, door.farewell(Some(frame))).await.ok();
    } else if code != 0 {
        timeout(FAREWELL, door.farewell(None)).await.ok();
    }
    ended.count("websocket");
    ended
}

impl Door {
    async fn run(&mut self) -> Close {
        let opening = self.opening();
        self.push(opening);
        loop {
            if let Some(close) = self.look() {
                return close;
            }
            self.sends.go_on(self.options.publish.as_ref());
            let is_written = self.line.get_ref().unwritten.is_empty();
            let reads = !self.sends.is_full();
            let look = self.blocked.map_or_else(Instant::now, |(_, look)| look);
            let step = tokio::select! {
                biased;
                turn = turn(&mut self.line, reads) => match turn {
                    Ok(Turn::Written) => Ok(()),
                    Ok(Turn::Message(message)) => self.take(message),
                    Err(_) => Err(Close::new(Ended::Gone, 0, "")),
                },
                published = self.sends.published() => self.acknowledge(published),
                () = self.ping.as_mut() => self.ping(),
                next = self.reader.next(), if is_written => self.tell(next),
                () = sleep_until(look), if !is_written => Ok(()),
            };
            if let Err(close) = step {
                return close;
            }
        }
    }

    fn opening(&self) -> Bytes {
        let Options { session, sessions, .. } = &self.options;
        let position = match self.reader.is_lost() {
            // A position before the reset would let a client who is cut in between miss it.
            true => String::new(),
            false => format!(r#""position":"{}","#, self.reader.position()),
        };
        let opening = format!(
            r#"{{"open":{{"session":"{}",{position}"last_client_seq":{},"ping":"{}","max_bytes":{}}}}}"#,
            session.text(),
            sessions.last(session),
            duration::format(PING),
            carrick_core::event::HARD_LIMIT,
        );
        wire::text(opening.as_bytes())
    }

    fn push(&mut self, frame: Bytes) {
        self.line.get_mut().unwritten.push(frame);
    }

    /// Finds a reader that takes too little.
    fn look(&mut self) -> Option<Close> {
        let unwritten = &self.line.get_ref().unwritten;
        if unwritten.is_empty() {
            self.blocked = None;
            return None;
        }
        let now = Instant::now();
        let (since, look) = *self.blocked.get_or_insert((now, now + LOOK));
        if now < look {
            return None;
        }
        self.blocked = Some((since, now + LOOK));
        self.reader.is_slow(unwritten.bytes(), now - since).then(|| {
            let reason = format!("too slow; position={}", self.reader.position());
            // The reason of a close has 123 bytes at most.
            let reason = if reason.len() > 123 { "too slow".to_owned() } else { reason };
            Close::new(Ended::Slow, code::SLOW, reason)
        })
    }

    /// Takes what the client says.
    fn take(&mut self, message: Option<Result<Message, Error>>) -> Result<(), Close> {
        self.awaits_pong = false;
        let broke = |code, reason: &str| Err(Close::new(Ended::Protocol, code, reason));
        match message {
            None => Err(Close::new(Ended::Gone, 0, "")),
            Some(Ok(Message::Text(text))) => match wire::read(&Bytes::from(text)) {
                Some(Said::Ping(number)) => {
                    self.push(wire::pong(number));
                    Ok(())
                }
                Some(Said::Send { id, event }) => {
                    self.send(id, event);
                    Ok(())
                }
                None => broke(code::PROTOCOL, wire::SHAPE),
            },
            Some(Ok(Message::Binary(_))) => broke(code::UNSUPPORTED, wire::SHAPE),
            Some(Ok(Message::Close(_))) => Err(Close::new(Ended::Gone, 1000, "")),
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(()),
            Some(Err(Error::Capacity(_))) => {
                broke(code::TOO_LARGE, &format!("a message may have {MAX_MESSAGE} bytes"))
            }
            Some(Err(Error::Utf8(_))) => broke(code::INVALID, "a text must be UTF-8"),
            Some(Err(Error::Protocol(error))) => {
                let mut reason = error.to_string();
                reason.truncate(reason.floor_char_boundary(123));
                broke(code::PROTOCOL, &reason)
            }
            Some(Err(_)) => Err(Close::new(Ended::Gone, 0, "")),
        }
    }

    fn send(&mut self, id: u64, event: Bytes) {
        if self.options.publish.is_none() {
            let problem = Problem::new(StatusCode::FORBIDDEN, "this client may not publish here");
            self.push(wire::refused(id, &problem));
            return;
        }
        let bytes = event.len();
        match Event::parse(event) {
            Ok(event) => {
                self.sends.bytes += bytes;
                self.sends.waiting.push((id, event));
            }
            Err(error) => self.push(wire::refused(id, &Problem::from(&error))),
        }
    }

    fn acknowledge(&mut self, published: Result<Vec<bool>, Problem>) -> Result<(), Close> {
        let Some(Publishing { ids, .. }) = self.sends.publishing.take() else { return Ok(()) };
        match published {
            Ok(fresh) => {
                for (id, fresh) in ids.iter().zip(fresh) {
                    self.push(wire::ack(*id, !fresh));
                }
                if let Some(last) = ids.iter().max() {
                    self.options.sessions.acknowledged(&self.options.session, *last);
                }
                Ok(())
            }
            // Later: going on with what came after these would change their order.
            Err(problem) if problem.status >= 500 || problem.status == 429 => {
                let reason = "what was sent cannot be published now";
                Err(Close::new(Ended::Busy, code::AGAIN, reason))
            }
            Err(problem) => {
                for id in ids {
                    self.push(wire::refused(id, &problem));
                }
                Ok(())
            }
        }
    }

    /// Pings, and looks for what came of it, in turn.
    fn ping(&mut self) -> Result<(), Close> {
        let next = match self.pinged {
            false => {
                (self.pinged, self.awaits_pong) = (true, true);
                self.push(Bytes::from_static(wire::PING));
                PONG
            }
            // Nothing is read while too many sends wait.
            true if self.awaits_pong && !self.sends.is_full() => {
                return Err(Close::new(Ended::Gone, 0, ""));
            }
            true => {
                self.pinged = false;
                PING - PONG
            }
        };
        self.ping.as_mut().reset(Instant::now() + next);
        Ok(())
    }

    fn tell(&mut self, next: Result<Next, Ended>) -> Result<(), Close> {
        match next {
            Ok(Next::Items(items)) => {
                metrics::counter!("carrick_feed_deliveries_total", "door" => "websocket")
                    .increment(items.len() as u64);
                for item in &items {
                    self.push(item.message());
                }
            }
            Ok(Next::Reset(topic)) => {
                self.push(wire::reset(topic.name(), &self.reader.position()));
            }
            Ok(Next::Silence { moved: true }) => {
                self.push(wire::bookmark(&self.reader.position()));
            }
            Ok(Next::Silence { moved: false }) => {}
            Err(ended @ Ended::Drain) => {
                return Err(Close::new(ended, code::AWAY, "the hub drains"));
            }
            Err(ended @ Ended::Expired) => {
                return Err(Close::new(ended, code::EXPIRED, "the token has expired"));
            }
            Err(ended) => return Err(Close::new(ended, code::RESTART, "the store is closed")),
        }
        Ok(())
    }

    /// Says goodbye, and waits for the client to do the same.
    async fn farewell(&mut self, frame: Option<CloseFrame>) {
        if frame.is_some() {
            self.line.close(frame).await.ok();
        }
        while let Ok(turn) = turn(&mut self.line, true).await {
            if let Turn::Message(None | Some(Err(_))) = turn {
                break;
            }
        }
        self.line.get_mut().shutdown().await.ok();
    }
}

/// Writes what is to go out, and reads what comes in.
async fn turn(line: &mut WebSocketStream<Line>, reads: bool) -> io::Result<Turn> {
    poll_fn(|cx| {
        let waiting = line.get_mut();
        if !waiting.unwritten.is_empty()
            && let Poll::Ready(written) = waiting.poll_drain(cx)
        {
            return Poll::Ready(written.map(|()| Turn::Written));
        }
        if reads && let Poll::Ready(message) = Pin::new(&mut *line).poll_next(cx) {
            return Poll::Ready(Ok(Turn::Message(message)));
        }
        Poll::Pending
    })
    .await
}
