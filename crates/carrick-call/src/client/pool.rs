//! Connections to one host, kept and used again.
//!
//! Our own, above hyper's connections, because the usual pool hides what the policies need to know:
//! which host a connection belongs to, how many requests it has carried, and whether a request that
//! failed was ever sent. A connection carries so many requests and lives so long at most, each with
//! jitter, so that a fleet does not reconnect in step and load follows new hosts.
//!
//! An exchange that is dropped half-way takes its HTTP/1.1 connection with it: what would come on it
//! next is the rest of that answer. On HTTP/2 only its stream is reset.

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rand::RngExt;
use tokio::{runtime::Handle, time::Instant};

use super::{
    BoxError,
    config::PoolConfig,
    connect::{Stream, Target},
    service::Named,
};

/// Why an exchange with a host failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// No connection could be made: nothing was sent.
    #[error("cannot connect to {host}")]
    Connect {
        /// Which host.
        host: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The connection broke, or the peer did not speak HTTP.
    #[error("the exchange with {host} broke off")]
    Exchange {
        /// Which host.
        host: String,
        /// Whether the request never left, so that a repeat cannot double its effect.
        never_sent: bool,
        /// Why.
        #[source]
        source: hyper::Error,
    },
}

impl TransportError {
    /// Whether the peer cannot have seen the request.
    pub fn was_never_sent(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            Self::Exchange { never_sent, .. } => *never_sent,
        }
    }
}

/// The connections to one host. Clones share them.
pub(super) struct Pool<B>(Arc<Shared<B>>);

struct Shared<B> {
    target: Target,
    config: PoolConfig,
    /// Idle HTTP/1.1 connections, the one used last at the end: it is the likeliest to be alive.
    idle: Mutex<Vec<Idle<B>>>,
    /// The HTTP/2 connection for new requests.
    shared: Mutex<Option<Kept<http2::SendRequest<B>>>>,
    /// One dial at a time for HTTP/2: everybody who waits can use it.
    dialling: tokio::sync::Mutex<()>,
    swept: Mutex<bool>,
}

struct Idle<B> {
    since: Instant,
    kept: Kept<http1::SendRequest<B>>,
}

/// A connection, and what is left of it.
struct Kept<S> {
    sender: S,
    requests_left: u32,
    ends_at: Instant,
    /// Answers that came on it: how an exchange that nothing came of knows whether others fared
    /// better.
    heard: Arc<AtomicU64>,
}

impl<S> Kept<S> {
    fn new(sender: S, config: &PoolConfig, now: Instant) -> Self {
        let mut rng = rand::rng();
        // Between 90 % and 110 %.
        let jitter = rng.random_range(90..=110_u32);
        let share = |whole: Duration| whole.saturating_mul(jitter) / 100;
        let requests = u64::from(config.max_requests()) * u64::from(jitter) / 100;
        Self {
            sender,
            requests_left: u32::try_from(requests).unwrap_or(u32::MAX).max(1),
            ends_at: now + share(config.max_age()),
            heard: Arc::default(),
        }
    }

    fn is_spent(&self, now: Instant) -> bool {
        self.requests_left == 0 || now >= self.ends_at
    }
}

/// A handle on an HTTP/2 connection, and the count of what came on it.
type Taken<B> = (http2::SendRequest<B>, Arc<AtomicU64>);

/// How long a connection must have been silent to be suspected.
const SILENT: Duration = Duration::from_millis(100);

/// Watches an exchange. If it is given up although nothing came on its connection meanwhile, the
/// connection may be half-dead, and the next attempt must not use it.
struct Silence<B> {
    pool: Weak<Shared<B>>,
    heard: Arc<AtomicU64>,
    before: u64,
    since: Instant,
    is_broken: bool,
}

impl<B> Silence<B> {
    fn new(pool: &Arc<Shared<B>>, heard: Arc<AtomicU64>) -> Self {
        let before = heard.load(Ordering::Relaxed);
        let pool = Arc::downgrade(pool);
        Self { pool, heard, before, since: Instant::now(), is_broken: false }
    }

    fn broken(mut self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
        self.is_broken = true;
    }
}

impl<B> Drop for Silence<B> {
    fn drop(&mut self) {
        if !self.is_broken
            && self.heard.load(Ordering::Relaxed) == self.before
            && self.since.elapsed() >= SILENT
            && let Some(pool) = self.pool.upgrade()
        {
            pool.retire(&self.heard);
        }
    }
}

impl<B> Clone for Pool<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B> fmt::Debug for Pool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.0.target).finish()
    }
}

impl<B> Pool<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    pub(super) fn new(target: Target, config: PoolConfig) -> Self {
        Self(Arc::new(Shared {
            target,
            config,
            idle: Mutex::new(Vec::new()),
            shared: Mutex::new(None),
            dialling: tokio::sync::Mutex::new(()),
            swept: Mutex::new(false),
        }))
    }

    /// Sends a request, on a connection that is there or on a new one.
    ///
    /// A request that a kept connection took back unsent, since the peer had closed it meanwhile,
    /// is sent once more on a new one: it was never seen.
    ///
    /// # Cancel safety
    /// What was sent may still take effect.
    pub(super) async fn send(
        &self,
        mut request: Request<B>,
        name: &Named,
    ) -> Result<Response<PooledBody<B>>, TransportError> {
        if self.speaks_http2() {
            return self.send_h2(request).await;
        }
        if let Some(kept) = self.0.pop(Instant::now()) {
            match self.send_h1(kept, request).await {
                Ok(response) => return Ok(response),
                Err((error, None)) => return Err(error),
                Err((_, Some(unsent))) => request = unsent,
            }
        }
        let (stream, is_h2) = self.connect().await?;
        if is_h2 {
            // Chosen by the peer just now: the request was made for HTTP/1.1.
            name.make_absolute(&mut request);
            self.keep_h2(stream).await?;
            return self.send_h2(request).await;
        }
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(error, true))?;
        tokio::spawn(connection); // ends with the last handle on it
        let kept = Kept::new(sender, &self.0.config, Instant::now());
        self.send_h1(kept, request).await.map_err(|(error, _)| error)
    }

    /// Whether requests go over HTTP/2, by the settings or since the peer chose it.
    pub(super) fn speaks_http2(&self) -> bool {
        self.0.config.is_http2() || self.0.shared.lock().is_some()
    }

    async fn connect(&self) -> Result<(Stream, bool), TransportError> {
        let connected = self.0.target.connect().await;
        connected.map_err(|source| TransportError::Connect { host: self.host(), source })
    }

    fn host(&self) -> String {
        format!("{}:{}", self.0.target.host, self.0.target.port)
    }

    fn broken(&self, source: hyper::Error, never_sent: bool) -> TransportError {
        TransportError::Exchange { host: self.host(), never_sent, source }
    }

    async fn send_h1(
        &self,
        mut kept: Kept<http1::SendRequest<B>>,
        request: Request<B>,
    ) -> Result<Response<PooledBody<B>>, (TransportError, Option<Request<B>>)> {
        kept.requests_left = kept.requests_left.saturating_sub(1);
        // Its task may have yet to see that the last answer ended; that it has ended is sure.
        if let Err(error) = kept.sender.ready().await {
            return Err((self.broken(error, true), Some(request)));
        }
        match kept.sender.try_send_request(request).await {
            Ok(response) => {
                // An upgraded or closed connection cannot carry another request; hyper says so then.
                let keeps = response.version() == Version::HTTP_11;
                let back = keeps.then(|| (kept, Arc::downgrade(&self.0)));
                Ok(response.map(|body| PooledBody::new(body, back)))
            }
            Err(mut error) => {
                let unsent = error.take_message();
                Err((self.broken(error.into_error(), unsent.is_some()), unsent))
            }
        }
    }

    async fn send_h2(
        &self,
        request: Request<B>,
    ) -> Result<Response<PooledBody<B>>, TransportError> {
        let mut request = request;
        *request.version_mut() = Version::HTTP_2;
        let mut fresh = false;
        loop {
            let (mut sender, heard) = match self.0.take_h2(Instant::now()) {
                Some(taken) => taken,
                None => {
                    let _one = self.0.dialling.lock().await;
                    match self.0.take_h2(Instant::now()) {
                        Some(taken) => taken,
                        None => {
                            let (stream, _) = self.connect().await?;
                            fresh = true;
                            self.keep_h2(stream).await?
                        }
                    }
                }
            };
            let silence = Silence::new(&self.0, heard);
            match sender.try_send_request(request).await {
                Ok(response) => {
                    silence.broken();
                    return Ok(response.map(|body| PooledBody::new(body, None)));
                }
                Err(mut error) => {
                    self.0.retire(&silence.heard);
                    silence.broken();
                    match error.take_message() {
                        Some(unsent) if !fresh => request = unsent,
                        unsent => return Err(self.broken(error.into_error(), unsent.is_some())),
                    }
                }
            }
        }
    }

    async fn keep_h2(&self, stream: Stream) -> Result<Taken<B>, TransportError> {
        let config = &self.0.config;
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(config.keep_alive()))
            .keep_alive_timeout(config.keep_alive_timeout())
            .adaptive_window(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(error, true))?;
        tokio::spawn(connection); // ends with the last handle on it
        let mut kept = Kept::new(sender.clone(), config, Instant::now());
        kept.requests_left -= 1;
        let heard = Arc::clone(&kept.heard);
        *self.0.shared.lock() = Some(kept);
        Ok((sender, heard))
    }
}

impl<B> Shared<B> {
    fn pop(&self, now: Instant) -> Option<Kept<http1::SendRequest<B>>> {
        let mut idle = self.idle.lock();
        while let Some(Idle { since, kept }) = idle.pop() {
            let is_stale = now.saturating_duration_since(since) >= self.config.idle();
            if !kept.sender.is_closed() && !kept.is_spent(now) && !is_stale {
                return Some(kept);
            }
        }
        None
    }

    fn take_h2(&self, now: Instant) -> Option<Taken<B>> {
        let mut shared = self.shared.lock();
        let kept = shared.as_mut()?;
        if kept.sender.is_closed() || kept.is_spent(now) {
            *shared = None; // what is under way on it ends by itself
            return None;
        }
        kept.requests_left -= 1;
        Some((kept.sender.clone(), Arc::clone(&kept.heard)))
    }

    /// New requests do not use this HTTP/2 connection any more; those on it go on.
    fn retire(&self, heard: &Arc<AtomicU64>) {
        let mut shared = self.shared.lock();
        if shared.as_ref().is_some_and(|kept| Arc::ptr_eq(&kept.heard, heard)) {
            *shared = None;
        }
    }
}

impl<B: Send + 'static> Shared<B> {
    fn give_back(self: &Arc<Self>, kept: Kept<http1::SendRequest<B>>, now: Instant) {
        if kept.is_spent(now) || kept.sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock();
        if idle.len() >= self.config.max_idle() {
            idle.remove(0); // the one unused for longest
        }
        idle.push(Idle { since: now, kept });
        drop(idle);
        // An answer may be dropped where no runtime is; another will start the sweep then.
        let Ok(runtime) = Handle::try_current() else { return };
        if !std::mem::replace(&mut *self.swept.lock(), true) {
            runtime.spawn(sweep(Arc::downgrade(self), self.config.idle()));
        }
    }
}

/// Closes what was idle for too long; ends when there is nothing left to close, or no pool.
async fn sweep<B: Send + 'static>(pool: Weak<Shared<B>>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        let mut swept = pool.swept.lock();
        let mut idle = pool.idle.lock();
        idle.retain(|one| {
            now.saturating_duration_since(one.since) < every && !one.kept.sender.is_closed()
        });
        if idle.is_empty() {
            *swept = false;
            return;
        }
    }
}

/// A connection, and where it goes when its answer has been read.
type Back<B> = (Kept<http1::SendRequest<B>>, Weak<Shared<B>>);

/// The body of an answer; gives its connection back when it has been read to its end.
pub(super) struct PooledBody<B> {
    /// None of an answer that came from nowhere, as an injected fault's does.
    body: Option<Incoming>,
    back: Option<Back<B>>,
}

impl<B> PooledBody<B> {
    fn new(body: Incoming, back: Option<Back<B>>) -> Self
    where
        B: Send + 'static,
    {
        let is_empty = body.is_end_stream();
        let mut pooled = Self { body: Some(body), back };
        if is_empty {
            pooled.settle(); // nobody reads a body that is empty
        }
        pooled
    }
}

impl<B> Default for PooledBody<B> {
    fn default() -> Self {
        Self { body: None, back: None }
    }
}

impl<B> fmt::Debug for PooledBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.body.fmt(f)
    }
}

impl<B: Send + Unpin + 'static> Body for PooledBody<B> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        match &frame {
            Some(Ok(_)) if !body.is_end_stream() => {}
            Some(Err(_)) => this.back = None,
            _ => this.settle(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl<B> PooledBody<B> {
    fn settle(&mut self)
    where
        B: Send + 'static,
    {
        if let Some((kept, pool)) = self.back.take()
            && let Some(pool) = pool.upgrade()
        {
            pool.give_back(kept, Instant::now());
        }
    }
}
