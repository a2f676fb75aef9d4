//! The client against real servers: connections, retries, deadlines, bodies.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use carrick_call::{
    CallError, Policy,
    balance::Endpoint,
    breaker::State,
    bulkhead::Priority,
    client::{AnswerError, Client, DependencyConfig, DependencyOptions, tls_config},
    egress::{EgressConfig, EgressOptions, Guarded},
    explain::{EXPLAIN, Explain},
    fault::{AbortOptions, DelayOptions, FaultOptions},
    hedge::HedgeOptions,
    queue::QueueOptions,
    retry::{ATTEMPT, RETRIED},
};
use carrick_core::deadline::Deadline;
use http::{HeaderMap, Request, header::CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use sha2::{Digest, Sha256};
use tokio::{net::TcpListener, time::Instant};

use crate::server::{Answer, Server, answer};

const MS: Duration = Duration::from_millis(1);

fn options(servers: &[&Server]) -> DependencyOptions {
    let mut options = DependencyOptions {
        url: "http://dependency.test".to_owned(),
        hosts: servers.iter().map(|server| server.address.to_string()).collect(),
        ..DependencyOptions::default()
    };
    options.retry.backoff = MS;
    options.retry.backoff_cap = MS;
    options
}

fn client(options: DependencyOptions) -> Client {
    Client::new(DependencyConfig::new("test", options).unwrap()).unwrap()
}

fn get(path: &str) -> Request<Empty<Bytes>> {
    Request::get(path).body(Empty::new()).unwrap()
}

async fn text(client: &Client, path: &str) -> String {
    let answer = client.call(get(path)).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

/// Answers with these, one after the other, and then with the last.
fn script(
    statuses: &[u16],
) -> (Arc<AtomicUsize>, impl Fn() -> u16 + Clone + Send + 'static + use<>) {
    let calls = Arc::<AtomicUsize>::default();
    let (counts, statuses) = (Arc::clone(&calls), statuses.to_vec());
    let next = move || {
        let call = counts.fetch_add(1, Ordering::SeqCst);
        statuses[call.min(statuses.len() - 1)]
    };
    (calls, next)
}

#[tokio::test]
async fn calls_one_after_the_other_share_a_connection() {
    for http2 in [false, true] {
        let server = Server::start(|request| async move {
            answer(200, format!("{} {:?}", request.uri().path(), request.version()))
        })
        .await;
        let mut options = options(&[&server]);
        options.pool.http2 = http2;
        let client = client(options);
        let version = if http2 { "HTTP/2.0" } else { "HTTP/1.1" };
        for _ in 0..50 {
            assert_eq!(text(&client, "/v1/prices").await, format!("/v1/prices {version}"));
        }
        assert_eq!(server.connections(), 1);
        assert_eq!(client.bulkhead().in_flight(), 0);
    }
}

#[tokio::test]
async fn a_connection_carries_so_many_requests_and_no_more() {
    for http2 in [false, true] {
        let server = Server::start(|_| async { answer(200, "x") }).await;
        let mut options = options(&[&server]);
        options.pool.max_requests = 10;
        options.pool.http2 = http2;
        let client = client(options);
        for _ in 0..100 {
            text(&client, "/").await;
        }
        // Ten, give or take a tenth.
        assert!((9..=12).contains(&server.connections()), "{}", server.connections());
    }
}

#[tokio::test]
async fn an_idle_connection_that_was_cut_costs_nobody_an_error() {
    let server = Server::start(|_| async { answer(200, "x") }).await;
    let mut options = options(&[&server]);
    options.max_attempts = 1;
    let client = client(options);
    for n in 1..=20 {
        let request = Request::post("/").body(Full::<Bytes>::from("not idempotent")).unwrap();
        let answer = client.call(request).await.unwrap();
        answer.into_body().collect().await.unwrap();
        server.cut();
        // Until the client has seen it: what is sent just then cannot be known to be unseen.
        tokio::time::sleep(5 * MS).await;
        assert_eq!(server.connections(), n);
    }
}

#[tokio::test]
async fn an_answer_that_is_dropped_half_way_is_not_read_by_the_next_call() {
    let server = Server::start(|request| async move {
        let path = request.uri().path().to_owned();
        answer(200, if path == "/large" { vec![b'x'; 4_000_000] } else { b"small".to_vec() })
    })
    .await;
    let client = client(options(&[&server]));
    for _ in 0..5 {
        let mut large = client.call(get("/large")).await.unwrap().into_body();
        assert!(large.frame().await.unwrap().is_ok());
        drop(large);
        assert_eq!(text(&client, "/small").await, "small");
    }
    assert_eq!(client.bulkhead().in_flight(), 0);
    assert!(client.hosts().iter().all(|(_, pending)| *pending == 0));
}

#[tokio::test]
async fn a_failure_is_tried_again_and_both_attempts_say_which_they_are() {
    let seen = Arc::<Mutex<Vec<HeaderMap>>>::default();
    let (calls, next) = script(&[503, 200]);
    let server = Server::start({
        let seen = Arc::clone(&seen);
        move |request| {
            seen.lock().unwrap().push(request.headers().clone());
            let status = next();
            async move { answer(status, "x") }
        }
    })
    .await;
    let client = client(options(&[&server]));
    let explain = Explain::new(Instant::now());
    let mut request = get("/");
    request.extensions_mut().insert(explain.clone());
    request.extensions_mut().insert(Deadline::at(Instant::now() + 800 * MS));
    let answer = client.call(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()[RETRIED], "1", "so that nobody above tries again as well");
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    let seen = seen.lock().unwrap();
    assert_eq!(
        (&seen[0][ATTEMPT], &seen[1][ATTEMPT]),
        (&"1".parse().unwrap(), &"2".parse().unwrap())
    );
    for headers in seen.iter() {
        assert_eq!(headers["host"], "dependency.test");
        let left: u64 = headers["x-request-timeout-ms"].to_str().unwrap().parse().unwrap();
        assert!((1..=800).contains(&left), "{left}");
    }
    assert_eq!(explain.attempts().len(), 2, "{explain:?}");
}

#[tokio::test]
async fn istio_13851_a_post_is_sent_twice_only_with_a_key_and_then_byte_for_byte() {
    let digests = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let (_, next) = script(&[503, 200, 503, 503, 200]);
    let server = Server::start({
        let digests = Arc::clone(&digests);
        move |request| {
            let (digests, status) = (Arc::clone(&digests), next());
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                digests.lock().unwrap().push(Sha256::digest(&body).to_vec());
                answer(status, "x")
            }
        }
    })
    .await;
    let client = client(options(&[&server]));
    let body: Vec<u8> = (0..60_000_u32).map(|n| (n * 31 % 251) as u8).collect();
    let post = |key: Option<&str>, body: Vec<u8>| {
        let request = Request::post("/orders");
        let request = match key {
            Some(key) => request.header("idempotency-key", key),
            None => request,
        };
        let pieces: Vec<_> = body
            .chunks(7000)
            .map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(piece))))
            .collect();
        let body = StreamBody::new(futures_util::stream::iter(pieces));
        client.call(request.body(body).unwrap())
    };
    let whole = Sha256::digest(&body).to_vec();
    assert_eq!(post(Some("k"), body.clone()).await.unwrap().status(), 200);
    assert_eq!(*digests.lock().unwrap(), [whole.clone(), whole.clone()]);
    assert_eq!(post(None, body.clone()).await.unwrap().status(), 503, "told as it is");
    let large = vec![7; 70_000];
    assert_eq!(post(Some("k"), large).await.unwrap().status(), 503, "too large to be kept");
    assert_eq!(digests.lock().unwrap().len(), 4);
}

#[tokio::test]
async fn connect_es_463_a_host_that_swallows_everything_costs_one_try() {
    let black_hole = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server::start(|_| async { answer(200, "here") }).await;
    for http2 in [false, true] {
        let mut options = options(&[&server]);
        options.hosts.push(black_hole.local_addr().unwrap().to_string());
        options.per_try_timeout = Some(150 * MS);
        options.pool.http2 = http2;
        let client = client(options);
        for _ in 0..10 {
            assert_eq!(text(&client, "/").await, "here");
        }
        assert_eq!(client.bulkhead().in_flight(), 0);
    }
}

#[tokio::test]
async fn libmodal_263_a_retry_does_not_use_the_connection_that_fell_silent() {
    // Requests on the first connection are never answered; on later ones they are.
    let first = Arc::<AtomicUsize>::default();
    let server = Server::start({
        let first = Arc::clone(&first);
        move |_| {
            let n = first.fetch_add(1, Ordering::SeqCst);
            async move {
                if n == 0 {
                    std::future::pending::<()>().await;
                }
                answer(200, "here")
            }
        }
    })
    .await;
    let mut options = options(&[&server]);
    options.pool.http2 = true;
    options.per_try_timeout = Some(200 * MS);
    let client = client(options);
    assert_eq!(text(&client, "/").await, "here");
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn nobody_listening_is_no_answer_and_was_never_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let client = client(DependencyOptions { url: format!("http://{address}"), ..options(&[]) });
    let error = client.call(get("/")).await.unwrap_err();
    let CallError::Inner(error) = error else { panic!("{error:?}") };
    assert!(error.was_never_sent(), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

fn grpc(status: &'static str, body: &'static str) -> Answer {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", status.parse().unwrap());
    let frames = [Frame::data(Bytes::from(body)), Frame::trailers(trailers)];
    let body = StreamBody::new(futures_util::stream::iter(frames.map(Ok::<_, Infallible>)));
    let mut answer = http::Response::new(body.boxed_unsync());
    answer.headers_mut().insert(CONTENT_TYPE, "application/grpc".parse().unwrap());
    answer
}

#[tokio::test]
async fn a_grpc_status_in_the_trailers_is_the_verdict() {
    let timeouts = Arc::<Mutex<Vec<String>>>::default();
    let server = Server::start({
        let timeouts = Arc::clone(&timeouts);
        move |request| {
            let timeout = request.headers()["grpc-timeout"].to_str().unwrap().to_owned();
            timeouts.lock().unwrap().push(timeout);
            async { grpc("14", "part") }
        }
    })
    .await;
    let mut options = options(&[&server]);
    options.pool.http2 = true;
    let client = client(options);
    let mut calls = 0;
    while client.breaker().state() == State::Closed {
        let request = Request::post("/pkg.Service/Method")
            .header(CONTENT_TYPE, "application/grpc")
            .body(Full::<Bytes>::from("message"))
            .unwrap();
        let answer = client.call(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let end = answer.into_body().collect().await.unwrap();
        assert_eq!(end.trailers().unwrap()["grpc-status"], "14");
        calls += 1;
        assert!(calls <= 20, "twenty failures open the circuit");
    }
    assert!(timeouts.lock().unwrap().iter().all(|timeout| timeout.len() <= 9));
    let error = client.call(get("/")).await.unwrap_err();
    assert!(matches!(error, CallError::Refused(refusal) if refusal.policy == Policy::Breaker));
}

#[tokio::test]
async fn the_deadline_covers_the_body() {
    let server = Server::start(|_| async {
        let first =
            futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("a")))]);
        let never = futures_util::stream::pending();
        let body = StreamBody::new(futures_util::StreamExt::chain(first, never));
        http::Response::new(body.boxed_unsync())
    })
    .await;
    let mut options = options(&[&server]);
    options.timeout = 300 * MS;
    let client = client(options);
    let start = Instant::now();
    let mut body = client.call(get("/")).await.unwrap().into_body();
    assert!(body.frame().await.unwrap().is_ok());
    let error = body.frame().await.unwrap().unwrap_err();
    assert!(matches!(error, AnswerError::Expired), "{error:?}");
    assert!(start.elapsed() >= 300 * MS);
    assert_eq!(client.bulkhead().in_flight(), 0);
}

#[tokio::test]
async fn ten_megabytes_arrive_whole() {
    let content: Bytes = (0..10_000_000_u32).map(|n| (n % 253) as u8).collect::<Vec<_>>().into();
    let server = Server::start({
        let content = content.clone();
        move |_| {
            let content = content.clone();
            async move { answer(200, content) }
        }
    })
    .await;
    for http2 in [false, true] {
        let mut options = options(&[&server]);
        options.pool.http2 = http2;
        options.timeout = Duration::from_secs(30);
        let client = client(options);
        let body = client.call(get("/")).await.unwrap().into_body().collect().await.unwrap();
        assert_eq!(Sha256::digest(body.to_bytes()), Sha256::digest(&content));
    }
}

#[tokio::test]
async fn tls_is_checked_by_name_and_by_certificate() {
    let key = rcgen::generate_simple_self_signed(vec!["dependency.test".to_owned()]).unwrap();
    let certificate = key.cert.der().clone();
    let mut config = tokio_rustls::rustls::ServerConfig::builder_with_provider(Arc::new(
        tokio_rustls::rustls::crypto::aws_lc_rs::default_provider(),
    ))
    .with_safe_default_protocol_versions()
    .unwrap()
    .with_no_client_auth()
    .with_single_cert(
        vec![certificate.clone()],
        tokio_rustls::rustls::pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der())
            .unwrap(),
    )
    .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let server = Server::with_tls(Some(Arc::new(config).into()), |request| async move {
        answer(200, format!("{:?} {:?}", request.version(), request.uri().authority()))
    })
    .await;
    let client = |url: &str| {
        let options = DependencyOptions { url: url.to_owned(), ..options(&[&server]) };
        let tls = tls_config([certificate.clone()], true).unwrap();
        let config = DependencyConfig::new("test", options).unwrap();
        Client::builder(config).tls(tls).build().unwrap()
    };
    let right = client("https://dependency.test");
    for _ in 0..3 {
        assert_eq!(text(&right, "/").await, "HTTP/2.0 Some(dependency.test)", "chosen by the peer");
    }
    assert_eq!(server.connections(), 1);
    let wrong = client("https://other.test").call(get("/")).await.unwrap_err();
    let CallError::Inner(wrong) = wrong else { panic!("{wrong:?}") };
    assert!(wrong.was_never_sent(), "{wrong}");
}

#[tokio::test]
async fn resty_1197_failsafe_go_65_ten_hedged_megabytes_arrive_whole() {
    let content: Bytes = (0..10_000_000_u32).map(|n| (n % 251) as u8).collect::<Vec<_>>().into();
    let calls = Arc::<AtomicUsize>::default();
    let server = Server::start({
        let (content, calls) = (content.clone(), Arc::clone(&calls));
        move |_| {
            let (content, call) = (content.clone(), calls.fetch_add(1, Ordering::SeqCst));
            async move {
                // Every third hangs: it is the loser, and is dropped while the winner's body comes.
                if call >= 30 && call % 3 == 0 {
                    std::future::pending::<()>().await;
                }
                answer(200, if call < 30 { Bytes::from("small") } else { content })
            }
        }
    })
    .await;
    for http2 in [false, true] {
        calls.store(0, Ordering::SeqCst);
        let mut options = options(&[&server]);
        options.pool.http2 = http2;
        options.timeout = Duration::from_secs(30);
        options.hedge = Some(HedgeOptions { share: 1.0, ..HedgeOptions::default() });
        let client = client(options);
        for _ in 0..30 {
            text(&client, "/").await;
        }
        for _ in 0..4 {
            let body = client.call(get("/")).await.unwrap().into_body().collect().await.unwrap();
            assert_eq!(Sha256::digest(body.to_bytes()), Sha256::digest(&content));
        }
        assert!(calls.load(Ordering::SeqCst) >= 35, "some were made twice");
        assert_eq!(client.bulkhead().in_flight(), 0);
    }
}

#[tokio::test]
async fn a_hedge_goes_to_another_host() {
    let hangs = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let slow = Server::start({
        let hangs = Arc::clone(&hangs);
        move |_| {
            let hangs = hangs.load(Ordering::SeqCst);
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                answer(200, "slow")
            }
        }
    })
    .await;
    let well = Server::start(|_| async {
        tokio::time::sleep(50 * MS).await;
        answer(200, "well")
    })
    .await;
    let mut options = options(&[&slow, &well]);
    options.max_attempts = 1;
    options.hedge = Some(HedgeOptions { share: 1.0, ..HedgeOptions::default() });
    let client = client(options);
    // By weight and by latency it is the one to ask, a second time too.
    let endpoint =
        |server: &Server, weight| Endpoint::new(server.address.to_string()).with_weight(weight);
    client.set_hosts(vec![endpoint(&slow, 1000), endpoint(&well, 1)]);
    for _ in 0..50 {
        text(&client, "/").await;
    }
    hangs.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        assert_eq!(text(&client, "/").await, "well");
    }
    assert_eq!(client.bulkhead().in_flight(), 0);
}

#[tokio::test]
async fn an_answer_tells_why_its_call_went_as_it_did_if_it_is_to() {
    let (_, next) = script(&[503, 200]);
    let server = Server::start(move |_| {
        let status = next();
        async move { answer(status, "x") }
    })
    .await;
    let mut options = options(&[&server]);
    options.explain = true;
    let explained = client(options.clone()).call(get("/")).await.unwrap();
    let told = explained.headers()[EXPLAIN].to_str().unwrap();
    let first = format!("attempt 1: overload from {} in ", server.address);
    assert!(told.starts_with(&first), "{told}");
    assert!(told.contains("; attempt 2: success from "), "{told}");
    assert!(told.contains("; retry: attempt 2 in "), "{told}");
    options.explain = false;
    assert!(!client(options).call(get("/")).await.unwrap().headers().contains_key(EXPLAIN));
}

#[tokio::test]
async fn injected_faults_look_like_the_dependencys_own() {
    let server = Server::start(|_| async { answer(200, "x") }).await;
    for http2 in [false, true] {
        let mut options = options(&[&server]);
        options.pool.http2 = http2;
        let abort = Some(AbortOptions { share: 1.0, status: 503 });
        let header = Some(("x-test".to_owned(), "yes".to_owned()));
        options.fault = Some(FaultOptions { abort, header, ..FaultOptions::default() });
        let client = client(options);
        assert_eq!(text(&client, "/").await, "x");
        let explain = Explain::new(Instant::now());
        let mut request = get("/");
        request.headers_mut().insert("x-test", "yes".parse().unwrap());
        request.extensions_mut().insert(explain.clone());
        let answer = client.call(request).await.unwrap();
        assert_eq!(answer.status(), 503);
        assert!(answer.into_body().collect().await.unwrap().to_bytes().is_empty());
        assert_eq!(explain.attempts().len(), 3, "it is tried again as a 503 is");
        let told = explain.decisions()[0].to_string();
        assert_eq!(told, "fault: answered with 503 without being sent");
        assert_eq!(client.bulkhead().in_flight(), 0);
    }
    assert_eq!(server.connections(), 2, "one for each call that was sent");

    let mut options = options(&[&server]);
    options.timeout = 100 * MS;
    let (time, jitter) = (Duration::from_secs(5), Duration::ZERO);
    let delay = Some(DelayOptions { share: 1.0, time, jitter });
    options.fault = Some(FaultOptions { delay, ..FaultOptions::default() });
    let client = client(options);
    assert!(matches!(client.call(get("/")).await, Err(CallError::Expired)));
}

#[tokio::test]
async fn with_a_queue_a_burst_waits_for_places_until_its_bodies_are_read() {
    let most = Arc::<AtomicUsize>::default();
    let at_a_time = Arc::<AtomicUsize>::default();
    let server = Server::start({
        let (most, at_a_time) = (Arc::clone(&most), Arc::clone(&at_a_time));
        move |_| {
            let (most, at_a_time) = (Arc::clone(&most), Arc::clone(&at_a_time));
            async move {
                let now = at_a_time.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                tokio::time::sleep(MS).await;
                at_a_time.fetch_sub(1, Ordering::SeqCst);
                answer(200, vec![b'x'; 100_000])
            }
        }
    })
    .await;
    let mut options = options(&[&server]);
    options.bulkhead.max = 4;
    options.timeout = Duration::from_secs(30);
    let max_wait = Duration::from_secs(20);
    options.queue = Some(QueueOptions { length: 100, max_wait, ..QueueOptions::default() });
    let client = client(options);
    let calls = (0..50).map(|_| async {
        let mut request = get("/");
        request.extensions_mut().insert(Priority::Critical);
        client.call(request).await.unwrap().into_body().collect().await.unwrap().to_bytes().len()
    });
    let read = futures_util::future::join_all(calls).await;
    assert_eq!(read, [100_000; 50]);
    assert_eq!(most.load(Ordering::SeqCst), 4);
    assert_eq!(client.bulkhead().in_flight(), 0);
}

#[tokio::test]
async fn an_address_that_must_not_be_reached_is_not_tried_again() {
    let server = Server::start(|_| async { answer(200, "x") }).await;
    let options = DependencyOptions { url: format!("http://{}", server.address), ..options(&[]) };
    let config = DependencyConfig::new("test", options).unwrap();
    let guarded = Guarded::new(
        EgressConfig::try_from(EgressOptions { ports: Vec::new(), ..EgressOptions::default() })
            .unwrap(),
    );
    let client = Client::builder(config).dial(Arc::new(guarded)).build().unwrap();
    let explain = Explain::new(Instant::now());
    let mut request = get("/");
    request.extensions_mut().insert(explain.clone());
    assert!(matches!(client.call(request).await, Err(CallError::Inner(_))));
    assert_eq!((explain.attempts().len(), server.connections()), (1, 0));
}
