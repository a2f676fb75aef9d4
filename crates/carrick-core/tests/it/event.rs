//! What goes in comes out.

use bytes::Bytes;
use carrick_core::event::{Attribute, BATCH, Event, HARD_LIMIT, Lint, STRUCTURED};
use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;

const LEAST: &str = r#""specversion":"1.0","id":"1","source":"/s","type":"t""#;

fn event(members: &str) -> Event {
    Event::parse(format!("{{{LEAST}{members}}}")).unwrap()
}

fn refused(document: &str) -> String {
    let error = Event::parse(document.to_owned()).expect_err(document);
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| {
        (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap())
    };
    pairs.iter().map(pair).collect()
}

#[test]
fn e19_big_integers_order_and_duplicates_survive_untouched() {
    let document = r#"{ "data" : {"n":18446744073709551617,"a":1,"a":2.50}, "z":"\u0041", "type":"t",
        "source":"/s","id":"1", "specversion":"1.0", "ext":9007199254740993 }"#;
    assert_eq!(Event::parse(document).unwrap().as_json(), document);
}

#[test]
fn e19_an_extension_that_is_set_changes_no_other_byte() {
    let document = r#"{"data":{"n":18446744073709551617,"a":1,"a":2}, "specversion":"1.0","id":"1","source":"/s","type":"t" }"#;
    let event = Event::parse(document).unwrap();
    let added = event.with_extension("partitionkey", "k\"1").unwrap();
    let expected = document.replace(" }", ",\"partitionkey\":\"k\\\"1\" }");
    assert_eq!(added.as_json(), expected.as_str());
    assert_eq!(added.partition_key().as_deref(), Some("k\"1"));
    let changed = added.with_extension("partitionkey", "k2").unwrap();
    assert_eq!(changed.as_json(), expected.replace("k\\\"1", "k2").as_str());
}

#[test]
fn setting_a_required_attribute_or_a_bad_name_is_refused() {
    for name in ["id", "data", "specversion", "Upper", "with-dash", "", "ü"] {
        assert!(event("").with_extension(name, "x").is_err(), "{name}");
    }
    let large = "x".repeat(HARD_LIMIT);
    assert!(event("").with_extension("ext", large).unwrap_err().is_too_large());
}

#[test]
fn m7_the_time_is_the_producers_and_is_kept() {
    let event = event(r#","time":"2026-12-01T10:00:00.123456789+02:00""#);
    assert_eq!(event.time().unwrap().to_string(), "2026-12-01T08:00:00.123456789Z");
    assert!(event.as_json().windows(6).any(|window| window == b"+02:00"));
}

#[test]
fn a_missing_or_wrong_attribute_is_named_with_its_rule_and_value() {
    let id = refused(r#"{"specversion":"1.0","source":"/s","type":"t"}"#);
    assert_eq!(id, "attribute `id` must be present, not absent");
    let version = refused(r#"{"specversion":"0.3","id":"1","source":"/s","type":"t"}"#);
    assert_eq!(version, "attribute `specversion` must be \"1.0\", not \"0.3\"");
    let long = format!(r#"{{{LEAST},"time":"{}"}}"#, "9".repeat(100_000));
    let time = refused(&long);
    assert!(time.starts_with("attribute `time` must be an RFC 3339 time") && time.len() < 300);
    for wrong in [
        r#","ext":{}"#,
        r#","ext":[1]"#,
        r#","ext":1.5"#,
        r#","ext":1e3"#,
        r#","Ext":"x""#,
        r#","a-b":"x""#,
        r#","subject":7"#,
        r#","expirytime":"soon""#,
        r#","data_base64":"!""#,
        r#","data":1,"data_base64":"""#,
        r#","subject":"\ud800""#,
        r#","id":"""#,
        r#","id":null"#,
    ] {
        refused(&format!("{{{LEAST}{wrong}}}"));
    }
    for junk in ["", "null", "[]", "\"x\"", "{", "{}x", "{\"a\"}", "nul"] {
        refused(junk);
    }
}

#[test]
fn a_null_is_as_good_as_absent_and_the_last_duplicate_counts() {
    let event = event(r#","subject":null,"ext":"a","ext":"b""#);
    assert_eq!(event.subject(), None);
    assert_eq!(event.attribute("ext"), Some(Attribute::String("b".to_owned())));
    assert_eq!(event.attributes().len(), 5);
}

#[test]
fn sizes_are_limited_at_the_byte() {
    let frame = format!("{{{LEAST},\"data\":\"\"}}").len();
    let fits = format!("{{{LEAST},\"data\":\"{}\"}}", "x".repeat(HARD_LIMIT - frame));
    assert!(Event::parse(fits.clone()).is_ok());
    assert!(Event::parse(fits.replace("\"1\"", "\"12\"")).unwrap_err().is_too_large());
}

#[test]
fn depth_is_no_danger() {
    let deep = format!("{{{LEAST},\"data\":{}1{}}}", "[".repeat(400_000), "]".repeat(400_000));
    assert_eq!(Event::parse(deep.clone()).unwrap().as_json(), deep.as_str());
}

#[test]
fn a_batch_is_slices_of_its_body() {
    let one = format!("{{{LEAST}}}");
    let body = Bytes::from(format!(" [ {one} ,\n{one} ] "));
    let events = Event::parse_batch(body.clone(), 2).unwrap();
    assert!(events.iter().all(|event| event.as_json() == one.as_str()));
    let within = body.as_ptr_range();
    assert!(events.iter().all(|event| within.contains(&event.as_json().as_ptr())));
    assert!(Event::parse_batch(body, 1).unwrap_err().is_too_large());
    assert!(Event::parse_batch("[]", 1).unwrap().is_empty());
    let wrong = Event::parse_batch(format!("[{one},{{}}]"), 9).unwrap_err();
    assert_eq!(wrong.to_string(), "event 1 of the batch is wrong");
}

#[test]
fn binary_mode_gives_the_same_bytes_back() {
    let data: [(&str, &[u8]); 8] = [
        ("application/json", br#"{"n":18446744073709551617, "a":1,"a":2}"#),
        ("application/json; charset=utf-8", b"\"text\""),
        ("application/json", b" {\"spaced\": 1} "),
        ("application/json", b"{broken"),
        ("application/vnd.shop+json", b"[1,2]"),
        ("text/plain", "grüße \u{0}\n".as_bytes()),
        ("text/plain", b"\xff\xfe"),
        ("image/png", b"\x89PNG\r\n"),
    ];
    for (content_type, bytes) in data {
        let sent = headers(&[
            ("ce-specversion", "1.0"),
            ("CE-ID", "1"),
            ("ce-source", "/s"),
            ("ce-type", "t"),
            ("ce-subject", "gr%C3%BC%C3%9Fe%20%25"),
            ("content-type", content_type),
        ]);
        let events = Event::from_http(&sent, Bytes::copy_from_slice(bytes), 1).unwrap();
        let event = Event::parse(events[0].as_json().clone()).unwrap();
        assert_eq!(event.subject().as_deref(), Some("grüße %"));
        let (received, body) = event.to_http_binary();
        assert_eq!(body, bytes, "{content_type}");
        assert_eq!(received["content-type"], content_type);
        assert_eq!(received["ce-subject"], "gr%C3%BC%C3%9Fe%20%25");
    }
}

#[test]
fn the_mode_is_chosen_by_the_headers() {
    let one = format!("{{{LEAST}}}");
    let count = |content_type: &str, body: &str| {
        let sent = headers(&[("content-type", content_type)]);
        Event::from_http(&sent, Bytes::from(body.to_owned()), 10).map(|events| events.len()).ok()
    };
    assert_eq!(count(STRUCTURED, &one), Some(1));
    assert_eq!(count("Application/CloudEvents+JSON; charset=UTF-8", &one), Some(1));
    assert_eq!(count(BATCH, &format!("[{one},{one}]")), Some(2));
    assert_eq!(count("application/cloudevents+xml", &one), None);
    assert_eq!(count("application/cloudevents+json; charset=utf-16", &one), None);
    assert_eq!(count("application/json", &one), None, "no mode is named");
    let mut twice = headers(&[
        ("ce-specversion", "1.0"),
        ("ce-id", "1"),
        ("ce-source", "/s"),
        ("ce-type", "t"),
    ]);
    assert!(Event::from_http(&twice, Bytes::new(), 1).is_ok());
    twice.append("ce-id", HeaderValue::from_static("2"));
    assert!(Event::from_http(&twice, Bytes::new(), 1).is_err());
}

#[test]
fn the_builder_makes_what_the_parser_takes() {
    let event = Event::builder("order.placed.v1")
        .source("/shop")
        .extension("partitionkey", "A-4471")
        .extension("sampled", true)
        .extension("shard", 7)
        .data_json(&serde_json::json!({"total": 1299}))
        .build()
        .unwrap();
    assert_eq!(event.data().unwrap().bytes, r#"{"total":1299}"#);
    assert_eq!(event.attribute("shard"), Some(Attribute::Integer(7)));
    assert_eq!(event.id().len(), 36, "an id is made");
    assert!(Event::builder("t").build().is_err(), "a source is not");
}

#[test]
fn lints_advise_and_never_refuse() {
    let lints = |ty: &str| Event::builder(ty).source("/s").build().unwrap().lints();
    assert_eq!(lints("com.shop.order.placed.v2"), [Lint::NoTime]);
    assert_eq!(lints("order.paid.v1"), [Lint::NoTime]);
    assert_eq!(lints("order.create"), [Lint::NoVersion, Lint::NotPastTense, Lint::NoTime]);
}

#[test]
fn an_event_is_known_by_source_and_id_alone() {
    let key = |source: &str, id: &str, ty: &str| {
        Event::builder(ty).source(source).id(id).build().unwrap().dedupe_key()
    };
    assert_eq!(key("/a", "b", "x"), key("/a", "b", "y"));
    assert_ne!(key("/a", "b", "x"), key("/", "ab", "x"));
    // Stored by brokers: it must never change.
    assert_eq!(key("/shop", "4471", "t"), PINNED, "{:#x}", key("/shop", "4471", "t"));
}

const PINNED: u128 = 0xa97e_06c0_1f20_b613_fd3f_5566_ef1e_33b5;

proptest! {
    #[test]
    fn any_extension_text_survives_splicing_and_headers(text in "\\PC*", other in "\\PC{0,20}") {
        let event = event("").with_extension("one", text.as_str()).unwrap();
        let event = event.with_extension("two", other.as_str()).unwrap();
        prop_assert_eq!(event.attribute("one"), Some(Attribute::String(text.clone())));
        let (sent, body) = event.to_http_binary();
        let back = Event::from_http(&sent, body, 1).unwrap();
        prop_assert_eq!(back[0].attribute("one"), Some(Attribute::String(text)));
        prop_assert_eq!(back[0].attribute("two"), Some(Attribute::String(other)));
    }

    #[test]
    fn any_data_survives_binary_mode(bytes: Vec<u8>, json: bool) {
        let content_type = if json { "application/json" } else { "text/plain" };
        let built = Event::builder("t").source("/s").data(bytes.clone(), content_type).build();
        prop_assert_eq!(built.unwrap().to_http_binary().1, bytes);
    }
}
