//! Telemetry of a whole process: this test binary starts itself as a child for each case, since a
//! process has one telemetry.

use std::{
    process::{Command, Output},
    time::Duration,
};

use carrick_ops::telemetry::{LogFormat, Metrics, Telemetry, TelemetryError, TelemetryOptions};
use serde_json::Value;
use tracing::{info, info_span, warn};

pub(crate) const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
pub(crate) const LINKED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const CHILD: &str = "CARRICK_OPS_TEST_CHILD";

/// Runs `case` of this file in a process of its own.
pub(crate) fn in_child(test: &str, environment: &[(&str, &str)]) -> Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, test)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stdout));
    output
}

/// Whether this process is the child that runs `test`.
pub(crate) fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == test)
}

fn log_lines(format: LogFormat) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let options = TelemetryOptions {
        format,
        filter: "info,it::telemetry=debug".to_owned(),
        ..Default::default()
    };
    let telemetry = Telemetry::start(&options).unwrap();
    assert!(matches!(Telemetry::start(&options), Err(TelemetryError::AlreadyStarted)));

    info!("outside of any span");
    let request = info_span!("request", method = "POST", traceparent = PARENT);
    request.in_scope(|| {
        warn!(attempt = 2, retry = true, error = %"refused \"here\"", "cannot connect");
        info_span!("step").in_scope(|| info!("deeper"));
    });
    let consume = info_span!("consume", link.traceparent = tracing::field::Empty);
    consume.record("link.traceparent", tracing::field::display(LINKED));
    consume.in_scope(|| info!("consumed"));
    info_span!("junk", traceparent = "00-junk").in_scope(|| info!("junk"));
    tracing::debug!(target: "elsewhere", "filtered out");
    runtime.block_on(telemetry.stop(Duration::from_secs(10)));
}

#[test]
fn a_json_line_names_its_trace() {
    const TEST: &str = "telemetry::a_json_line_names_its_trace";
    if is_child(TEST) {
        return log_lines(LogFormat::Auto); // standard error is no terminal here
    }
    let stderr = in_child(TEST, &[]).stderr;
    let lines: Vec<Value> = String::from_utf8(stderr)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}")))
        .collect();
    let messages: Vec<_> = lines.iter().map(|line| line["message"].as_str().unwrap()).collect();
    assert_eq!(messages, ["outside of any span", "cannot connect", "deeper", "consumed", "junk"]);

    assert!(lines[0].get("trace_id").is_none() && lines[0].get("fields").is_none());
    let warning = &lines[1];
    assert_eq!(warning["level"], "WARN");
    assert_eq!(warning["target"], "it::telemetry");
    assert_eq!(warning["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(warning["span_id"], "00f067aa0ba902b7");
    assert_eq!(warning["fields"]["attempt"], 2);
    assert_eq!(warning["fields"]["retry"], true);
    assert_eq!(warning["fields"]["error"], "refused \"here\"");
    assert_eq!(warning["spans"][0]["name"], "request");
    assert_eq!(warning["spans"][0]["fields"]["method"], "POST");
    assert!(warning["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok());

    assert_eq!(lines[2]["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736", "from the span around");
    assert_eq!(lines[2]["spans"][1]["name"], "step", "outermost first");
    assert_eq!(lines[3]["trace_id"], "0af7651916cd43dd8448eb211c80319c", "the linked one");
    assert!(lines[4].get("trace_id").is_none(), "junk is not shown as an id");
}

#[test]
fn a_pretty_line_names_its_trace_too() {
    const TEST: &str = "telemetry::a_pretty_line_names_its_trace_too";
    if is_child(TEST) {
        return log_lines(LogFormat::Pretty);
    }
    let text = String::from_utf8(in_child(TEST, &[]).stderr).unwrap();
    let line = text.lines().find(|line| line.contains("cannot connect")).unwrap();
    assert!(line.contains("WARN"), "{line}");
    assert!(line.ends_with(" trace_id=4bf92f3577b34da6a3ce929d0e0e4736"), "{line}");
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn a_filter_that_cannot_be_read_is_named() {
    let options = TelemetryOptions { filter: "carrick=loud".to_owned(), ..Default::default() };
    let error = Telemetry::start(&options).unwrap_err();
    assert!(error.to_string().contains("carrick=loud"), "{error}");
}

#[test]
#[cfg(not(feature = "otlp"))]
fn an_endpoint_without_the_feature_is_refused_and_not_ignored() {
    let endpoint = Some("http://127.0.0.1:4318".to_owned());
    let options = TelemetryOptions { otlp: endpoint, ..Default::default() };
    assert!(matches!(Telemetry::start(&options), Err(TelemetryError::NoOtlp)));
}

#[test]
fn metrics_are_histograms_with_buckets_beside_those_of_the_process() {
    const TEST: &str = "telemetry::metrics_are_histograms_with_buckets_beside_those_of_the_process";
    if !is_child(TEST) {
        in_child(TEST, &[]);
        return;
    }
    let all = Metrics::install().unwrap();
    assert!(matches!(Metrics::install(), Err(TelemetryError::AlreadyStarted)));
    metrics::counter!("carrick_test_total", "topic" => "orders").increment(3);
    metrics::gauge!("carrick_test_depth").set(7.0);
    metrics::histogram!("carrick_test_wait_seconds").record(0.003);
    metrics::histogram!("carrick_test_event_bytes").record(300.0);
    metrics::histogram!("carrick_test_batch").record(30.0);
    let text = all.render();
    for line in [
        "carrick_test_total{topic=\"orders\"} 3",
        "carrick_test_depth 7",
        "carrick_test_wait_seconds_bucket{le=\"0.0025\"} 0",
        "carrick_test_wait_seconds_bucket{le=\"0.005\"} 1",
        "carrick_test_event_bytes_bucket{le=\"1024\"} 1",
        "carrick_test_batch_bucket{le=\"50\"} 1",
        "# TYPE process_resident_memory_bytes gauge",
    ] {
        assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
    }
}

#[test]
fn a_script_that_invents_topics_cannot_fill_the_memory() {
    const TEST: &str = "telemetry::a_script_that_invents_topics_cannot_fill_the_memory";
    if !is_child(TEST) {
        in_child(TEST, &[]);
        return;
    }
    let all = Metrics::install().unwrap();
    let count = |topic: usize| {
        metrics::counter!("carrick_test_total", "topic" => topic.to_string()).increment(1);
    };
    (0..20_000).for_each(count);
    (0..10).for_each(count);
    let text = all.render();
    let series = text.lines().filter(|line| line.starts_with("carrick_test_total{")).count();
    assert_eq!(series, 10_000);
    assert!(text.contains("carrick_test_total{topic=\"0\"} 2"), "known ones go on counting");
    assert!(text.contains("carrick_telemetry_series_refused_total 10000"), "and the rest is told");
}
