//! Topics: publishing to them, and listing them.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, Response, StatusCode, header::LINK},
};
use carrick_core::{event::Event, name::Topic, position::Position, problem::Problem};
use carrick_message::broker::{Broker, Outgoing};
use carrick_store::log::MAX_BATCH;

use super::{
    Api, Named,
    answer::{Answer, json},
    fields::Fields,
};
use crate::config::Scope;

/// The longest wait of a request: below what the usual proxies cut off.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(60);

/// The longest delay of a publish: what the queue holds a record for.
const MAX_DELAY: Duration = Duration::from_secs(30 * 86_400);

pub(super) async fn publish(
    State(api): State<Api>,
    Named(topic): Named<String>,
    request: Request,
) -> Answer {
    // Before the body is read: nobody without a right makes the hub take four megabytes.
    api.0.guard.caller(request.headers())?.topic(&topic, Scope::Publish)?;
    let (headers, query, body) = api.body(request).await?;
    let topic = api.0.guard.caller(&headers)?.topic(&topic, Scope::Publish)?;
    let due = match query {
        None => None,
        Some(query) => due(&Fields::from_query(Some(&query)))?,
    };
    let events = Event::from_http(&headers, body, MAX_BATCH)?;
    if events.is_empty() {
        return Err(Problem::invalid("events", "1 to 1000 events", 0).into());
    }
    let events: Vec<_> = events.into_iter().map(|event| Outgoing { event, due }).collect();
    let published = api.0.hub.broker.publish(&topic, events).await?;
    let accepted = published.fresh.iter().filter(|fresh| **fresh).count();
    let duplicates = published.fresh.len() - accepted;
    let position =
        published.position.map(|position| position.seal(&api.0.hub.seal, topic.as_str()));
    let position = position.unwrap_or_default();
    let body =
        format!(r#"{{"accepted":{accepted},"duplicates":{duplicates},"position":"{position}"}}"#);
    Ok(json(StatusCode::CREATED, body))
}

fn due(query: &Fields) -> Answer<Option<jiff::Timestamp>> {
    use carrick_core::clock::{Clock, SystemClock};
    let delay = query.duration("delay", Duration::ZERO, Duration::ZERO..=MAX_DELAY)?;
    Ok((!delay.is_zero()).then(|| SystemClock.wall() + delay))
}

/// `GET /v1/topics`: names and positions, by keyset.
pub(super) async fn list(State(api): State<Api>, request: Request) -> Answer {
    let caller = api.0.guard.caller(request.headers())?;
    caller.any(Scope::Consume)?;
    let query = Fields::from_query(request.uri().query());
    let limit = query.count("limit", 100, 1..=MAX_BATCH)?;
    let scope = caller.tenant().to_owned();
    let seal = &api.0.hub.seal;
    let cursor = query.text("cursor")?;
    let mut after = cursor.map(|cursor| open_topic(seal, &scope, cursor)).transpose()?;
    let mut rows = Vec::new();
    let mut more = false;
    'pages: loop {
        let page = api.0.hub.store().streams(after.as_ref(), MAX_BATCH).await?;
        let full = page.len() == MAX_BATCH;
        for (topic, bounds) in page {
            after = Some(topic.clone());
            if topic.tenant() != scope || !caller.sees(topic.name()) {
                continue;
            }
            if rows.len() == limit {
                more = true;
                break 'pages;
            }
            let epoch = api.0.hub.store().epoch();
            let position = Position { epoch, seq: bounds.last }.seal(seal, topic.as_str());
            let events = bounds.last + 1 - bounds.first;
            rows.push((topic, events, position));
        }
        if !full {
            break;
        }
    }
    let body: Vec<String> = rows
        .iter()
        .map(|(topic, events, position)| {
            format!(r#"{{"topic":"{}","events":{events},"position":"{position}"}}"#, topic.name())
        })
        .collect();
    let mut response = json(StatusCode::OK, format!(r#"{{"topics":[{}]}}"#, body.join(",")));
    if let Some((last, ..)) = rows.last().filter(|_| more) {
        let cursor = seal.seal("topics", &scope, last.as_str().as_bytes());
        link(&mut response, &format!("/v1/topics?limit={limit}&cursor={cursor}"));
    }
    Ok(response)
}

fn open_topic(seal: &carrick_core::seal::Seal, scope: &str, cursor: &str) -> Answer<Topic> {
    let opened = seal.open("topics", scope, cursor).ok();
    let topic = opened.and_then(|name| String::from_utf8(name).ok()?.parse().ok());
    topic.ok_or_else(|| Problem::invalid("cursor", "one that a page gave", cursor).into())
}

pub(super) fn link(response: &mut Response<Body>, next: &str) {
    if let Ok(value) = HeaderValue::try_from(format!("<{next}>; rel=\"next\"")) {
        response.headers_mut().insert(LINK, value);
    }
}
