//! What does reading an envelope cost? Judge `parse` by the run's own `serde_json_value`.

use std::hint::black_box;

use bytes::Bytes;
use carrick_core::event::Event;
use criterion::{Criterion, criterion_group, criterion_main};

fn parse(c: &mut Criterion) {
    let filler = "x".repeat(800);
    let document = Bytes::from(format!(
        r#"{{"specversion":"1.0","id":"4471","source":"/shop","type":"order.placed.v1","partitionkey":"A-4471","time":"2026-12-01T00:00:00Z","datacontenttype":"application/json","data":{{"total":1299,"filler":"{filler}"}}}}"#
    ));
    let mut group = c.benchmark_group("event/parse_1kib");
    group.bench_function("serde_json_value", |b| {
        b.iter(|| serde_json::from_slice::<serde_json::Value>(black_box(&document)).unwrap());
    });
    group
        .bench_function("parse", |b| b.iter(|| Event::parse(black_box(document.clone())).unwrap()));
    group.finish();
}

criterion_group!(benches, parse);
criterion_main!(benches);
