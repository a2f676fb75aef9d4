//! Who asks, and what they may do.

use std::{sync::Arc, time::Duration};

use axum::http::{
    HeaderMap, StatusCode,
    header::{AUTHORIZATION, HOST, ORIGIN},
};
use carrick_core::{
    clock::{Clock, SystemClock},
    name::{DEFAULT_TENANT, Topic},
    seal::Seal,
};
use carrick_edge::feed::matches;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{
    answer::{Answer, Refusal},
    fields::repeated,
    grant::Grant,
};
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
    /// Of the subscription tokens.
    seal: Seal,
}

/// A token, and its places among those who wait.
#[derive(Debug)]
struct Known {
    token: Token,
    waits: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

/// A caller that was recognised.
#[derive(Clone, Debug)]
pub(super) struct Caller<'a> {
    /// Its token, or the one that made its subscription token; none where there are no tokens.
    known: Option<&'a Known>,
    grant: Option<Grant>,
}

impl Guard {
    pub(super) fn new(config: &HubConfig, loopback: bool, seal: Seal) -> Self {
        let known = |token: &Token| Known {
            token: token.clone(),
            waits: Arc::new(Semaphore::new(config.limits.waits_per_token)),
            readers: Arc::new(Semaphore::new(config.limits.readers_per_token)),
        };
        let tokens: Vec<_> = config.tokens.iter().map(known).collect();
        let origins = config.origins.clone();
        Self { local: loopback && tokens.is_empty(), tokens, origins, seal }
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
        let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let bearer = value.and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        self.recognise(headers, bearer.map(|(_, token)| token.trim()))
    }

    /// Recognises who reads: a browser can put no header on a stream, so that its subscription token
    /// may be in the query. Tokens of the configuration may not: addresses are written to logs.
    pub(super) fn reader(&self, headers: &HeaderMap, query: Option<&str>) -> Answer<Caller<'_>> {
        let token = repeated(query, "token").pop().filter(|token| Grant::is_one(token));
        match token.filter(|_| !headers.contains_key(AUTHORIZATION)) {
            Some(token) => self.recognise(headers, Some(&token)),
            None => self.caller(headers),
        }
    }

    fn recognise(&self, headers: &HeaderMap, token: Option<&str>) -> Answer<Caller<'_>> {
        if self.local && self.is_from_a_web_page(headers) {
            return Err(foreign());
        }
        let unknown = || {
            metrics::counter!("carrick_hub_unauthorized_total").increment(1);
            Refusal::new(StatusCode::UNAUTHORIZED, "a bearer token is needed")
        };
        if let Some(token) = token.filter(|token| Grant::is_one(token)) {
            let ended = || {
                metrics::counter!("carrick_hub_unauthorized_total").increment(1);
                let detail = "this subscription token is not valid, or not any more";
                Refusal::new(StatusCode::UNAUTHORIZED, detail)
            };
            let grant = Grant::open(&self.seal, token, SystemClock.wall()).ok_or_else(ended)?;
            // What the token that made it may not do any more, it may not either.
            let known = match &grant.issuer {
                None if self.tokens.is_empty() => None,
                None => return Err(ended()),
                Some(name) => {
                    let mut tokens = self.tokens.iter();
                    Some(tokens.find(|known| known.token.name == *name).ok_or_else(ended)?)
                }
            };
            return Ok(Caller { known, grant: Some(grant) });
        }
        if self.tokens.is_empty() {
            return Ok(Caller { known: None, grant: None });
        }
        let digest = Sha256::digest(token.ok_or_else(unknown)?.as_bytes());
        // Every token is compared, in constant time: how long it takes tells nothing.
        let mut found = None;
        for known in &self.tokens {
            if bool::from(known.token.digest.ct_eq(digest.as_slice())) {
                found = Some(known);
            }
        }
        Ok(Caller { known: Some(found.ok_or_else(unknown)?), grant: None })
    }

    /// Whether a page that somebody visits sent this: from another origin that is not listed, or
    /// after its own name was made to point here (DNS rebinding).
    fn is_from_a_web_page(&self, headers: &HeaderMap) -> bool {
        let rebound = headers.get(HOST).is_some_and(|host| !host.to_str().is_ok_and(is_local));
        rebound || self.origin(headers).is_err()
    }
}

impl Caller<'_> {
    fn token(&self) -> Option<&Token> {
        self.known.map(|known| &known.token)
    }

    pub(super) fn tenant(&self) -> &str {
        self.token().map_or(DEFAULT_TENANT, |token| &token.tenant)
    }

    /// When its right ends, if it does.
    pub(super) fn ends_at(&self) -> Option<Instant> {
        let grant = self.grant.as_ref()?;
        let left = grant.expires.duration_since(SystemClock.wall());
        Some(Instant::now() + Duration::try_from(left).unwrap_or_default())
    }

    /// The topic of that name, if the caller may do this with it.
    pub(super) fn topic(&self, name: &str, scope: Scope) -> Answer<Topic> {
        let topic = Topic::in_tenant(self.tenant(), name)?;
        self.any(scope)?;
        if !self.sees(name) {
            return Err(self.refused(scope));
        }
        Ok(topic)
    }

    /// Whether the caller may do something that is on no topic in particular.
    pub(super) fn any(&self, scope: Scope) -> Answer<()> {
        let granted = self.grant.as_ref().is_none_or(|grant| grant.allows(scope));
        match self.token().is_none_or(|token| token.scopes.contains(&scope)) && granted {
            true => Ok(()),
            false => Err(self.refused(scope)),
        }
    }

    pub(super) fn sees(&self, topic: &str) -> bool {
        let sees = |token: &Token| token.topics.iter().any(|pattern| matches(pattern, topic));
        self.token().is_none_or(sees) && self.grant.as_ref().is_none_or(|grant| grant.sees(topic))
    }

    /// Whether one of the patterns that the caller sees covers something.
    pub(super) fn covers(&self, covers: impl Fn(&str) -> bool, scope: Scope) -> Answer<()> {
        self.any(scope)?;
        let covered = |token: &Token| token.topics.iter().any(|pattern| covers(pattern));
        match self.token().is_none_or(covered) {
            true => Ok(()),
            false => Err(self.refused(scope)),
        }
    }

    /// The name under which it makes subscription tokens. One of these makes no others.
    pub(super) fn issuer(&self) -> Answer<Option<String>> {
        if self.grant.is_some() {
            return Err(self.refused(Scope::Admin));
        }
        Ok(self.token().map(|token| token.name.clone()))
    }

    /// A place among the requests that wait with its token; there is no limit without one.
    pub(super) fn place(&self) -> Answer<Option<OwnedSemaphorePermit>> {
        let Some(known) = self.known else { return Ok(None) };
        let (places, detail) = match self.grant {
            None => (&known.waits, "too many requests wait with this token"),
            Some(_) => (&known.readers, "too many readers have this token's subscription tokens"),
        };
        take(places, detail).map(Some)
    }

    /// A place among the streams of its token.
    pub(super) fn stream(&self) -> Answer<Option<OwnedSemaphorePermit>> {
        let Some(known) = self.known else { return Ok(None) };
        take(&known.readers, "too many streams are open with this token").map(Some)
    }

    fn refused(&self, scope: Scope) -> Refusal {
        metrics::counter!("carrick_hub_forbidden_total").increment(1);
        let who = match (&self.grant, self.token()) {
            (Some(_), _) => "this subscription token".to_owned(),
            (None, Some(token)) => format!("token {:?}", token.name),
            (None, None) => "who asks".to_owned(),
        };
        let detail = format!("{who} may not {scope:?} here").to_lowercase();
        Refusal::new(StatusCode::FORBIDDEN, detail)
    }
}

fn take(places: &Arc<Semaphore>, detail: &str) -> Answer<OwnedSemaphorePermit> {
    Arc::clone(places).try_acquire_owned().map_err(|_| Refusal::busy(detail, 5))
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
        let places = Arc::new(Semaphore::new(1));
        let known = Known { token, waits: Arc::clone(&places), readers: places };
        let (origins, seal) = (Vec::new(), Seal::new([7; 32]));
        Guard { tokens: vec![known], local: false, origins, seal }
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
            seal: Seal::new([7; 32]),
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
