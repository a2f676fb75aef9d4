//! What does a deadline cost a call? Judge `ours` by `tokio` (a timer of the runtime for each call) and
//! by `bare` (no deadline) of the same run.

use std::{
    convert::Infallible,
    future::Future,
    hint::black_box,
    pin::{Pin, pin},
    sync::Barrier,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use carrick_call::deadline::{
    ClientDeadlineConfig, DeadlineConfig, DeadlineLayer, ServerDeadlineLayer, Timer,
};
use criterion::{Criterion, criterion_group, criterion_main};
use http::{HeaderValue, Request, Response};
use http_body_util::Empty;
use tokio::{
    runtime::Runtime,
    time::{Instant, sleep, sleep_until},
};
use tower::{Layer, Service, ServiceExt, timeout::TimeoutLayer};

const SPAN: Duration = Duration::from_secs(2);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
}

fn arm_ours(timer: &Timer, waker: &Waker, end: Instant) {
    let mut armed = None;
    assert!(timer.poll_at(end, black_box(&mut armed), waker).is_pending());
}

fn arm_tokio(cx: &mut Context<'_>, end: Instant) {
    let timer = pin!(sleep_until(end));
    assert!(black_box(timer).poll(cx).is_pending());
}

/// Arms and takes back, which is what becomes of nearly every deadline.
fn armed(c: &mut Criterion) {
    let runtime = runtime();
    let _entered = runtime.enter();
    let mut group = c.benchmark_group("deadline/armed");
    let (waker, end) = (Waker::noop(), Instant::now() + 3600 * SPAN);
    let timer = Timer::new();
    group.bench_function("ours", |b| b.iter(|| arm_ours(&timer, waker, end)));
    group.bench_function("tokio", |b| {
        let mut cx = Context::from_waker(waker);
        b.iter(|| arm_tokio(&mut cx, end));
    });
    group.finish();
}

/// The same on two threads at a time.
fn contended(c: &mut Criterion) {
    let runtime = runtime();
    let end = Instant::now() + 3600 * SPAN;
    let timer = Timer::new();
    let both = |work: &(dyn Fn() + Sync), calls: u64| {
        let barrier = Barrier::new(2);
        let one = || {
            let _entered = runtime.enter();
            barrier.wait();
            let start = Instant::now();
            (0..calls).for_each(|_| work());
            start.elapsed()
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(one);
            one().max(other.join().expect("it does not panic"))
        })
    };
    let mut group = c.benchmark_group("deadline/armed_by_two_threads");
    group.bench_function("ours", |b| {
        b.iter_custom(|calls| both(&|| arm_ours(&timer, Waker::noop(), end), calls));
    });
    group.bench_function("tokio", |b| {
        let work = || arm_tokio(&mut Context::from_waker(Waker::noop()), end);
        b.iter_custom(|calls| both(&work, calls));
    });
    group.finish();
}

/// Ready at once, or after having yielded once.
#[derive(Clone, Copy, Debug)]
struct Bare {
    yields: bool,
}

struct Answer {
    yields: bool,
}

impl Future for Answer {
    type Output = Result<Response<Empty<Bytes>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if std::mem::take(&mut self.yields) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(Response::new(Empty::new())))
    }
}

impl Service<Request<()>> for Bare {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Answer {
        Answer { yields: self.yields }
    }
}

async fn run<S: Service<Request<()>>>(mut service: S, calls: u64, says: bool) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        let mut request = Request::new(());
        if says {
            let left = HeaderValue::from_static("1500");
            request.headers_mut().insert("x-request-timeout-ms", left);
        }
        let Ok(ready) = service.ready().await else { panic!("it never fails") };
        assert!(black_box(ready.call(request).await).is_ok());
    }
    start.elapsed()
}

fn layers(c: &mut Criterion) {
    let runtime = runtime();
    for (name, yields) in [("ready", false), ("yields", true)] {
        let bare = Bare { yields };
        let mut group = c.benchmark_group(format!("deadline/{name}"));
        group.bench_function("bare", |b| {
            b.iter_custom(|calls| runtime.block_on(run(bare, calls, false)));
        });
        group.bench_function("tokio", |b| {
            let service = TimeoutLayer::new(SPAN).layer(bare);
            b.iter_custom(|calls| runtime.block_on(run(service.clone(), calls, false)));
        });
        group.bench_function("ours_client", |b| {
            let service = DeadlineLayer::new("bench", ClientDeadlineConfig::default()).layer(bare);
            b.iter_custom(|calls| runtime.block_on(run(service.clone(), calls, false)));
        });
        group.bench_function("bare_with_header", |b| {
            b.iter_custom(|calls| runtime.block_on(run(bare, calls, true)));
        });
        group.bench_function("ours_server", |b| {
            let service = ServerDeadlineLayer::new(DeadlineConfig::default()).layer(bare);
            b.iter_custom(|calls| runtime.block_on(run(service.clone(), calls, true)));
        });
        group.finish();
    }
}

/// How late it is noticed, for what it costs less.
fn late(c: &mut Criterion) {
    let runtime = runtime();
    let mut group = c.benchmark_group("deadline/sleep_of_5_ms");
    group.sample_size(20);
    let span = Duration::from_millis(5);
    group.bench_function("tokio", |b| {
        b.iter_custom(|calls| {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..calls {
                    sleep(span).await;
                }
                start.elapsed()
            })
        });
    });
    group.bench_function("ours", |b| {
        let timer = Timer::new();
        b.iter_custom(|calls| {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..calls {
                    let (end, mut armed) = (Instant::now() + span, None);
                    std::future::poll_fn(|cx| timer.poll_at(end, &mut armed, cx.waker())).await;
                }
                start.elapsed()
            })
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = armed, contended, layers, late
}
criterion_main!(benches);
