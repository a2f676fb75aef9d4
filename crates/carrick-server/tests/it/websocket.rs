//! The WebSocket door, from outside.

use std::time::Duration;

use carrick_server::config::Scope;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Error, Message, client::IntoClientRequest, protocol::CloseFrame},
};

use crate::{
    edge::{A, token},
    kit::{Answer, JSON, Running, event},
};

const T: &str = "/v1/topics/t/events";

struct Client(WebSocketStream<TcpStream>);

impl Client {
    async fn connect(
        hub: &Running,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<Self, Answer> {
        let mut request = format!("ws://localhost{path}").into_client_request().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        match client_async(request, hub.connect().await).await {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(Error::Http(response)) => {
                let head = format!("HTTP/1.1 {} \r\n\r\n", response.status().as_u16());
                let mut answer = Answer::read(&head);
                for (name, value) in response.headers() {
                    answer.head += &format!("\r\n{name}: {}", value.to_str().unwrap());
                }
                answer.body = String::from_utf8(response.into_body().unwrap_or_default()).unwrap();
                Err(answer)
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Connects, and takes the opening.
    async fn open(hub: &Running, path: &str) -> (Self, Value) {
        let mut client = Self::connect(hub, path, &[]).await.unwrap();
        let opening = client.next().await["open"].take();
        assert!(opening["session"].is_string() && opening["ping"] == "25s", "{opening}");
        (client, opening)
    }

    async fn message(&mut self) -> Message {
        let patience = Duration::from_secs(20);
        tokio::time::timeout(patience, self.0.next())
            .await
            .expect("it says something")
            .expect("it goes on")
            .unwrap()
    }

    async fn next(&mut self) -> Value {
        loop {
            match self.message().await {
                Message::Text(text) => return serde_json::from_str(&text).unwrap(),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn closed(&mut self) -> CloseFrame {
        loop {
            if let Message::Close(frame) = self.message().await {
                return frame.unwrap();
            }
        }
    }

    async fn say(&mut self, message: impl Into<String>) {
        self.0.send(Message::text(message.into())).await.unwrap();
    }

    async fn send(&mut self, number: u64, id: &str) {
        self.say(format!(r#"{{"send":{},"id":{number}}}"#, event(id, json!({})))).await;
    }

    async fn ids(&mut self, count: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while ids.len() < count {
            ids.push(self.next().await["event"]["id"].as_str().unwrap().to_owned());
        }
        ids
    }
}

#[tokio::test]
async fn an_opening_has_the_position_from_which_nothing_is_missed() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "0", json!({})).await;
    let (mut client, opening) = Client::open(&hub, T).await;
    for id in ["1", "2", "3"] {
        hub.publish("t", id, json!({})).await;
    }
    let first = client.next().await;
    assert_eq!(first["event"]["id"], "1");
    assert_eq!(client.ids(2).await, ["2", "3"]);
    for (position, rest) in [(&opening["position"], 3), (&first["position"], 2)] {
        let path = format!("{T}?after={}", position.as_str().unwrap());
        let (mut again, _) = Client::open(&hub, &path).await;
        let ids = again.ids(rest).await;
        assert_eq!(ids, ["1", "2", "3"][3 - rest..]);
        let page = hub.get(&path).await.ok(200).json();
        assert_eq!(page["events"].as_array().unwrap().len(), rest, "by long poll the same");
    }
    let (mut lost, opening) = Client::open(&hub, &format!("{T}?after=junk")).await;
    assert_eq!(opening["position"], Value::Null, "there is none before the reset");
    assert_eq!(lost.next().await["reset"]["topic"], "t");
    assert_eq!(lost.ids(4).await, ["0", "1", "2", "3"]);
}

#[tokio::test]
async fn what_is_sent_is_published_in_order_and_acknowledged_once_durable() {
    let hub = Running::start(|_| {}).await;
    let (mut client, opening) = Client::open(&hub, &format!("{T}?type=none")).await;
    assert_eq!(opening["last_client_seq"], 0);
    for number in 1..=200 {
        client.send(number, &number.to_string()).await;
    }
    client.send(201, "7").await;
    client.say(r#"{"send":{"id":"x"},"id":202}"#).await;
    for number in 1..=201 {
        let answer = client.next().await;
        // The refusal does not wait for those before it.
        let answer = if answer.get("refused").is_some() { client.next().await } else { answer };
        assert_eq!(answer["ack"], json!({"id": number, "duplicate": number == 201}));
    }
    let page = hub.get(&format!("{T}?limit=1000")).await.ok(200).json();
    let ids: Vec<_> =
        page["events"].as_array().unwrap().iter().map(|event| event["id"].clone()).collect();
    let expected: Vec<_> = (1..=200).map(|number: u32| json!(number.to_string())).collect();
    assert_eq!(ids, expected);

    let session = opening["session"].as_str().unwrap();
    let (mut again, opening) = Client::open(&hub, &format!("{T}?session={session}")).await;
    assert_eq!((&opening["session"], &opening["last_client_seq"]), (&json!(session), &json!(201)));
    again.send(200, "200").await;
    assert_eq!(again.next().await["ack"], json!({"id": 200, "duplicate": true}));
}

#[tokio::test]
async fn a_refused_send_names_its_field_and_the_connection_goes_on() {
    let hub = Running::start(|_| {}).await;
    let (mut client, _) = Client::open(&hub, T).await;
    client.say(r#"{"send":{"specversion":"1.0","id":"","source":"/s","type":"a"},"id":1}"#).await;
    let refused = client.next().await["refused"].take();
    assert_eq!((&refused["id"], &refused["problem"]["status"]), (&json!(1), &json!(400)));
    assert_eq!(refused["problem"]["field"], "id");
    client.say(r#"{"ping":7}"#).await;
    assert_eq!(client.next().await, json!({"pong": 7}));
}

#[tokio::test]
async fn what_breaks_the_protocol_is_closed_with_its_code() {
    let hub = Running::start(|_| {}).await;
    let large = "x".repeat(1024 * 1024 + 2000);
    for (message, code) in [
        (Message::text("junk"), 1002),
        (Message::text(r#"{"ping":1,"id":1}"#), 1002),
        (Message::binary(vec![1, 2]), 1003),
        (Message::text(large), 1009),
    ] {
        let (mut client, _) = Client::open(&hub, T).await;
        client.0.send(message.clone()).await.unwrap();
        let frame = client.closed().await;
        assert_eq!(u16::from(frame.code), code, "{frame:?}");
        assert!(!frame.reason.is_empty());
    }
    // Not masked, as a client must.
    let (client, _) = Client::open(&hub, T).await;
    let mut raw = client.0.into_inner();
    raw.write_all(b"\x81\x02{}").await.unwrap();
    let mut left = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut raw, &mut left).await.unwrap();
    assert_eq!((left[0], &left[2..4]), (0x88, &1002_u16.to_be_bytes()[..]), "{left:?}");
}

#[tokio::test]
async fn a_refusal_comes_before_the_connection_is_a_websocket() {
    let hub = Running::start(|options| {
        options.feed.subscribers = 1;
        options.origins = vec!["https://shop.example".into()];
    })
    .await;
    let connect = |headers| Client::connect(&hub, T, headers);
    let refused = |result: Result<Client, Answer>, status| {
        result.err().expect("it is refused").problem(status);
    };
    refused(connect(&[("sec-websocket-protocol", "chat.v2")]).await, 400);
    refused(connect(&[("sec-websocket-key", "short")]).await, 400);
    refused(connect(&[("sec-websocket-version", "12")]).await, 426);
    for origin in ["https://evil.example", "http://shop.example", "null"] {
        let headers = [("origin", origin)];
        refused(Client::connect(&hub, T, &headers).await, 403);
    }
    let chosen =
        [("sec-websocket-protocol", "other, carrick.v1"), ("origin", "https://shop.example")];
    let mut first = connect(&chosen).await.unwrap();
    first.next().await;
    let full = connect(&[]).await.err().unwrap();
    assert!(full.header("retry-after").is_some(), "{full:?}");
    full.problem(503);
    hub.publish("t", "1", json!({})).await;
    assert_eq!(first.ids(1).await, ["1"], "who is in stays");
    first.0.close(None).await.unwrap();
    drop(first);
    while connect(&[]).await.is_err() {}
}

#[tokio::test]
async fn several_topics_are_named_and_have_one_position() {
    let hub = Running::start(|_| {}).await;
    let (mut client, _) = Client::open(&hub, "/v1/topics/a/events?topic=b").await;
    hub.publish("b", "1", json!({})).await;
    let message = client.next().await;
    assert_eq!((&message["topic"], &message["event"]["id"]), (&json!("b"), &json!("1")));
    hub.publish("a", "2", json!({})).await;
    let position = message["position"].as_str().unwrap();
    let path = format!("/v1/topics/b/events?topic=a&after={position}");
    let (mut again, _) = Client::open(&hub, &path).await;
    assert_eq!(again.ids(1).await, ["2"]);
}

#[tokio::test]
async fn a_drain_says_goodbye_within_its_window() {
    let hub = Running::start(|options| {
        options.drain.window = Duration::from_secs(1);
        options.drain.interrupt_window = Duration::from_secs(1);
    })
    .await;
    let (mut client, _) = Client::open(&hub, T).await;
    let stopped = tokio::spawn(hub.stop());
    assert_eq!(u16::from(client.closed().await.code), 1001);
    // Answers the goodbye.
    assert!(client.0.next().await.is_none());
    assert!(!stopped.await.unwrap().forced);
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_cut_and_its_sibling_misses_nothing() {
    let hub = Running::start(|options| {
        options.feed.slow_bytes = 64 * 1024;
        options.feed.slow_after = Duration::from_millis(600);
    })
    .await;
    let (mut stopped, _) = Client::open(&hub, T).await;
    let (mut sibling, _) = Client::open(&hub, T).await;
    let cut = || async {
        let metrics = hub.get("/metrics").await.ok(200).body;
        metrics.lines().any(|line| {
            line.starts_with("carrick_feed_ended_total")
                && line.contains("websocket")
                && line.contains("slow")
        })
    };
    let data = "x".repeat(100_000);
    let mut published = 0;
    while !cut().await {
        assert!(published < 2000, "it is never cut");
        hub.publish("t", &published.to_string(), json!({"data": data})).await;
        assert_eq!(sibling.ids(1).await, [published.to_string()]);
        published += 1;
    }
    let mut last = None;
    // Whether the goodbye comes through depends on how much it reads now.
    while let Some(Ok(message)) = stopped.0.next().await {
        match message {
            Message::Close(frame) => assert_eq!(u16::from(frame.unwrap().code), 3008),
            Message::Text(text) => {
                let mut message: Value = serde_json::from_str(&text).unwrap();
                last = Some(message["position"].take());
            }
            _ => {}
        }
    }
    let path = format!("{T}?after={}", last.unwrap().as_str().unwrap());
    let page = hub.get(&path).await.ok(200).json();
    assert!(!page["events"].as_array().unwrap().is_empty(), "it goes on where it was cut");
}

#[tokio::test]
async fn a_subscription_token_opens_what_it_names_until_its_end() {
    let hub = Running::start(|options| {
        let mut all = token("a", A, vec![Scope::Consume, Scope::Publish]);
        all.topics = vec!["t".to_owned(), "user.*".to_owned()];
        options.token = vec![all];
    })
    .await;
    let mint = |body: Value, bearer: String| {
        let headers = format!("{JSON}authorization: Bearer {bearer}\r\n");
        let hub = &hub;
        async move { hub.ask("POST", "/v1/subscriptions/token", &headers, body.to_string()).await }
    };
    let ask = |topics: &[&str]| mint(json!({"topics": topics, "ttl": "10s"}), "a".to_owned());
    ask(&["secrets"]).await.problem(403);
    ask(&["t", "*"]).await.problem(403);
    ask(&["user*"]).await.problem(403);
    ask(&["bad topic"]).await.problem(400);
    mint(json!({"topics": ["t"], "ttl": "5s"}), "a".to_owned()).await.problem(400);
    let minted = ask(&["user.7.*"]).await.ok(201).json();
    assert_eq!(minted["expires_in"], "10s");
    let token = minted["token"].as_str().unwrap().to_owned();
    assert!(token.starts_with("cst_"));
    mint(json!({"topics": ["t"]}), token.clone()).await.problem(403);

    let mine = format!("/v1/topics/user.7.inbox/events?token={token}");
    for path in [format!("{T}?token={token}"), format!("{mine}&topic=t"), format!("{mine}x")] {
        let status = hub.get(&path).await.status;
        assert!(status == 403 || status == 401, "{path}: {status}");
    }
    hub.get(&mine).await.ok(204);
    let bearer = format!("{}authorization: Bearer {token}\r\n", crate::kit::EVENT);
    let publish = hub.ask("POST", "/v1/topics/user.7.inbox/events", &bearer, event("1", json!({})));
    publish.await.problem(403);
    let (mut client, _) = Client::open(&hub, &mine).await;
    client.send(1, "1").await;
    assert_eq!(client.next().await["refused"]["problem"]["status"], 403);
    // It ends while it is open, and opens nothing after that.
    assert_eq!(u16::from(client.closed().await.code), 3005);
    assert_eq!(hub.get(&mine).await.status, 401);

    let ask = json!({"topics": ["t"], "publish": true});
    let minted = mint(ask, "a".to_owned()).await.ok(201).json();
    let path = format!("{T}?token={}", minted["token"].as_str().unwrap());
    let (mut client, _) = Client::open(&hub, &path).await;
    client.send(1, "1").await;
    assert!([client.next().await, client.next().await].iter().any(|said| said["ack"]["id"] == 1));
}
