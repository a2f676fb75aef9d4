//! What the stack costs in memory, on the path that nearly all calls take.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    pin::pin,
    task::{Context, Poll, Waker},
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
use tokio::time::Instant;
use tower::Service;

#[derive(Clone, Copy, Debug)]
struct Ok200;

impl Service<()> for Ok200 {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        ready(Ok(()))
    }
}

#[test]
fn a_call_that_succeeds_allocates_nothing() {
    let balancer = Balancer::with("test", BalanceConfig::default(), None, |_| Ok200);
    let endpoints = (0..10).map(|n| Endpoint::new(n.to_string())).collect();
    balancer.update(endpoints, Instant::now());
    let policies = Policies {
        name: "test".to_owned(),
        timeout: Duration::from_secs(2),
        per_try_timeout: Some(Duration::from_secs(1)),
        retry: RetryConfig::default(),
        budget: Budget::new("test", BudgetConfig::default()),
        balancer,
        throttle: None,
        bulkhead: Bulkhead::new("test", BulkheadConfig::default()),
        queue: None,
        breaker: Breaker::new("test", BreakerConfig::default()),
        stream: StreamConfig::default(),
        timer: Timer::new(),
    };
    let mut stack = Stack::new(policies, AnyError);
    let mut call = || {
        let mut call = pin!(stack.call(()));
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Ok(()))));
    };
    call(); // a thread's first call makes what the thread keeps
    let counted = allocation_counter::measure(|| (0..1000).for_each(|_| call()));
    assert_eq!(counted.count_total, 0, "{counted:?}");
}
