//! `GET /v1/topics/{topic}/events`: a topic's doors. Which one, the request's headers say.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode,
        header::{ACCEPT, CACHE_CONTROL, CONNECTION},
        request::Parts,
    },
    response::IntoResponse,
};
use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    name::Topic,
    problem::Problem,
};
use carrick_edge::{
    feed::{Filter, Item, Limit, MAX_TOPICS, Place, Start, Subscription},
    long_poll::{self, PollError, Polled},
    socket::HandOff,
    sse,
};
use carrick_store::log::MAX_BATCH;
use tokio::time::Instant;

use super::{
    Api, Named,
    answer::{Answer, Refusal, json},
    auth::Caller,
    cors,
    fields::{Fields, repeated},
    topics::MAX_WAIT,
    websocket,
};
use crate::config::Scope;

/// Where to go on, on every answer of a read.
const POSITION: HeaderName = HeaderName::from_static("carrick-position");

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Bytes of events in one answer, unless one event alone has more.
const ANSWER_BYTES: usize = 4 * 1024 * 1024;

/// Patterns of a filter at most.
const MAX_PATTERNS: usize = 32;

/// The longest pattern: a type or a subject has no limit of its own.
const MAX_PATTERN: usize = 1024;

pub(super) async fn read(
    State(api): State<Api>,
    Named(topic): Named<String>,
    request: Request,
) -> Answer {
    // Without the body, which nobody may share.
    let (request, _) = request.into_parts();
    let (headers, query) = (&request.headers, request.uri.query());
    let caller = api.0.guard.reader(headers, query)?;
    let topics = named(&caller, &topic, query)?;
    let filter = Filter { types: patterns(query, "type")?, subjects: patterns(query, "subject")? };
    if websocket::is_asked(headers) {
        return api.websocket(&caller, &topic, topics, filter, request).await;
    }
    match door(headers)? {
        Door::Stream => Ok(api.stream(&caller, topics, filter, request).await),
        Door::Poll => api.poll(&caller, topics, filter, &request).await,
    }
}

enum Door {
    Poll,
    Stream,
}

/// The door for what a client takes: the first that it names.
fn door(headers: &HeaderMap) -> Answer<Door> {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or("*/*");
    let door = |media: &str| match media.split(';').next().unwrap_or_default().trim() {
        "text/event-stream" => Some(Door::Stream),
        "*/*" | "application/*" | "application/json" | "" => Some(Door::Poll),
        _ => None,
    };
    accept.split(',').find_map(door).ok_or_else(|| {
        let detail = "this resource answers application/json and text/event-stream";
        Refusal::new(StatusCode::NOT_ACCEPTABLE, detail)
    })
}

fn patterns(query: Option<&str>, name: &str) -> Answer<Vec<String>> {
    let patterns = repeated(query, name);
    if patterns.len() > MAX_PATTERNS {
        let range = format!("at most {MAX_PATTERNS} patterns");
        return Err(Problem::invalid(name, &range, patterns.len()).into());
    }
    match patterns.iter().find(|pattern| !(1..=MAX_PATTERN).contains(&pattern.len())) {
        None => Ok(patterns),
        Some(pattern) => {
            let range = format!("1 to {MAX_PATTERN} bytes, with * at the end for any rest");
            Err(Problem::invalid(name, &range, format!("{} bytes", pattern.len())).into())
        }
    }
}

/// The topics that a request names, in an order that does not depend on how it names them.
fn named(caller: &Caller<'_>, first: &str, query: Option<&str>) -> Answer<Vec<Topic>> {
    let mut names = repeated(query, "topic");
    names.push(first.to_owned());
    names.sort_unstable();
    names.dedup();
    if names.len() > MAX_TOPICS {
        let range = format!("at most {MAX_TOPICS} topics");
        return Err(Problem::invalid("topic", &range, names.len()).into());
    }
    names.iter().map(|name| caller.topic(name, Scope::Consume)).collect()
}

impl Api {
    async fn poll(
        &self,
        caller: &Caller<'_>,
        topics: Vec<Topic>,
        filter: Filter,
        request: &Parts,
    ) -> Answer {
        let query = Fields::from_query(request.uri.query());
        let limit = query.count("limit", 100, 1..=MAX_BATCH)?;
        let wait = query.duration("wait", Duration::ZERO, Duration::ZERO..=MAX_WAIT)?;
        let after = query.text("after")?.filter(|text| !text.is_empty()).unwrap_or("earliest");
        let start = self.0.feed.start(&topics, after).map_err(|_| {
            let range = "earliest, latest, or a position of these topics";
            Problem::invalid("after", range, after)
        })?;
        let until = Instant::now() + wait;
        let until = caller.ends_at().map_or(until, |end| until.min(end));
        let mut subscription = self.0.feed.subscribe(&topics, start, filter).await?;
        let limit = Limit { events: limit, bytes: ANSWER_BYTES };
        let place = || Answer::Ok(self.0.feed.place("long_poll")?.with(caller.place()?));
        let polled = long_poll::poll(&mut subscription, limit, until, place).await;
        let polled = polled.map_err(|error| match error {
            PollError::Refused(refusal) => refusal,
            PollError::Store(error) => error.into(),
        })?;
        let position = subscription.position();
        let mut response = match polled {
            Polled::Events(items) => page(&items, &position),
            Polled::Nothing => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::NO_CONTENT;
                response
            }
            Polled::Reset(topic) => {
                let detail = "events after this position are gone: there is a gap before the \
                              position given here";
                let problem = Problem::new(StatusCode::GONE, detail)
                    .with("reset", true)
                    .with("topic", topic.name())
                    .with("position", position);
                return Err(problem.into());
            }
        };
        let headers = response.headers_mut();
        let value = HeaderValue::try_from(position).expect("a sealed text is base64");
        headers.insert(POSITION, value);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }

    /// A stream of Server-Sent Events. From here on the answer is a 200: a browser takes any other
    /// for the end.
    async fn stream(
        &self,
        caller: &Caller<'_>,
        topics: Vec<Topic>,
        filter: Filter,
        request: Parts,
    ) -> Response<Body> {
        let mut head = sse::response_head();
        cors::mark(&mut head, self.listed(&request.headers));
        let query = request.uri.query();
        let unnamed = Fields::from_query(query).text("event") == Ok(Some("message"));
        if request.method == Method::HEAD {
            return answer(head, Body::empty());
        }
        let start = self.last_event(&topics, &request);
        let opened = async {
            let own = caller.stream()?;
            let place = self.0.feed.admit("sse")?;
            let subscription = self.0.feed.subscribe(&topics, start, filter).await?;
            Answer::Ok((place.with(own), subscription))
        };
        let (place, subscription): (Place, Subscription) = match opened.await {
            Ok(opened) => opened,
            Err(refusal) => {
                // Spread further: who was told the same second must not come back in it.
                let least = Duration::from_secs(refusal.retry_after().unwrap_or(5));
                let retry = least + Duration::from_millis(rand::random_range(0..2000));
                return answer(head, Body::from(sse::busy(retry, "not now: come back later")));
            }
        };
        let options = sse::Options { unnamed, expires: caller.ends_at() };
        let Some(hand_off) = request.extensions.get::<HandOff>().cloned() else {
            return answer(head, Body::new(sse::body(subscription, place, options)));
        };
        drop(request);
        head.insert(CONNECTION, HeaderValue::from_static("close"));
        let head = raw_head(StatusCode::OK, &head);
        let never: Infallible = hand_off
            .take_over(Box::new(move |socket, _| {
                Box::pin(async move {
                    sse::stream(socket, head, subscription, place, options).await;
                })
            }))
            .await;
        match never {}
    }

    /// Where a stream starts. What cannot be read is answered with a reset and not with an error,
    /// which would stop a browser for good.
    pub(super) fn last_event(&self, topics: &[Topic], request: &Parts) -> Start {
        let header = request.headers.get(LAST_EVENT_ID);
        let query = Fields::from_query(request.uri.query());
        let given = match header.filter(|value| !value.is_empty()) {
            Some(value) => Some(value.to_str().unwrap_or("?").to_owned()),
            None => ["last_event_id", "lastEventId", "after"].iter().find_map(|name| {
                let text = query.text(name).ok().flatten()?;
                (!text.is_empty()).then(|| text.to_owned())
            }),
        };
        let text = given.as_deref().unwrap_or("latest");
        self.0.feed.start(topics, text).unwrap_or(Start::Lost)
    }
}

fn answer(head: HeaderMap, body: Body) -> Response<Body> {
    let mut response = body.into_response();
    *response.headers_mut() = head;
    response
}

/// The head of an answer that a handler writes itself.
pub(super) fn raw_head(status: StatusCode, headers: &HeaderMap) -> Bytes {
    let date = SystemClock.wall().strftime("%a, %d %b %Y %H:%M:%S GMT");
    let mut head = format!("HTTP/1.1 {status}\r\ndate: {date}\r\n").into_bytes();
    for (name, value) in headers {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head.into()
}

fn page(items: &[Item], position: &str) -> Response<Body> {
    let bytes: usize = items.iter().map(|item| item.entry.body().len() + 1).sum();
    let mut body = Vec::with_capacity(bytes + 128);
    body.extend_from_slice(b"{\"events\":[");
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            body.push(b',');
        }
        body.extend_from_slice(item.entry.body());
    }
    body.extend_from_slice(b"],\"position\":\"");
    body.extend_from_slice(position.as_bytes());
    body.extend_from_slice(b"\"}");
    json(StatusCode::OK, body)
}
