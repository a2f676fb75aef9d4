//! Traces as a collector receives them: a stub that speaks just enough HTTP, and a reader of just
//! enough protobuf.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    sync::mpsc::{Receiver, sync_channel},
    thread,
    time::Duration,
};

use carrick_ops::telemetry::{Telemetry, TelemetryError, TelemetryOptions, current_traceparent};
use tracing::{info, info_span};

use crate::telemetry::{LINKED, PARENT, in_child, is_child};

const ENDPOINT: &str = "CARRICK_OPS_TEST_ENDPOINT";

/// A collector: answers every request with 200 and hands over path and body.
fn collector() -> (String, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (requests, received) = sync_channel(16);
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut stream = BufReader::new(connection.unwrap());
            loop {
                let mut head = Vec::new();
                while stream.read_until(b'\n', &mut head).is_ok_and(|read| read > 2) {}
                let Ok(head) = String::from_utf8(head) else { break };
                let Some(path) = head.split(' ').nth(1).map(str::to_owned) else { break };
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    let is_it = name.eq_ignore_ascii_case("content-length");
                    is_it.then(|| value.trim().parse::<usize>().unwrap())
                });
                let mut body = vec![0; length.unwrap_or(0)];
                stream.read_exact(&mut body).unwrap();
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                stream.get_mut().write_all(answer).unwrap();
                if requests.send((path, body)).is_err() {
                    return;
                }
            }
        }
    });
    (address, received)
}

/// The fields of a protobuf message: number, and the bytes (or the number, little-endian).
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (&byte, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return value;
            }
        }
        unreachable!()
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let value = match tag & 7 {
            0 => varint(&mut bytes).to_le_bytes().to_vec(),
            kind => {
                let length = match kind {
                    1 => 8,
                    5 => 4,
                    2 => varint(&mut bytes) as usize,
                    other => panic!("wire type {other}"),
                };
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                value.to_vec()
            }
        };
        fields.push((tag >> 3, value));
    }
    fields
}

/// All values of a field.
fn all(message: &[u8], number: u64) -> Vec<Vec<u8>> {
    fields(message).into_iter().filter(|(n, _)| *n == number).map(|(_, value)| value).collect()
}

fn one(message: &[u8], number: u64) -> Vec<u8> {
    all(message, number).into_iter().next().unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Debug)]
struct Received {
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u8,
    links: Vec<(String, String)>,
    attributes: Vec<String>,
}

/// The spans of an `ExportTraceServiceRequest`, by the field numbers of opentelemetry-proto 1.x.
fn spans(request: &[u8]) -> Vec<Received> {
    let scopes = all(request, 1).into_iter().flat_map(|resource| all(&resource, 2));
    let spans = scopes.flat_map(|scope| all(&scope, 2));
    spans
        .map(|span| Received {
            trace: hex(&one(&span, 1)),
            id: hex(&one(&span, 2)),
            parent: hex(&one(&span, 4)),
            name: String::from_utf8(one(&span, 5)).unwrap(),
            kind: one(&span, 6)[0],
            links: all(&span, 13)
                .iter()
                .map(|link| (hex(&one(link, 1)), hex(&one(link, 2))))
                .collect(),
            attributes: all(&span, 9)
                .iter()
                .map(|attribute| String::from_utf8(one(attribute, 1)).unwrap())
                .collect(),
        })
        .collect()
}

const SERVER: u8 = 2;
const PRODUCER: u8 = 4;
const CONSUMER: u8 = 5;

fn trace_a_process() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // As in a server: within the runtime, where nothing may block.
    runtime.block_on(async {
        let options = TelemetryOptions {
            otlp: Some(std::env::var(ENDPOINT).unwrap()),
            service: "shop".to_owned(),
            ..Default::default()
        };
        let telemetry = Telemetry::start(&options).unwrap();
        assert_eq!((current_traceparent(), carrick_core::trace::recorded()), (None, None));
        info_span!("request", otel.kind = "server", traceparent = PARENT).in_scope(|| {
            info_span!("publish", otel.kind = "producer").in_scope(|| {
                info!("publishing");
                let current = current_traceparent().unwrap();
                let recorded = carrick_core::trace::recorded();
                assert_eq!(recorded.map(|span| span.to_string()).as_ref(), Some(&current));
                println!("published under {current}");
            });
            // Opened inside another span, and yet a root.
            let consume = info_span!(
                "consume",
                otel.kind = "consumer",
                link.traceparent = tracing::field::Empty,
            );
            consume.record("link.traceparent", tracing::field::display(LINKED));
            consume.in_scope(|| info!("consuming"));
            let both = format!("{LINKED}, {PARENT},junk");
            info_span!("batch", otel.kind = "consumer", link.traceparent = both).in_scope(|| {});
        });
        telemetry.stop(Duration::from_secs(20)).await;
    });
}

#[test]
fn m5_a_consumers_span_is_a_root_with_a_link_and_a_producers_is_a_child() {
    const TEST: &str = "otlp::m5_a_consumers_span_is_a_root_with_a_link_and_a_producers_is_a_child";
    if is_child(TEST) {
        return trace_a_process();
    }
    let (address, received) = collector();
    let output = in_child(TEST, &[(ENDPOINT, &address)]);
    let mut found = Vec::new();
    while let Ok((path, body)) = received.try_recv() {
        assert_eq!(path, "/v1/traces");
        found.extend(spans(&body));
    }
    let named = |name: &str| {
        let mut spans = found.iter().filter(|span| span.name == name);
        let span = spans.next().unwrap_or_else(|| panic!("no span {name} in {found:?}"));
        assert!(spans.next().is_none(), "{name} twice");
        span
    };

    let (request, publish) = (named("request"), named("publish"));
    assert_eq!((request.trace.as_str(), request.kind), (&PARENT[3..35], SERVER));
    assert_eq!(request.parent, PARENT[36..52]);
    assert_eq!(
        (publish.kind, &publish.trace, &publish.parent),
        (PRODUCER, &request.trace, &request.id)
    );

    let linked = (LINKED[3..35].to_owned(), LINKED[36..52].to_owned());
    let consume = named("consume");
    assert_eq!((consume.kind, consume.parent.as_str()), (CONSUMER, ""), "a root");
    assert_eq!(consume.links, std::slice::from_ref(&linked));
    assert!(consume.trace != request.trace && consume.trace != linked.0, "in a trace of its own");
    let parent = (PARENT[3..35].to_owned(), PARENT[36..52].to_owned());
    assert_eq!(named("batch").links, [linked, parent]);
    for span in &found {
        let left = span.attributes.iter().any(|name| name.contains("traceparent"));
        assert!(!left, "they are links, no attributes: {span:?}");
    }

    // Log lines carry the ids under which the spans were sent.
    let log = String::from_utf8(output.stderr).unwrap();
    for (message, span) in [("publishing", publish), ("consuming", consume)] {
        let line = log.lines().find(|line| line.contains(message)).unwrap();
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (line["trace_id"].as_str(), line["span_id"].as_str()),
            (Some(span.trace.as_str()), Some(span.id.as_str()))
        );
    }
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stored = format!("published under 00-{}-{}-01", publish.trace, publish.id);
    assert!(stdout.contains(&stored), "{stored} is what an outbox row would carry:\n{stdout}");
}

#[test]
fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    const TEST: &str = "otlp::a_collector_that_is_away_costs_spans_and_nothing_else";
    if is_child(TEST) {
        return trace_a_process();
    }
    // A port that was free a moment ago.
    let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = in_child(TEST, &[(ENDPOINT, &format!("http://{away}"))]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("consuming"));
}

#[test]
fn an_endpoint_that_cannot_work_is_refused_with_what_was_given() {
    for (endpoint, sample) in
        [("https://collector", 1.0), ("collector:4318", 1.0), ("http://c", 1.5)]
    {
        let options = TelemetryOptions {
            otlp: Some(endpoint.to_owned()),
            otlp_sample: sample,
            ..Default::default()
        };
        let error = Telemetry::start(&options).unwrap_err();
        assert!(matches!(error, TelemetryError::Otlp(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains(endpoint) || text.contains("1.5"), "{text}");
    }
}
