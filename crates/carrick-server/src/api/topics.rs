//! Topics: publishing, and reading by long poll.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
        header::{ACCEPT, CACHE_CONTROL, LINK, UPGRADE},
    },
};
use carrick_core::{event::Event, name::Topic, position::Position, problem::Problem};
use carrick_message::broker::{Broker, Outgoing};
use carrick_store::{
    StoreError,
    log::{Bounds, MAX_BATCH, ReadLimit, Record, Seq},
};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{
    Api, Named,
    answer::{Answer, Refusal, json},
    fields::Fields,
};
use crate::config::Scope;

/// Where to go on, on every answer of a read.
pub(super) const POSITION: HeaderName = HeaderName::from_static("carrick-position");

/// The longest wait of a request: below what the usual proxies cut off.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(60);

/// The longest delay of a publish: what the queue holds a record for.
const MAX_DELAY: Duration = Duration::from_secs(30 * 86_400);

/// Bytes of events in one answer, unless one event alone has more.
const ANSWER_BYTES: usize = 4 * 1024 * 1024;

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

/// `GET /v1/topics/{topic}/events`: what comes after a position, or a wait for it.
pub(super) async fn read(
    State(api): State<Api>,
    Named(topic): Named<String>,
    request: Request,
) -> Answer {
    let headers = request.headers();
    let topic = api.0.guard.caller(headers)?.topic(&topic, Scope::Consume)?;
    check_door(headers)?;
    let query = Fields::from_query(request.uri().query());
    let limit = query.count("limit", 100, 1..=MAX_BATCH)?;
    let wait = query.duration("wait", Duration::ZERO, Duration::ZERO..=MAX_WAIT)?;
    let after = api.start(&topic, query.text("after")?).await?;
    let limit = ReadLimit { records: limit, bytes: ANSWER_BYTES };

    let store = api.0.hub.store();
    let until = Instant::now() + wait;
    // Made before the look: what is appended after it is not missed.
    let waiter = store.waiter(&topic);
    let announced = api.0.drain.announced();
    let mut place = None;
    loop {
        let woken = waiter.woken();
        let records = match store.read(&topic, after, limit).await {
            Ok(records) => records,
            Err(StoreError::Trimmed { bounds, .. } | StoreError::Beyond { bounds, .. }) => {
                return Err(api.reset(&topic, bounds));
            }
            Err(error) => return Err(error.into()),
        };
        let now = Instant::now();
        if !records.is_empty() || now >= until || announced.is_cancelled() {
            return Ok(api.page(&topic, after, &records));
        }
        if place.is_none() {
            place = Some(api.place(headers)?);
        }
        tokio::select! {
            _ = timeout_at(until, woken) => {}
            () = sleep_until(now + store.backstop()) => {}
            () = announced.cancelled() => {}
        }
    }
}

/// Long poll is the one door so far; who asks for another is told so.
fn check_door(headers: &HeaderMap) -> Answer<()> {
    if headers.contains_key(UPGRADE) {
        let detail = "WebSocket is not offered here; read by long poll (?wait=25s)";
        return Err(Refusal::new(StatusCode::NOT_IMPLEMENTED, detail));
    }
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or("*/*");
    let takes = |media: &str| {
        let media = media.split(';').next().unwrap_or_default().trim();
        matches!(media, "*/*" | "application/*" | "application/json" | "")
    };
    if accept.split(',').any(takes) {
        return Ok(());
    }
    let detail = "this resource answers application/json (Server-Sent Events are not offered here)";
    Err(Refusal::new(StatusCode::NOT_ACCEPTABLE, detail))
}

impl Api {
    /// The number after which a read starts.
    async fn start(&self, topic: &Topic, after: Option<&str>) -> Answer<Seq> {
        let store = self.0.hub.store();
        match after.unwrap_or("earliest") {
            "earliest" | "" => Ok(store.bounds(topic).await?.first - 1),
            "latest" => Ok(store.bounds(topic).await?.last),
            text => {
                let Ok(position) = Position::open(&self.0.hub.seal, topic.as_str(), text) else {
                    let range = "earliest, latest, or a position of this topic";
                    return Err(Problem::invalid("after", range, text).into());
                };
                if position.epoch == store.epoch() {
                    return Ok(position.seq);
                }
                let bounds = store.bounds(topic).await?;
                Err(self.reset(topic, bounds))
            }
        }
    }

    /// Tells a reader that what it asks for is gone, and where it may start over.
    fn reset(&self, topic: &Topic, bounds: Bounds) -> Refusal {
        metrics::counter!("carrick_hub_resets_total").increment(1);
        let detail = "events after this position are gone: there is a gap before the position given \
                      here";
        let position = self.position(topic, bounds.first - 1);
        Problem::new(StatusCode::GONE, detail).with("reset", true).with("position", position).into()
    }

    fn position(&self, topic: &Topic, seq: Seq) -> String {
        let epoch = self.0.hub.store().epoch();
        Position { epoch, seq }.seal(&self.0.hub.seal, topic.as_str())
    }

    fn page(&self, topic: &Topic, after: Seq, records: &[Record]) -> Response<Body> {
        let position = self.position(topic, records.last().map_or(after, |record| record.seq));
        let mut response = if records.is_empty() {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NO_CONTENT;
            response
        } else {
            let bytes: usize = records.iter().map(|record| record.body.len() + 1).sum();
            let mut body = Vec::with_capacity(bytes + 128);
            body.extend_from_slice(b"{\"events\":[");
            for (index, record) in records.iter().enumerate() {
                if index > 0 {
                    body.push(b',');
                }
                body.extend_from_slice(&record.body);
            }
            body.extend_from_slice(b"],\"position\":\"");
            body.extend_from_slice(position.as_bytes());
            body.extend_from_slice(b"\"}");
            json(StatusCode::OK, body)
        };
        let headers = response.headers_mut();
        let value = HeaderValue::try_from(position).expect("a sealed text is base64");
        headers.insert(POSITION, value);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}
