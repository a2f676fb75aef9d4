//! Who asks, and what they may do.

use axum::http::{
    HeaderMap, StatusCode,
    header::{AUTHORIZATION, HOST, ORIGIN},
};
use carrick_core::name::{DEFAULT_TENANT, Topic};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use super::answer::{Answer, Refusal};
use crate::config::{HubConfig, Scope, Token};

/// Checks tokens. Without any, everybody is tenant `default` and may do everything, which is why
/// such a hub listens on loopback only.
#[derive(Debug)]
pub(super) struct Guard {
    tokens: Vec<Known>,
    /// Nobody but this machine's own programs is meant to ask.
    local: bool,
}

/// A token, and its places among the requests that wait.
#[derive(Debug)]
struct Known {
    token: Token,
    waits: Semaphore,
}

/// A caller that was recognised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller<'a>(Option<&'a Token>);

impl Guard {
    pub(super) fn new(config: &HubConfig, loopback: bool) -> Self {
        let known = |token: &Token| Known {
            token: token.clone(),
            waits: Semaphore::new(config.limits.waits_per_token),
        };
        let tokens: Vec<_> = config.tokens.iter().map(known).collect();
        Self { local: loopback && tokens.is_empty(), tokens }
    }

    /// The places among the requests that wait, of the caller's token.
    pub(super) fn places(&self, headers: &HeaderMap) -> Answer<Option<&Semaphore>> {
        Ok(self.known(headers)?.map(|known| &known.waits))
    }

    /// Recognises a caller by its bearer token.
    pub(super) fn caller(&self, headers: &HeaderMap) -> Answer<Caller<'_>> {
        Ok(Caller(self.known(headers)?.map(|known| &known.token)))
    }

    fn known(&self, headers: &HeaderMap) -> Answer<Option<&Known>> {
        if self.tokens.is_empty() {
            return match self.local && from_a_web_page(headers) {
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
        self.0.is_none_or(|token| token.topics.iter().any(|pattern| matches(pattern, topic)))
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

/// Whether a page that somebody visits sent this: from another origin, or after its own name was
/// made to point here (DNS rebinding).
fn from_a_web_page(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(HOST);
    let rebound = host.is_some_and(|host| !is_local(host));
    let other = text(ORIGIN).is_some_and(|origin| {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_none() || authority != host
    });
    rebound || other
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

fn matches(pattern: &str, topic: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => topic.starts_with(start),
        None => pattern == topic,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        let digest = Sha256::digest(b"secret").into();
        let topics = vec!["orders".to_owned(), "billing.*".to_owned()];
        let (name, tenant) = ("shop".to_owned(), "acme".to_owned());
        let token = Token { name, digest, tenant, scopes: vec![Scope::Publish], topics };
        Guard { tokens: vec![Known { token, waits: Semaphore::new(1) }], local: false }
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
        let guard = Guard { tokens: Vec::new(), local: true };
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
            assert!(!check(host, Some("null")), "{host}");
        }
        assert!(!check("rebound.example:7070", None));
        assert!(!check("127.0.0.1.rebound.example", None));
    }
}
