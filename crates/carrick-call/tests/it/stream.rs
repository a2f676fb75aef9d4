//! Answers that are streams, through the client, from a real server.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use carrick_call::{
    breaker::State,
    client::{AnswerError, Client, DependencyConfig, DependencyOptions},
    deadline::Streaming,
};
use carrick_core::deadline::Deadline;
use futures_util::{StreamExt, stream};
use http::{Request, Response, header::CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, StreamBody};
use tokio::time::{Instant, sleep};

use crate::server::Server;

const MS: Duration = Duration::from_millis(1);

/// Gives a piece after each of these milliseconds, and what its callers said.
async fn serves(spans: &[u32], content: &'static str) -> (Server, Arc<Mutex<Vec<String>>>) {
    let said = Arc::<Mutex<Vec<String>>>::default();
    let spans = spans.to_vec();
    let server = Server::start({
        let said = Arc::clone(&said);
        move |request| {
            let told = request.headers()["x-request-timeout-ms"].to_str().unwrap().to_owned();
            said.lock().unwrap().push(told);
            let pieces = stream::iter(spans.clone()).then(|span| async move {
                sleep(span * MS).await;
                Ok::<_, Infallible>(Frame::data(Bytes::from("piece")))
            });
            let answer = Response::builder().header(CONTENT_TYPE, content);
            let answer = answer.body(StreamBody::new(pieces).boxed_unsync()).unwrap();
            async { answer }
        }
    })
    .await;
    (server, said)
}

fn client(server: &Server, change: impl FnOnce(&mut DependencyOptions)) -> Client {
    let url = format!("http://{}", server.address);
    let timeout = 300 * MS;
    let mut options = DependencyOptions { url, timeout, ..DependencyOptions::default() };
    options.max_attempts = 1;
    change(&mut options);
    Client::new(DependencyConfig::new("test", options).unwrap()).unwrap()
}

fn streaming() -> Request<Empty<Bytes>> {
    let mut request = Request::get("/events").body(Empty::new()).unwrap();
    request.extensions_mut().insert(Streaming);
    request
}

/// What came of a stream, when it ended, and whether well.
async fn read(client: &Client, request: Request<Empty<Bytes>>) -> (usize, Duration, bool) {
    let start = Instant::now();
    let mut body = client.call(request).await.unwrap().into_body();
    let mut pieces = 0;
    loop {
        match body.frame().await {
            Some(Ok(_)) => pieces += 1,
            Some(Err(error)) => {
                assert!(matches!(error, AnswerError::Expired), "{error:?}");
                assert_eq!(client.bulkhead().in_flight(), 0);
                return (pieces, start.elapsed(), false);
            }
            None => {
                assert_eq!(client.bulkhead().in_flight(), 0);
                return (pieces, start.elapsed(), true);
            }
        }
    }
}

#[tokio::test]
async fn opencrabs_1678_a_stream_outlives_the_timeout_of_its_head() {
    let (server, said) = serves(&[100; 8], "application/x-ndjson").await;
    let client = client(&server, |_| {});
    let (pieces, took, well) = read(&client, streaming()).await;
    assert_eq!((pieces, well), (8, true));
    assert!(took >= 800 * MS);
    // Unmarked, it is an answer like any other, and ends.
    let other = Request::get("/events").body(Empty::new()).unwrap();
    let (pieces, _, well) = read(&client, other).await;
    assert!(pieces < 8 && !well);
    let said = said.lock().unwrap();
    assert!(said[0].parse::<u32>().unwrap() > 3_599_000, "an hour, less what has passed: {said:?}");
    assert!(said[1].parse::<u32>().unwrap() <= 300, "{said:?}");
}

#[tokio::test]
async fn server_sent_events_are_a_stream_without_being_marked() {
    let (server, _) = serves(&[100; 8], "text/event-stream").await;
    let request = Request::get("/events").body(Empty::new()).unwrap();
    let (pieces, _, well) = read(&client(&server, |_| {}), request).await;
    assert_eq!((pieces, well), (8, true));
}

#[tokio::test]
async fn a_stream_ends_when_it_is_silent_too_old_or_late_with_its_first_byte() {
    let (server, _) = serves(&[50, 50, 60_000], "text/event-stream").await;
    let silent = client(&server, |options| options.stream.idle = 200 * MS);
    let (pieces, took, well) = read(&silent, streaming()).await;
    assert_eq!((pieces, well), (2, false));
    assert!(took >= 300 * MS, "{took:?}");

    let late = client(&server, |options| options.stream.first_byte = 20 * MS);
    assert_eq!(read(&late, streaming()).await.0, 0);

    let old = client(&server, |options| options.stream.lifetime = 80 * MS);
    let (pieces, took, well) = read(&old, streaming()).await;
    assert_eq!((pieces, well), (1, false));
    assert!(took >= 80 * MS, "{took:?}");
}

#[tokio::test]
async fn a_stream_keeps_the_deadline_of_its_caller() {
    let (server, said) = serves(&[100; 100], "text/event-stream").await;
    let mut request = streaming();
    request.extensions_mut().insert(Deadline::at(Instant::now() + 650 * MS));
    let (pieces, took, well) = read(&client(&server, |_| {}), request).await;
    assert!((1..=6).contains(&pieces) && !well, "{pieces}");
    assert!(took >= 650 * MS, "{took:?}");
    let told: u32 = said.lock().unwrap()[0].parse().unwrap();
    assert!((300..=650).contains(&told), "{told}");
}

#[tokio::test]
async fn how_long_a_stream_lived_is_not_how_slow_its_host_is() {
    let (server, _) = serves(&[10; 30], "text/event-stream").await;
    let client = client(&server, |options| {
        options.breaker.min_calls = 1;
        options.breaker.slow_rate = Some(0.1);
        options.breaker.slow_call = 200 * MS;
        options.stream.lifetime = 250 * MS;
    });
    let (_, took, well) = read(&client, streaming()).await;
    assert!(took >= 250 * MS && !well);
    assert_eq!(client.breaker().state(), State::Closed, "nor is a long life a failure");
}
