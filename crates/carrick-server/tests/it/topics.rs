//! Publishing, and reading by long poll.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::kit::{Answer, BATCH, EVENT, Running, event};

const T: &str = "/v1/topics/t/events";

fn ids(answer: &Answer) -> Vec<String> {
    let events = answer.json()["events"].as_array().unwrap().clone();
    events.iter().map(|event| event["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn what_is_read_is_what_was_published_to_the_byte() {
    let hub = Running::start(|_| {}).await;
    let odd = r#"{ "type":"t.v1","x":"\u00e9", "id":"1","source":"/s" ,"specversion":"1.0","data":{"n":12345678901234567890123,"n":1.10,"z":[ ]} }"#;
    let plain = event("2", json!({"data": 1}));
    hub.ask("POST", T, EVENT, odd).await.ok(201);
    hub.ask("POST", T, BATCH, format!("[{plain} , {}]", event("3", json!({})))).await.ok(201);
    let binary = "ce-specversion: 1.0\r\nce-id: 4\r\nce-source: /s\r\nce-type: t.v1\r\n\
                  content-type: application/json\r\n";
    hub.ask("POST", T, binary, r#"{"big":98765432109876543210}"#).await.ok(201);
    let answer = hub.get(&format!("{T}?after=earliest")).await.ok(200);
    assert!(answer.body.starts_with(&format!(r#"{{"events":[{odd},{plain},"#)), "{}", answer.body);
    assert!(answer.body.contains(r#""data":{"big":98765432109876543210}"#), "{}", answer.body);
    assert_eq!(ids(&answer), ["1", "2", "3", "4"]);
}

#[tokio::test]
async fn a_repeat_is_counted_and_not_stored() {
    let hub = Running::start(|_| {}).await;
    let first = hub.publish("t", "1", json!({})).await.json();
    assert_eq!((&first["accepted"], &first["duplicates"]), (&json!(1), &json!(0)));
    let batch = format!("[{},{}]", event("1", json!({})), event("2", json!({})));
    let key = format!("{BATCH}idempotency-key: k\r\n");
    let again = hub.ask("POST", T, &key, batch).await.ok(201).json();
    assert_eq!((&again["accepted"], &again["duplicates"]), (&json!(1), &json!(1)));
    assert_eq!(ids(&hub.get(T).await), ["1", "2"]);
}

#[tokio::test]
async fn a_reader_goes_on_where_it_was_and_is_told_where_that_is() {
    let hub = Running::start(|_| {}).await;
    for id in ["1", "2", "3"] {
        hub.publish("t", id, json!({})).await;
    }
    let page = hub.get(&format!("{T}?limit=2")).await.ok(200);
    let position = page.json()["position"].as_str().unwrap().to_owned();
    assert_eq!(page.header("carrick-position"), Some(&*position));
    let rest = hub.get(&format!("{T}?after={position}")).await.ok(200);
    assert_eq!((ids(&page), ids(&rest)), (vec!["1".into(), "2".into()], vec!["3".into()]));
    let end = rest.header("carrick-position").unwrap();
    let none = hub.get(&format!("{T}?after={end}")).await.ok(204);
    assert_eq!(none.header("carrick-position").map(|it| it.len()), Some(end.len()));
    assert_eq!(none.body, "");
    let latest = hub.get(&format!("{T}?after=latest")).await.ok(204);
    hub.publish("t", "4", json!({})).await;
    let after = latest.header("carrick-position").unwrap();
    assert_eq!(ids(&hub.get(&format!("{T}?after={after}")).await), ["4"]);
}

#[tokio::test]
async fn a_wait_ends_with_the_first_event_and_not_before() {
    let hub = Running::start(|_| {}).await;
    let wait = format!("{T}?wait=30s");
    let (answer, ()) = tokio::join!(hub.get(&wait), async {
        // Others' events wake nobody here.
        hub.publish("other", "1", json!({})).await;
        hub.publish("t", "1", json!({})).await;
    });
    assert_eq!(ids(&answer.ok(200)), ["1"]);
    let began = Instant::now();
    hub.get(&format!("{T}?after=latest&wait=300ms")).await.ok(204);
    assert!(began.elapsed() >= Duration::from_millis(300), "no empty answer before its time (E2)");
}

#[tokio::test]
async fn a_position_of_another_store_topic_or_tenant_is_noticed() {
    let key = "07".repeat(32);
    let first = Running::start(|options| options.seal_key = key.clone()).await;
    let position = first.publish("t", "1", json!({})).await.json()["position"].clone();
    let second = Running::start(|options| options.seal_key = key.clone()).await;
    second.publish("t", "2", json!({})).await;

    let after = format!("{T}?after={}", position.as_str().unwrap());
    let gone = second.get(&after).await.problem(410);
    assert_eq!(gone.extensions["reset"], true);
    let fresh = gone.extensions["position"].as_str().unwrap();
    assert_eq!(ids(&second.get(&format!("{T}?after={fresh}")).await), ["2"]);

    let elsewhere = after.replace("/t/", "/u/");
    assert_eq!(first.get(&elsewhere).await.problem(400).extensions["field"], "after");
    let stranger = Running::start(|_| {}).await;
    stranger.get(&after).await.problem(400);
}

#[tokio::test]
async fn an_event_with_a_delay_is_read_at_once_and_delivered_later() {
    let hub = Running::start(|_| {}).await;
    hub.ask("POST", &format!("{T}?delay=1s"), EVENT, event("1", json!({}))).await.ok(201);
    let began = Instant::now();
    assert_eq!(ids(&hub.get(T).await), ["1"]);
    assert_eq!(hub.lease("t", json!({})).await, Vec::<Value>::new());
    assert_eq!(hub.lease("t", json!({"wait": "20s"})).await.len(), 1);
    assert!(began.elapsed() >= Duration::from_millis(900), "{:?}", began.elapsed());
}

#[tokio::test]
async fn every_refusal_of_a_publish_is_a_problem_of_its_own_status() {
    let hub = Running::start(|_| {}).await;
    let big = event("1", json!({"data": "x".repeat(1 << 20)}));
    let batch = |count: usize| {
        let events: Vec<_> = (0..count).map(|n| event(&n.to_string(), json!({}))).collect();
        format!("[{}]", events.join(","))
    };
    for (headers, body, status) in [
        (EVENT, "{".to_owned(), 400),
        (EVENT, "[]".to_owned(), 400),
        (EVENT, r#"{"specversion":"1.0","id":"","source":"/s","type":"t"}"#.to_owned(), 400),
        (EVENT, "[".repeat(100_000), 400),
        (EVENT, big, 413),
        (BATCH, "[]".to_owned(), 400),
        (BATCH, batch(1001), 413),
        ("content-type: text/plain\r\n", event("1", json!({})), 415),
        ("", event("1", json!({})), 415),
    ] {
        let answer = hub.ask("POST", T, headers, &body).await;
        answer.problem(status);
    }
    hub.get(T).await.ok(204);
    hub.ask("POST", T, BATCH, batch(1000)).await.ok(201);
    let id = r#"{"specversion":"1.0","id":7,"source":"/s","type":"t"}"#;
    assert_eq!(hub.ask("POST", T, EVENT, id).await.problem(400).extensions["field"], "id");
    for name in ["a%20b", "a%2Fb", &"a".repeat(201)] {
        let path = format!("/v1/topics/{name}/events");
        hub.ask("POST", &path, EVENT, event("1", json!({}))).await.problem(400);
    }
}

#[tokio::test]
async fn a_parameter_out_of_its_range_is_named_with_range_and_value() {
    let hub = Running::start(|_| {}).await;
    for (query, field) in [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("wait=61s", "wait"),
        ("wait=-1s", "wait"),
        ("after=junk", "after"),
    ] {
        let problem = hub.get(&format!("{T}?{query}")).await.problem(400);
        assert_eq!(problem.extensions["field"], field, "{query}");
        assert!(problem.extensions.contains_key("range"), "{query}");
        assert_eq!(problem.extensions["value"], query.split('=').nth(1).unwrap());
    }
    hub.get(&format!("{T}?limit=1000&wait=0s")).await.ok(204);
    hub.ask("POST", &format!("{T}?delay=31d"), EVENT, event("1", json!({}))).await.problem(400);
}

#[tokio::test]
async fn doors_that_are_not_there_say_so() {
    let hub = Running::start(|_| {}).await;
    hub.ask("GET", T, "accept: text/csv\r\n", "").await.problem(406);
    let wrong = hub.ask("DELETE", T, "", "").await;
    wrong.problem(405);
    assert_eq!(wrong.header("allow"), Some("GET,HEAD,POST"));
    hub.get("/v1/nothing").await.problem(404);
    hub.publish("t", "1", json!({})).await;
    let head = hub.ask("HEAD", T, "", "").await.ok(200);
    assert!(head.body.is_empty() && head.header("carrick-position").is_some(), "{head:?}");
}

#[tokio::test]
async fn topics_are_listed_by_page_and_by_tenant() {
    let hub = Running::start(|_| {}).await;
    for topic in ["a", "b", "c"] {
        hub.publish(topic, "1", json!({})).await;
    }
    let mut next = "/v1/topics?limit=2".to_owned();
    let mut found = Vec::new();
    loop {
        let page = hub.get(&next).await.ok(200);
        let rows = page.json()["topics"].as_array().unwrap().clone();
        found.extend(rows.iter().map(|row| row["topic"].as_str().unwrap().to_owned()));
        let Some(link) = page.header("link") else { break };
        next = link[1..].split('>').next().unwrap().to_owned();
    }
    assert_eq!(found, ["a", "b", "c"]);
    hub.get("/v1/topics?cursor=junk").await.problem(400);
}
