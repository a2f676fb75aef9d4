//! Egress: a connector that reaches the Internet and nothing nearer.
//!
//! Where somebody from outside names a URL, as for a webhook, it must not lead into the network that
//! the server stands in. Checking the URL is not enough: its name may resolve to anything, and to
//! something else the next time. So the check is made where the connection is: on every address that
//! the resolver gives, and the connection goes to exactly an address that passed. Redirects are new
//! URLs, and are checked like the first ([`follow`]).
//!
//! Source: pattern document, webhooks; RFC 6890 and the IANA registries for the ranges. Differs: one
//! bad address among good ones refuses them all, for whoever mixes them means harm.

mod core;
#[cfg(all(test, not(carrick_loom)))]
mod tests;

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
};

use carrick_core::config::{Faults, InvalidConfig};
use futures_util::future::BoxFuture;
use http::{HeaderMap, Uri, header::LOCATION, uri::Scheme};
use metrics::counter;
use serde::Deserialize;
use tokio::net::{TcpStream, lookup_host};
use tower_service::Service;

pub use self::core::{Class, Network, class};
use crate::{Policy, Refusal};

/// Addresses of one name that are tried. All are checked; a name with many dead ones would keep its
/// caller for as long as it likes.
const MAX_TRIED: usize = 8;

/// Settings as an operator writes them; become an [`EgressConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct EgressOptions {
    /// Ports that may be reached. Default 80 and 443; empty for all.
    pub ports: Vec<u16>,
    /// Networks that may be reached although they are not the Internet's, such as `10.1.0.0/16`: whoever
    /// names a URL then reaches what is there. Default none.
    pub danger_allow: Vec<String>,
    /// Whether `http` may be used, and not `https` only. Default yes.
    pub plain: bool,
}

impl Default for EgressOptions {
    fn default() -> Self {
        Self { ports: vec![80, 443], danger_allow: Vec::new(), plain: true }
    }
}

/// Settings that a connector can rely on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "EgressOptions")]
pub struct EgressConfig {
    ports: Vec<u16>,
    allow: Vec<Network>,
    plain: bool,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self::try_from(EgressOptions::default()).expect("the defaults are right")
    }
}

impl TryFrom<EgressOptions> for EgressConfig {
    type Error = InvalidConfig;

    fn try_from(options: EgressOptions) -> Result<Self, InvalidConfig> {
        let EgressOptions { ports, danger_allow, plain } = options;
        let mut faults = Faults::default();
        faults.unless(!ports.contains(&0), "ports", "1..=65535 each");
        let mut allow = Vec::new();
        for text in danger_allow {
            match Network::from_str(&text) {
                Ok(network) => allow.push(network),
                Err(_) => {
                    let range = "networks such as 10.1.0.0/16";
                    faults.unless_value(false, "danger-allow", range, format!("{text:?}"));
                }
            }
        }
        faults.into_result(Self { ports, allow, plain })
    }
}

/// Why a URL is not called.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EgressError {
    /// It leads somewhere that must not be reached. Which address it was is not told: whoever asked
    /// would learn what the resolver knows.
    #[error("{host} leads to {class}")]
    Forbidden {
        /// The host as it was named.
        host: String,
        /// What is there.
        class: Class,
    },
    /// Its port may not be reached.
    #[error("port {0} may not be reached")]
    Port(u16),
    /// It is no URL that can be called.
    #[error("the URL must be {0}")]
    Url(&'static str),
    /// The name leads nowhere.
    #[error("{0} has no address")]
    NoAddress(String),
}

impl From<EgressError> for Refusal {
    fn from(error: EgressError) -> Self {
        let reason = error.to_string().into();
        Self { policy: Policy::Egress, reason, retry_after: None, sent: false }
    }
}

impl From<EgressError> for io::Error {
    fn from(error: EgressError) -> Self {
        let kind = match error {
            EgressError::NoAddress(_) => io::ErrorKind::NotFound,
            _ => io::ErrorKind::PermissionDenied,
        };
        Self::new(kind, error)
    }
}

impl EgressConfig {
    /// Checks an address.
    ///
    /// # Errors
    /// What is there instead of the Internet.
    pub fn verdict(&self, address: IpAddr) -> Result<(), Class> {
        match class(address) {
            Some(_) if self.allow.iter().any(|network| network.contains(address)) => Ok(()),
            Some(class) => Err(class),
            None => Ok(()),
        }
    }

    /// Checks what can be seen of a URL before its name is resolved.
    ///
    /// # Errors
    /// [`EgressError::Url`], [`EgressError::Port`], or [`EgressError::Forbidden`] for a bare address.
    pub fn check(&self, uri: &Uri) -> Result<(), EgressError> {
        let scheme = uri.scheme().ok_or(EgressError::Url("absolute"))?;
        let is_plain = *scheme == Scheme::HTTP;
        if !is_plain && *scheme != Scheme::HTTPS {
            return Err(EgressError::Url("http or https"));
        }
        if is_plain && !self.plain {
            return Err(EgressError::Url("https"));
        }
        let authority = uri.authority().ok_or(EgressError::Url("absolute"))?;
        if authority.as_str().contains('@') {
            return Err(EgressError::Url("without user and password"));
        }
        self.check_port(port(uri)?)?;
        let host = bare(authority.host());
        if let Ok(address) = host.parse() {
            self.check_address(host, address)?;
        }
        Ok(())
    }

    fn check_port(&self, port: u16) -> Result<(), EgressError> {
        let allowed = self.ports.is_empty() || self.ports.contains(&port);
        if allowed { Ok(()) } else { Err(EgressError::Port(port)) }
    }

    fn check_address(&self, host: &str, address: IpAddr) -> Result<(), EgressError> {
        self.verdict(address).map_err(|class| {
            counter!("carrick_egress_refused_total").increment(1);
            EgressError::Forbidden { host: host.to_owned(), class }
        })
    }
}

/// The port of a URL. One that is no port is not taken for none: others may read it otherwise.
fn port(uri: &Uri) -> Result<u16, EgressError> {
    let authority = uri.authority().ok_or(EgressError::Url("absolute"))?;
    let by_scheme = if uri.scheme() == Some(&Scheme::HTTP) { 80 } else { 443 };
    match authority.as_str().rsplit_once(':') {
        Some((_, digits)) if !digits.ends_with(']') && !digits.is_empty() => {
            authority.port_u16().ok_or(EgressError::Url("with a port that is one"))
        }
        _ => Ok(by_scheme),
    }
}

fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Resolves names.
pub trait Resolve: fmt::Debug + Send + Sync + 'static {
    /// All addresses of a name.
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The system's resolver.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            let found = lookup_host((host, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// Connects to the Internet, and to nothing nearer. Clones share the resolver.
///
/// It is a service of URIs, too, as clients take one for their connections; for hyper-util's, map the
/// answer with `TokioIo::new`. A proxy of the environment is not asked: it would resolve the name
/// itself.
///
/// ```
/// # use carrick_call::egress::{EgressConfig, EgressError, Guarded};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let guarded = Guarded::new(EgressConfig::default());
/// let error = guarded.connect("169.254.169.254", 80).await.unwrap_err();
/// assert_eq!(error.to_string(), "169.254.169.254 leads to a link-local address");
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Guarded {
    config: Arc<EgressConfig>,
    resolver: Arc<dyn Resolve>,
}

impl Guarded {
    /// With the system's resolver.
    pub fn new(config: EgressConfig) -> Self {
        Self::with_resolver(config, Arc::new(SystemResolver))
    }

    /// With another.
    pub fn with_resolver(config: EgressConfig, resolver: Arc<dyn Resolve>) -> Self {
        Self { config: Arc::new(config), resolver }
    }

    /// The settings.
    pub fn config(&self) -> &EgressConfig {
        &self.config
    }

    /// The first addresses of a host, all of which may be reached; 8 at most.
    ///
    /// # Errors
    /// [`EgressError`], if a single one may not, and if the name leads nowhere.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn addresses(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, EgressError> {
        self.config.check_port(port)?;
        let host = bare(host);
        let found = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => {
                let found = self.resolver.resolve(host).await;
                found.map_err(|_| EgressError::NoAddress(host.to_owned()))?
            }
        };
        for address in &found {
            self.config.check_address(host, *address)?;
        }
        if found.is_empty() {
            return Err(EgressError::NoAddress(host.to_owned()));
        }
        let tried = found.into_iter().take(MAX_TRIED);
        Ok(tried.map(|address| SocketAddr::new(address, port)).collect())
    }

    /// Connects to a host, at one of the addresses that were checked.
    ///
    /// # Errors
    /// An [`EgressError`] within the I/O error, or why no address could be connected to.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let addresses = self.addresses(host, port).await?;
        // To the addresses, and not to the name: it might resolve otherwise by now.
        let stream = TcpStream::connect(&addresses[..]).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Service<Uri> for Guarded {
    type Response = TcpStream;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TcpStream>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let guarded = self.clone();
        Box::pin(async move {
            guarded.config.check(&uri)?;
            guarded.connect(uri.host().unwrap_or_default(), port(&uri)?).await
        })
    }
}

#[cfg(feature = "client")]
impl crate::client::Dial for Guarded {
    fn dial<'a>(&'a self, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<TcpStream>> {
        Box::pin(self.connect(host, port))
    }
}

/// Redirects that are followed at most.
pub const MAX_REDIRECTS: usize = 3;

/// Where a redirect leads, checked like the URL that led to it.
///
/// Follow none if nobody asked for it. What is meant for one origin, such as `Authorization` or a
/// signature, must not be sent to the next.
///
/// * `hops`: redirects that were followed before this one.
///
/// # Errors
/// [`EgressError::Url`] after too many, for a target that cannot be read, and for one that leaves
/// `https`; otherwise as [`EgressConfig::check`].
pub fn follow(
    config: &EgressConfig,
    from: &Uri,
    headers: &HeaderMap,
    hops: usize,
) -> Result<Uri, EgressError> {
    if hops >= MAX_REDIRECTS {
        return Err(EgressError::Url("at its end within 3 redirects"));
    }
    let unreadable = EgressError::Url("redirected to something readable");
    let Some(Ok(target)) = headers.get(LOCATION).map(|target| target.to_str()) else {
        return Err(unreadable);
    };
    // "The same scheme, another host": read as a path it would go to the wrong host.
    let target = match (target.starts_with("//"), from.scheme_str()) {
        (true, Some(scheme)) => format!("{scheme}:{target}"),
        _ => target.to_owned(),
    };
    let target: Uri = target.parse().map_err(|_| unreadable)?;
    let mut parts = target.into_parts();
    if parts.authority.is_none() {
        let origin = from.clone().into_parts();
        (parts.scheme, parts.authority) = (origin.scheme, origin.authority);
    } else if parts.scheme.is_none() {
        parts.scheme = from.scheme().cloned();
    }
    let target = Uri::from_parts(parts).map_err(|_| EgressError::Url("redirected to a URL"))?;
    if from.scheme() == Some(&Scheme::HTTPS) && target.scheme() != Some(&Scheme::HTTPS) {
        return Err(EgressError::Url("redirected to https"));
    }
    config.check(&target)?;
    Ok(target)
}
