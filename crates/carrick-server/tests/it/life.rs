//! From start to end: restarts, drains, and what is described of the interface.

use std::time::Duration;

use carrick_ops::drain::Trigger;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::kit::Running;

#[tokio::test]
async fn positions_leases_and_dead_letters_outlive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let hub = Running::on_file(folder.path(), |_| {}).await;
    for id in ["1", "2", "3"] {
        hub.publish("t", id, json!({})).await;
    }
    let page = hub.get("/v1/topics/t/events?limit=1").await.ok(200);
    let position = page.header("carrick-position").unwrap().to_owned();
    let got = hub.lease("t", json!({"max": 2, "lease": "1h"})).await;
    hub.settle("nack", &got[1], json!({"dead": true})).await.ok(200);
    assert!(!hub.stop().await.forced);

    let hub = Running::on_file(folder.path(), |_| {}).await;
    let rest = hub.get(&format!("/v1/topics/t/events?after={position}")).await.ok(200).json();
    assert_eq!(rest["events"].as_array().unwrap().len(), 2);
    assert_eq!(hub.publish("t", "3", json!({})).await.json()["duplicates"], 1);
    assert_eq!(hub.lease("t", json!({"max": 10})).await.len(), 1, "one leased, one dead, one new");
    hub.settle("ack", &got[0], json!({})).await.ok(200);
    let dead = hub.get("/v1/topics/t/groups/g/dead").await.json();
    assert_eq!(dead["dead"].as_array().unwrap().len(), 1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let key = std::fs::metadata(folder.path().join("hub.key")).unwrap();
        assert_eq!(key.permissions().mode() & 0o777, 0o600, "the key is nobody else's");
    }
}

#[tokio::test]
async fn a_drain_fails_readiness_first_answers_those_who_wait_and_takes_work_meanwhile() {
    let hub = Running::start(|options| {
        options.drain.window = Duration::from_millis(500);
        options.drain.interrupt_window = Duration::from_millis(500);
    })
    .await;
    hub.get("/readyz").await.ok(200);
    let waiting = [
        hub.ask("GET", "/v1/topics/t/events?wait=50s", "", ""),
        hub.ask("GET", "/v1/topics/t/events?after=latest&wait=50s", "", ""),
    ];
    let [first, second] = waiting;
    let (first, second, report) = tokio::join!(first, second, async {
        // Until both wait.
        while hub.drain.in_flight() < 3 {
            tokio::task::yield_now().await;
        }
        hub.drain.trigger(Trigger::Terminate);
        let finished = hub.drain.finished();
        let meanwhile = async {
            hub.get("/readyz").await.problem(503);
            hub.get("/livez").await.ok(200);
            hub.publish("other", "1", json!({})).await;
        };
        tokio::join!(finished, meanwhile).0
    });
    for answer in [first, second] {
        assert!(answer.ok(204).header("carrick-position").is_some(), "it can go on elsewhere");
    }
    assert!(!report.forced && report.left.is_empty(), "{report:?}");
    assert!(tokio::net::TcpStream::connect(hub.address).await.is_err(), "nothing new is accepted");
}

#[tokio::test]
async fn a_waiting_client_that_hangs_up_leaves_its_place() {
    let hub = Running::start(|options| options.feed.subscribers = 1).await;
    let mut gone = hub.connect().await;
    let request = "GET /v1/topics/t/events?wait=50s HTTP/1.1\r\nhost: localhost\r\n\r\n";
    gone.write_all(request.as_bytes()).await.unwrap();
    let look = "/v1/topics/t/events?wait=1ms";
    let refused = loop {
        let answer = hub.get(look).await;
        if answer.status == 503 {
            break answer;
        }
    };
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    drop(gone);
    while hub.get(look).await.status != 204 {}
}

#[tokio::test]
async fn every_path_that_is_described_is_there_and_answers_those_methods() {
    let hub = Running::start(|_| {}).await;
    let document = hub.get("/openapi.json").await.ok(200).json();
    let mut operations = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let concrete = path.replace("{topic}", "t").replace("{group}", "g");
        for method in ["get", "post", "put", "delete", "patch"] {
            let method_name = method.to_uppercase();
            let status = hub.ask(&method_name, &concrete, "", "").await.status;
            let described = item.get(method).is_some();
            assert_eq!(status != 405 && status != 404, described, "{method} {path}: {status}");
            operations += usize::from(described);
        }
    }
    assert!(operations >= 15, "{operations}");
}

#[tokio::test]
async fn the_front_page_and_the_report_are_there() {
    let hub = Running::start(|_| {}).await;
    assert!(hub.get("/").await.ok(200).body.contains("openapi.json"));
    assert!(hub.get("/metrics").await.ok(200).body.contains("process_resident_memory_bytes"));
    assert_eq!(hub.get("/debug/deep").await.ok(200).json()["status"], "healthy");
}
