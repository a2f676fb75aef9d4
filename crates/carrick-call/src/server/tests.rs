//! Tests of the server's layers, with handlers that do what they are told.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use carrick_core::{context::Context, problem::Problem};
use futures_util::poll;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::sleep;
use tower::{ServiceExt, service_fn};
use tower_layer::Layer;

use super::*;
use crate::{Mode, bulkhead::LimitOptions, deadline::Streaming};

fn layer(places: u32, change: impl FnOnce(&mut ServerOptions)) -> ServerLayer {
    let mut options = ServerOptions::default();
    (options.bulkhead.max, options.queue.length) = (places, 1);
    change(&mut options);
    ServerLayer::new("test", ServerConfig::try_from(options).unwrap())
}

/// A request that waits for so many milliseconds.
fn request(millis: u64) -> Request<u64> {
    Request::new(millis)
}

async fn handle(request: Request<u64>) -> Result<Response<Full<Bytes>>, ()> {
    sleep(Duration::from_millis(request.into_body())).await;
    Ok(Response::new(Full::from("answer")))
}

fn in_flight(layer: &ServerLayer) -> (usize, u32) {
    (layer.queue().waiting(), layer.queue().bulkhead().in_flight())
}

#[tokio::test(start_paused = true)]
async fn what_finds_no_place_is_told_so_with_the_time_to_come_back_and_the_handler_is_not_asked() {
    let layer = layer(1, |_| {});
    let asked = Arc::new(AtomicU32::new(0));
    let handler = {
        let asked = Arc::clone(&asked);
        service_fn(move |request| {
            asked.fetch_add(1, Relaxed);
            handle(request)
        })
    };
    let service = layer.layer(handler);
    let mut runs = Box::pin(service.clone().oneshot(request(100)));
    let mut waits = Box::pin(service.clone().oneshot(request(100)));
    assert!(poll!(&mut runs).is_pending() && poll!(&mut waits).is_pending());
    let refused = service.clone().oneshot(request(0)).await.unwrap();
    assert_eq!(refused.status(), 503);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let problem: Problem = serde_json::from_slice(&body).unwrap();
    assert_eq!((problem.status, problem.detail.as_deref()), (503, Some("the queue is full")));
    let mut grpc = request(0);
    grpc.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    let refused = service.oneshot(grpc).await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["grpc-status"]),
        (200, &"8".parse().unwrap())
    );
    assert!(refused.headers().contains_key("grpc-retry-pushback-ms"));
    assert_eq!(asked.load(Relaxed), 1);
    for one in [runs, waits] {
        let answer = one.await.unwrap();
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "answer");
    }
    assert_eq!((asked.load(Relaxed), in_flight(&layer)), (2, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_place_is_held_until_the_body_has_been_sent_and_a_stream_gives_it_back_at_its_head() {
    let layer = layer(9, |_| {});
    let answer = |is_stream: bool| {
        let layer = &layer;
        async move {
            let service = layer.layer(service_fn(move |_: Request<u64>| async move {
                let frame = || Ok::<_, ()>(http_body::Frame::data(Bytes::from_static(b"piece")));
                let body = StreamBody::new(futures_util::stream::iter([frame(), frame()]));
                let mut answer = Response::new(body);
                if is_stream {
                    answer.extensions_mut().insert(Streaming);
                }
                Ok::<_, ()>(answer)
            }));
            service.oneshot(request(0)).await.unwrap()
        }
    };
    let whole = answer(false).await;
    assert_eq!(in_flight(&layer), (0, 1));
    let stream = answer(true).await;
    assert_eq!(in_flight(&layer), (0, 1));
    whole.into_body().collect().await.unwrap();
    assert_eq!(in_flight(&layer), (0, 0));
    drop((stream, answer(false).await));
    assert_eq!(in_flight(&layer), (0, 0), "a client that leaves");
}

#[tokio::test(start_paused = true)]
async fn a_handler_whose_time_is_over_is_ended_and_gives_its_place_back_and_the_limit_learns() {
    let layer = layer(8, |options| options.bulkhead.limit = LimitOptions::Aimd(Default::default()));
    let before = layer.queue().bulkhead().limit();
    let service = layer.layer(service_fn(handle));
    let answer = service.oneshot(request(60_000)).await.unwrap();
    assert_eq!(answer.status(), 504);
    assert_eq!(in_flight(&layer), (0, 0));
    assert!(layer.queue().bulkhead().limit() < before);
}

#[tokio::test(start_paused = true)]
async fn the_important_are_served_when_the_others_are_not() {
    let layer = layer(1, |_| {}).with_priority(|parts| match parts.uri.path() {
        "/checkout" => Priority::Critical,
        _ => Priority::Sheddable,
    });
    let service = layer.layer(service_fn(handle));
    let to = |path: &str| Request::builder().uri(path).body(10).unwrap();
    let mut runs = Box::pin(service.clone().oneshot(to("/other")));
    let mut waits = Box::pin(service.clone().oneshot(to("/other")));
    assert!(poll!(&mut runs).is_pending() && poll!(&mut waits).is_pending());
    let mut checkout = Box::pin(service.clone().oneshot(to("/checkout")));
    assert!(poll!(&mut checkout).is_pending());
    assert_eq!(waits.await.unwrap().status(), 503);
    drop(runs.await);
    assert_eq!(checkout.await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn dropped_at_every_poll_nothing_stays_held() {
    let layer = layer(1, |_| {});
    let service = layer.layer(service_fn(|_: Request<u64>| async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        Ok::<_, ()>(Response::new(Full::<Bytes>::from("answer")))
    }));
    for polls in 0..6 {
        let mut runs = Box::pin(service.clone().oneshot(request(0)));
        let mut waits = Box::pin(service.clone().oneshot(request(0)));
        for _ in 0..polls {
            if poll!(&mut waits).is_ready() || poll!(&mut runs).is_ready() {
                break;
            }
        }
        drop((runs, waits));
        assert_eq!(in_flight(&layer), (0, 0), "{polls}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_handler_has_the_context_of_its_caller() {
    let layer = layer(1, |options| options.deadline.refuse = Mode::Enforce);
    let service = layer.layer(service_fn(|_: Request<u64>| async {
        let context = Context::current().unwrap();
        let text = format!("{} {:?}", context.trace().trace_id(), context.idempotency_key());
        Ok::<_, ()>(Response::new(Full::<Bytes>::from(text)))
    }));
    let mut with = request(0);
    let headers = with.headers_mut();
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    headers.insert("traceparent", parent.parse().unwrap());
    headers.insert("idempotency-key", "k".parse().unwrap());
    let body = service.oneshot(with).await.unwrap().into_body();
    let text = body.collect().await.unwrap().to_bytes();
    assert_eq!(text, "0af7651916cd43dd8448eb211c80319c Some(\"k\")");
}

#[test]
fn all_faults_are_told_with_their_tables() {
    let mut options = ServerOptions::default();
    options.deadline.max = Duration::ZERO;
    options.bulkhead.max = 0;
    options.queue.length = 0;
    let faults = ServerConfig::try_from(options).unwrap_err();
    let keys: Vec<_> = faults.faults().iter().map(|fault| fault.key.as_str()).collect();
    assert_eq!(keys, ["deadline.max", "deadline.min-useful", "bulkhead.max", "queue.length"]);
    let text = "[queue]\nlength = 5\nmax-wait = \"1s\"\n[deadline]\nmax = \"5s\"";
    assert!(toml::from_str::<ServerConfig>(text).is_ok());
    assert!(toml::from_str::<ServerConfig>("[queue]\nmax-wait = \"5s\"").is_err());
}
