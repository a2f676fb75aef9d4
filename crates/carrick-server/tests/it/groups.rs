//! Leases, what is said of them, and dead letters.

use serde_json::{Value, json};

use crate::kit::{JSON, Running};

const DEAD: &str = "/v1/topics/t/groups/g/dead";

#[tokio::test]
async fn what_is_acknowledged_does_not_come_back_and_a_second_ack_is_stale() {
    let hub = Running::start(|_| {}).await;
    for id in ["1", "2"] {
        hub.publish("t", id, json!({})).await;
    }
    let got = hub.lease("t", json!({"max": 10, "lease": "60s"})).await;
    assert_eq!(got.len(), 2);
    assert_eq!((&got[0]["attempt"], &got[0]["expires_in"]), (&json!(1), &json!("60s")));
    assert_eq!(got[0]["event"]["id"], "1");
    let leases = json!([got[0]["lease"], "junk"]);
    let answer = hub.post("/v1/leases/ack", json!({"leases": leases})).await.ok(200).json();
    assert_eq!(answer, json!({"acked": [got[0]["lease"]], "stale": ["junk"]}));
    let again = hub.settle("ack", &got[0], json!({})).await.problem(409);
    assert_eq!(again.extensions["stale"], json!([got[0]["lease"]]));
    assert_eq!(hub.lease("t", json!({})).await, Vec::<Value>::new(), "one acked, one under lease");
}

#[tokio::test]
async fn a_nack_comes_back_counted_unless_it_says_otherwise() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "1", json!({})).await;
    let mut attempts = Vec::new();
    for more in [json!({}), json!({"counted": false}), json!({"delay": "100ms"}), json!({})] {
        let got = hub.lease("t", json!({"wait": "10s"})).await;
        attempts.push(got[0]["attempt"].as_u64().unwrap());
        let answer = hub.settle("nack", &got[0], more).await.ok(200).json();
        assert_eq!(answer["nacked"].as_array().unwrap().len(), 1);
    }
    assert_eq!(attempts, [1, 2, 2, 3]);
}

#[tokio::test]
async fn a_lease_that_is_extended_outlives_its_first_end() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "1", json!({})).await;
    let got = hub.lease("t", json!({"lease": "1s"})).await;
    let answer = hub.settle("extend", &got[0], json!({"lease": "30s"})).await.ok(200).json();
    assert_eq!(answer["extended"], json!([got[0]["lease"]]));
    assert!(hub.lease("t", json!({"wait": "1500ms"})).await.is_empty());
    hub.settle("ack", &got[0], json!({})).await.ok(200);
}

#[tokio::test]
async fn a_lease_that_ran_out_is_stale_and_its_event_delivered_again() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "1", json!({})).await;
    let lost = hub.lease("t", json!({"lease": "1s"})).await;
    let again = hub.lease("t", json!({"wait": "20s"})).await;
    assert_eq!(again[0]["attempt"], 2);
    for verb in ["ack", "nack", "extend"] {
        hub.settle(verb, &lost[0], json!({})).await.problem(409);
    }
    hub.settle("ack", &again[0], json!({})).await.ok(200);
}

#[tokio::test]
async fn a_failed_head_blocks_its_key_and_no_other() {
    let hub = Running::start(|_| {}).await;
    for (id, key) in [("1", "a"), ("2", "a"), ("3", "b")] {
        hub.publish("t", id, json!({"partitionkey": key})).await;
    }
    let first = hub.lease("t", json!({"max": 1})).await;
    hub.settle("nack", &first[0], json!({"delay": "1h", "reason": "no"})).await.ok(200);
    let other = hub.lease("t", json!({"max": 10})).await;
    assert_eq!(other.len(), 1);
    assert_eq!(other[0]["event"]["id"], "3");

    let blocked = hub.get("/v1/topics/t/groups/g/blocked").await.ok(200).json();
    let row = blocked["blocked"].as_array().unwrap().iter().find(|row| row["key"] == "a").unwrap();
    assert_eq!((&row["head"], &row["attempts"]), (&json!(1), &json!(1)));
    let skip = format!("{DEAD}/skip");
    hub.post(&skip, json!({})).await.problem(400);
    let skipped = hub.post(&skip, json!({"key": "a", "reason": "by hand"})).await.ok(200).json();
    assert_eq!(skipped, json!({"skipped": 1}));
    assert_eq!(hub.lease("t", json!({})).await[0]["event"]["id"], "2", "its key moves on");
    assert_eq!(hub.get(DEAD).await.json()["dead"][0]["cause"], "by hand");
}

#[tokio::test]
async fn an_event_that_fails_too_often_is_a_dead_letter_whatever_its_consumer_says() {
    let hub = Running::start(|options| options.delivery.max_attempts = 2).await;
    hub.publish("t", "fails", json!({})).await;
    for _ in 0..2 {
        let got = hub.lease("t", json!({})).await;
        hub.settle("nack", &got[0], json!({"reason": "cannot"})).await.ok(200);
    }
    assert!(hub.lease("t", json!({})).await.is_empty());
    let dead = hub.get(DEAD).await.ok(200).json()["dead"].clone();
    assert_eq!((&dead[0]["cause"], &dead[0]["attempts"]), (&json!("cannot"), &json!(2)));
}

#[tokio::test]
async fn an_event_whose_consumer_never_comes_back_is_a_dead_letter_too() {
    let hub = Running::start(|options| options.delivery.max_attempts = 2).await;
    hub.publish("t", "crashes", json!({})).await;
    for attempt in [1, 2] {
        let got = hub.lease("t", json!({"lease": "1s", "wait": "20s"})).await;
        assert_eq!(got[0]["attempt"], attempt);
    }
    assert!(hub.lease("t", json!({"wait": "2s"})).await.is_empty(), "it is not delivered again");
    let dead = hub.get(DEAD).await.ok(200).json()["dead"].clone();
    let cause = dead[0]["cause"].as_str().unwrap();
    assert_eq!(cause, "given up after 2 deliveries that were not acknowledged");
}

#[tokio::test]
async fn dead_letters_are_listed_by_page_redriven_and_purged() {
    let hub = Running::start(|_| {}).await;
    for id in ["1", "2", "3"] {
        hub.publish("t", id, json!({"data": 1.10})).await;
    }
    for delivery in hub.lease("t", json!({"max": 10})).await {
        let more = json!({"dead": true, "reason": format!("no {}", delivery["event"]["id"])});
        hub.settle("nack", &delivery, more).await.ok(200);
    }
    let page = hub.get(&format!("{DEAD}?limit=2")).await.ok(200);
    assert_eq!(page.json()["dead"].as_array().unwrap().len(), 2);
    let next = page.header("link").unwrap()[1..].split('>').next().unwrap().to_owned();
    let rest = hub.get(&next).await.ok(200);
    assert_eq!(rest.json()["dead"][0]["id"], "3");
    assert_eq!(rest.header("link"), None);
    let stolen = next.replace("/g/", "/h/");
    assert_eq!(hub.get(&stolen).await.problem(400).extensions["field"], "cursor");

    for body in [json!({}), json!({"all": false}), json!({"all": true, "key": "k"})] {
        for verb in ["redrive", "purge"] {
            hub.post(&format!("{DEAD}/{verb}"), body.clone()).await.problem(400);
        }
    }
    let redrive = json!({"cause": "no \"1\""});
    let answer = hub.post(&format!("{DEAD}/redrive"), redrive).await.ok(200).json();
    assert_eq!(answer, json!({"redriven": 1}));
    let again = hub.lease("t", json!({})).await;
    assert_eq!((&again[0]["event"]["id"], &again[0]["attempt"]), (&json!("1"), &json!(1)));
    let answer = hub.post(&format!("{DEAD}/purge"), json!({"all": true})).await.ok(200).json();
    assert_eq!(answer, json!({"purged": 2}));
}

#[tokio::test]
async fn a_field_out_of_its_range_is_named_and_nothing_is_leased() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "1", json!({})).await;
    let lease = "/v1/topics/t/groups/g/lease";
    for (body, field) in [
        (json!({"max": 0}), "max"),
        (json!({"max": 1001}), "max"),
        (json!({"max": -1}), "max"),
        (json!({"lease": "999ms"}), "lease"),
        (json!({"lease": "13h"}), "lease"),
        (json!({"lease": 5}), "lease"),
        (json!({"wait": "61s"}), "wait"),
        (json!([1]), "body"),
    ] {
        let problem = hub.post(lease, body.clone()).await.problem(400);
        assert_eq!(problem.extensions["field"], field, "{body}");
    }
    for body in ["{", "\u{0}", "nul"] {
        hub.ask("POST", lease, JSON, body).await.problem(400);
    }
    for body in [json!({}), json!({"leases": []}), json!({"leases": [1]}), json!({"leases": "x"})] {
        let problem = hub.post("/v1/leases/ack", body).await.problem(400);
        assert_eq!(problem.extensions["field"], "leases");
    }
    let many = vec!["x"; 1001];
    hub.post("/v1/leases/ack", json!({"leases": many})).await.problem(400);
    assert_eq!(hub.lease("t", json!({"max": 1000})).await[0]["attempt"], 1);
}

#[tokio::test]
async fn a_group_that_is_made_at_the_end_gets_what_comes_later() {
    let hub = Running::start(|_| {}).await;
    hub.publish("t", "1", json!({})).await;
    let (path, latest) = ("/v1/topics/t/groups/g", r#"{"start":"latest"}"#);
    hub.ask("PUT", path, JSON, latest).await.ok(201);
    hub.ask("PUT", path, JSON, latest).await.ok(200);
    hub.ask("PUT", path, JSON, r#"{"start":"middle"}"#).await.problem(400);
    hub.publish("t", "2", json!({})).await;
    assert_eq!(hub.lease("t", json!({})).await[0]["event"]["id"], "2");
    let groups = hub.get("/v1/topics/t/groups").await.ok(200).json();
    let row = &groups["groups"][0];
    assert_eq!(
        (&row["group"], &row["backlog"], &row["leased"]),
        (&json!("g"), &json!(1), &json!(1))
    );
}
