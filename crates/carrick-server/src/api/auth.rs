//! Who asks, and what they may do.

use std::sync::Arc;

use axum::http::{
    HeaderMap, StatusCode,
    header::{AUTHORIZATION, HOST, ORIGIN},
};
use carrick_core::name::{DEFAULT_TENANT, Topic};
use carrick_edge::feed::matches;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::{Answer, Refusal};
use crate::config::{HubConfig, Scope, Token};

/// Checks tokens. Without any, everybody is tenant `default` and may do everything, which is why
/// such a hub listens on loopback only.
#[derive(Debug)]
pub(super) struct Guard {
    tokens: Vec<Known>,
    /// Nobody but this machine's own programs is meant to ask.
    local: bool,
    /// Origins of pages that may ask, besides the hub's own.
    origins: Vec<String>,
}

/// A token, and its places among the requests that wait.
#[derive(Debug)]
struct Known {
    token: Token,
    waits: Arc<Semaphore>,
}

/// A caller that was recognised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller<'a>(Option<&'a Token>);

impl Guard {
    pub(super) fn new(config: &HubConfig, loopback: bool) -> Self {
        let known = |token: &Token| Known {
            token: token.clone(),
            waits: Arc::new(Semaphore::new(config.limits.waits_per_token)),
        };
        let tokens: Vec<_> = config.tokens.iter().map(known).collect();
        let origins = config.origins.clone();
        Self { local: loopback && tokens.is_empty(), tokens, origins }
    }

    /// A place among the requests that wait with the caller's token; there is no limit without one.
    pub(super) fn place(&self, headers: &HeaderMap) -> Answer<Option<OwnedSemaphorePermit>> {
        let Some(known) = self.known(headers)? else { return Ok(None) };
        match Arc::clone(&known.waits).try_acquire_owned() {
            Ok(permit) => Ok(Some(permit)),
            Err(_) => Err(Refusal::busy("too many requests wait with this token", 5)),
        }
    }

    /// Whether a page of this origin may read answers: one that is listed.
    pub(super) fn is_listed(&self, origin: &str) -> bool {
        self.origins.iter().any(|listed| listed == origin)
    }

    /// Refuses a page that is neither of the hub's own origin nor listed, whatever token it has. Who
    /// sends no origin is no page.
    pub(super) fn origin(&self, headers: &HeaderMap) -> Answer<()> {
        let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
        let origin = origin.to_str().unwrap_or("?");
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if self.is_listed(origin) || host.is_some_and(|host| is_own(origin, host)) {
            return Ok(());
        }
        metrics::counter!("carrick_hub_forbidden_total").increment(1);
        let detail = "pages of this origin are refused (origins)";
        Err(Refusal::new(StatusCode::FORBIDDEN, detail))
    }

    /// Recognises a caller by its bearer token.
    pub(super) fn caller(&self, headers: &HeaderMap) -> Answer<Caller<'_>> {
        Ok(Caller(self.known(headers)?.map(|known| &known.token)))
    }

    fn known(&self, headers: &HeaderMap) -> Answer<Option<&Known>> {
        if self.tokens.is_empty() {
            return match self.local && self.is_from_a_web_page(headers) {
                true => Err(foreign()),
                false => Ok(None),
            };
        }
        let unknown = || {
            metrics::counter!("carrick_hub_unauthorized_total").increment(1);
            Refusal::new(StatusCode::UNAUTHORIZED, "a bearer token is needed")
        };
        let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, token) = value.and_then(|value| value.split_once(' ')).ok_or_else(unknown)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(unknown());
        }
        let digest = Sha256::digest(token.trim().as_bytes());
        // Every token is compared, in constant time: how long it takes tells nothing.
        let mut found = None;
        for known in &self.tokens {
            if bool::from(known.token.digest.ct_eq(digest.as_slice())) {
                found = Some(known);
            }
        }
        found.map(Some).ok_or_else(unknown)
    }

    /// Whether a page that somebody visits sent this: from another origin that is not listed, or
    /// after its own name was made to point here (DNS rebinding).
    fn is_from_a_web_page(&self, headers: &HeaderMap) -> bool {
        let rebound = headers.get(HOST).is_some_and(|host| !host.to_str().is_ok_and(is_local));
        rebound || self.origin(headers).is_err()
    }
}

impl Caller<'_> {
    pub(super) fn tenant(&self) -> &str {
        self.0.map_or(DEFAULT_TENANT, |token| &token.tenant)
    }

    /// The topic of that name, if the caller may do this with it.
    pub(super) fn topic(&self, name: &str, scope: Scope) -> Answer<Topic> {
        let topic = Topic::in_tenant(self.tenant(), name)?;
        self.may(scope, name)?;
        Ok(topic)
    }

    /// Whether the caller may do something that is on no topic in particular.
    pub(super) fn any(&self, scope: Scope) -> Answer<()> {
        match self.0 {
            Some(token) if !token.scopes.contains(&scope) => Err(refused(token, scope)),
            _ => Ok(()),
        }
    }

    pub(super) fn sees(&self, topic: &str) -> bool {
        let sees = |token: &Token| token.topics.iter().any(|pattern| matches(pattern, topic));
        self.0.is_none_or(sees)
    }

    fn may(&self, scope: Scope, topic: &str) -> Answer<()> {
        self.any(scope)?;
        match self.0 {
            Some(token) if !self.sees(topic) => Err(refused(token, scope)),
            _ => Ok(()),
        }
    }
}

fn refused(token: &Token, scope: Scope) -> Refusal {
    metrics::counter!("carrick_hub_forbidden_total").increment(1);
    let detail = format!("token {:?} may not {scope:?} here", token.name).to_lowercase();
    Refusal::new(StatusCode::FORBIDDEN, detail)
}

fn foreign() -> Refusal {
    metrics::counter!("carrick_hub_forbidden_total").increment(1);
    let detail = "a hub without tokens answers this machine's own programs: pages of other origins, \
                  and host names of the internet, are refused";
    Refusal::new(StatusCode::FORBIDDEN, detail)
}

/// Whether an origin is that of the host that was asked. TLS may end before the hub, so the scheme
/// does not tell.
fn is_own(origin: &str, host: &str) -> bool {
    origin.split_once("://").is_some_and(|(_, authority)| authority == host)
}

/// An address, or a name that nobody can buy.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => return rest.contains(']'),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.');
    name.parse::<std::net::Ipv4Addr>().is_ok()
        || !name.contains('.')
        || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        let digest = Sha256::digest(b"secret").into();
        let topics = vec!["orders".to_owned(), "billing.*".to_owned()];
        let (name, tenant) = ("shop".to_owned(), "acme".to_owned());
        let token = Token { name, digest, tenant, scopes: vec![Scope::Publish], topics };
        let waits = Arc::new(Semaphore::new(1));
        Guard { tokens: vec![Known { token, waits }], local: false, origins: Vec::new() }
    }

    fn ask(guard: &Guard, header: &str, topic: &str, scope: Scope) -> Result<String, u16> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, header.parse().unwrap());
        let topic = guard.caller(&headers).and_then(|caller| caller.topic(topic, scope));
        topic.map(|topic| topic.to_string()).map_err(|refusal| refusal.problem().status)
    }

    #[test]
    fn a_token_opens_its_tenants_topics_for_its_scopes_and_nothing_else() {
        let guard = guard();
        let check = |header: &str, topic: &str, scope| ask(&guard, header, topic, scope);
        assert_eq!(check("Bearer secret", "orders", Scope::Publish), Ok("acme/orders".to_owned()));
        assert!(check("bearer secret", "billing.x", Scope::Publish).is_ok());
        assert_eq!(check("Bearer secret", "orders2", Scope::Publish), Err(403));
        assert_eq!(check("Bearer secret", "orders", Scope::Consume), Err(403));
        assert_eq!(check("Bearer Secret", "orders", Scope::Publish), Err(401));
        assert_eq!(check("Basic secret", "orders", Scope::Publish), Err(401));
        assert!(guard.caller(&HeaderMap::new()).is_err());
    }

    #[test]
    fn a_hub_without_tokens_does_not_answer_web_pages() {
        let guard = Guard {
            tokens: Vec::new(),
            local: true,
            origins: vec!["https://listed.example".to_owned()],
        };
        let check = |host: &str, origin: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, host.parse().unwrap());
            if let Some(origin) = origin {
                headers.insert(ORIGIN, origin.parse().unwrap());
            }
            guard.caller(&headers).is_ok()
        };
        for host in ["127.0.0.1:7070", "[::1]:7070", "localhost:7070", "hub", "a.localhost"] {
            assert!(check(host, None), "{host}");
            assert!(check(host, Some(&format!("http://{host}"))), "its own page at {host}");
            assert!(!check(host, Some("https://shop.example")), "another page at {host}");
            assert!(check(host, Some("https://listed.example")), "a page that is listed at {host}");
            assert!(!check(host, Some("http://listed.example")), "another scheme at {host}");
            assert!(!check(host, Some("https://evil-listed.example")), "{host}");
            assert!(!check(host, Some("null")), "{host}");
        }
        assert!(!check("rebound.example:7070", None));
        assert!(!check("127.0.0.1.rebound.example", None));
    }
}
