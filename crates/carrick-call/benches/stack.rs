//! What does the whole stack add to a call? Judge `ours` by `bare` (the service alone) and by `tower`
//! (timeout, load-shed, concurrency-limit and retry with budget) of the same run.

use std::{
    convert::Infallible,
    future::Future,
    hint::black_box,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use carrick_call::{
    balance::{BalanceConfig, Balancer, Endpoint},
    breaker::{Breaker, BreakerConfig},
    budget::{Budget, BudgetConfig},
    bulkhead::{Bulkhead, BulkheadConfig},
    classify::AnyError,
    deadline::{StreamConfig, Timer},
    retry::RetryConfig,
    stack::{Policies, Stack},
};
use criterion::{Criterion, criterion_group, criterion_main};
use tokio::{runtime::Runtime, time::Instant};
use tower::{
    Service, ServiceBuilder, ServiceExt,
    retry::{
        Policy,
        budget::{Budget as _, TpsBudget},
    },
};

/// Ready at once, or after having yielded once.
#[derive(Clone, Copy, Debug)]
struct Bare {
    yields: bool,
}

#[derive(Debug)]
struct Answer {
    yields: bool,
}

impl Future for Answer {
    type Output = Result<(), Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if std::mem::take(&mut self.yields) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

impl Service<()> for Bare {
    type Response = ();
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Answer {
        Answer { yields: self.yields }
    }
}

fn stack(service: Bare) -> Stack<Bare, AnyError> {
    let balancer = Balancer::with("bench", BalanceConfig::default(), None, move |_| service);
    let endpoints = (0..10).map(|n| Endpoint::new(n.to_string())).collect();
    balancer.update(endpoints, Instant::now());
    let policies = Policies {
        name: "bench".to_owned(),
        timeout: Duration::from_secs(2),
        per_try_timeout: None,
        retry: RetryConfig::default(),
        budget: Budget::new("bench", BudgetConfig::default()),
        balancer,
        throttle: None,
        bulkhead: Bulkhead::new("bench", BulkheadConfig::default()),
        queue: None,
        breaker: Breaker::new("bench", BreakerConfig::default()),
        stream: StreamConfig::default(),
        timer: Timer::new(),
    };
    Stack::new(policies, AnyError)
}

/// Retries errors within a budget; the bench has none.
#[derive(Clone, Debug)]
struct Again(Arc<TpsBudget>);

impl<T, E> Policy<(), T, E> for Again {
    type Future = std::future::Ready<()>;

    fn retry(&mut self, _: &mut (), result: &mut Result<T, E>) -> Option<Self::Future> {
        if result.is_ok() {
            self.0.deposit();
            return None;
        }
        self.0.withdraw().then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, (): &()) -> Option<()> {
        Some(())
    }
}

async fn run<S: Service<()>>(mut service: S, calls: u64) -> Duration
where
    S::Error: std::fmt::Debug,
{
    let start = Instant::now();
    for _ in 0..calls {
        let ready = service.ready().await.expect("it never fails");
        if black_box(ready.call(()).await).is_err() {
            panic!("it never fails");
        }
    }
    start.elapsed()
}

fn stacks(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime: Runtime = runtime.expect("a runtime");
    for (name, yields) in [("ready", false), ("yields", true)] {
        let bare = Bare { yields };
        let mut group = c.benchmark_group(format!("stack/{name}"));
        group.bench_function("bare", |b| {
            b.iter_custom(|calls| runtime.block_on(run(bare, calls)));
        });
        group.bench_function("ours", |b| {
            let ours = stack(bare);
            b.iter_custom(|calls| runtime.block_on(run(ours.clone(), calls)));
        });
        group.bench_function("tower", |b| {
            let tower = ServiceBuilder::new()
                .retry(Again(Arc::new(TpsBudget::default())))
                .load_shed()
                .concurrency_limit(100)
                .timeout(Duration::from_secs(2))
                .service(bare);
            b.iter_custom(|calls| runtime.block_on(run(tower.clone(), calls)));
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(1));
    targets = stacks
}
criterion_main!(benches);
