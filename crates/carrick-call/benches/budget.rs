//! What does a budget add to one call? Judge `ours` by tower's budget of the same run, on one thread
//! and on two that share one.

use std::{
    hint::black_box,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use carrick_call::budget::{Budget, BudgetConfig, BudgetKind, BudgetOptions};
use carrick_core::outcome::Outcome;
use criterion::{
    BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime,
};
use tokio::time::Instant;
use tower::retry::budget::{Budget as _, TpsBudget};

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

fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    threads: u32,
    call: impl Fn() + Sync,
) {
    group.bench_function(name, |b| b.iter_custom(|calls| together(threads, calls, &call)));
}

fn ours(kind: BudgetKind, cap: u32) -> Budget {
    let options = BudgetOptions { kind, cap, ..BudgetOptions::default() };
    Budget::new("bench", BudgetConfig::try_from(options).expect("in range"))
}

fn tower() -> TpsBudget {
    TpsBudget::new(Duration::from_secs(10), 10, 0.1)
}

fn budgets(c: &mut Criterion) {
    let now = Instant::now(); // an argument, so that the clock is not what is measured
    for threads in [1, 2] {
        let mut group = c.benchmark_group(format!("budget/deposit/{threads}"));
        let bare = AtomicU64::new(0);
        measure(&mut group, "baseline_atomic_add", threads, || {
            black_box(bare.fetch_add(1, Ordering::Relaxed));
        });
        let full = ours(BudgetKind::Ratio, 1);
        drop(full.deposit(now));
        measure(&mut group, "ours_full", threads, || drop(full.deposit(black_box(now))));
        // Ten deposits and the withdrawal they pay for: the purse never fills, and each changes it.
        let changing = ours(BudgetKind::Ratio, 16_000);
        measure(&mut group, "ours_changing", threads, || {
            for _ in 0..10 {
                drop(changing.deposit(black_box(now)));
            }
            drop(changing.withdraw(black_box(now)));
        });
        let flying = ours(BudgetKind::InFlight, 100);
        measure(&mut group, "ours_in_flight", threads, || drop(flying.deposit(black_box(now))));
        let tokens = ours(BudgetKind::Tokens, 10);
        measure(&mut group, "ours_tokens", threads, || {
            drop(tokens.deposit(black_box(now)));
            tokens.settle(black_box(Outcome::Success));
        });
        let theirs = tower();
        measure(&mut group, "tower", threads, || theirs.deposit());
        let theirs = tower();
        measure(&mut group, "tower_changing", threads, || {
            (0..10).for_each(|_| theirs.deposit());
            black_box(theirs.withdraw());
        });
        group.finish();

        let mut group = c.benchmark_group(format!("budget/refusal/{threads}"));
        let empty = ours(BudgetKind::Ratio, 1);
        drop(empty.withdraw(now));
        measure(&mut group, "ours", threads, || drop(empty.withdraw(black_box(now))));
        let theirs = TpsBudget::new(Duration::from_secs(10), 0, 0.0);
        measure(&mut group, "tower", threads, || {
            black_box(theirs.withdraw());
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(1));
    targets = budgets
}
criterion_main!(benches);
