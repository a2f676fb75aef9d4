//! Who asks, and what they may do.

use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use carrick_core::name::{DEFAULT_TENANT, Topic};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::answer::{Answer, Refusal};
use crate::config::{Scope, Token};

/// Checks tokens. Without any, everybody is tenant `default` and may do everything, which is why
/// such a hub listens on loopback only.
#[derive(Debug)]
pub(super) struct Guard(Vec<Token>);

/// A caller that was recognised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller<'a>(Option<&'a Token>);

impl Guard {
    pub(super) fn new(tokens: Vec<Token>) -> Self {
        Self(tokens)
    }

    /// Recognises a caller by its bearer token.
    pub(super) fn caller(&self, headers: &HeaderMap) -> Answer<Caller<'_>> {
        if self.0.is_empty() {
            return Ok(Caller(None));
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
        for token in &self.0 {
            if bool::from(token.digest.ct_eq(digest.as_slice())) {
                found = Some(token);
            }
        }
        found.map(|token| Caller(Some(token))).ok_or_else(unknown)
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
        Guard::new(vec![Token { name, digest, tenant, scopes: vec![Scope::Publish], topics }])
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
        assert_eq!(check("bearer secret", "billing.x", Scope::Publish).is_ok(), true);
        assert_eq!(check("Bearer secret", "orders2", Scope::Publish), Err(403));
        assert_eq!(check("Bearer secret", "orders", Scope::Consume), Err(403));
        assert_eq!(check("Bearer Secret", "orders", Scope::Publish), Err(401));
        assert_eq!(check("Basic secret", "orders", Scope::Publish), Err(401));
        assert!(guard.caller(&HeaderMap::new()).is_err());
    }
}
