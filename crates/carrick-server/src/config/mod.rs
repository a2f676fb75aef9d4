//! Configuration of the hub: as written, and as checked.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use carrick_call::client::{DependencyConfig, DependencyOptions};
use carrick_core::config::{Faults, InvalidConfig, duration, size};
use carrick_edge::feed::{FeedConfig, FeedOptions};
use carrick_ops::{
    drain::{DrainConfig, DrainOptions},
    telemetry::TelemetryOptions,
};
use serde::Deserialize;

/// The commented default file.
pub const DEFAULT: &str = include_str!("default.toml");

/// What an operator writes in `carrick.toml`; becomes a [`HubConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct HubOptions {
    /// Where the hub listens.
    pub listen: String,
    /// URL of the store.
    pub store: String,
    /// 32 bytes in hexadecimal; empty to make one.
    pub seal_key: String,
    /// Listen anywhere without tokens or TLS.
    pub danger_open_listener: bool,
    /// Certificate and key.
    pub tls: TlsOptions,
    /// How events are delivered.
    pub delivery: DeliveryOptions,
    /// How long things are kept.
    pub retention: RetentionOptions,
    /// How much is taken at a time.
    pub limits: LimitOptions,
    /// How topics are read by clients.
    pub feed: FeedOptions,
    /// Origins of web pages that may ask, besides the hub's own: `https://shop.example`.
    pub origins: Vec<String>,
    /// How the hub ends.
    pub drain: DrainOptions,
    /// Logs and traces.
    pub telemetry: TelemetryOptions,
    /// Who may do what.
    pub token: Vec<TokenOptions>,
    /// What is called, by name.
    pub dependency: BTreeMap<String, DependencyOptions>,
}

/// TLS of the listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct TlsOptions {
    /// PEM file with the certificate chain.
    pub certificate: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// Delivery to groups.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeliveryOptions {
    /// Deliveries of an event before it is a dead letter, 1..=1000. Default 10.
    pub max_attempts: u32,
}

/// How long things are kept.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RetentionOptions {
    /// Events that every group has finished with, at least 1 s. Default 7 d.
    #[serde(with = "duration")]
    pub age: Duration,
    /// Dead letters, at least 1 s. Default 30 d.
    #[serde(with = "duration")]
    pub dead_age: Duration,
    /// Between two looks, 100 ms to 1 d. Default 1 min.
    #[serde(with = "duration")]
    pub every: Duration,
}

/// How much is taken at a time.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LimitOptions {
    /// Connections, 1..=1 000 000. Default 10 000.
    pub connections: usize,
    /// Requests that wait for deliveries, 1..=1 000 000. Default 5000. Readers of topics are the
    /// feed's.
    pub waits: usize,
    /// Requests that wait and readers, with one token, 1..=1 000 000. Default 1000.
    pub waits_per_token: usize,
    /// Streams that may be open with one token, and readers with subscription tokens of it.
    pub readers_per_token: usize,
    /// Bytes of a body, 1 KiB to 64 MiB. Default 4 MiB.
    #[serde(with = "size")]
    pub body: usize,
    /// For the first request of a connection, and for each body, 100 ms to 10 min. Default 10 s.
    #[serde(with = "duration")]
    pub receive: Duration,
    /// Between two requests of a connection, `receive` to 1 h. Default 75 s: longer than the pools
    /// of the usual clients, so that they, and not the hub, close what is idle.
    #[serde(with = "duration")]
    pub idle: Duration,
    /// Events being published, at least 1. Default 20 000.
    pub publishing: usize,
    /// Bytes being published, at least 1 MiB. Default 32 MiB.
    #[serde(with = "size")]
    pub publishing_bytes: usize,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TokenOptions {
    /// For logs.
    pub name: String,
    /// Digest of the token, in hexadecimal.
    pub sha256: String,
    /// Whose names it sees.
    #[serde(default = "default_tenant")]
    pub tenant: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// On which topics; `*` at the end stands for anything. All if not given.
    #[serde(default = "all_topics")]
    pub topics: Vec<String>,
}

fn default_tenant() -> String {
    carrick_core::name::DEFAULT_TENANT.to_owned()
}

fn all_topics() -> Vec<String> {
    vec!["*".to_owned()]
}

/// What a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Publish events.
    Publish,
    /// Read topics, and lease and settle as any group.
    Consume,
    /// Look at groups and dead letters, and redrive, skip and purge.
    Admin,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7070".to_owned(),
            store: "sqlite://carrick.db".to_owned(),
            seal_key: String::new(),
            danger_open_listener: false,
            tls: TlsOptions::default(),
            delivery: DeliveryOptions::default(),
            retention: RetentionOptions::default(),
            limits: LimitOptions::default(),
            feed: FeedOptions::default(),
            origins: Vec::new(),
            drain: DrainOptions::default(),
            telemetry: TelemetryOptions::default(),
            token: Vec::new(),
            dependency: BTreeMap::new(),
        }
    }
}

impl Default for DeliveryOptions {
    fn default() -> Self {
        Self { max_attempts: 10 }
    }
}

impl Default for RetentionOptions {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(86_400);
        Self { age: 7 * DAY, dead_age: 30 * DAY, every: Duration::from_secs(60) }
    }
}

impl Default for LimitOptions {
    fn default() -> Self {
        Self {
            connections: 10_000,
            waits: 5000,
            waits_per_token: 1000,
            readers_per_token: 15_000,
            body: 4 * 1024 * 1024,
            receive: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            publishing: 20_000,
            publishing_bytes: 32 * 1024 * 1024,
        }
    }
}

/// Settings that the hub can rely on.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// URL of the store.
    pub(crate) store: String,
    pub(crate) seal_key: Option<[u8; 32]>,
    pub(crate) tls: Option<TlsOptions>,
    pub(crate) delivery: DeliveryOptions,
    pub(crate) retention: RetentionOptions,
    pub(crate) limits: LimitOptions,
    pub(crate) feed: FeedConfig,
    pub(crate) origins: Vec<String>,
    pub(crate) drain: DrainConfig,
    pub(crate) telemetry: TelemetryOptions,
    pub(crate) tokens: Vec<Token>,
    pub(crate) dependencies: BTreeMap<String, DependencyConfig>,
}

/// A token that was checked.
#[derive(Clone, Debug)]
pub struct Token {
    pub(crate) name: String,
    pub(crate) digest: [u8; 32],
    pub(crate) tenant: String,
    pub(crate) scopes: Vec<Scope>,
    pub(crate) topics: Vec<String>,
}

impl HubConfig {
    /// Where the hub listens.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Settings of the feed.
    pub fn feed(&self) -> &FeedConfig {
        &self.feed
    }

    /// TLS of the listener, if it has it.
    pub fn tls(&self) -> Option<&TlsOptions> {
        self.tls.as_ref()
    }

    /// How much it takes at a time.
    pub fn limits(&self) -> &LimitOptions {
        &self.limits
    }

    /// What is called, by name.
    pub fn dependencies(&self) -> &BTreeMap<String, DependencyConfig> {
        &self.dependencies
    }

    /// Logs and traces.
    pub fn telemetry(&self) -> &TelemetryOptions {
        &self.telemetry
    }
}

impl TryFrom<HubOptions> for HubConfig {
    type Error = InvalidConfig;

    fn try_from(options: HubOptions) -> Result<Self, InvalidConfig> {
        let HubOptions {
            listen,
            store,
            seal_key,
            danger_open_listener,
            tls,
            delivery,
            retention,
            limits,
            feed,
            origins,
            drain,
            telemetry,
            token,
            dependency,
        } = options;
        let mut faults = Faults::default();
        let (secs, text) = (Duration::from_secs, duration::format);

        let address = listen.parse::<SocketAddr>().ok();
        let range = "an address and a port, such as 127.0.0.1:7070";
        faults.unless_value(address.is_some(), "listen", range, &listen);
        let scheme = ["sqlite:", "postgres:", "postgresql:", "memory:"];
        let known = scheme.iter().any(|scheme| store.starts_with(scheme));
        let shown = store.split(':').next().unwrap_or_default();
        faults.unless_value(known, "store", "sqlite://…, postgres://… or memory:", shown);
        let key = hexadecimal(&seal_key);
        let no_key = seal_key.is_empty();
        faults.unless(no_key || key.is_some(), "seal-key", "64 hexadecimal digits, or empty");

        let both = tls.certificate.as_os_str().is_empty() == tls.key.as_os_str().is_empty();
        faults.unless(both, "tls", "a certificate and a key, or neither");
        let tls = Some(tls).filter(|tls| !tls.key.as_os_str().is_empty());
        let guarded = tls.is_some() && !token.is_empty();
        let loopback = address.is_none_or(|address| address.ip().is_loopback());
        let range = "loopback, unless there are tokens and TLS (or danger-open-listener is set)";
        faults.unless_value(loopback || guarded || danger_open_listener, "listen", range, &listen);

        let attempts = delivery.max_attempts;
        faults.unless_value(
            (1..=1000).contains(&attempts),
            "delivery.max-attempts",
            "1..=1000",
            attempts,
        );
        let RetentionOptions { age, dead_age, every } = retention;
        faults.unless_value(age >= secs(1), "retention.age", "at least 1s", text(age));
        let dead = dead_age >= secs(1);
        faults.unless_value(dead, "retention.dead-age", "at least 1s", text(dead_age));
        let look = (Duration::from_millis(100)..=secs(86_400)).contains(&every);
        faults.unless_value(look, "retention.every", "100ms to 1d", text(every));

        let LimitOptions {
            connections,
            waits,
            waits_per_token,
            readers_per_token,
            body,
            receive,
            idle,
            publishing,
            publishing_bytes,
        } = limits;
        let many = 1..=1_000_000;
        let range = "1..=1000000";
        faults.unless_value(many.contains(&connections), "limits.connections", range, connections);
        faults.unless_value(many.contains(&waits), "limits.waits", range, waits);
        let share = many.contains(&waits_per_token);
        faults.unless_value(share, "limits.waits-per-token", range, waits_per_token);
        let share = many.contains(&readers_per_token);
        faults.unless_value(share, "limits.readers-per-token", range, readers_per_token);
        let bytes = (1024..=64 << 20).contains(&body);
        let shown = size::format(body as u64);
        faults.unless_value(bytes, "limits.body", "1KiB to 64MiB", shown);
        let time = (Duration::from_millis(100)..=secs(600)).contains(&receive);
        faults.unless_value(time, "limits.receive", "100ms to 10m", text(receive));
        let idles = (receive..=secs(3600)).contains(&idle);
        faults.unless_value(idles, "limits.idle", "limits.receive to 1h", text(idle));
        faults.unless_value(publishing >= 1, "limits.publishing", "at least 1", publishing);
        let shown = size::format(publishing_bytes as u64);
        let enough = publishing_bytes >= body.max(1 << 20);
        let range = "at least 1MiB, and at least limits.body";
        faults.unless_value(enough, "limits.publishing-bytes", range, shown);

        let feed = FeedConfig::try_from(feed).map_err(|inner| faults.nest("feed", inner)).ok();
        for origin in &origins {
            let range = "an origin, such as https://shop.example";
            faults.unless_value(is_origin(origin), "origins", range, origin);
        }
        let drain = DrainConfig::try_from(drain).map_err(|inner| faults.nest("drain", inner)).ok();
        let tokens = tokens(token, &mut faults);
        let mut dependencies = BTreeMap::new();
        for (name, options) in dependency {
            match DependencyConfig::new(&name, options) {
                Ok(config) => {
                    dependencies.insert(name, config);
                }
                Err(inner) => faults.nest(&format!("dependency.{name}"), inner),
            }
        }
        let placeholder = SocketAddr::from(([127, 0, 0, 1], 0));
        let listen = address.unwrap_or(placeholder);
        let (delivery, retention, limits) = (delivery, retention, limits);
        let drain = drain.unwrap_or_else(|| {
            DrainConfig::try_from(DrainOptions::default()).expect("the defaults are in range")
        });
        faults.into_result(Self {
            listen,
            store,
            seal_key: key,
            tls,
            delivery,
            retention,
            limits,
            feed: feed.unwrap_or_default(),
            origins,
            drain,
            telemetry,
            tokens,
            dependencies,
        })
    }
}

fn tokens(options: Vec<TokenOptions>, faults: &mut Faults) -> Vec<Token> {
    let mut tokens = Vec::with_capacity(options.len());
    for (index, TokenOptions { name, sha256, tenant, scopes, topics }) in
        options.into_iter().enumerate()
    {
        let key = |field: &str| format!("token.{index}.{field}");
        // What subscription tokens name the one that made them by.
        let known = tokens.iter().any(|token: &Token| token.name == name);
        faults.unless_value(!known, &key("name"), "of no other token", &name);
        let digest = hexadecimal(&sha256);
        faults.unless(digest.is_some(), &key("sha256"), "64 hexadecimal digits");
        let named = carrick_core::name::Topic::in_tenant(&tenant, "x").is_ok();
        let range = "1 to 200 characters of A-Z a-z 0-9 . _ -";
        faults.unless_value(named, &key("tenant"), range, &tenant);
        faults.unless(!scopes.is_empty(), &key("scopes"), "some of publish, consume, admin");
        if let Some(digest) = digest {
            tokens.push(Token { name, digest, tenant, scopes, topics });
        }
    }
    tokens
}

/// Scheme and authority, and nothing else: what a browser sends.
fn is_origin(text: &str) -> bool {
    let parsed = text.parse::<http::Uri>().ok();
    parsed.is_some_and(|uri| {
        let scheme = matches!(uri.scheme_str(), Some("http" | "https"));
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        scheme
            && !authority.contains('@')
            && text.split_once("://").is_some_and(|(_, rest)| rest == authority)
    })
}

/// 32 bytes from 64 digits.
pub(crate) fn hexadecimal(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_file_says_what_the_defaults_are() {
        let written: HubOptions = toml::from_str(DEFAULT).unwrap();
        assert_eq!(written, HubOptions::default());
        assert!(HubConfig::try_from(written).is_ok());
    }

    fn refused(change: impl FnOnce(&mut HubOptions)) -> String {
        let mut options = HubOptions::default();
        change(&mut options);
        HubConfig::try_from(options).unwrap_err().to_string()
    }

    #[test]
    fn a_listener_off_loopback_needs_tokens_and_tls_or_the_danger_flag() {
        for open in ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:7070"] {
            let fault = refused(|options| options.listen = open.to_owned());
            assert!(fault.contains("listen must be loopback") && fault.contains(open), "{fault}");
        }
        let token = TokenOptions {
            name: "a".to_owned(),
            sha256: "0".repeat(64),
            tenant: default_tenant(),
            scopes: vec![Scope::Publish],
            topics: all_topics(),
        };
        refused(|options| {
            options.listen = "0.0.0.0:7070".to_owned();
            options.token = vec![token.clone()];
        });
        let mut open = HubOptions { listen: "0.0.0.0:1".to_owned(), ..HubOptions::default() };
        open.token = vec![token];
        open.tls = TlsOptions { certificate: "c.pem".into(), key: "k.pem".into() };
        assert!(HubConfig::try_from(open.clone()).is_ok());
        open.token.clear();
        open.danger_open_listener = true;
        assert!(HubConfig::try_from(open).is_ok());
    }

    #[test]
    fn all_faults_are_told_at_once_with_key_range_and_value() {
        let fault = refused(|options| {
            options.delivery.max_attempts = 0;
            options.limits.body = 1;
            options.retention.every = Duration::ZERO;
            options.drain.grace = Duration::from_secs(100_000);
            options.store = "mysql://secret@host".to_owned();
        });
        for part in [
            "delivery.max-attempts must be 1..=1000, not 0",
            "limits.body must be 1KiB to 64MiB, not 1B",
            "retention.every must be 100ms to 1d, not 0s",
            "drain.grace",
            "store must be",
        ] {
            assert!(fault.contains(part), "{part} in {fault}");
        }
        assert!(!fault.contains("secret"));
    }
}
