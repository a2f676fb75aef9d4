//! The client of one dependency: every policy in its one right order, over connections of its own.
//!
//! A [`DependencyConfig`] says where the dependency is and how it is to be treated; a [`Client`] calls
//! it. The policies are those of the [`stack`](crate::stack), and so is their order. An answer's body
//! is part of its call: it comes under the same deadline, holds the call's places until it has been
//! read, and a gRPC status in its trailers is the verdict that the policies learn from.
//!
//! Each host has connections of its own (`pool`), HTTP/1.1 or HTTP/2, plain or TLS.

mod body;
mod channel;
mod config;
mod connect;
mod dependency;
mod pool;
mod service;

use std::{error::Error as StdError, fmt, io, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, uri::Scheme};
use http_body::Body;
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use rustls::ClientConfig;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use self::{
    body::AtEnd,
    connect::{Target, Tls},
    pool::Pool,
    service::{HostService, Hosted, Judge, Named, Whole},
};
pub use self::{
    body::{AnswerBody, AnswerError},
    channel::{Channel, ChannelBody},
    config::{PoolConfig, PoolOptions},
    connect::{AnyAddress, Dial, tls_config},
    dependency::{DependencyConfig, DependencyOptions, Sum},
    pool::TransportError,
};
use crate::{
    CallError,
    balance::{
        Balancer, Endpoint,
        discovery::{self, Discovery},
    },
    breaker::{Breaker, State},
    budget::Budget,
    bulkhead::Bulkhead,
    deadline::Timer,
    explain::{EXPLAIN, Explain},
    fault::{Fault, FaultService},
    hedge::{Hedge, HedgeService},
    outlier::Detector,
    retry::ReplayBody,
    stack::{Policies, Stack},
    throttle::Throttle,
};

type BoxError = Box<dyn StdError + Send + Sync>;
type RequestBody = ReplayBody<UnsyncBoxBody<Bytes, SourceError>>;

/// What the body of a request failed with.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct SourceError(BoxError);

/// Calls one dependency. Clones share its connections and its policies.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use carrick_call::client::{Client, DependencyConfig, DependencyOptions};
/// use http_body_util::{BodyExt, Empty};
///
/// let options = DependencyOptions { url: "http://127.0.0.1:9000".into(), ..Default::default() };
/// let pricing = Client::new(DependencyConfig::new("pricing", options)?)?;
/// let request = http::Request::get("/v1/prices/4471").body(Empty::<bytes::Bytes>::new())?;
/// let answer = pricing.call(request).await?;
/// println!("{} {:?}", answer.status(), answer.into_body().collect().await?.to_bytes());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    service: HedgeService<Stack<Hosted, Judge, AtEnd>, Whole>,
    replay: usize,
    explains: bool,
    detector: Detector,
    _discovery: Option<Arc<Discovery>>,
}

/// Makes a [`Client`] with something other than the defaults.
#[derive(Debug)]
pub struct Builder {
    config: DependencyConfig,
    dial: Arc<dyn Dial>,
    tls: Option<Arc<ClientConfig>>,
}

impl Client {
    /// A client that dials whatever the dependency's name resolves to. For `https`, give it the
    /// certificates to trust: [`Client::builder`].
    ///
    /// # Errors
    /// If the dependency wants TLS.
    ///
    /// # Panics
    /// Outside a runtime, if the dependency is looked up at intervals.
    pub fn new(config: DependencyConfig) -> io::Result<Self> {
        Self::builder(config).build()
    }

    /// A client, step by step.
    pub fn builder(config: DependencyConfig) -> Builder {
        Builder { config, dial: Arc::new(AnyAddress), tls: None }
    }

    /// Makes a call. The request's URI needs a path only; scheme and authority are the dependency's.
    ///
    /// A [`Deadline`](carrick_core::deadline::Deadline) in the request's extensions, or else of the
    /// context in scope, bounds it, and never beyond the dependency's own timeout. An
    /// [`Explain`] there is told what was decided, and a
    /// [`Priority`](crate::bulkhead::Priority) says who goes first where calls wait for a place.
    ///
    /// # Errors
    /// [`CallError::Refused`] if nothing was sent, [`CallError::Expired`] if time ran out, and
    /// [`CallError::Inner`] if no host gave an answer. An answer of any status is no error.
    ///
    /// # Cancel safety
    /// Dropping it gives back what the call holds; what was sent may still take effect.
    pub async fn call<B>(
        &self,
        request: Request<B>,
    ) -> Result<Response<AnswerBody>, CallError<TransportError>>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let replay = self.replay;
        let mut request = request.map(|body| {
            if body.is_end_stream() {
                return ReplayBody::whole(Bytes::new());
            }
            let body = body.map_err(|error| SourceError(error.into()));
            let body = UnsyncBoxBody::new(body);
            ReplayBody::new(body, replay)
        });
        let explain = self.explains.then(|| {
            let explain = || Explain::new(Instant::now());
            request.extensions_mut().get_or_insert_with(explain).clone()
        });
        let mut answer = self.service.clone().call(request).await?;
        if let Some(explain) = explain {
            answer.headers_mut().insert(EXPLAIN, explain.to_header());
        }
        Ok(answer)
    }

    fn policies(&self) -> &Policies<Hosted> {
        self.service.inner().policies()
    }

    /// The policies, as they are now.
    pub fn breaker(&self) -> &Breaker {
        &self.policies().breaker
    }

    /// What retries are paid from.
    pub fn budget(&self) -> &Budget {
        &self.policies().budget
    }

    /// Calls at a time.
    pub fn bulkhead(&self) -> &Bulkhead {
        &self.policies().bulkhead
    }

    /// Which hosts are left out.
    pub fn outliers(&self) -> &Detector {
        &self.detector
    }

    /// The hosts, with what is known of them.
    pub fn hosts(&self) -> Vec<(String, u32)> {
        let hosts = self.policies().balancer.hosts();
        hosts.iter().map(|host| (host.endpoint().address.to_string(), host.pending())).collect()
    }

    /// Replaces the hosts.
    pub fn set_hosts(&self, hosts: Vec<Endpoint>) {
        self.policies().balancer.update(hosts, Instant::now());
    }
}

impl Builder {
    /// Opens connections with `dial`: a guarded one, where a user supplied the URL.
    #[must_use]
    pub fn dial(self, dial: Arc<dyn Dial>) -> Self {
        Self { dial, ..self }
    }

    /// Settings of TLS: see [`tls_config`].
    #[must_use]
    pub fn tls(self, tls: Arc<ClientConfig>) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// The client.
    ///
    /// # Errors
    /// If the dependency wants TLS and no settings of it were given, or its name cannot be one of a
    /// certificate.
    ///
    /// # Panics
    /// As [`Client::new`].
    pub fn build(self) -> io::Result<Client> {
        let Self { config, dial, tls } = self;
        let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let host = config.authority.host();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let tls = if config.is_tls {
            let Some(tls) = tls else {
                return Err(wrong(format!("{}: https needs certificates to trust", config.name)));
            };
            let name = host.to_owned().try_into();
            let name = name.map_err(|_| wrong(format!("{host} can be in no certificate")))?;
            Some(Tls { connector: TlsConnector::from(tls), name })
        } else {
            None
        };
        let scheme = if config.is_tls { Scheme::HTTPS } else { Scheme::HTTP };
        let value = HeaderValue::from_str(config.authority.as_str());
        let name = Arc::new(Named {
            scheme,
            authority: config.authority.clone(),
            host: value.map_err(|_| wrong(format!("{host} can be in no header")))?,
        });
        let detector = Detector::new(&config.name, config.outlier.clone());
        let make = {
            let pool = config.pool.clone();
            let fault = config.fault.map(|fault| Fault::new(&config.name, fault));
            let (port, patience) = (config.port, config.pool.connect_timeout());
            move |endpoint: &Endpoint| {
                let address = dependency::split(&endpoint.address);
                let (host, port) = address.unwrap_or((&endpoint.address, port));
                let (host, tls, dial) = (host.to_owned(), tls.clone(), Arc::clone(&dial));
                let target = Target { host, port, tls, dial, patience };
                let pool = Pool::new(target, pool.clone());
                let service = HostService { pool, name: Arc::clone(&name) };
                FaultService::maybe(service, fault.clone())
            }
        };
        let balancer =
            Balancer::with(&config.name, config.balance.clone(), Some(detector.clone()), make);
        let hosts = if config.hosts.is_empty() {
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            vec![Endpoint::new(format!("{host}:{}", config.port))]
        } else {
            config.hosts.iter().map(|host| Endpoint::new(host.as_str())).collect()
        };
        balancer.update(hosts, Instant::now());
        let discovery = config
            .dns_interval
            .filter(|_| config.hosts.is_empty())
            .map(|every| Arc::new(discovery::dns(&balancer, host.to_owned(), config.port, every)));
        let (replay, explains) = (config.retry.replay(), config.explain);
        let policies = Policies {
            timeout: config.timeout,
            per_try_timeout: config.per_try_timeout,
            retry: config.retry,
            budget: Budget::new(&config.name, config.budget),
            balancer,
            throttle: config.throttle.map(|throttle| Throttle::new(&config.name, throttle)),
            bulkhead: Bulkhead::new(&config.name, config.bulkhead),
            queue: config.queue,
            breaker: Breaker::new(&config.name, config.breaker),
            stream: config.stream,
            timer: Timer::new(),
            name: config.name,
        };
        let hedge = config.hedge.map(|hedge| {
            let breaker = policies.breaker.clone();
            let is_well = Box::new(move || breaker.state() == State::Closed);
            let (timer, budget) = (policies.timer.clone(), policies.budget.clone());
            Hedge::with(&policies.name, hedge, timer, Some(budget), Some(is_well))
        });
        let stack = Stack::finishing(policies, Judge, AtEnd);
        let service = HedgeService::maybe(stack, hedge, Whole);
        Ok(Client { service, replay, explains, detector, _discovery: discovery })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.service.inner().fmt(f)
    }
}
