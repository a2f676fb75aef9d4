//! Subscription tokens: what a backend hands to a browser, so that it never holds a token of the
//! configuration. Sealed, not stored: any hub with the same key knows them, and they end by themselves,
//! or when the token that made them is taken out of the configuration.

use std::time::Duration;

use axum::{
    extract::{Request, State},
    http::{Response, StatusCode},
};
use carrick_core::{
    clock::{Clock, SystemClock},
    config::duration,
    name::Topic,
    seal::Seal,
};
use carrick_edge::feed::{MAX_TOPICS, matches};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{
    Api,
    answer::{Answer, json as answer},
};
use crate::config::Scope;

/// How they begin, so that a scanner for leaked secrets finds them.
const PREFIX: &str = "cst_";

/// What they are sealed for.
const PURPOSE: &str = "subscription";

const TTL: Duration = Duration::from_secs(600);

const MOST_TTL: Duration = Duration::from_secs(86_400);

/// What a subscription token allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Grant {
    /// Name of the token that made it; none where there are no tokens.
    pub(super) issuer: Option<String>,
    /// Topics, `*` at the end for any rest.
    pub(super) topics: Vec<String>,
    /// Whether it may publish to them, besides reading.
    pub(super) publish: bool,
    /// When it ends.
    pub(super) expires: Timestamp,
}

impl Grant {
    fn seal(&self, seal: &Seal) -> String {
        let payload = serde_json::to_vec(self).expect("a grant is JSON");
        format!("{PREFIX}{}", seal.seal(PURPOSE, "", &payload))
    }

    /// Reads a token; `None` if it is no subscription token, or none that holds now.
    pub(super) fn open(seal: &Seal, text: &str, now: Timestamp) -> Option<Self> {
        let payload = seal.open(PURPOSE, "", text.strip_prefix(PREFIX)?).ok()?;
        let grant: Self = serde_json::from_slice(&payload).ok()?;
        (now < grant.expires).then_some(grant)
    }

    pub(super) fn is_one(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    pub(super) fn allows(&self, scope: Scope) -> bool {
        scope == Scope::Consume || scope == Scope::Publish && self.publish
    }

    pub(super) fn sees(&self, topic: &str) -> bool {
        self.topics.iter().any(|pattern| matches(pattern, topic))
    }
}

/// Whether everything that fits the narrow pattern fits the wide one.
fn covers(wide: &str, narrow: &str) -> bool {
    match (wide.strip_suffix('*'), narrow.strip_suffix('*')) {
        (Some(wide), Some(narrow)) => narrow.starts_with(wide),
        (None, Some(_)) => false,
        (_, None) => matches(wide, narrow),
    }
}

/// `POST /v1/subscriptions/token`.
pub(super) async fn mint(State(api): State<Api>, request: Request) -> Answer {
    api.0.guard.caller(request.headers())?.issuer()?;
    let (headers, fields) = api.fields(request).await?;
    let caller = api.0.guard.caller(&headers)?;
    let issuer = caller.issuer()?;
    let topics = fields.texts("topics", MAX_TOPICS)?;
    let publish = fields.flag("publish", false)?;
    let ttl = fields.duration("ttl", TTL, Duration::from_secs(10)..=MOST_TTL)?;
    for topic in &topics {
        // `*` alone stands for all.
        let name = topic.strip_suffix('*').unwrap_or(topic);
        if !name.is_empty() || name == *topic {
            Topic::in_tenant(caller.tenant(), name)?;
        }
        caller.covers(|wide| covers(wide, topic), Scope::Consume)?;
    }
    if publish {
        caller.any(Scope::Publish)?;
    }
    let expires = SystemClock.wall() + ttl;
    let topics: Vec<_> = topics.into_iter().map(str::to_owned).collect();
    let grant = Grant { issuer, topics, publish, expires };
    let body = json!({
        "token": grant.seal(&api.0.hub.seal),
        "expires_at": expires.to_string(),
        "expires_in": duration::format(ttl),
    });
    Ok(created(&body))
}

fn created(body: &serde_json::Value) -> Response<axum::body::Body> {
    answer(StatusCode::CREATED, body.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_covers_no_more_than_it_says() {
        for (wide, narrow, expected) in [
            ("*", "*", true),
            ("*", "a", true),
            ("user.*", "user.7.*", true),
            ("user.*", "user.*", true),
            ("user.*", "user.7", true),
            ("user.7.*", "user.*", false),
            ("user.7", "user.7*", false),
            ("user.7", "user.7", true),
            ("user.7", "user.8", false),
        ] {
            assert_eq!(covers(wide, narrow), expected, "{wide} over {narrow}");
        }
    }

    #[test]
    fn a_token_holds_until_its_end_and_with_its_seal_only() {
        let (seal, now) = (Seal::new([7; 32]), Timestamp::UNIX_EPOCH);
        let expires = now + Duration::from_secs(60);
        let topics = vec!["t".to_owned()];
        let grant = Grant { issuer: None, topics, publish: false, expires };
        let token = grant.seal(&seal);
        assert_eq!(Grant::open(&seal, &token, now), Some(grant));
        assert_eq!(Grant::open(&seal, &token, expires), None);
        assert_eq!(Grant::open(&Seal::new([8; 32]), &token, now), None);
        assert_eq!(Grant::open(&seal, &token[4..], now), None);
        let mut altered = token.into_bytes();
        let last = altered.len() - 3;
        altered[last] ^= 1;
        assert_eq!(Grant::open(&seal, &String::from_utf8(altered).unwrap(), now), None);
    }
}
