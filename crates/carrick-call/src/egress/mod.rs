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

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

use carrick_core::config::{Faults, InvalidConfig};
use futures_util::future::BoxFuture;
use http::{HeaderMap, Uri, header::LOCATION, uri::Scheme};
use metrics::counter;
use serde::Deserialize;
use tokio::net::{TcpStream, lookup_host};

pub use self::core::{Class, Network, class};

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
        let port = authority.port_u16().unwrap_or(if is_plain { 80 } else { 443 });
        self.check_port(port)?;
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

    /// The addresses of a host, all of which may be reached.
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
        Ok(found.into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }

    /// Connects to a host, at one of the addresses that were checked.
    ///
    /// # Errors
    /// An [`EgressError`] within the I/O error, or why no address could be connected to.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let addresses = self.addresses(host, port).await;
        let addresses =
            addresses.map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))?;
        // To the addresses, and not to the name: it might resolve otherwise by now.
        let stream = TcpStream::connect(&addresses[..]).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
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

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

    use super::*;

    /// Answers with these, one after the other.
    #[derive(Debug)]
    struct Script(Vec<Vec<&'static str>>, AtomicUsize);

    impl Resolve for Script {
        fn resolve<'a>(&'a self, _host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            let answer = &self.0[self.1.fetch_add(1, Ordering::SeqCst).min(self.0.len() - 1)];
            let found = answer.iter().map(|text| text.parse().unwrap()).collect();
            Box::pin(async { Ok(found) })
        }
    }

    fn guarded(options: EgressOptions, answers: &[&[&'static str]]) -> Guarded {
        let script = Script(answers.iter().map(|one| one.to_vec()).collect(), AtomicUsize::new(0));
        let config = EgressConfig::try_from(options).unwrap();
        Guarded::with_resolver(config, Arc::new(script))
    }

    #[tokio::test]
    async fn one_bad_address_among_good_ones_refuses_them_all() {
        for bad in ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:8.8.8.8", "fd00::1"]
        {
            let guarded = guarded(EgressOptions::default(), &[&["93.184.216.34", bad]]);
            let error = guarded.addresses("evil.test", 443).await.unwrap_err();
            assert!(matches!(error, EgressError::Forbidden { .. }), "{bad}: {error}");
            assert!(!error.to_string().contains(bad), "what the resolver knows is not told");
        }
    }

    #[tokio::test]
    async fn a_name_that_changes_between_check_and_connection_is_checked_where_it_connects() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = EgressOptions { ports: vec![port], ..EgressOptions::default() };
        let guarded = guarded(options, &[&["93.184.216.34"], &["127.0.0.1"]]);
        assert!(guarded.addresses("rebinds.test", port).await.is_ok(), "what a check would see");
        let error = guarded.connect("rebinds.test", port).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[tokio::test]
    async fn an_exception_is_reached_and_only_that() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = EgressOptions {
            ports: Vec::new(),
            danger_allow: vec!["127.0.0.0/8".to_owned()],
            ..EgressOptions::default()
        };
        let guarded = guarded(options, &[&["127.0.0.1"]]);
        assert!(guarded.connect("here.test", port).await.is_ok());
        assert!(guarded.connect("10.0.0.1", port).await.is_err());
        assert!(guarded.connect("[::1]", port).await.is_err());
    }

    #[track_caller]
    fn check(url: &str, fine: bool) {
        let found = EgressConfig::default().check(&url.parse().unwrap());
        assert_eq!(found.is_ok(), fine, "{url}: {found:?}");
    }

    #[test]
    fn a_url_is_checked_for_what_shows() {
        check("https://example.com/hook", true);
        check("http://example.com", true);
        check("https://example.com:8443/", false);
        check("https://user:secret@example.com/", false);
        check("ftp://example.com/", false);
        check("/hook", false);
        check("http://127.0.0.1/", false);
        check("http://[::1]/", false);
        check("http://[::ffff:127.0.0.1]/", false);
        check("http://93.184.216.34/", true);
        let strict = EgressOptions { plain: false, ..EgressOptions::default() };
        let strict = EgressConfig::try_from(strict).unwrap();
        assert!(strict.check(&"http://example.com/".parse().unwrap()).is_err());
    }

    #[track_caller]
    fn redirects(from: &str, location: &str, hops: usize, expected: Option<&str>) {
        let mut headers = HeaderMap::new();
        headers.insert(LOCATION, location.parse().unwrap());
        let config = EgressConfig::default();
        let found = follow(&config, &from.parse().unwrap(), &headers, hops);
        assert_eq!(found.as_ref().ok().map(ToString::to_string).as_deref(), expected, "{found:?}");
    }

    #[test]
    fn a_redirect_is_checked_like_the_url_that_led_to_it() {
        let from = "https://a.example/x?y";
        redirects(from, "https://b.example/z", 0, Some("https://b.example/z"));
        redirects(from, "/z", 2, Some("https://a.example/z"));
        redirects(from, "/z", 3, None);
        redirects(from, "http://b.example/z", 0, None);
        redirects("http://a.example/", "http://b.example/z", 0, Some("http://b.example/z"));
        redirects(from, "https://169.254.169.254/latest", 0, None);
        redirects(from, "https://b.example:22/", 0, None);
        redirects(from, "gopher://b.example/", 0, None);
        let none = follow(&EgressConfig::default(), &from.parse().unwrap(), &HeaderMap::new(), 0);
        assert!(none.is_err());
    }

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options = EgressOptions {
            ports: vec![0],
            danger_allow: vec!["10.0.0.0/33".to_owned(), "x".to_owned()],
            plain: true,
        };
        assert_eq!(EgressConfig::try_from(options).unwrap_err().faults().len(), 3);
    }
}
