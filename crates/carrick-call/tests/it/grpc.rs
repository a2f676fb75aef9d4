//! With tonic: its clients over our channel, its servers behind our layers, all four kinds of calls.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use bytes::Bytes;
use carrick_call::{
    client::{Client, DependencyConfig, DependencyOptions},
    deadline::Streaming,
    retry::Idempotent,
    server::{ServerConfig, ServerLayer, ServerOptions},
};
use carrick_core::context::Context;
use futures_util::{Stream, StreamExt, future::BoxFuture, stream};
use http::uri::PathAndQuery;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tonic::{
    Code, Request, Response, Status,
    body::Body,
    client::{Grpc, GrpcService},
    server::NamedService,
    transport::{Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};

const MS: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Number {
    #[prost(uint32, tag = "1")]
    value: u32,
}

fn number(value: u32) -> Number {
    Number { value }
}

type Numbers = Pin<Box<dyn Stream<Item = Result<Number, Status>> + Send>>;
type Asked = Request<tonic::Streaming<Number>>;

/// What generated code would make of a service with a method of each kind.
#[derive(Clone, Debug, Default)]
struct Arithmetic {
    /// How many calls of `Halve` are answered `UNAVAILABLE` first.
    fails: Arc<AtomicU32>,
    calls: Arc<AtomicUsize>,
}

impl NamedService for Arithmetic {
    const NAME: &'static str = "test.Arithmetic";
}

impl Arithmetic {
    /// Unary: half of a number. Tells the milliseconds that are left for 0, and hangs for 1.
    async fn halve(self, request: Request<Number>) -> Result<Response<Number>, Status> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let one_less = |left: u32| left.checked_sub(1);
        if self.fails.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            return Err(Status::unavailable("not yet"));
        }
        let value = match request.into_inner().value {
            0 => {
                let context = Context::current().expect("in scope");
                context.deadline().remaining(Instant::now()).as_millis() as u32
            }
            1 => std::future::pending().await,
            value => value / 2,
        };
        Ok(Response::new(number(value)))
    }

    /// Server streaming: counts down, ten to the second.
    async fn count_down(request: Request<Number>) -> Result<Response<Numbers>, Status> {
        let from = request.into_inner().value;
        let numbers = stream::iter((0..from).rev()).then(|value| async move {
            sleep(100 * MS).await;
            Ok(number(value))
        });
        let mut answer = Response::new(numbers.boxed() as Numbers);
        answer.extensions_mut().insert(Streaming);
        Ok(answer)
    }

    /// Client streaming: the sum.
    async fn add(request: Asked) -> Result<Response<Number>, Status> {
        let mut numbers = request.into_inner();
        let mut sum = 0;
        while let Some(one) = numbers.message().await? {
            sum += one.value;
        }
        Ok(Response::new(number(sum)))
    }

    /// Both: the double of each as it comes.
    async fn double(request: Asked) -> Result<Response<Numbers>, Status> {
        let doubled = request.into_inner().map(|one| one.map(|one| number(one.value * 2)));
        let mut answer = Response::new(doubled.boxed() as Numbers);
        answer.extensions_mut().insert(Streaming);
        Ok(answer)
    }
}

impl Service<http::Request<Body>> for Arithmetic {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let codec = ProstCodec::<Number, Number>::default();
            let mut grpc = tonic::server::Grpc::new(codec);
            Ok(match request.uri().path() {
                "/test.Arithmetic/Halve" => {
                    let halve = service_fn(move |request| service.clone().halve(request));
                    grpc.unary(halve, request).await
                }
                "/test.Arithmetic/CountDown" => {
                    grpc.server_streaming(service_fn(Self::count_down), request).await
                }
                "/test.Arithmetic/Add" => {
                    grpc.client_streaming(service_fn(Self::add), request).await
                }
                "/test.Arithmetic/Double" => {
                    grpc.streaming(service_fn(Self::double), request).await
                }
                path => panic!("no method {path}"),
            })
        })
    }
}

/// Serves it behind our layers, until the set is dropped.
fn serve(service: &Arithmetic, options: ServerOptions) -> (SocketAddr, JoinSet<()>) {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let layer = ServerLayer::new("test", ServerConfig::try_from(options).unwrap());
    let server = Server::builder().layer(layer).add_service(service.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { server.serve_with_incoming(incoming).await.unwrap() });
    (address, tasks)
}

fn client(address: SocketAddr, change: impl FnOnce(&mut DependencyOptions)) -> Client {
    let url = format!("http://{address}");
    let mut options = DependencyOptions { url, ..DependencyOptions::default() };
    options.pool.http2 = true;
    options.retry.backoff = MS;
    options.retry.backoff_cap = MS;
    change(&mut options);
    Client::new(DependencyConfig::new("test", options).unwrap()).unwrap()
}

fn method(name: &'static str) -> PathAndQuery {
    PathAndQuery::from_static(name)
}

/// What generated code would make of a client.
struct Calls<T>(Grpc<T>);

impl<T> Calls<T>
where
    T: GrpcService<Body>,
    T::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error:
        Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    async fn ready(&mut self) {
        assert!(self.0.ready().await.is_ok());
    }

    async fn halve(&mut self, request: Request<Number>) -> Result<u32, Status> {
        self.ready().await;
        let codec = ProstCodec::<Number, Number>::default();
        let answer = self.0.unary(request, method("/test.Arithmetic/Halve"), codec).await?;
        Ok(answer.into_inner().value)
    }

    async fn count_down(
        &mut self,
        request: Request<Number>,
    ) -> Result<tonic::Streaming<Number>, Status> {
        self.ready().await;
        let codec = ProstCodec::<Number, Number>::default();
        let path = method("/test.Arithmetic/CountDown");
        Ok(self.0.server_streaming(request, path, codec).await?.into_inner())
    }

    async fn add(&mut self, numbers: Vec<u32>) -> Result<u32, Status> {
        self.ready().await;
        let codec = ProstCodec::<Number, Number>::default();
        let request = Request::new(stream::iter(numbers).map(number));
        let answer =
            self.0.client_streaming(request, method("/test.Arithmetic/Add"), codec).await?;
        Ok(answer.into_inner().value)
    }

    async fn double(
        &mut self,
        numbers: impl Stream<Item = Number> + Send + 'static,
    ) -> Result<tonic::Streaming<Number>, Status> {
        self.ready().await;
        let codec = ProstCodec::<Number, Number>::default();
        let mut request = Request::new(numbers);
        request.extensions_mut().insert(Streaming);
        let path = method("/test.Arithmetic/Double");
        Ok(self.0.streaming(request, path, codec).await?.into_inner())
    }
}

async fn all_four_kinds<T>(channel: T)
where
    T: GrpcService<Body>,
    T::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error:
        Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let mut calls = Calls(Grpc::new(channel));
    assert_eq!(calls.halve(Request::new(number(42))).await.unwrap(), 21);
    let values = calls.count_down(Request::new(number(3))).await.unwrap();
    let values: Vec<_> = values.map(|one| one.unwrap().value).collect().await;
    assert_eq!(values, [2, 1, 0]);
    assert_eq!(calls.add((1..=100).collect()).await.unwrap(), 5050);
    // Each answer comes before the next question is asked.
    let (ask, asked) = tokio::sync::mpsc::channel(1);
    let asked =
        stream::unfold(asked, |mut asked| async move { Some((asked.recv().await?, asked)) });
    let mut doubled = calls.double(asked).await.unwrap();
    for value in 1..=10 {
        ask.send(number(value)).await.unwrap();
        assert_eq!(doubled.message().await.unwrap(), Some(number(value * 2)));
    }
    drop(ask);
    assert_eq!(doubled.message().await.unwrap(), None);
}

#[tokio::test]
async fn all_four_kinds_of_calls_go_through_our_channel_and_our_server() {
    let (address, _server) = serve(&Arithmetic::default(), ServerOptions::default());
    let client = client(address, |_| {});
    all_four_kinds(client.channel()).await;
    assert_eq!(client.bulkhead().in_flight(), 0);
    // The client is a service of its own right as well.
    all_four_kinds(client).await;
    let theirs = Endpoint::from_shared(format!("http://{address}")).unwrap();
    all_four_kinds(theirs.connect().await.unwrap()).await;
}

#[tokio::test]
async fn the_timeout_of_a_generated_client_is_the_deadline_on_both_sides() {
    let (address, _server) = serve(&Arithmetic::default(), ServerOptions::default());
    let client = client(address, |_| {});
    let mut calls = Calls(Grpc::new(client.channel()));
    let within = |value, timeout| {
        let mut request = Request::new(number(value));
        request.set_timeout(timeout);
        request
    };
    let left = calls.halve(within(0, 700 * MS)).await.unwrap();
    assert!((1..=700).contains(&left), "{left} ms are left in the handler");
    let start = Instant::now();
    let status = calls.halve(within(1, 200 * MS)).await.unwrap_err();
    // Tonic's server keeps the same time, and if it is first it says `CANCELLED`.
    let code = status.code();
    assert!(matches!(code, Code::DeadlineExceeded | Code::Cancelled), "{status}");
    assert!((150 * MS..1000 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
    let status = calls.halve(within(2, 10 * MS)).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "nothing is sent that comes too late");
    assert_eq!(client.bulkhead().in_flight(), 0);
}

#[tokio::test]
async fn a_server_of_tonic_ends_what_takes_too_long_and_sheds_what_is_too_much() {
    let mut options = ServerOptions::default();
    options.deadline.max = 300 * MS;
    options.deadline.stream.idle = 50 * MS;
    options.deadline.stream.first_byte = 150 * MS;
    options.bulkhead.max = 1;
    options.queue.max_wait = 50 * MS;
    let (address, _server) = serve(&Arithmetic::default(), options);
    let theirs = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let theirs = theirs.connect().await.unwrap();

    let (mut first, mut second) = (Calls(Grpc::new(theirs.clone())), Calls(Grpc::new(theirs)));
    let start = Instant::now();
    let hangs = first.halve(Request::new(number(1)));
    let finds_no_place = async {
        sleep(100 * MS).await;
        let status = second.halve(Request::new(number(4))).await.unwrap_err();
        assert!(start.elapsed() < 300 * MS, "{:?}", start.elapsed());
        status
    };
    let (late, shed) = tokio::join!(hangs, finds_no_place);
    let late = late.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    assert!(start.elapsed() >= 300 * MS);
    assert_eq!(shed.code(), Code::ResourceExhausted, "{shed}");
    let pushback = shed.metadata().get("grpc-retry-pushback-ms").unwrap();
    assert!(pushback.to_str().unwrap().parse::<u32>().is_ok(), "{pushback:?}");
    // The place of a stream is given back at its head, and its silence is told in its trailers.
    let mut stream = first.count_down(Request::new(number(9))).await.unwrap();
    assert_eq!(second.halve(Request::new(number(4))).await.unwrap(), 2);
    assert_eq!(stream.message().await.unwrap(), Some(number(8)));
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn a_call_is_tried_again_only_if_it_says_that_it_may_be() {
    let service = Arithmetic::default();
    let (address, _server) = serve(&service, ServerOptions::default());
    let client = client(address, |_| {});
    let mut calls = Calls(Grpc::new(client.channel()));
    service.fails.store(2, Ordering::SeqCst);
    let mut read = Request::new(number(8));
    read.extensions_mut().insert(Idempotent);
    assert_eq!(calls.halve(read).await.unwrap(), 4);
    assert_eq!(service.calls.load(Ordering::SeqCst), 3);

    service.fails.store(1, Ordering::SeqCst);
    let status = calls.halve(Request::new(number(8))).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "not yet"));
    assert_eq!(service.calls.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_stream_of_grpc_outlives_the_timeout_of_its_head() {
    let (address, _server) = serve(&Arithmetic::default(), ServerOptions::default());
    let client = client(address, |options| options.timeout = 300 * MS);
    let mut calls = Calls(Grpc::new(client.channel()));
    let mut request = Request::new(number(6));
    request.extensions_mut().insert(Streaming);
    let values: Vec<_> = calls.count_down(request).await.unwrap().collect().await;
    assert!(values.iter().all(Result::is_ok) && values.len() == 6, "{values:?}");
    assert_eq!(client.bulkhead().in_flight(), 0);
    // One that is not marked ends with its call.
    let values = calls.count_down(Request::new(number(6))).await.unwrap();
    assert!(values.collect::<Vec<_>>().await.iter().any(Result::is_err));
}

#[tokio::test]
async fn what_the_policies_decide_comes_as_a_status() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = client(nobody, |options| {
        options.breaker.min_calls = 2;
        options.max_attempts = 1;
    });
    let mut calls = Calls(Grpc::new(client.channel()));
    let mut told = Vec::new();
    for _ in 0..10 {
        let status = calls.halve(Request::new(number(8))).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        told.push((
            status.message().to_owned(),
            status.metadata().contains_key("grpc-retry-pushback-ms"),
        ));
    }
    assert_eq!(told[0], (format!("cannot connect to {nobody}"), false));
    let (message, has_pushback) = &told[9];
    assert!(message.starts_with("refused by the breaker: ") && *has_pushback, "{message}");
}
