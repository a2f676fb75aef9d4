//! Connections: TCP, and TLS over it where a URL says `https`.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Opens the TCP connection to a host. The default dials what the name resolves to; a guarded one
/// refuses addresses that must not be reached (`egress`).
pub trait Dial: fmt::Debug + Send + Sync + 'static {
    /// Connects to a host by name or address.
    ///
    /// # Cancel safety
    /// Safe to drop: a half-open connection is closed.
    fn dial<'a>(&'a self, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<TcpStream>>;
}

/// Dials whatever a name resolves to.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnyAddress;

impl Dial for AnyAddress {
    fn dial<'a>(&'a self, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<TcpStream>> {
        Box::pin(async move {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        })
    }
}

/// Where connections go, and how.
#[derive(Clone)]
pub(super) struct Target {
    /// The host as it is dialled.
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Option<Tls>,
    pub(super) dial: Arc<dyn Dial>,
    pub(super) patience: Duration,
}

/// TLS to one name.
#[derive(Clone)]
pub(super) struct Tls {
    pub(super) connector: TlsConnector,
    pub(super) name: ServerName<'static>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

impl Target {
    /// Connects, with TLS if it is wanted; tells whether the peer chose HTTP/2.
    pub(super) async fn connect(&self) -> io::Result<(Stream, bool)> {
        let connect = async {
            let tcp = self.dial.dial(&self.host, self.port).await?;
            let Some(Tls { connector, name }) = &self.tls else {
                return Ok((Stream::Plain(tcp), false));
            };
            let tls = connector.connect(name.clone(), tcp).await?;
            let is_h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
            Ok((Stream::Tls(Box::new(tls)), is_h2))
        };
        timeout_at(Instant::now() + self.patience, connect).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, "no connection in time"))
        })
    }
}

/// Settings of TLS that trust these certificates, and offer HTTP/2 and HTTP/1.1.
///
/// # Errors
/// If none of the certificates can be trusted.
pub fn tls_config(
    trusted: impl IntoIterator<Item = CertificateDer<'static>>,
    http2: bool,
) -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(trusted);
    if added == 0 {
        return Err(io::Error::other("there is no certificate to trust"));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    if http2 {
        config.alpn_protocols.push(b"h2".to_vec());
    }
    config.alpn_protocols.push(b"http/1.1".to_vec());
    Ok(Arc::new(config))
}

/// A connection.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
