//! A hub, over HTTP: what the command line and the relay speak through.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use async_trait::async_trait;
use bytes::Bytes;
use carrick_call::{
    CallError, Mode,
    client::{DependencyConfig, DependencyOptions, tls_config},
};
use carrick_core::{
    clock::{Clock, SystemClock},
    deadline::Deadline,
    event::{BATCH, HARD_LIMIT},
    name::{Group, Topic},
    outcome::parse_retry_after,
    problem::Problem,
};
use carrick_message::broker::{
    Broker, BrokerError, Capabilities, Delivery, LeaseId, LeaseRequest, Outgoing, Published,
    Verdict, Verdicted,
};
use http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER},
};
use http_body_util::{BodyExt, Full, Limited};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio::time::Instant;

/// Bytes of an answer that are taken at most: a page of events has 4 MiB, or one large event.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// A client of one hub. Clones share its connections.
#[derive(Clone, Debug)]
pub struct Client {
    hub: carrick_call::client::Client,
    base: Arc<str>,
    token: Option<HeaderValue>,
}

/// An answer of a hub.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

/// Why a hub gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("the hub at {base} cannot be reached")]
pub struct Unreachable {
    base: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl Client {
    /// A client of the hub at `http://host:port` or `https://host:port`.
    ///
    /// * `ca`: a PEM file with the only certificates that are trusted; else those of the system are.
    ///
    /// # Errors
    /// The URL or the token is not one, or there are no certificates to trust.
    pub fn new(base: &str, token: Option<&str>, ca: Option<&Path>) -> anyhow::Result<Self> {
        let base = base.trim_end_matches('/');
        let uri: http::Uri = base.parse().with_context(|| format!("{base:?} is no URL"))?;
        let known = matches!(uri.scheme_str(), Some("http" | "https"));
        if !known || uri.authority().is_none() || uri.path() != "/" {
            bail!("the hub's URL must be http://host:port or https://host:port, not {base:?}");
        }
        let is_tls = uri.scheme_str() == Some("https");
        let token = token.map(|token| format!("Bearer {token}").parse()).transpose();
        let mut token: Option<HeaderValue> = token.context("the token is no header value")?;
        if let Some(token) = &mut token {
            token.set_sensitive(true);
        }
        // Whoever speaks to a hub repeats what it may by itself: a second circuit, or second retries,
        // would only work against that.
        let mut options =
            DependencyOptions { url: base.into(), max_attempts: 1, ..DependencyOptions::default() };
        options.timeout = Duration::from_secs(3600); // each call says its own
        options.breaker.mode = Mode::Observe;
        options.bulkhead.mode = Mode::Observe;
        options.pool.connect_timeout = Duration::from_secs(5);
        options.pool.idle_timeout = Duration::from_secs(30);
        let config = DependencyConfig::new("hub", options)?;
        let mut builder = carrick_call::client::Client::builder(config);
        if is_tls {
            // Certificates are looked for only where they are needed.
            let tls = tls_config(certificates(ca)?, false);
            builder = builder.tls(tls.context("name the certificates with --ca")?);
        }
        Ok(Self { hub: builder.build()?, base: base.into(), token })
    }

    /// Sends a request; resolves with whatever the hub answers within `patience`.
    ///
    /// # Errors
    /// [`Unreachable`] if there is no answer, or too large a one.
    ///
    /// # Cancel safety
    /// The hub may still do what it was asked.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: impl Into<Bytes>,
        patience: Duration,
    ) -> Result<Answer, Unreachable> {
        let mut request = Request::builder().method(method).uri(path);
        request = request.header(CONTENT_TYPE, content_type);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.extension(Deadline::at(Instant::now() + patience));
        let request = request.body(Full::new(body.into()));
        let request = request.map_err(|error| self.unreachable(error))?;
        let answer = self.hub.call(request).await.map_err(|error| match error {
            CallError::Inner(inner) => self.unreachable(inner),
            other => self.unreachable(other),
        })?;
        let (parts, body) = answer.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await;
        let body = body.map_err(|error| self.unreachable(error))?;
        Ok(Answer { status: parts.status, headers: parts.headers, body: body.to_bytes() })
    }

    fn unreachable(
        &self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Unreachable {
        Unreachable { base: self.base.to_string(), source: source.into() }
    }

    /// Sends JSON.
    ///
    /// # Errors
    /// As [`Client::call`].
    ///
    /// # Cancel safety
    /// The hub may still do what it was asked.
    pub async fn post_json(
        &self,
        path: &str,
        body: &serde_json::Value,
        patience: Duration,
    ) -> Result<Answer, Unreachable> {
        self.call(Method::POST, path, "application/json", body.to_string(), patience).await
    }
}

/// The certificates to trust: those of a PEM file, or the system's.
pub(crate) fn certificates(ca: Option<&Path>) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    Ok(match ca {
        Some(path) => CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .with_context(|| format!("--ca: cannot read {}", path.display()))?,
        // Some may be unreadable; only none at all is a fault.
        None => rustls_native_certs::load_native_certs().certs,
    })
}

impl Answer {
    /// The problem that it tells.
    pub fn problem(&self) -> Problem {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| {
            let text = String::from_utf8_lossy(&self.body).chars().take(200).collect::<String>();
            Problem::new(self.status, text)
        })
    }

    /// How long the hub asks to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        let value = self.headers.get(RETRY_AFTER)?.to_str().ok()?;
        parse_retry_after(value, SystemClock.wall())
    }

    fn broker_error(&self) -> BrokerError {
        let problem = Box::new(self.problem());
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                BrokerError::Overloaded {
                    retry_after: self.retry_after().unwrap_or(Duration::from_secs(1)),
                }
            }
            status if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT => {
                BrokerError::Unavailable(problem)
            }
            _ => BrokerError::Refused(problem),
        }
    }
}

impl From<Unreachable> for BrokerError {
    fn from(error: Unreachable) -> Self {
        Self::Unavailable(Box::new(error))
    }
}

/// The longest that a publish may take: past that the relay sends it again, and the hub recognises
/// what it has.
const PATIENCE: Duration = Duration::from_secs(30);

/// A hub is a broker. Settling goes one by one here; a consumer with much to settle is better off in
/// the hub's own process.
#[async_trait]
impl Broker for Client {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            order_per_key: true,
            delay: true,
            attempts: true,
            extend: true,
            dead_letters: true,
            dedupe_window: Some(Duration::from_secs(120)),
            max_event: HARD_LIMIT,
        }
    }

    async fn publish(
        &self,
        topic: &Topic,
        events: Vec<Outgoing>,
    ) -> Result<Published, BrokerError> {
        let delayed = events.iter().any(|outgoing| outgoing.due.is_some());
        if delayed {
            let source = "a batch to a hub cannot hold events with times of their own";
            return Err(BrokerError::Refused(source.into()));
        }
        let bytes: usize = events.iter().map(|outgoing| outgoing.event.as_json().len() + 1).sum();
        let mut body = Vec::with_capacity(bytes + 2);
        body.push(b'[');
        for (index, outgoing) in events.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.extend_from_slice(outgoing.event.as_json());
        }
        body.push(b']');
        let path = format!("/v1/topics/{}/events", topic.name());
        let answer = self.call(Method::POST, &path, BATCH, body, PATIENCE).await?;
        if answer.status != StatusCode::CREATED {
            return Err(answer.broker_error());
        }
        #[derive(serde::Deserialize)]
        struct Told {
            duplicates: usize,
        }
        let told: Told = serde_json::from_slice(&answer.body)
            .map_err(|error| BrokerError::Unavailable(error.into()))?;
        // The hub tells how many it had, not which.
        let mut fresh = vec![true; events.len()];
        fresh.iter_mut().take(told.duplicates).for_each(|fresh| *fresh = false);
        Ok(Published { fresh, position: None })
    }

    async fn lease(
        &self,
        topic: &Topic,
        group: &Group,
        request: LeaseRequest,
    ) -> Result<Vec<Delivery>, BrokerError> {
        use carrick_core::{config::duration::format, event::Event};
        #[derive(serde::Deserialize)]
        struct Told<'a> {
            #[serde(borrow)]
            deliveries: Vec<One<'a>>,
        }
        #[derive(serde::Deserialize)]
        struct One<'a> {
            lease: String,
            attempt: u32,
            #[serde(borrow)]
            event: &'a serde_json::value::RawValue,
        }
        let before = tokio::time::Instant::now();
        let body = serde_json::json!({
            "max": request.max, "wait": format(request.wait), "lease": format(request.lease),
        });
        let path = format!("/v1/topics/{}/groups/{group}/lease", topic.name());
        let answer = self.post_json(&path, &body, request.wait + PATIENCE).await?;
        if answer.status != StatusCode::OK {
            return Err(answer.broker_error());
        }
        let unreadable =
            |error: Box<dyn std::error::Error + Send + Sync>| BrokerError::Unavailable(error);
        let told: Told<'_> =
            serde_json::from_slice(&answer.body).map_err(|error| unreadable(error.into()))?;
        let delivery = |one: One<'_>| {
            let event = Event::parse(answer.body.slice_ref(one.event.get().as_bytes()))
                .map_err(|error| unreadable(error.into()))?;
            Ok(Delivery {
                lease: LeaseId(one.lease),
                fence: None,
                attempt: one.attempt,
                first_delivered_at: SystemClock.wall(),
                expires_at: before + request.lease,
                event,
            })
        };
        told.deliveries.into_iter().map(delivery).collect()
    }

    async fn settle(
        &self,
        verdicts: Vec<(LeaseId, Verdict)>,
    ) -> Result<Vec<Verdicted>, BrokerError> {
        use carrick_core::config::duration::format;
        let mut answers = Vec::with_capacity(verdicts.len());
        for (lease, verdict) in verdicts {
            let leases = [&lease.0];
            let (verb, body) = match verdict {
                Verdict::Ack => ("ack", serde_json::json!({ "leases": leases })),
                Verdict::Nack { delay, counted } => (
                    "nack",
                    serde_json::json!({ "leases": leases, "delay": format(delay), "counted": counted }),
                ),
                Verdict::Extend { lease } => {
                    ("extend", serde_json::json!({ "leases": leases, "lease": format(lease) }))
                }
                Verdict::DeadLetter { cause } => {
                    ("nack", serde_json::json!({ "leases": leases, "dead": true, "reason": cause }))
                }
            };
            let answer = self.post_json(&format!("/v1/leases/{verb}"), &body, PATIENCE).await?;
            answers.push(match answer.status {
                StatusCode::OK => Verdicted::Done,
                StatusCode::CONFLICT => Verdicted::Stale,
                _ => return Err(answer.broker_error()),
            });
        }
        Ok(answers)
    }
}
