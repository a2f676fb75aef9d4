//! The WebSocket door: everything is checked before the connection is one, as a refusal after it
//! tells a browser nothing (RFC 6455, section 4.2).

use std::{convert::Infallible, sync::Arc};

use axum::{
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version,
        header::{
            CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
            SEC_WEBSOCKET_VERSION, UPGRADE,
        },
        request::Parts,
    },
    response::IntoResponse,
};
use carrick_core::name::Topic;
use carrick_edge::{
    feed::Filter,
    socket::HandOff,
    websocket::{self, Publish, SUBPROTOCOL, Session},
};
use carrick_message::broker::{Broker, Outgoing};

use super::{
    Api,
    answer::{Answer, Refusal},
    auth::Caller,
    feed::raw_head,
    fields::Fields,
};
use crate::config::Scope;

/// Whether a request asks for a WebSocket.
pub(super) fn is_asked(headers: &HeaderMap) -> bool {
    has(headers, UPGRADE, "websocket")
}

/// Whether one of a header's values, which are lists, has a word.
fn has(headers: &HeaderMap, name: HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|found| found.trim().eq_ignore_ascii_case(word))
}

/// The head of the answer that makes a connection a WebSocket, or why it becomes none.
fn handshake(request: &Parts) -> Answer<HeaderMap> {
    let refuse = |detail: &str| Err(Refusal::new(StatusCode::BAD_REQUEST, detail));
    let headers = &request.headers;
    if request.method != Method::GET || request.version != Version::HTTP_11 {
        return refuse("a WebSocket begins with a GET of HTTP/1.1");
    }
    if !has(headers, CONNECTION, "upgrade") {
        return refuse("a WebSocket needs the header connection: upgrade");
    }
    if headers.get(SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
        let detail = "sec-websocket-version must be 13";
        return Err(Refusal::new(StatusCode::UPGRADE_REQUIRED, detail));
    }
    // 16 bytes in base64.
    let key = headers.get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
    let is_key = key.len() == 24 && key.ends_with(b"==") && {
        let digits = key.iter().take(22);
        digits.copied().all(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(&byte))
    };
    if !is_key {
        return refuse("sec-websocket-key must be 16 bytes in base64");
    }
    let mut head = HeaderMap::new();
    head.insert(UPGRADE, HeaderValue::from_static("websocket"));
    head.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    let accept = HeaderValue::try_from(websocket::accept_key(key)).expect("base64");
    head.insert(SEC_WEBSOCKET_ACCEPT, accept);
    if headers.contains_key(SEC_WEBSOCKET_PROTOCOL) {
        // One that nobody offered would make the client give up (defects.md E9).
        if !has(headers, SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL) {
            return refuse("sec-websocket-protocol must offer carrick.v1, or nothing");
        }
        head.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    }
    Ok(head)
}

impl Api {
    /// A WebSocket, on a connection that is taken over.
    pub(super) async fn websocket(
        &self,
        caller: &Caller<'_>,
        name: &str,
        topics: Vec<Topic>,
        filter: Filter,
        request: Parts,
    ) -> Answer {
        let head = match handshake(&request) {
            Ok(head) => head,
            Err(refusal) if refusal.status() == StatusCode::UPGRADE_REQUIRED => {
                let mut response = refusal.into_response();
                let version = HeaderValue::from_static("13");
                response.headers_mut().insert(SEC_WEBSOCKET_VERSION, version);
                return Ok(response);
            }
            Err(refusal) => return Err(refusal),
        };
        self.0.guard.origin(&request.headers)?;
        let Some(hand_off) = request.extensions.get::<HandOff>().cloned() else {
            let detail = "this connection cannot become a WebSocket";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, detail));
        };
        let start = self.last_event(&topics, &request);
        let own = caller.stream()?;
        let place = self.0.feed.admit("websocket")?.with(own);
        let subscription = self.0.feed.subscribe(&topics, start, filter).await?;
        let query = Fields::from_query(request.uri.query());
        let session = query.text("session").ok().flatten();
        let options = websocket::Options {
            expires: caller.ends_at(),
            publish: self.publisher(caller, name),
            session: Session::open(&self.0.hub.seal, caller.tenant(), session),
            sessions: Arc::clone(&self.0.sessions),
        };
        drop(request);
        let head = raw_head(StatusCode::SWITCHING_PROTOCOLS, &head);
        let never: Infallible = hand_off
            .take_over(Box::new(move |socket, read| {
                Box::pin(async move {
                    websocket::serve(socket, head, read, subscription, place, options).await;
                })
            }))
            .await;
        match never {}
    }

    /// Publishes to the topic of the address, if the caller may.
    fn publisher(&self, caller: &Caller<'_>, name: &str) -> Option<Publish> {
        let topic = caller.topic(name, Scope::Publish).ok()?;
        let broker = self.0.hub.broker.clone();
        Some(Arc::new(move |events| {
            let (broker, topic) = (broker.clone(), topic.clone());
            Box::pin(async move {
                let events = events.into_iter().map(|event| Outgoing { event, due: None });
                match broker.publish(&topic, events.collect()).await {
                    Ok(published) => Ok(published.fresh),
                    Err(error) => Err(Refusal::from(error).problem()),
                }
            })
        }))
    }
}
