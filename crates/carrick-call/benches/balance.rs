//! What does it cost to choose a host? Judge `pick_give_back` and `pick_settle` by `round_robin` of
//! the same run (a shared counter and a clone of the host's handle), and `service/ours` by
//! `service/tower` (p2c with peak EWMA over the same ten services that answer at once).

use std::{
    convert::Infallible,
    future::{Ready, ready},
    hint::black_box,
    pin::Pin,
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use carrick_call::{
    balance::{Balance, BalanceConfig, Balancer, Endpoint, Host},
    outlier::{Detector, OutlierConfig},
};
use carrick_core::outcome::Outcome;
use criterion::{Criterion, criterion_group, criterion_main};
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::Instant;
use tower::{
    Service,
    balance::p2c,
    discover::ServiceList,
    load::{CompleteOnResponse, PeakEwma},
};

const MS: Duration = Duration::from_millis(1);

fn endpoints(hosts: usize, weight: impl Fn(usize) -> u16) -> Vec<Endpoint> {
    (0..hosts).map(|n| Endpoint::new(n.to_string()).with_weight(weight(n))).collect()
}

fn balancer(hosts: usize, weight: impl Fn(usize) -> u16) -> Balancer {
    let balancer = Balancer::new("bench", BalanceConfig::default());
    balancer.update(endpoints(hosts, weight), Instant::now());
    balancer
}

/// The naive way: the next host, whatever it is like.
struct RoundRobin {
    hosts: Vec<Arc<Host>>,
    next: AtomicUsize,
}

impl RoundRobin {
    fn pick(&self) -> Arc<Host> {
        Arc::clone(&self.hosts[self.next.fetch_add(1, Relaxed) % self.hosts.len()])
    }
}

fn picks(c: &mut Criterion) {
    let (now, mut rng) = (Instant::now(), SmallRng::seed_from_u64(1));
    let mut group = c.benchmark_group("balance/pick");
    let naive = RoundRobin { hosts: balancer(10, |_| 1).hosts(), next: AtomicUsize::new(0) };
    group.bench_function("round_robin", |b| b.iter(|| naive.pick()));
    let even = balancer(10, |_| 1);
    group.bench_function("pick_give_back", |b| {
        b.iter(|| {
            even.pick(now, &mut rng, None).map(|pick| pick.settle(Outcome::Rejected, MS, now))
        });
    });
    let detector = Detector::new("bench", OutlierConfig::default());
    let watched = Balancer::with("bench", BalanceConfig::default(), Some(detector), |_| ());
    watched.update(endpoints(10, |_| 1), now);
    let weighted = balancer(10, |n| n as u16 + 1);
    let many = balancer(1000, |_| 1);
    for (name, balancer) in
        [("", &even), ("_weighted", &weighted), ("_watched", &watched), ("_of_1000", &many)]
    {
        group.bench_function(format!("pick_settle{name}"), |b| {
            let mut time = now;
            b.iter(|| {
                time += Duration::from_micros(10);
                let pick = balancer.pick(time, &mut rng, None);
                pick.map(|pick| pick.settle(Outcome::Success, MS, time))
            });
        });
    }
    group.finish();
}

fn threads(c: &mut Criterion) {
    let now = Instant::now();
    let even = balancer(10, |_| 1);
    let naive = RoundRobin { hosts: even.hosts(), next: AtomicUsize::new(0) };
    let mut group = c.benchmark_group("balance/two_threads");
    group.bench_function("round_robin", |b| {
        b.iter_custom(|times| two(times, |_| drop(black_box(naive.pick()))));
    });
    group.bench_function("pick_settle", |b| {
        b.iter_custom(|times| {
            two(times, |rng| {
                let pick = even.pick(now, rng, None);
                let _ = black_box(pick.map(|pick| pick.settle(Outcome::Success, MS, now)));
            })
        });
    });
    group.finish();
}

/// Runs it `times` times on each of two threads at once.
fn two(times: u64, run: impl Fn(&mut SmallRng) + Sync) -> Duration {
    let (barrier, run) = (Barrier::new(2), &run);
    let thread = |seed| {
        let mut rng = SmallRng::seed_from_u64(seed);
        barrier.wait();
        let start = Instant::now();
        (0..times).for_each(|_| run(&mut rng));
        start.elapsed()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| thread(1));
        let ours = thread(2);
        ours.max(other.join().expect("the thread only counts"))
    })
}

#[derive(Clone)]
struct AtOnce;

impl Service<u64> for AtOnce {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: u64) -> Self::Future {
        ready(Ok(request))
    }
}

/// One call, from readiness to its answer.
fn call<S: Service<u64>>(service: &mut S) -> Option<S::Response> {
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok(())) = service.poll_ready(&mut context) else { return None };
    let mut future = std::pin::pin!(service.call(1));
    match Pin::as_mut(&mut future).poll(&mut context) {
        Poll::Ready(answer) => answer.ok(),
        Poll::Pending => None,
    }
}

fn services(c: &mut Criterion) {
    let mut group = c.benchmark_group("balance/service");
    let load = || PeakEwma::new(AtOnce, MS, 10e9, CompleteOnResponse::default());
    let list = ServiceList::new::<u64>((0..10).map(|_| load()).collect::<Vec<_>>());
    let mut theirs = p2c::Balance::new(list);
    group.bench_function("tower", |b| b.iter(|| call(&mut theirs).expect("it answers at once")));
    let balancer = Balancer::with("bench", BalanceConfig::default(), None, |_| AtOnce);
    balancer.update(endpoints(10, |_| 1), Instant::now());
    let mut ours = Balance::new(balancer);
    group.bench_function("ours", |b| b.iter(|| call(&mut ours).expect("it answers at once")));
    group.finish();
}

criterion_group!(benches, picks, threads, services);
criterion_main!(benches);
