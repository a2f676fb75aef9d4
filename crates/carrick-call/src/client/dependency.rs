//! A dependency as it is configured, and the arithmetic of that.

use std::time::Duration;

use carrick_core::config::{Faults, InvalidConfig, duration};
use http::{Uri, uri::Authority};
use serde::{Deserialize, Deserializer};

use super::{PoolConfig, PoolOptions};
use crate::{
    balance::{BalanceConfig, BalanceOptions},
    breaker::{BreakerConfig, BreakerOptions},
    budget::{BudgetConfig, BudgetOptions},
    bulkhead::{BulkheadConfig, BulkheadOptions},
    deadline::{StreamConfig, StreamOptions},
    fault::{FaultConfig, FaultOptions},
    hedge::{HedgeConfig, HedgeOptions},
    outlier::{OutlierConfig, OutlierOptions, may_eject},
    queue::{QueueConfig, QueueOptions},
    retry::{RetryConfig, RetryOptions},
    throttle::{ThrottleConfig, ThrottleOptions},
};

/// A dependency as an operator writes it, in `[dependency.NAME]`; becomes a [`DependencyConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct DependencyOptions {
    /// Where it is: `http://host[:port]` or `https://host[:port]`.
    pub url: String,
    /// Its hosts as `host:port`, if they are not to be found by the name in `url`. Default none.
    pub hosts: Vec<String>,
    /// Look the name up every so often and use all its addresses, 1 s to 1 h. Default: never, the name
    /// is resolved with each connection.
    #[serde(deserialize_with = "optional")]
    pub dns_interval: Option<Duration>,
    /// How long a call may take in all, 1 ms to 1 h. Default 2 s.
    #[serde(with = "duration")]
    pub timeout: Duration,
    /// How long one attempt may take, 1 ms to `timeout`; the last that is allowed may take what is
    /// left. Default: what is left.
    #[serde(deserialize_with = "optional")]
    pub per_try_timeout: Option<Duration>,
    /// Until when answers that are streams may go on, whose heads alone come under `timeout`.
    pub stream: StreamOptions,
    /// Whether each answer tells in a header why its call went as it did (`x-carrick-explain`). Default
    /// false: it names hosts.
    pub explain: bool,
    /// Attempts, the first among them, 1..=20. Default 3.
    pub max_attempts: u32,
    /// Waits and bodies of retries.
    pub retry: RetryOptions,
    /// What retries are paid from.
    pub budget: BudgetOptions,
    /// The circuit.
    pub breaker: BreakerOptions,
    /// Which hosts are left out.
    pub outlier: OutlierOptions,
    /// How hosts are chosen.
    pub balance: BalanceOptions,
    /// Asks less of it when it refuses often. Default never.
    pub throttle: Option<ThrottleOptions>,
    /// Calls at a time.
    pub bulkhead: BulkheadOptions,
    /// Whether, and for how long, a call waits for a place of the bulkhead. Default never.
    pub queue: Option<QueueOptions>,
    /// Connections.
    pub pool: PoolOptions,
    /// Whether and when slow calls are made twice. Default never.
    pub hedge: Option<HedgeOptions>,
    /// What goes wrong on purpose, in each attempt. Default nothing.
    pub fault: Option<FaultOptions>,
}

fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    duration::deserialize(from).map(Some)
}

impl Default for DependencyOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            hosts: Vec::new(),
            dns_interval: None,
            timeout: Duration::from_secs(2),
            per_try_timeout: None,
            stream: StreamOptions::default(),
            explain: false,
            max_attempts: 3,
            retry: RetryOptions::default(),
            budget: BudgetOptions::default(),
            breaker: BreakerOptions::default(),
            outlier: OutlierOptions::default(),
            balance: BalanceOptions::default(),
            throttle: None,
            bulkhead: BulkheadOptions::default(),
            queue: None,
            pool: PoolOptions::default(),
            hedge: None,
            fault: None,
        }
    }
}

/// A dependency that can be called.
///
/// ```
/// # use std::time::Duration;
/// # use carrick_call::client::{DependencyConfig, DependencyOptions};
/// let options = DependencyOptions {
///     url: "http://127.0.0.1:9000".to_owned(),
///     per_try_timeout: Some(Duration::from_millis(700)),
///     ..DependencyOptions::default()
/// };
/// let config = DependencyConfig::new("pricing", options)?;
/// let sum = &config.sums()[0];
/// assert!(!sum.fits);
/// assert_eq!(sum.text, "3 tries × 700ms = 2s100ms > timeout 2s");
/// # Ok::<(), carrick_core::config::InvalidConfig>(())
/// ```
#[derive(Clone, Debug)]
pub struct DependencyConfig {
    pub(super) name: String,
    pub(super) is_tls: bool,
    pub(super) authority: Authority,
    pub(super) port: u16,
    pub(super) hosts: Vec<String>,
    pub(super) dns_interval: Option<Duration>,
    pub(super) timeout: Duration,
    pub(super) per_try_timeout: Option<Duration>,
    pub(super) stream: StreamConfig,
    pub(super) explain: bool,
    pub(super) retry: RetryConfig,
    pub(super) budget: BudgetConfig,
    pub(super) breaker: BreakerConfig,
    pub(super) outlier: OutlierConfig,
    outlier_options: OutlierOptions,
    pub(super) balance: BalanceConfig,
    pub(super) throttle: Option<ThrottleConfig>,
    pub(super) bulkhead: BulkheadConfig,
    pub(super) queue: Option<QueueConfig>,
    pub(super) pool: PoolConfig,
    pub(super) hedge: Option<HedgeConfig>,
    pub(super) fault: Option<FaultConfig>,
}

/// A sum over several settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sum {
    /// What it is about.
    pub name: &'static str,
    /// The sum, with its numbers.
    pub text: String,
    /// Whether it comes out.
    pub fits: bool,
}

impl DependencyConfig {
    /// Checks each setting of a dependency. Whether they fit each other is told by
    /// [`DependencyConfig::sums`].
    ///
    /// # Errors
    /// All faults at once, each with its key, range and value.
    pub fn new(name: &str, options: DependencyOptions) -> Result<Self, InvalidConfig> {
        let DependencyOptions {
            url,
            hosts,
            dns_interval,
            timeout,
            per_try_timeout,
            stream,
            explain,
            max_attempts,
            retry,
            budget,
            breaker,
            outlier,
            balance,
            throttle,
            bulkhead,
            queue,
            pool,
            hedge,
            fault,
        } = options;
        let mut faults = Faults::default();
        let text = duration::format;
        let (ms, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
        let target = target(&url);
        faults.unless_value(
            target.is_some(),
            "url",
            "http://host[:port] or https://host[:port]",
            format!("{url:?}"),
        );
        let are_hosts = hosts.iter().all(|host| split(host).is_some());
        faults.unless_value(are_hosts, "hosts", "host:port each", format!("{hosts:?}"));
        let bound = dns_interval.is_none_or(|every| (1000 * ms..=hour).contains(&every));
        faults.unless_value(
            bound,
            "dns-interval",
            "1s to 1h",
            text(dns_interval.unwrap_or_default()),
        );
        faults.unless_value((ms..=hour).contains(&timeout), "timeout", "1ms to 1h", text(timeout));
        if let Some(span) = per_try_timeout {
            let range = format!("1ms to timeout ({})", text(timeout));
            faults.unless_value(
                (ms..=timeout).contains(&span),
                "per-try-timeout",
                &range,
                text(span),
            );
        }
        faults.unless_value(
            (1..=20).contains(&max_attempts),
            "max-attempts",
            "1..=20",
            max_attempts,
        );
        let retry = RetryOptions { max_attempts: max_attempts.clamp(1, 20), ..retry };
        let outlier_options = outlier.clone();
        let stream = faults.take("stream", StreamConfig::try_from(stream));
        let retry = faults.take("retry", RetryConfig::try_from(retry));
        let budget = faults.take("budget", BudgetConfig::try_from(budget));
        let breaker = faults.take("breaker", BreakerConfig::try_from(breaker));
        let outlier = faults.take("outlier", OutlierConfig::try_from(outlier));
        let balance = faults.take("balance", BalanceConfig::try_from(balance));
        let throttle =
            throttle.and_then(|one| faults.take("throttle", ThrottleConfig::try_from(one)));
        let bulkhead = faults.take("bulkhead", BulkheadConfig::try_from(bulkhead));
        let queue = queue.and_then(|queue| faults.take("queue", QueueConfig::try_from(queue)));
        let pool = faults.take("pool", PoolConfig::try_from(pool));
        let hedge = hedge.and_then(|hedge| faults.take("hedge", HedgeConfig::try_from(hedge)));
        let fault = fault.and_then(|fault| faults.take("fault", FaultConfig::try_from(fault)));
        faults.into_result(())?;
        let (is_tls, authority, port) = target.expect("checked");
        Ok(Self {
            name: name.to_owned(),
            is_tls,
            authority,
            port,
            hosts,
            dns_interval,
            timeout,
            per_try_timeout,
            stream: stream.expect("checked"),
            explain,
            retry: retry.expect("checked"),
            budget: budget.expect("checked"),
            breaker: breaker.expect("checked"),
            outlier: outlier.expect("checked"),
            outlier_options,
            balance: balance.expect("checked"),
            throttle,
            bulkhead: bulkhead.expect("checked"),
            queue,
            pool: pool.expect("checked"),
            hedge,
            fault,
        })
    }

    /// The dependency's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What follows from the settings together; what does not fit is a fault.
    pub fn sums(&self) -> Vec<Sum> {
        let text = duration::format;
        let timeout = self.timeout;
        let tries = self.retry.max_attempts();
        let backoff = self.retry.worst_backoff();
        let mut sums = Vec::new();
        let mut sum = |name, text: String, fits| sums.push(Sum { name, text, fits });
        let relation = |fits: bool| if fits { "≤" } else { ">" };
        if let Some(one) = self.per_try_timeout {
            let all = one.saturating_mul(tries);
            let fits = all <= timeout;
            let line = format!(
                "{tries} tries × {} = {} {} timeout {}",
                text(one),
                text(all),
                relation(fits),
                text(timeout)
            );
            sum("tries", line, fits);
            // The last try may take what is left: it must be worth it.
            let before = one.saturating_mul(tries - 1).saturating_add(backoff);
            let all = before.saturating_add(self.retry.min_useful());
            let fits = all <= timeout;
            let line = format!(
                "{} tries × {} + waits of at most {} + {} for the last = {} {} timeout {}",
                tries - 1,
                text(one),
                text(backoff),
                text(self.retry.min_useful()),
                text(all),
                relation(fits),
                text(timeout)
            );
            sum("last try", line, fits);
        } else {
            let all = backoff.saturating_add(self.retry.min_useful().saturating_mul(tries));
            let fits = all <= timeout;
            let line = format!(
                "waits of at most {} + {tries} tries × {} at least = {} {} timeout {}",
                text(backoff),
                text(self.retry.min_useful()),
                text(all),
                relation(fits),
                text(timeout)
            );
            sum("tries", line, fits);
        }
        let one = self.per_try_timeout.unwrap_or(timeout);
        let connect = self.pool.connect_timeout();
        let fits = connect <= timeout;
        let line = format!(
            "a connection may take {} {} timeout {}",
            text(connect),
            relation(fits),
            text(timeout)
        );
        sum("connect", line, fits);
        let useful = self.retry.min_useful();
        let fits = useful <= one;
        let line = format!(
            "{} is the least useful time {} {} of one try",
            text(useful),
            relation(fits),
            text(one)
        );
        sum("least time", line, fits);
        if let Some(queue) = &self.queue {
            let wait = queue.options().max_wait;
            let all = wait.saturating_add(useful);
            let fits = all <= timeout;
            let line = format!(
                "a wait for a place of at most {} + {} for the call = {} {} timeout {}",
                text(wait),
                text(useful),
                text(all),
                relation(fits),
                text(timeout)
            );
            sum("queue", line, fits);
        }
        let penalty = self.balance.options().failure_penalty;
        let fits = penalty >= one;
        let line = format!(
            "a failure counts as {} {} {} of one try",
            text(penalty),
            if fits { "≥" } else { "<" },
            text(one)
        );
        sum("failure penalty", line, fits);
        let hosts = self.hosts.len().max(1);
        let most = (0..=hosts)
            .take_while(|out| *out == 0 || may_eject(&self.outlier_options, hosts, out - 1))
            .last();
        let line = format!("of {hosts} host(s) {} may be left out at a time", most.unwrap_or(0));
        sum("outliers", line, true);
        let budget = self.budget.options();
        let amplified = 1.0 + budget.ratio;
        let line = format!(
            "at most {amplified:.2} × the load by retries, and {} retries a second on top",
            budget.floor
        );
        sum("retry load", line, true);
        sums
    }
}

/// The scheme, authority and port of a URL without a path.
fn target(url: &str) -> Option<(bool, Authority, u16)> {
    let uri: Uri = url.parse().ok()?;
    let is_tls = match uri.scheme_str()? {
        "http" => false,
        "https" => true,
        _ => return None,
    };
    let authority = uri.authority()?;
    let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
    if !is_bare || authority.as_str().contains('@') || authority.host().is_empty() {
        return None;
    }
    let port = authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    Some((is_tls, authority.clone(), port))
}

/// Host and port of an address as it is written.
pub(super) fn split(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok()?;
    (!host.is_empty()).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(url: &str) -> DependencyOptions {
        DependencyOptions { url: url.to_owned(), ..DependencyOptions::default() }
    }

    fn parse(text: &str) -> DependencyOptions {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_dependency_is_read_with_a_table_for_each_policy() {
        let options = parse(
            r#"
            url = "https://pricing.internal"
            hosts = ["10.0.0.1:8443", "[::1]:8443"]
            timeout = "2s"
            per-try-timeout = "600ms"
            max-attempts = 3
            [breaker]
            failure-rate = 0.25
            [pool]
            http2 = true
            [queue]
            length = 8
            [throttle]
            k = 1.5
            [fault]
            abort = { share = 0.01, status = 503 }
            "#,
        );
        let config = DependencyConfig::new("pricing", options).unwrap();
        assert_eq!((config.is_tls, config.port), (true, 443));
        assert!(config.sums().iter().all(|sum| sum.fits), "{:#?}", config.sums());
        let unknown: Result<DependencyOptions, _> = toml::from_str("max-retries = 2");
        assert!(unknown.unwrap_err().to_string().contains("max-retries"));
    }

    #[test]
    fn all_faults_are_told_with_their_tables() {
        let options = parse(
            r#"
            url = "ftp://x"
            hosts = ["nowhere"]
            timeout = "0s"
            max-attempts = 0
            [breaker]
            failure-rate = 2.0
            [budget]
            cap = 0
            [throttle]
            k = 0.5
            [queue]
            length = 0
            [fault]
            max-active = 0
            "#,
        );
        let faults = DependencyConfig::new("pricing", options).unwrap_err();
        let keys: Vec<_> = faults.faults().iter().map(|fault| fault.key.as_str()).collect();
        let expected = [
            "url",
            "hosts",
            "timeout",
            "max-attempts",
            "budget.cap",
            "breaker.failure-rate",
            "throttle.k",
            "queue.length",
            "fault.max-active",
        ];
        assert_eq!(keys, expected);
        for url in ["", "http://", "http://h/path", "http://u:p@h", "h:80", "http://h?x"] {
            assert!(DependencyConfig::new("x", self::options(url)).is_err(), "{url:?}");
        }
    }

    #[test]
    fn a_wait_in_line_must_leave_time_for_the_call() {
        let mut options = options("http://h");
        let max_wait = Duration::from_secs(2);
        options.queue = Some(QueueOptions { max_wait, ..QueueOptions::default() });
        let config = DependencyConfig::new("pricing", options).unwrap();
        let wrong: Vec<_> = config.sums().into_iter().filter(|sum| !sum.fits).collect();
        let told = "a wait for a place of at most 2s + 50ms for the call = 2s50ms > timeout 2s";
        assert_eq!((wrong.len(), wrong[0].text.as_str()), (1, told));
    }

    #[test]
    fn seven_hundred_milliseconds_three_times_do_not_fit_two_seconds() {
        let mut options = options("http://h");
        options.per_try_timeout = Some(Duration::from_millis(700));
        let config = DependencyConfig::new("pricing", options.clone()).unwrap();
        let wrong: Vec<_> = config.sums().into_iter().filter(|sum| !sum.fits).collect();
        assert_eq!(wrong[0].text, "3 tries × 700ms = 2s100ms > timeout 2s");
        options.max_attempts = 2;
        let config = DependencyConfig::new("pricing", options).unwrap();
        assert!(config.sums().iter().all(|sum| sum.fits), "{:#?}", config.sums());
    }
}
