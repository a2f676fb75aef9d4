//! What comes to the listener that no well-meant client sends, and what must be told nevertheless.

use std::time::Duration;

use carrick_server::config::{Scope, TokenOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::kit::{Answer, JSON, Running, rest};

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed_whatever_it_began() {
    let patience = Duration::from_millis(200);
    let hub = Running::start(|options| options.limits.receive = patience).await;
    for begun in ["", "P", "PRI * HTTP/2.0", "GET / HT"] {
        let mut stream = hub.connect().await;
        stream.write_all(begun.as_bytes()).await.unwrap();
        // Closed over what was sent, or after reading it: both are the end.
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut [0])).await;
        assert_eq!(read.expect("the hub closes").unwrap_or(0), 0, "{begun:?}");
    }
}

#[tokio::test]
async fn an_idle_connection_outlives_the_time_for_a_request() {
    let hub = Running::start(|options| {
        options.limits.receive = Duration::from_millis(200);
        options.limits.idle = Duration::from_secs(2);
    })
    .await;
    let mut stream = hub.connect().await;
    let request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).await.unwrap();
    let began = tokio::time::Instant::now();
    rest(&mut stream).await;
    assert!(began.elapsed() >= Duration::from_secs(1), "closed after {:?}", began.elapsed());
}

#[tokio::test]
async fn junk_and_heads_too_large_are_told_so() {
    let hub = Running::start(|_| {}).await;
    let many: String = (0..200).map(|n| format!("x{n}: y\r\n")).collect();
    // A head is looked at between two reads: what one of them may add is beyond the limit.
    let long = "y".repeat(200_000);
    for (request, status) in [
        ("JUNK\r\n\r\n".to_owned(), 400),
        (format!("GET / HTTP/1.1\r\nhost: a\r\n{many}\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nhost: a\r\nx: {long}\r\n\r\n"), 431),
    ] {
        let answer = Answer::read(&hub.exchange(request.as_bytes()).await);
        assert_eq!(answer.status, status, "{}", &request[..20]);
    }
}

#[tokio::test]
async fn one_connection_too_many_is_told_so_and_a_place_that_is_left_is_taken() {
    let hub = Running::start(|options| options.limits.connections = 2).await;
    let held = [hub.connect().await, hub.connect().await];
    let mut told = None;
    while told.is_none() {
        // The two may not have been accepted yet.
        told = Some(hub.ask("GET", "/livez", "", "").await).filter(|answer| answer.status == 503);
    }
    told.unwrap().problem(503);
    drop(held);
    while hub.ask("GET", "/livez", "", "").await.status != 200 {}
}

#[tokio::test]
async fn a_body_too_large_is_refused_so_that_its_sender_sees_it() {
    let hub = Running::start(|options| options.limits.body = 64 * 1024).await;
    let (path, headers) = ("/v1/topics/t/events", "content-type: application/cloudevents+json\r\n");
    let body = "x".repeat(200 * 1024);
    hub.ask("POST", path, headers, &body).await.problem(413);
    let chunked = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
         transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    Answer::read(&hub.exchange(chunked.as_bytes()).await).problem(413);
}

#[tokio::test]
async fn names_that_are_no_text_are_a_problem_like_any_other() {
    let hub = Running::start(|_| {}).await;
    for path in ["/v1/topics/%ff/events", "/v1/topics/t/groups/%ff/dead"] {
        hub.ask("GET", path, "", "").await.problem(400);
    }
}

#[tokio::test]
async fn a_web_page_cannot_use_the_hub_of_who_visits_it() {
    let hub = Running::start(|_| {}).await;
    let (ack, body) = ("/v1/leases/ack", r#"{"leases":["x"]}"#);
    hub.ask("POST", ack, JSON, body).await.problem(409);
    let form = "content-type: text/plain\r\n";
    let problem = hub.ask("POST", ack, form, body).await.problem(415);
    assert_eq!(problem.extensions["field"], "content-type");
    hub.ask("POST", ack, &format!("{JSON}origin: https://shop.example\r\n"), body)
        .await
        .problem(403);
    let rebound = "GET /v1/topics HTTP/1.1\r\nhost: a.example:7070\r\nconnection: close\r\n\r\n";
    Answer::read(&hub.exchange(rebound.as_bytes()).await).problem(403);
}

pub(crate) fn token(name: &str, sha256: &str, scopes: Vec<Scope>) -> TokenOptions {
    let (tenant, topics) = ("default".to_owned(), vec!["*".to_owned()]);
    TokenOptions { name: name.to_owned(), sha256: sha256.to_owned(), tenant, scopes, topics }
}

/// Digests of `a` and of `c`.
pub(crate) const A: &str = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb";
const C: &str = "2e7d2c03a9507ae265ecf5b5356885a53393a2029d241394997265a1a25aefc6";

#[tokio::test]
async fn what_tells_of_every_tenant_is_for_operators_and_probes_are_for_all() {
    let hub = Running::start(|options| {
        options.token =
            vec![token("a", A, vec![Scope::Admin]), token("c", C, vec![Scope::Consume])];
    })
    .await;
    for (path, nobody, consumer) in [
        ("/debug/deep", 401, 403),
        ("/livez", 200, 200),
        ("/readyz", 200, 200),
        ("/openapi.json", 200, 200),
    ] {
        let mut found = Vec::new();
        for headers in ["", "authorization: Bearer c\r\n", "authorization: Bearer a\r\n"] {
            found.push(hub.ask("GET", path, headers, "").await.status);
        }
        assert_eq!(found, [nobody, consumer, 200], "{path}");
    }
}

#[tokio::test]
async fn one_token_does_not_take_all_the_places_of_those_who_wait() {
    let hub = Running::start(|options| {
        options.token =
            vec![token("a", A, vec![Scope::Consume]), token("c", C, vec![Scope::Consume])];
        options.limits.waits_per_token = 1;
    })
    .await;
    let mut waiting = hub.connect().await;
    let wait = "GET /v1/topics/t/events?wait=30s HTTP/1.1\r\nhost: localhost\r\n\
                authorization: Bearer a\r\n\r\n";
    waiting.write_all(wait.as_bytes()).await.unwrap();
    let short = "/v1/topics/t/events?wait=1ms";
    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    while hub.ask("GET", short, &bearer("a"), "").await.status != 503 {}
    assert_eq!(hub.ask("GET", short, &bearer("c"), "").await.status, 204);
    drop(waiting);
    while hub.ask("GET", short, &bearer("a"), "").await.status != 204 {}
}
