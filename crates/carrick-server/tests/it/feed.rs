//! Streams of Server-Sent Events, from outside.

use std::time::Duration;

use carrick_server::config::Scope;
use http_body_util::{BodyExt, Empty};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    edge::{A, token},
    kit::{Answer, Running},
};

const T: &str = "/v1/topics/t/events";

/// What a line of a stream adds up to at its end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Message {
    event: String,
    id: String,
    data: String,
    retry: Option<u64>,
    is_comment: bool,
}

impl Message {
    fn parse(text: &str) -> Self {
        let mut message = Self::default();
        let mut data = Vec::new();
        for line in text.trim_end().lines() {
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "" => message.is_comment = true,
                "event" => value.clone_into(&mut message.event),
                "id" => value.clone_into(&mut message.id),
                "data" => data.push(value),
                "retry" => message.retry = Some(value.parse().unwrap()),
                _ => panic!("{line:?}"),
            }
        }
        message.data = data.join("\n");
        message
    }
}

/// A reader that sends what a test says.
struct Stream {
    socket: TcpStream,
    unread: Vec<u8>,
    head: Answer,
}

impl Stream {
    async fn open(hub: &Running, path: &str, headers: &str) -> Self {
        let mut socket = hub.connect().await;
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             accept: text/event-stream\r\n{headers}\r\n"
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        let head = Answer::read("HTTP/1.1 000 \r\n\r\n");
        let mut stream = Self { socket, unread: Vec::new(), head };
        let head = stream.until(b"\r\n\r\n").await.expect("a head");
        stream.head = Answer::read(&head);
        stream
    }

    /// Opens one, and takes what every stream begins with.
    async fn begun(hub: &Running, path: &str, headers: &str) -> (Self, Message) {
        let mut stream = Self::open(hub, path, headers).await;
        assert_eq!(stream.head.status, 200, "{:?}", stream.head);
        let first = stream.any().await.expect("its first bytes");
        assert!((2000..=8000).contains(&first.retry.unwrap()) && first.is_comment, "{first:?}");
        let bookmark = stream.any().await.expect("where it starts");
        assert!(bookmark.event == "bookmark" && bookmark.data == "{}", "{bookmark:?}");
        assert!(!bookmark.id.is_empty());
        (stream, bookmark)
    }

    async fn until(&mut self, end: &[u8]) -> Option<String> {
        loop {
            if let Some(at) = self.unread.windows(end.len()).position(|window| window == end) {
                let rest = self.unread.split_off(at + end.len());
                let text = std::mem::replace(&mut self.unread, rest);
                return Some(String::from_utf8(text).unwrap());
            }
            let read = self.socket.read_buf(&mut self.unread);
            let patience = Duration::from_secs(20);
            let read = tokio::time::timeout(patience, read).await.expect("it goes on or ends");
            if read.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// The next message or comment; `None` at the end.
    async fn any(&mut self) -> Option<Message> {
        self.until(b"\n\n").await.map(|text| Message::parse(&text))
    }

    /// The next message.
    async fn next(&mut self) -> Message {
        loop {
            let message = self.any().await.expect("a message before the end");
            if !message.is_comment {
                return message;
            }
        }
    }

    async fn ids(&mut self, count: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while ids.len() < count {
            ids.push(id_of(&self.next().await));
        }
        ids
    }
}

fn id_of(message: &Message) -> String {
    let event: Value =
        serde_json::from_str(&message.data).unwrap_or_else(|error| panic!("{error}: {message:?}"));
    event["id"].as_str().unwrap_or_else(|| panic!("{message:?}")).to_owned()
}

#[tokio::test]
async fn a_stream_begins_at_once_and_its_positions_are_good_on_every_door() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "0", json!({})).await;
    let (mut stream, bookmark) = Stream::begun(&hub, T, "").await;
    let head = &stream.head;
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    assert_eq!(head.header("cache-control"), Some("no-store"));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    assert!(head.header("date").is_some() && head.header("content-length").is_none());
    for id in ["1", "2", "3"] {
        hub.publish("t", id, json!({"data": "a\nb"})).await;
    }
    let first = stream.next().await;
    assert_eq!((first.event.as_str(), id_of(&first).as_str()), ("t.done.v1", "1"));
    assert_eq!(stream.ids(2).await, ["2", "3"]);

    let rest = hub.get(&format!("{T}?after={}", first.id)).await.ok(200).json();
    assert_eq!(rest["events"].as_array().unwrap().len(), 2, "the same position, by long poll");
    let header = format!("last-event-id: {}\r\n", first.id);
    let (mut again, _) = Stream::begun(&hub, T, &header).await;
    assert_eq!(again.ids(2).await, ["2", "3"]);
    for name in ["last_event_id", "lastEventId", "after"] {
        let path = format!("{T}?{name}={}", bookmark.id);
        let (mut again, _) = Stream::begun(&hub, &path, "").await;
        assert_eq!(again.ids(3).await, ["1", "2", "3"], "{name}");
    }
    // A browser sends both once it comes back: the header is the younger.
    let path = format!("{T}?last_event_id={}", bookmark.id);
    let (mut again, _) = Stream::begun(&hub, &path, &header).await;
    assert_eq!(again.ids(2).await, ["2", "3"]);
}

#[tokio::test]
async fn an_event_keeps_its_bytes_and_its_name_may_be_left_out() {
    let hub = Running::start(|_| {}).await;
    let (mut named, _) = Stream::begun(&hub, T, "").await;
    let (mut unnamed, _) = Stream::begun(&hub, &format!("{T}?event=message"), "").await;
    let event = "{\"specversion\":\"1.0\",\r\n \"id\":\"1\",\"source\":\"/s\",\n\"type\":\"a\",\"data\":1e400}";
    hub.ask("POST", T, crate::kit::EVENT, event).await.ok(201);
    let message = named.next().await;
    assert_eq!(message.data, event.replace('\r', ""), "a line's end is a line's end");
    assert_eq!(message.event, "a");
    let again = unnamed.next().await;
    assert_eq!((again.event.as_str(), again.data, again.id), ("", message.data, message.id));
}

#[tokio::test]
async fn a_position_that_is_lost_is_a_reset_and_not_an_error() {
    let hub = Running::start(|_| {}).await;
    for id in ["1", "2"] {
        hub.publish("t", id, json!({})).await;
    }
    let other = Running::start(|_| {}).await;
    let foreign = other.get(T).await.header("carrick-position").unwrap().to_owned();
    for given in ["junk", &foreign, "\u{e4}"] {
        let mut stream = Stream::open(&hub, T, &format!("last-event-id: {given}\r\n")).await;
        let reset = stream.next().await;
        assert_eq!(reset.event, "reset", "{given}: {reset:?}");
        let data: Value = serde_json::from_str(&reset.data).unwrap();
        assert_eq!((&data["topic"], &data["position"]), (&json!("t"), &json!(reset.id)));
        assert_eq!(stream.ids(2).await, ["1", "2"], "from the oldest that is kept");
    }
}

#[tokio::test]
async fn a_filter_lets_through_what_fits_and_a_quiet_stream_keeps_its_place() {
    let hub = Running::start(|options| options.feed.keep_alive = Duration::from_secs(1)).await;
    let path = format!("{T}?type=order.*&subject=7&subject=8*");
    let (mut stream, bookmark) = Stream::begun(&hub, &path, "").await;
    for (id, ty, subject) in [("1", "order.placed.v1", "7"), ("2", "refund.paid.v1", "7")] {
        hub.publish("t", id, json!({"type": ty, "subject": subject})).await;
    }
    hub.publish("t", "3", json!({"type": "order.placed.v1"})).await;
    hub.publish("t", "4", json!({"type": "order.placed.v1", "subject": "81"})).await;
    assert_eq!(stream.ids(2).await, ["1", "4"]);
    for id in ["5", "6"] {
        hub.publish("t", id, json!({})).await;
    }
    let moved = stream.next().await;
    assert_eq!(moved.event, "bookmark", "nothing fitted, and yet it comes further");
    assert_ne!(moved.id, bookmark.id);
    let rest = hub.get(&format!("{T}?after={}", moved.id)).await;
    rest.ok(204);
    let silent = stream.any().await.unwrap();
    assert!(silent.is_comment, "{silent:?}");

    let wrong = "y".repeat(1025);
    hub.get(&format!("{T}?type={wrong}")).await.problem(400);
    let many = "&subject=x".repeat(33);
    hub.get(&format!("{T}?a=b{many}")).await.problem(400);
}

#[tokio::test]
async fn several_topics_have_one_position() {
    let hub = Running::start(|_| {}).await;
    let path = "/v1/topics/b/events?topic=a&topic=c";
    let (mut stream, _) = Stream::begun(&hub, path, "").await;
    for (topic, id) in [("a", "a1"), ("b", "b1"), ("other", "x"), ("c", "c1"), ("a", "a2")] {
        hub.publish(topic, id, json!({})).await;
    }
    let mut seen = Vec::new();
    let mut middle = None;
    for count in 1..=4 {
        let message = stream.next().await;
        seen.push(id_of(&message));
        if count == 2 {
            middle = Some(message.id);
        }
    }
    let rest = seen.split_off(2);
    // Named in another order, and by another door.
    let again = format!("/v1/topics/c/events?topic=b&topic=a&topic=b&after={}", middle.unwrap());
    let mut found = Vec::new();
    let mut next = again.clone();
    loop {
        let page = hub.get(&format!("{next}&limit=1")).await;
        if page.status == 204 {
            break;
        }
        let page = page.ok(200).json();
        found.push(page["events"][0]["id"].as_str().unwrap().to_owned());
        let position = page["position"].as_str().unwrap();
        next = format!("/v1/topics/a/events?topic=b&topic=c&after={position}");
    }
    let sorted = |ids: &[String]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    assert_eq!(sorted(&found), sorted(&rest), "{seen:?}");
    // For other topics it is no position.
    let fewer = again.replace("&topic=a", "");
    hub.get(&fewer).await.problem(400);
    let many: String = (0..33).map(|n| format!("&topic=t{n}")).collect();
    let problem = hub.get(&format!("{T}?x=y{many}")).await.problem(400);
    assert!(problem.detail.unwrap().contains("32"), "the limit is named");
}

#[tokio::test]
async fn http_2_has_the_same_stream() {
    let hub = Running::start(|_| {}).await;
    let io = hyper_util::rt::TokioIo::new(hub.connect().await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    tokio::spawn(connection);
    let uri = format!("http://localhost{T}");
    let request = http::Request::get(uri).header("accept", "text/event-stream");
    let request = request.body(Empty::<bytes::Bytes>::new()).unwrap();
    let mut response = client.send_request(request).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, http::Version::HTTP_2));
    let mut text = String::new();
    hub.publish("t", "1", json!({})).await;
    while !text.contains("\"id\":\"1\"") {
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
    }
    assert!(text.starts_with(":\nretry: "), "{text}");
    drop(response);
    hub.stop().await;
}

#[tokio::test]
async fn a_drain_lets_each_stream_go_within_its_window() {
    let hub = Running::start(|options| {
        options.drain.window = Duration::from_secs(4);
        options.drain.interrupt_window = Duration::from_secs(4);
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(Stream::begun(&hub, T, "").await);
    }
    let draining = tokio::spawn(hub.stop());
    let ended = streams.into_iter().map(|(mut stream, _)| async move {
        while let Some(message) = stream.any().await {
            assert!(message.is_comment, "{message:?}");
        }
        tokio::time::Instant::now()
    });
    let mut ended = futures_util::future::join_all(ended).await;
    ended.sort_unstable();
    let spread = ended[19] - ended[0];
    assert!(spread > Duration::from_millis(500), "all at once: {spread:?}");
    assert!(!draining.await.unwrap().forced);
}

#[tokio::test]
async fn a_newcomer_without_a_place_is_told_when_to_come_and_whoever_is_in_stays() {
    let hub = Running::start(|options| options.feed.subscribers = 1).await;
    let (mut inside, _) = Stream::begun(&hub, T, "").await;
    let mut refused = Stream::open(&hub, T, "").await;
    assert_eq!(refused.head.status, 200, "a browser would give up for good on a 503");
    let told = refused.any().await.unwrap();
    assert!(told.retry.unwrap() >= 5000, "{told:?}");
    assert!(refused.any().await.is_none(), "and it ends");
    hub.publish("t", "1", json!({})).await;
    assert_eq!(inside.ids(1).await, ["1"]);
    drop(inside);
    loop {
        let mut stream = Stream::open(&hub, T, "").await;
        stream.any().await.unwrap();
        if stream.any().await.is_some() {
            break;
        }
    }
}

#[tokio::test]
async fn a_crowd_is_let_in_at_a_rate_each_told_its_own_time() {
    let hub = Running::start(|options| {
        (options.feed.admission, options.feed.admission_burst) = (1, 2);
    })
    .await;
    let mut told = Vec::new();
    let mut held = Vec::new();
    for _ in 0..6 {
        let mut stream = Stream::open(&hub, T, "").await;
        let first = stream.any().await.unwrap();
        match stream.any().await {
            Some(_) => held.push(stream),
            None => told.push(first.retry.unwrap()),
        }
    }
    assert!((2..=4).contains(&held.len()), "{}", held.len());
    assert!(told.windows(2).all(|pair| pair[1] > pair[0].saturating_sub(2000)), "{told:?}");
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_cut_and_its_sibling_misses_nothing() {
    let hub = Running::start(|options| {
        options.feed.slow_bytes = 64 * 1024;
        options.feed.slow_after = Duration::from_millis(600);
    })
    .await;
    let (mut stopped, _) = Stream::begun(&hub, T, "").await;
    let (mut sibling, _) = Stream::begun(&hub, T, "").await;
    let cut = || async {
        let metrics = hub.get("/metrics").await.ok(200).body;
        metrics.lines().any(|line| {
            line.starts_with("carrick_feed_ended_total")
                && line.contains("slow")
                && !line.ends_with(" 0")
        })
    };
    let data = "x".repeat(100_000);
    let mut published = 0;
    // More than the kernel's buffers hold for the one that does not read.
    while !cut().await {
        assert!(published < 2000, "it is never cut");
        hub.publish("t", &published.to_string(), json!({"data": data})).await;
        assert_eq!(sibling.ids(1).await, [published.to_string()]);
        published += 1;
    }
    while stopped.any().await.is_some() {}
    hub.publish("t", "last", json!({})).await;
    assert_eq!(sibling.ids(1).await, ["last"]);
}

#[tokio::test]
async fn a_stream_outlives_its_hub_and_misses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let hub = Running::on_file(folder.path(), |_| {}).await;
    let (mut stream, _) = Stream::begun(&hub, T, "").await;
    hub.publish("t", "1", json!({})).await;
    let last = stream.next().await.id;
    let publishing = hub.publish("t", "2", json!({}));
    publishing.await;
    hub.stop().await;
    let hub = Running::on_file(folder.path(), |_| {}).await;
    hub.publish("t", "3", json!({})).await;
    let (mut stream, _) = Stream::begun(&hub, T, &format!("last-event-id: {last}\r\n")).await;
    assert_eq!(stream.ids(2).await, ["2", "3"]);
}

#[tokio::test]
async fn a_page_of_a_listed_origin_may_read_and_no_other() {
    let hub = Running::start(|options| options.origins = vec!["https://shop.example".into()]).await;
    let listed = "origin: https://shop.example\r\n";
    let stream = Stream::begun(&hub, T, listed).await.0;
    let allowed = |answer: &Answer| answer.header("access-control-allow-origin").map(str::to_owned);
    assert_eq!(allowed(&stream.head).as_deref(), Some("https://shop.example"));
    let asks = format!("{listed}access-control-request-method: GET\r\n");
    let before = hub.ask("OPTIONS", T, &asks, "").await.ok(204);
    assert_eq!(allowed(&before).as_deref(), Some("https://shop.example"));
    assert!(before.header("access-control-allow-headers").unwrap().contains("last-event-id"));
    let head = hub.ask("HEAD", T, &format!("{listed}accept: text/event-stream\r\n"), "").await;
    assert_eq!(allowed(&head.ok(200)).as_deref(), Some("https://shop.example"));
    let foreign = hub.ask("GET", T, "origin: https://evil.example\r\n", "").await;
    assert_eq!(allowed(&foreign), None);
    foreign.problem(403);
}

#[tokio::test]
async fn a_token_without_the_right_to_a_topic_gets_no_stream_of_it() {
    let hub = Running::start(|options| {
        let mut token = token("a", A, vec![Scope::Consume]);
        token.topics = vec!["t".to_owned()];
        options.token = vec![token];
    })
    .await;
    let sse = "accept: text/event-stream\r\n";
    let ask = |path, more| hub.ask("GET", path, more, "");
    ask(T, sse).await.problem(401);
    let mine = format!("{sse}authorization: Bearer a\r\n");
    ask("/v1/topics/t/events?topic=u", &mine).await.problem(403);
    Stream::begun(&hub, T, "authorization: Bearer a\r\n").await;
}
