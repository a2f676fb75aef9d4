//! A real HTTP server on a port of its own, which does what a test says and counts connections.

use std::{
    convert::Infallible,
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_rustls::TlsAcceptor;

pub(crate) type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Ends with its connections when it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    open: Arc<Mutex<JoinSet<()>>>,
    _accepts: JoinSet<()>,
}

impl Server {
    pub(crate) async fn start<F, A>(does: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
        A: Future<Output = Answer> + Send + 'static,
    {
        Self::with_tls(None, does).await
    }

    pub(crate) async fn with_tls<F, A>(tls: Option<TlsAcceptor>, does: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
        A: Future<Output = Answer> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::<AtomicUsize>::default();
        let open = Arc::<Mutex<JoinSet<()>>>::default();
        let mut accepts = JoinSet::new();
        accepts.spawn({
            let (connections, open) = (Arc::clone(&connections), Arc::clone(&open));
            async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    connections.fetch_add(1, Ordering::SeqCst);
                    let (does, tls) = (does.clone(), tls.clone());
                    open.lock().unwrap().spawn(async move {
                        let does = move |request| {
                            let answer = does(request);
                            async move { Ok::<_, Infallible>(answer.await) }
                        };
                        let server = auto::Builder::new(TokioExecutor::new());
                        // How a connection ends is the client's business.
                        match tls {
                            None => {
                                let io = TokioIo::new(stream);
                                server.serve_connection(io, service_fn(does)).await.ok();
                            }
                            Some(tls) => {
                                let Ok(stream) = tls.accept(stream).await else { return };
                                let io = TokioIo::new(stream);
                                server.serve_connection(io, service_fn(does)).await.ok();
                            }
                        }
                    });
                }
            }
        });
        Self { address, connections, open, _accepts: accepts }
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Cuts all connections.
    pub(crate) fn cut(&self) {
        self.open.lock().unwrap().abort_all();
    }
}

pub(crate) fn answer(status: u16, body: impl Into<Bytes>) -> Answer {
    let body = http_body_util::Full::new(body.into()).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}
