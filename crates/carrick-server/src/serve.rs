//! Listeners: connections, TLS, and the end of both.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use axum::Router;
use bytes::Bytes;
use carrick_edge::socket::{HandOff, Socket, Takeover};
use carrick_ops::drain::Drain;
use hyper::{
    server::conn::{http1, http2},
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;

use crate::config::{LimitOptions, TlsOptions};

/// Connections too many that are told so at a time; the rest of a flood is cut without a word.
const REFUSED: usize = 64;

/// A socket that is open and not yet served.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    tls: Option<Tls>,
    limits: LimitOptions,
}

#[derive(Clone)]
struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls(..)")
    }
}

impl Listener {
    /// Opens a socket.
    ///
    /// # Errors
    /// The address is in use, or the certificate or the key cannot be read.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn bind(
        address: SocketAddr,
        tls: Option<&TlsOptions>,
        limits: &LimitOptions,
    ) -> anyhow::Result<Self> {
        let tls = tls.map(acceptor).transpose()?;
        let socket = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        Ok(Self { socket, tls, limits: limits.clone() })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The operating system does not tell.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves until the drain closes the listeners; connections finish what they are at, and are cut
    /// when the drain forces them.
    ///
    /// # Cancel safety
    /// Safe to drop: the socket is closed, connections go on until the drain ends them.
    pub async fn serve(self, router: Router, drain: Drain) {
        let places = Arc::new(Semaphore::new(self.limits.connections));
        let refusals = Arc::new(Semaphore::new(REFUSED));
        let work = drain.work("connection");
        // Held until nothing is accepted any more: a drain must not end between an acceptance and
        // the guard for it.
        let _accepting = work.begin();
        let http = Arc::new(Http::new(&self.limits));
        let closing = drain.closing();
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                () = closing.cancelled() => return,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file handles, mostly: accepting again at once would spin.
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            // Answers are small and whole: waiting to fill a packet only delays them.
            stream.set_nodelay(true).ok();
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                metrics::counter!("carrick_hub_connections_refused_total").increment(1);
                if let Ok(place) = Arc::clone(&refusals).try_acquire_owned() {
                    // Ends by itself within two seconds.
                    tokio::spawn(async move {
                        refuse(stream).await;
                        drop(place);
                    });
                }
                continue;
            };
            let (http, router, drain) = (Arc::clone(&http), router.clone(), drain.clone());
            let (tls, patience) = (self.tls.clone(), self.limits.receive);
            let guard = work.begin();
            // Ends with its connection, or when the drain forces it.
            tokio::spawn(async move {
                let held = (place, guard);
                let taken = match tls {
                    None => http.plain(stream, router, &drain, patience).await,
                    Some(Tls(acceptor)) => {
                        let shaken = tokio::time::timeout(patience, acceptor.accept(stream)).await;
                        let Ok(Ok(stream)) = shaken else { return };
                        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        http.connection(stream, is_h2, router, &drain, patience).await
                    }
                };
                if let Some(Taken { takeover, socket, read }) = taken {
                    // A task of its own: this one, with all that served HTTP, is let go.
                    tokio::spawn(async move {
                        takeover(socket, read).await;
                        drop(held);
                    });
                }
            });
        }
    }
}

/// How both kinds of HTTP are spoken.
struct Http {
    one: http1::Builder,
    two: http2::Builder<TokioExecutor>,
}

/// A connection that a handler has taken over.
struct Taken {
    takeover: Takeover,
    socket: Box<dyn Socket>,
    read: Bytes,
}

/// How HTTP/2 begins when nobody agreed on it before.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

impl Http {
    fn new(limits: &LimitOptions) -> Self {
        let mut one = http1::Builder::new();
        one.timer(TokioTimer::new())
            // From the end of one request to the whole head of the next, so it is the idle time too.
            .header_read_timeout(limits.idle)
            .max_buf_size(64 * 1024);
        let mut two = http2::Builder::new(TokioExecutor::new());
        two.timer(TokioTimer::new())
            .max_concurrent_streams(256)
            .max_header_list_size(32 * 1024)
            .keep_alive_interval(Duration::from_secs(30));
        Self { one, two }
    }

    async fn plain(
        &self,
        stream: TcpStream,
        router: Router,
        drain: &Drain,
        patience: Duration,
    ) -> Option<Taken> {
        let asked = tokio::select! {
            asked = tokio::time::timeout(patience, speaks_h2(&stream)) => asked,
            // It has asked for nothing yet.
            () = async { drain.closing().cancelled().await } => return None,
        };
        match asked {
            Ok(Ok(is_h2)) => self.connection(stream, is_h2, router, drain, patience).await,
            Ok(Err(_)) => None,
            Err(_) => {
                metrics::counter!("carrick_hub_silent_connections_total").increment(1);
                None
            }
        }
    }

    /// Serves a connection to its end, or until a handler takes it over.
    async fn connection(
        &self,
        stream: impl Socket,
        is_h2: bool,
        router: Router,
        drain: &Drain,
        patience: Duration,
    ) -> Option<Taken> {
        let opened = AtomicBool::new(false);
        let hand_off = HandOff::default();
        let router = TowerToHyperService::new(router);
        let service = service_fn(|mut request: http::Request<hyper::body::Incoming>| {
            opened.store(true, Ordering::Relaxed);
            if !is_h2 {
                request.extensions_mut().insert(hand_off.clone());
            }
            router.call(request)
        });
        let io = TokioIo::new(stream);
        let ends = Ends { drain, opened: &opened, patience };
        if is_h2 {
            let mut serving = std::pin::pin!(self.two.serve_connection(io, service));
            ends.or(std::future::pending::<()>(), |cx, leave| {
                if leave {
                    serving.as_mut().graceful_shutdown();
                }
                serving.as_mut().poll(cx).map(drop)
            })
            .await;
            return None;
        }
        let mut serving = self.one.serve_connection(io, service);
        let takeover = ends
            .or(hand_off.asked(), |cx, leave| {
                if leave {
                    std::pin::Pin::new(&mut serving).graceful_shutdown();
                }
                std::pin::Pin::new(&mut serving).poll(cx).map(drop)
            })
            .await?;
        let parts = serving.into_parts();
        Some(Taken { takeover, socket: Box::new(parts.io.into_inner()), read: parts.read_buf })
    }
}

/// Whether a connection begins as HTTP/2 does.
async fn speaks_h2(stream: &TcpStream) -> std::io::Result<bool> {
    let mut begun = [0; PREFACE.len()];
    loop {
        let length = stream.peek(&mut begun).await?;
        if length == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if !PREFACE.starts_with(&begun[..length]) {
            return Ok(false);
        }
        if length == PREFACE.len() {
            return Ok(true);
        }
        // The rest is on its way, and the socket stays readable until it is here.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What ends a connection from outside.
struct Ends<'a> {
    drain: &'a Drain,
    opened: &'a AtomicBool,
    patience: Duration,
}

impl Ends<'_> {
    /// Drives a connection (`poll`; told once to leave) until it ends, is ended, or `asked` resolves.
    async fn or<T>(
        self,
        asked: impl Future<Output = T>,
        mut poll: impl FnMut(&mut std::task::Context<'_>, bool) -> std::task::Poll<()>,
    ) -> Option<T> {
        // Nobody else times a connection that never sends its first request.
        let opening = tokio::time::sleep(self.patience);
        tokio::pin!(opening, asked);
        let (closing, forced) = (self.drain.closing(), self.drain.forced());
        let (mut leave, mut told, mut timed) = (false, false, false);
        loop {
            let serving = std::future::poll_fn(|cx| poll(cx, std::mem::take(&mut leave)));
            tokio::select! {
                // A connection that breaks is the client's affair.
                () = serving => return None,
                asked = &mut asked => return Some(asked),
                () = closing.cancelled(), if !told => (told, leave) = (true, true),
                () = &mut opening, if !timed => {
                    timed = true;
                    if !self.opened.load(Ordering::Relaxed) {
                        metrics::counter!("carrick_hub_silent_connections_total").increment(1);
                        return None;
                    }
                }
                () = forced.cancelled() => return None,
            }
        }
    }
}

/// Tells one connection too many that it is.
async fn refuse(mut stream: TcpStream) {
    const PROBLEM: &str = r#"{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"too many connections (limits.connections)"}"#;
    let busy = format!(
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n\
         content-type: application/problem+json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n\
         {PROBLEM}",
        PROBLEM.len()
    );
    let tell = async {
        stream.write_all(busy.as_bytes()).await?;
        stream.shutdown().await?;
        // What the client sent is taken and dropped: closed over it, the answer would be lost.
        let mut unread = [0; 4096];
        while stream.read(&mut unread).await? > 0 {}
        std::io::Result::Ok(())
    };
    // Whoever does not read it is gone in two seconds.
    let told = tokio::time::timeout(Duration::from_secs(2), tell).await;
    drop(told);
}

fn acceptor(options: &TlsOptions) -> anyhow::Result<Tls> {
    let TlsOptions { certificate, key } = options;
    let certificates = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("tls.certificate: cannot read {}", certificate.display()))?;
    let private = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("tls.key: cannot read {}", key.display()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context("tls: no protocol versions")?
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .context("tls: the certificate and the key do not fit")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Tls(TlsAcceptor::from(Arc::new(config))))
}
