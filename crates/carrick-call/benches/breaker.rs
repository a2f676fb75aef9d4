//! What does a closed breaker add to one call? Judge `ours` by its neighbours of the same run: other
//! breakers doing the same, on one thread and on two that share one.

use std::{
    hint::black_box,
    sync::{Arc, Barrier},
    time::Duration,
};

use carrick_call::breaker::{Breaker, BreakerConfig, Forced};
use carrick_core::outcome::Outcome;
use criterion::{Criterion, criterion_group, criterion_main};
use failsafe::CircuitBreaker as _;
use tokio::time::Instant;

/// Runs `call` so often on each of so many threads; returns the time that one call took.
fn together(threads: u32, calls: u64, call: impl Fn() + Sync) -> Duration {
    let barrier = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        let work = || {
            barrier.wait();
            let start = Instant::now();
            (0..calls).for_each(|_| call());
            start.elapsed()
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|one| one.join().expect("no panic")).max().unwrap_or_default()
    })
}

fn closed(c: &mut Criterion) {
    let ours = Breaker::new("bench", BreakerConfig::default());
    let now = Instant::now(); // an argument, so that the clock is not what is measured
    let recloser = Arc::new(recloser::Recloser::default());
    let failsafe = failsafe::Config::new().build();
    for threads in [1, 2] {
        let mut group = c.benchmark_group(format!("breaker/closed/{threads}"));
        group.bench_function("ours", |b| {
            b.iter_custom(|calls| {
                together(threads, calls, || {
                    let permit = ours.admit(black_box(now)).expect("closed");
                    permit.settle(Outcome::Success, Duration::ZERO, now);
                })
            });
        });
        group.bench_function("ours_owned", |b| {
            b.iter_custom(|calls| {
                together(threads, calls, || {
                    let permit = ours.admit_owned(black_box(now)).expect("closed");
                    permit.settle(Outcome::Success, Duration::ZERO, now);
                })
            });
        });
        group.bench_function("recloser", |b| {
            b.iter_custom(|calls| {
                together(threads, calls, || {
                    recloser.call(|| black_box(Ok::<(), ()>(()))).expect("closed");
                })
            });
        });
        group.bench_function("failsafe", |b| {
            b.iter_custom(|calls| {
                together(threads, calls, || {
                    failsafe.call(|| black_box(Ok::<(), ()>(()))).expect("closed");
                })
            });
        });
        group.finish();
    }
}

fn open(c: &mut Criterion) {
    let ours = Breaker::new("bench", BreakerConfig::default());
    let now = Instant::now();
    for _ in 0..20 {
        ours.admit(now).expect("closed").settle(Outcome::Transient, Duration::ZERO, now);
    }
    let forced = Breaker::new("bench", BreakerConfig::default());
    forced.force(Some(Forced::Open), now);
    let mut group = c.benchmark_group("breaker/open");
    group.bench_function("refusal", |b| b.iter(|| ours.admit(black_box(now)).is_err()));
    group.bench_function("refusal_forced", |b| b.iter(|| forced.admit(black_box(now)).is_err()));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(1));
    targets = closed, open
}
criterion_main!(benches);
