//! A hub in this process, and a client that sends what a test says and nothing else.

use std::{net::SocketAddr, path::Path, sync::OnceLock, time::Duration};

use carrick_core::problem::Problem;
use carrick_ops::{
    drain::{Drain, DrainConfig, DrainOptions, DrainReport, Trigger},
    health::{Health, HealthConfig},
    telemetry::Metrics,
};
use carrick_server::{
    api::Api,
    config::{HubConfig, HubOptions},
    hub::Hub,
    serve::Listener,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};

pub(crate) const JSON: &str = "content-type: application/json\r\n";
pub(crate) const EVENT: &str = "content-type: application/cloudevents+json\r\n";
pub(crate) const BATCH: &str = "content-type: application/cloudevents-batch+json\r\n";

/// A running hub; dropping it ends it.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) drain: Drain,
    hub: Hub,
    serving: JoinHandle<()>,
}

impl Running {
    /// On a store in memory, unless the change says otherwise.
    pub(crate) async fn start(change: impl FnOnce(&mut HubOptions)) -> Self {
        let mut options = HubOptions { store: "memory:".to_owned(), ..HubOptions::default() };
        options.listen = "127.0.0.1:0".to_owned();
        options.drain = DrainOptions { window: Duration::from_millis(100), ..options.drain };
        change(&mut options);
        let drain = Drain::new(DrainConfig::try_from(options.drain.clone()).unwrap());
        let config = HubConfig::try_from(options).unwrap();
        let hub = Hub::open(&config).await.unwrap();
        let listener =
            Listener::bind(config.listen(), config.tls(), config.limits()).await.unwrap();
        let address = listener.address().unwrap();
        let health = Health::new(HealthConfig::default());
        health.follow(&drain);
        let api = Api::new(hub.clone(), &config, drain.clone());
        let router = api.clone().router(&health, metrics());
        tokio::spawn(api.farewell());
        let serving = tokio::spawn(listener.serve(router, drain.clone()));
        Self { address, drain, hub, serving }
    }

    /// On an SQLite file.
    pub(crate) async fn on_file(folder: &Path, change: impl FnOnce(&mut HubOptions)) -> Self {
        Self::start(|options| {
            options.store = format!("sqlite://{}/hub.db", folder.display());
            change(options);
        })
        .await
    }

    /// Ends it in good order.
    pub(crate) async fn stop(mut self) -> DrainReport {
        self.drain.trigger(Trigger::Interrupt);
        let report = self.drain.finished().await;
        (&mut self.serving).await.unwrap();
        self.hub.close().await;
        report
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes, and returns all that comes until the hub closes.
    pub(crate) async fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        rest(&mut stream).await
    }

    pub(crate) async fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: impl AsRef<[u8]>,
    ) -> Answer {
        let body = body.as_ref();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
             content-length: {}\r\n\r\n",
            body.len()
        );
        Answer::read(&self.exchange(&[head.as_bytes(), body].concat()).await)
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "").await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.ask("POST", path, JSON, body.to_string()).await
    }

    /// Publishes an event with this id to a topic, with more members.
    pub(crate) async fn publish(&self, topic: &str, id: &str, more: Value) -> Answer {
        let path = format!("/v1/topics/{topic}/events");
        self.ask("POST", &path, EVENT, event(id, more)).await.ok(201)
    }

    /// Leases as the group `g`.
    pub(crate) async fn lease(&self, topic: &str, body: Value) -> Vec<Value> {
        let path = format!("/v1/topics/{topic}/groups/g/lease");
        let answer = self.post(&path, body).await.ok(200).json();
        answer["deliveries"].as_array().unwrap().clone()
    }

    /// Settles one delivery.
    pub(crate) async fn settle(&self, verb: &str, delivery: &Value, mut more: Value) -> Answer {
        more["leases"] = json!([delivery["lease"]]);
        self.post(&format!("/v1/leases/{verb}"), more).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// The metrics of this process, which has one recorder for all its hubs.
fn metrics() -> Option<&'static Metrics> {
    static METRICS: OnceLock<Option<Metrics>> = OnceLock::new();
    METRICS.get_or_init(|| Metrics::install().ok()).as_ref()
}

/// An event's document.
pub(crate) fn event(id: &str, more: Value) -> String {
    let mut event = json!({"specversion": "1.0", "id": id, "source": "/test", "type": "t.done.v1"});
    if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
        event.extend(more);
    }
    event.to_string()
}

/// Everything until the other side closes; long before the test's patience ends, it has.
pub(crate) async fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text);
    tokio::time::timeout(Duration::from_secs(20), read).await.expect("the hub closes").unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn read(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("an answer");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head: head.to_owned(), body: body.to_owned() }
    }

    #[track_caller]
    pub(crate) fn ok(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(found, _)| *found == name).map(|(_, value)| value)
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn problem(&self, status: u16) -> Problem {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem: Problem = serde_json::from_str(&self.body).unwrap();
        assert_eq!(problem.status, status);
        problem
    }
}
