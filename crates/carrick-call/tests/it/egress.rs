//! A guarded client over real connections.

use std::{error::Error, io, sync::Arc};

use bytes::Bytes;
use carrick_call::egress::{EgressConfig, EgressError, EgressOptions, Guarded, Resolve};
use futures_util::future::BoxFuture;
use http::Uri;
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo},
};
use tower::ServiceExt;

use crate::server::{Server, answer};

/// Leads every name to this host.
#[derive(Debug)]
struct Here;

impl Resolve for Here {
    fn resolve<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Vec<std::net::IpAddr>>> {
        Box::pin(async { Ok(vec![[127, 0, 0, 1].into()]) })
    }
}

fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a EgressError> {
    let mut next = Some(error);
    while let Some(error) = next {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(found) = inner.and_then(|inner| inner.downcast_ref()) {
            return Some(found);
        }
        next = error.source();
    }
    None
}

#[tokio::test]
async fn hyper_utils_client_reaches_what_may_be_reached_and_hears_why_not() {
    let server = Server::start(|_| async { answer(200, "hello") }).await;
    let port = server.address.port();
    let client = |danger_allow| {
        let options = EgressOptions { ports: vec![port], danger_allow, plain: true };
        let config = EgressConfig::try_from(options).unwrap();
        let guarded = Guarded::with_resolver(config, Arc::new(Here));
        let client = Client::builder(TokioExecutor::new());
        client.build::<_, Empty<Bytes>>(guarded.map_response(TokioIo::new))
    };
    let uri: Uri = format!("http://hook.test:{port}/").parse().unwrap();
    let fine = client(vec!["127.0.0.0/8".to_owned()]);
    let answer = fine.get(uri.clone()).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hello");
    let error = client(Vec::new()).get(uri).await.unwrap_err();
    assert!(matches!(find(&error), Some(EgressError::Forbidden { .. })), "{error:?}");
    assert_eq!(server.connections(), 1, "nothing was dialled");
}
