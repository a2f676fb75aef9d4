//! The command line, through the binary.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::kit::Running;

struct Done {
    code: i32,
    out: String,
    err: String,
}

/// Runs the binary in an empty folder, with a hub if there is one.
fn run(hub: Option<&Running>, arguments: &[&str], input: &str) -> Done {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_carrick"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARRICK_")) {
        command.env_remove(name);
    }
    let url = hub.map(|hub| format!("http://{}", hub.address));
    command.env("CARRICK_URL", url.as_deref().unwrap_or("http://127.0.0.1:1"));
    command.args(arguments).current_dir(folder.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).ok();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it was not killed");
    Done { code, out: text(output.stdout), err: text(output.stderr) }
}

#[track_caller]
fn fails(arguments: &[&str], code: i32, says: &[&str]) {
    let done = run(None, arguments, "");
    assert_eq!(done.code, code, "{arguments:?}: {}", done.err);
    for part in says {
        assert!(done.err.contains(part), "{part:?} in {}", done.err);
    }
}

#[test]
fn wrong_flags_and_settings_are_2_and_name_key_range_and_value() {
    fails(&["up", "--listen", "0.0.0.0:1"], 2, &["flag --listen", "loopback", "0.0.0.0:1"]);
    let both = ["check", "--set", "limits.body=1B", "--set", "retention.age=0s"];
    fails(&both, 2, &["--set limits.body", "1KiB to 64MiB, not 1B", "retention.age must be"]);
    fails(&["check", "--set", "limits.bdoy=1"], 2, &["bdoy", "publishing-bytes"]);
    fails(&["check", "--config", "missing.toml"], 2, &["missing.toml"]);
    fails(&["tail", "a/b"], 2, &["a topic must be", "a/b"]);
    fails(&["dead", "redrive", "t", "g"], 2, &["--all"]);
    fails(&["relay", "--database", "mysql://u:secret@h"], 2, &["database must be", "not mysql"]);
    let secret = run(None, &["up", "--store", "mysql://u:secret@h"], "");
    assert_eq!(secret.code, 2);
    assert!(!secret.err.contains("secret"), "{}", secret.err);
}

#[test]
fn a_hub_or_a_database_that_is_away_is_4() {
    fails(&["tail", "t"], 4, &["127.0.0.1:1"]);
    fails(&["dead", "ls", "t", "g"], 4, &["cannot be reached"]);
    fails(&["publish", "t", "--type", "t.done.v1"], 4, &["cannot be reached"]);
    fails(&["relay", "--database", "sqlite:///no/such/folder/x.db", "--once"], 4, &[]);
}

#[test]
fn the_defaults_pass_their_own_check() {
    let done = run(None, &["check"], "");
    assert_eq!((done.code, done.out.lines().last()), (0, Some("ok")), "{}", done.err);
    let told: Value = serde_json::from_str(&run(None, &["check", "--json"], "").out).unwrap();
    assert_eq!(told["ok"], true);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_published_is_what_tail_shows() {
    let hub = Running::start(|_| {}).await;
    let number = r#"{"n":12345678901234567890123}"#;
    let publish = ["publish", "t", "--type", "t.done.v1", "--key", "k", "--data", number, "--json"];
    let told: Value = serde_json::from_str(&run(Some(&hub), &publish, "").out).unwrap();
    assert_eq!(told["accepted"], 1);
    let line = r#"{"specversion":"1.0","id":"9","source":"/s","type":"t.done.v1","z":"1","a":"2"}"#;
    let done = run(Some(&hub), &["publish", "t", "--stdin"], &format!("{line}\n\n{line}\n"));
    assert_eq!(done.out, "1 published, 1 were there already\n", "{}", done.err);
    let wrong = run(Some(&hub), &["publish", "t", "--stdin"], "{}\n");
    assert_eq!(wrong.code, 1);
    assert!(wrong.err.contains("line 1"), "{}", wrong.err);

    let tail = ["tail", "t", "--after", "earliest", "--no-follow", "--json"];
    let done = run(Some(&hub), &tail, "");
    assert!(done.out.contains(number), "{}", done.out);
    assert_eq!(done.out.lines().nth(1), Some(line));
    let human = run(Some(&hub), &["tail", "t", "--after", "earliest", "--count", "1"], "");
    assert!(human.out.contains("t.done.v1") && human.out.contains(number), "{}", human.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn dead_letters_are_listed_as_they_are_and_driven_again() {
    let hub = Running::start(|_| {}).await;
    let odd = r#"{"z":1,"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"n":12345678901234567890123}}"#;
    hub.ask("POST", "/v1/topics/t/events", crate::kit::EVENT, odd).await.ok(201);
    let got = hub.lease("t", json!({})).await;
    hub.settle("nack", &got[0], json!({"dead": true, "reason": "no"})).await.ok(200);
    let listed = run(Some(&hub), &["dead", "ls", "t", "g", "--json"], "");
    assert!(listed.out.contains(odd), "an event is not written anew: {}", listed.out);
    let table = run(Some(&hub), &["dead", "ls", "t", "g"], "").out;
    assert!(table.starts_with("SEQ") && table.contains(" no"), "{table}");
    let redrive = ["dead", "redrive", "t", "g", "--all", "--json"];
    assert_eq!(run(Some(&hub), &redrive, "").out, "{\"redriven\":1}\n");
    assert_eq!(run(Some(&hub), &redrive, "").out, "{\"redriven\":0}\n");
    assert_eq!(hub.lease("t", json!({})).await.len(), 1);
    let missing = run(Some(&hub), &["dead", "ls", "none", "g"], "");
    assert_eq!((missing.code, missing.out.contains("(none)")), (0, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_relay_empties_the_outbox_of_a_file_and_ends() {
    let hub = Running::start(|_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    let database = format!("sqlite://{}/app.db", folder.path().display());
    let migrate = ["relay", "--database", &database, "--migrate-only"];
    assert_eq!(run(Some(&hub), &migrate, "").code, 0);
    let conn = rusqlite::Connection::open(folder.path().join("app.db")).unwrap();
    for n in 0..25 {
        conn.execute(
            "INSERT INTO carrick_outbox (topic, key, type, source, data) \
             VALUES ('t', 'k', 't.done.v1', '/s', ?1)",
            [format!("{{\"n\":{n}}}")],
        )
        .unwrap();
    }
    let done = run(Some(&hub), &["relay", "--database", &database, "--once", "--json"], "");
    assert_eq!((done.code, &*done.out), (0, "{\"published\":25}\n"), "{}", done.err);
    let events = hub.get("/v1/topics/t/events").await.ok(200).json();
    let numbers: Vec<_> = events["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["data"]["n"].clone())
        .collect();
    assert_eq!(numbers, (0..25).map(Value::from).collect::<Vec<_>>(), "in the order of their key");
    let replay =
        run(Some(&hub), &["relay", "--database", &database, "--replay", "1h..", "--json"], "");
    let told: Value = serde_json::from_str(&replay.out).unwrap();
    assert_eq!(told["remembered"], 25, "the hub recognises what it has");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hub_behind_tls_is_reached_by_who_trusts_its_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (certificate, key) = (folder.path().join("c.pem"), folder.path().join("k.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let hub = Running::start(|options| {
        options.tls.certificate = certificate.clone();
        options.tls.key = key;
    })
    .await;
    let url = format!("https://{}", hub.address);
    let publish = ["publish", "t", "--type", "t.done.v1", "--hub", &url];
    let trusted = [&publish[..], &["--ca", certificate.to_str().unwrap()]].concat();
    let done = run(None, &trusted, "");
    assert_eq!((done.code, &*done.out), (0, "1 published, 0 were there already\n"), "{}", done.err);
    let stranger = run(None, &publish, "");
    assert_eq!(stranger.code, 4, "{}", stranger.err);
    // Whoever speaks without TLS gets no further than the handshake.
    assert!(!hub.exchange(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.contains("200"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_tells_how_it_went_and_its_code_says_what_came() {
    let hub = Running::start(|_| {}).await;
    let url = |path: &str| format!("http://{}{path}", hub.address);
    let done = run(Some(&hub), &["call", &url("/livez"), "--json"], "");
    assert_eq!(done.code, 0, "{}", done.err);
    let told: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(told["status"], 200);
    assert_eq!(told["attempts"][0]["outcome"], "success");
    assert_eq!(told["attempts"][0]["host"], hub.address.to_string());
    assert!(told["elapsed_ms"].as_f64().unwrap() > 0.0 && told["decisions"].is_array());

    let done = run(Some(&hub), &["call", &url("/nowhere"), "--explain"], "");
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("another try would end alike"), "{}", done.err);
    let nobody = ["call", "http://127.0.0.1:1/", "--max-attempts", "2", "--json"];
    let done = run(None, &nobody, "");
    assert_eq!(done.code, 2, "{}", done.err);
    let told: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((&told["status"], told["attempts"].as_array().unwrap().len()), (&Value::Null, 2));
    assert!(told["error"].as_str().unwrap().contains("127.0.0.1:1"), "{told}");
    fails(&["call", "pricing/x"], 3, &["pricing", "no dependency"]);
    fails(&["call", "http://h", "--bogus"], 3, &["--bogus"]);
    let longer = ["call", "http://h", "--timeout", "1s", "--per-try-timeout", "2s"];
    fails(&longer, 3, &["per-try-timeout must be 1ms to timeout (1s), not 2s"]);
}

#[test]
fn what_does_not_fit_is_shown_as_a_sum_and_fails() {
    let set = |per_try: &str| {
        let url = "dependency.pricing.url=http://127.0.0.1:9000";
        let per_try = format!("dependency.pricing.per-try-timeout={per_try}");
        run(None, &["check", "--json", "--set", url, "--set", &per_try], "")
    };
    let done = set("600ms");
    assert_eq!(done.code, 0, "{}{}", done.out, done.err);
    let done = set("700ms");
    assert_eq!(done.code, 1, "{}{}", done.out, done.err);
    let told: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(told["ok"], false);
    assert!(told["faults"][0].as_str().unwrap().contains("3 tries × 700ms = 2s100ms"), "{told}");
}
