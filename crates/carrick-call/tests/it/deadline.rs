//! Deadlines over real connections: who hangs up, who is late, and what goes on the wire.

use std::{convert::Infallible, future::pending, net::SocketAddr, time::Duration};

use bytes::Bytes;
use carrick_call::{
    CallError, Mode,
    deadline::{
        ClientDeadlineConfig, DeadlineConfig, DeadlineLayer, DeadlineOptions, ServerDeadlineLayer,
    },
};
use carrick_core::{context::Context, deadline::Deadline, trace::TraceContext};
use futures_util::{StreamExt, future::BoxFuture, stream};
use http::{Request, Response, header::CONTENT_TYPE};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::Instant,
};
use tower::{Layer, Service, ServiceExt};

const MS: Duration = Duration::from_millis(1);

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Handled = BoxFuture<'static, Result<Response<Body>, Infallible>>;

fn enforced() -> ServerDeadlineLayer {
    let options = DeadlineOptions { refuse: Mode::Enforce, ..DeadlineOptions::default() };
    ServerDeadlineLayer::new(DeadlineConfig::try_from(options).unwrap())
}

/// Serves a handler behind a layer; ends when it is dropped.
async fn serve<H>(layer: &ServerDeadlineLayer, handler: H) -> (SocketAddr, JoinSet<()>)
where
    H: Fn(Request<Incoming>) -> Handled + Clone + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = layer.layer(tower::service_fn(handler));
    let mut accepts = JoinSet::new();
    accepts.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = service.clone();
            open.spawn(async move {
                let serve = service_fn(move |request| service.clone().oneshot(request));
                let server = auto::Builder::new(TokioExecutor::new());
                // How a connection ends is the client's business.
                server.serve_connection(TokioIo::new(stream), serve).await.ok();
            });
        }
    });
    (address, accepts)
}

/// Tells when it is dropped.
struct Tells(mpsc::Sender<&'static str>);

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.try_send("dropped").ok();
    }
}

/// Never answers; tells when it begins and when it is dropped.
fn never(events: mpsc::Sender<&'static str>) -> impl Fn(Request<Incoming>) -> Handled + Clone {
    move |_| {
        let events = events.clone();
        Box::pin(async move {
            let _tells = Tells(events.clone());
            events.try_send("began").ok();
            pending().await
        })
    }
}

/// A body that never comes to its end.
fn endless() -> Body {
    let first = stream::iter([Ok(Frame::data(Bytes::from_static(b"first")))]);
    StreamBody::new(first.chain(stream::pending())).boxed_unsync()
}

async fn http2(address: SocketAddr) -> (http2::SendRequest<Empty<Bytes>>, JoinSet<()>) {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (send, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let mut drives = JoinSet::new();
    drives.spawn(async { connection.await.unwrap_or_default() });
    (send, drives)
}

async fn http1(address: SocketAddr) -> (http1::SendRequest<Empty<Bytes>>, JoinSet<()>) {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (send, connection) = http1::handshake(io).await.unwrap();
    let mut drives = JoinSet::new();
    drives.spawn(async { connection.await.unwrap_or_default() });
    (send, drives)
}

fn get(left: &str) -> Request<Empty<Bytes>> {
    let request = Request::get("http://here.test/").header("x-request-timeout-ms", left);
    request.header("host", "here.test").body(Empty::new()).unwrap()
}

#[tokio::test]
async fn a_client_that_hangs_up_over_http1_ends_the_handler() {
    let (events, mut told) = mpsc::channel(4);
    let layer = enforced();
    let (address, _server) = serve(&layer, never(events)).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: here.test\r\nx-request-timeout-ms: 2000\r\n\r\n";
    let start = Instant::now();
    stream.write_all(request).await.unwrap();
    assert_eq!(told.recv().await, Some("began"));
    drop(stream);
    assert_eq!(told.recv().await, Some("dropped"));
    assert!(start.elapsed() < 1500 * MS, "and not because its time was over");
    assert_eq!(layer.armed(), 0);
}

#[tokio::test]
async fn a_call_that_is_dropped_over_http2_ends_the_handler_and_not_the_connection() {
    let (events, mut told) = mpsc::channel(4);
    let layer = enforced();
    let (address, _server) = serve(&layer, never(events)).await;
    let (mut send, _drives) = http2(address).await;
    let start = Instant::now();
    let call = tokio::spawn(send.send_request(get("2000")));
    assert_eq!(told.recv().await, Some("began"));
    call.abort();
    assert_eq!(told.recv().await, Some("dropped"));
    assert!(start.elapsed() < 1500 * MS, "and not because its time was over");
    assert_eq!(layer.armed(), 0);
    assert!(send.ready().await.is_ok());
}

#[tokio::test]
async fn an_expired_call_is_answered_with_a_problem_and_the_connection_stays() {
    let (events, mut told) = mpsc::channel(4);
    let layer = enforced();
    let (address, _server) = serve(&layer, never(events)).await;
    let (mut send, _drives) = http1(address).await;
    for _ in 0..2 {
        let start = Instant::now();
        let answer = send.send_request(get("60")).await.unwrap();
        assert!(start.elapsed() >= 60 * MS, "never early");
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()[CONTENT_TYPE]),
            (504, &"application/problem+json".parse().unwrap(),)
        );
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(problem["detail"], "the deadline passed");
        assert_eq!((told.recv().await, told.recv().await), (Some("began"), Some("dropped")));
        send.ready().await.unwrap();
    }
}

#[tokio::test]
async fn a_body_that_is_late_breaks_off_and_grpcs_says_so_in_its_trailers() {
    let layer = enforced();
    let handler = |_| -> Handled { Box::pin(async { Ok(Response::new(endless())) }) };
    let (address, _server) = serve(&layer, handler).await;
    let (mut send, _drives) = http2(address).await;
    let mut grpc = Request::post("http://here.test/").header(CONTENT_TYPE, "application/grpc");
    grpc = grpc.header("grpc-timeout", "80m");
    let answer = send.send_request(grpc.body(Empty::new()).unwrap()).await.unwrap();
    let all = answer.into_body().collect().await.unwrap();
    assert_eq!(all.trailers().unwrap()["grpc-status"], "4");
    assert_eq!(all.to_bytes(), "first");

    let (mut send, _drives) = http1(address).await;
    let answer = send.send_request(get("80")).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.into_body().collect().await.is_err(), "never a shorter body for a whole one");
    assert_eq!(layer.armed(), 0);
}

#[tokio::test]
async fn what_a_client_sends_a_handler_has_in_scope() {
    let layer = enforced();
    let handler = |_| -> Handled {
        Box::pin(async {
            let context = Context::current().expect("in scope");
            let left = context.deadline().remaining(Instant::now()).as_millis();
            let key = context.idempotency_key().unwrap_or_default().to_owned();
            let text = format!("{} {left} {key}", context.trace().trace_id());
            Ok(Response::new(http_body_util::Full::from(text).boxed_unsync()))
        })
    };
    let (address, _server) = serve(&layer, handler).await;
    let (send, _drives) = http2(address).await;
    let client = DeadlineLayer::new("here", ClientDeadlineConfig::default());
    let service = tower::service_fn(move |request| send.clone().send_request(request));
    let mut client = client.layer(service);

    let trace = TraceContext::new();
    let deadline = Deadline::at(Instant::now() + 900 * MS);
    let context = Context::new(deadline, trace.clone());
    let request = || {
        let request = Request::post("http://here.test/").header("idempotency-key", "k");
        request.body(Empty::<Bytes>::new()).unwrap()
    };
    let answer = context.scope(async { client.ready().await?.call(request()).await }).await;
    let text = answer.unwrap().into_body().collect().await.unwrap().to_bytes();
    let text = std::str::from_utf8(&text).unwrap();
    let mut words = text.split(' ');
    assert_eq!(words.next(), Some(&*trace.trace_id().to_string()));
    let left: u128 = words.next().unwrap().parse().unwrap();
    assert!((1..=900).contains(&left), "{left}");
    assert_eq!(words.next(), Some("k"));
}

#[tokio::test]
async fn a_client_whose_time_is_over_ends_the_exchange() {
    let (events, mut told) = mpsc::channel(4);
    // Only counts, so that it is the client who ends it.
    let options = DeadlineOptions { mode: Mode::Observe, ..DeadlineOptions::default() };
    let layer = ServerDeadlineLayer::new(DeadlineConfig::try_from(options).unwrap());
    let (address, _server) = serve(&layer, never(events)).await;
    let (send, _drives) = http2(address).await;
    let client = DeadlineLayer::new("here", ClientDeadlineConfig::default());
    let service = tower::service_fn(move |request| send.clone().send_request(request));
    let mut request = get("60000");
    request.extensions_mut().insert(Deadline::at(Instant::now() + 80 * MS));
    let error = client.layer(service).oneshot(request).await.unwrap_err();
    assert!(matches!(error, CallError::Expired));
    assert_eq!((told.recv().await, told.recv().await), (Some("began"), Some("dropped")));
    assert_eq!((client.armed(), layer.armed()), (0, 0));
}
