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
use carrick_ops::drain::Drain;
use hyper::service::{Service, service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
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
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1()
            .timer(TokioTimer::new())
            // From the end of one request to the whole head of the next, so it is the idle time too.
            .header_read_timeout(self.limits.idle)
            .max_buf_size(64 * 1024);
        http.http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(256)
            .max_header_list_size(32 * 1024)
            .keep_alive_interval(Duration::from_secs(30));
        let http = Arc::new(http);
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
                let _held = (place, guard);
                match tls {
                    None => connection(&http, stream, router, &drain, patience).await,
                    Some(Tls(acceptor)) => {
                        let shaken = tokio::time::timeout(patience, acceptor.accept(stream)).await;
                        if let Ok(Ok(stream)) = shaken {
                            connection(&http, stream, router, &drain, patience).await;
                        }
                    }
                }
            });
        }
    }
}

async fn connection(
    http: &auto::Builder<TokioExecutor>,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    drain: &Drain,
    patience: Duration,
) {
    let opened = AtomicBool::new(false);
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        opened.store(true, Ordering::Relaxed);
        router.call(request)
    });
    let serving = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    // Nobody else times a connection that never says which HTTP it speaks.
    let opening = tokio::time::sleep(patience);
    tokio::pin!(opening);
    let (closing, forced) = (drain.closing(), drain.forced());
    let (mut told, mut timed) = (false, false);
    loop {
        tokio::select! {
            // A connection that breaks is the client's affair.
            _ = &mut serving => return,
            () = closing.cancelled(), if !told => {
                told = true;
                serving.as_mut().graceful_shutdown();
            }
            () = &mut opening, if !timed => {
                timed = true;
                if !opened.load(Ordering::Relaxed) {
                    metrics::counter!("carrick_hub_silent_connections_total").increment(1);
                    return;
                }
            }
            () = forced.cancelled() => return,
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
