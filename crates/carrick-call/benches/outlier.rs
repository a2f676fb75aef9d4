//! What does it cost to charge a call to its host? Judge `record` by `one_counter` of the same run,
//! and a sweep by its interval of ten seconds.

use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use carrick_call::outlier::{Detector, OutlierConfig, OutlierOptions};
use carrick_core::outcome::Outcome;
use criterion::{Criterion, criterion_group, criterion_main};
use tokio::time::Instant;

const MS: Duration = Duration::from_millis(1);

fn records(c: &mut Criterion) {
    let now = Instant::now();
    let mut group = c.benchmark_group("outlier/record");
    let counter = AtomicU64::new(0);
    group.bench_function("one_counter", |b| b.iter(|| black_box(&counter).fetch_add(1, Relaxed)));
    for (name, latency) in [("record", false), ("record_with_latency", true)] {
        let options = OutlierOptions { latency, ..OutlierOptions::default() };
        let config = OutlierConfig::try_from(options).expect("these are in range");
        let host = Detector::new("bench", config).add("host", now);
        group.bench_function(name, |b| b.iter(|| host.record(Outcome::Success, MS, now)));
    }
    group.finish();
}

fn sweeps(c: &mut Criterion) {
    let now = Instant::now();
    let options = OutlierOptions { latency: true, ..OutlierOptions::default() };
    let config = OutlierConfig::try_from(options).expect("these are in range");
    let detector = Detector::new("bench", config);
    let hosts: Vec<_> = (0..100).map(|n| detector.add(&n.to_string(), now)).collect();
    let mut group = c.benchmark_group("outlier/sweep");
    group.bench_function("of_100_hosts", |b| {
        b.iter(|| {
            for host in &hosts {
                host.record(Outcome::Success, MS, now);
            }
            detector.sweep(now)
        });
    });
    group.finish();
}

criterion_group!(benches, records, sweeps);
criterion_main!(benches);
