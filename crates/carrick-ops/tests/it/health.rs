use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use carrick_ops::{
    drain::{Drain, DrainConfig, Trigger},
    health::{Band, Health, HealthConfig, Hysteresis},
};
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::time::{advance, timeout};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

async fn get(health: &Health, path: &str) -> (StatusCode, Value) {
    let router: Router = health.routes();
    let response = router.oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    assert_eq!(head.headers["cache-control"], "no-store");
    let is_problem = head.headers["content-type"] == "application/problem+json";
    assert_eq!(is_problem, !head.status.is_success(), "every error is a problem");
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    (head.status, serde_json::from_slice(&body).unwrap())
}

fn health() -> Health {
    Health::new(HealthConfig::default())
}

#[tokio::test]
async fn nothing_that_is_wrong_with_others_makes_an_instance_unready_or_dead() {
    let health = health();
    health.dependency("database", Duration::from_secs(1), async || Err("refused".to_owned()));
    assert_eq!(get(&health, "/livez").await.0, StatusCode::OK);
    assert_eq!(get(&health, "/readyz").await.0, StatusCode::OK);
    let (status, body) = get(&health, "/debug/deep").await;
    assert_eq!(status, StatusCode::OK, "a report is no verdict");
    assert_eq!(body["status"], "degraded");
    assert_eq!(body["dependencies"]["database"]["detail"], "refused");
}

#[tokio::test]
async fn an_instance_is_unready_until_it_is_migrated_and_again_when_it_drains() {
    let health = health();
    let drain = Drain::new(DrainConfig::default());
    let migrated = health.flag("migrated", "migrations pending");
    health.follow(&drain);

    let (status, body) = get(&health, "/readyz").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(body["detail"], "migrations pending");
    assert_eq!(body["conditions"][0]["name"], "migrated");

    migrated.raise();
    assert_eq!(get(&health, "/readyz").await.0, StatusCode::OK);

    drain.trigger(Trigger::Terminate);
    let (status, body) = get(&health, "/readyz").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "at once, not at the end of the window");
    assert_eq!(body["detail"], "draining");
    assert_eq!(get(&health, "/livez").await.0, StatusCode::OK, "draining is not dying");
}

#[tokio::test(start_paused = true)]
async fn a_saturated_pool_takes_an_instance_out_only_when_it_stays_saturated() {
    let health = health();
    let waiting = Arc::new(AtomicU32::new(0));
    let level = Arc::clone(&waiting);
    health.level("pool", Band { high: 50.0, low: 10.0 }, Hysteresis::default(), move || {
        f64::from(level.load(Ordering::Relaxed))
    });
    let ready = async || get(&health, "/readyz").await.0.is_success();

    waiting.store(80, Ordering::Relaxed);
    assert!(ready().await);
    waiting.store(0, Ordering::Relaxed);
    advance(Duration::from_secs(5)).await;
    assert!(ready().await, "a peak between two probes is none of their business");

    waiting.store(80, Ordering::Relaxed);
    assert!(ready().await);
    advance(Duration::from_secs(2)).await;
    assert!(!ready().await);
    waiting.store(30, Ordering::Relaxed);
    advance(Duration::from_secs(60)).await;
    assert!(!ready().await, "inside the band it stays as it was");
    waiting.store(10, Ordering::Relaxed);
    assert!(!ready().await);
    advance(Duration::from_secs(10)).await;
    assert!(ready().await);
}

#[tokio::test(start_paused = true)]
async fn the_watch_sees_what_happens_between_probes() {
    let health = health();
    let bad = Arc::new(AtomicBool::new(true));
    let is_bad = Arc::clone(&bad);
    health.own(
        "writer",
        Hysteresis { fail_after: Duration::from_secs(2), ..Hysteresis::default() },
        move || if is_bad.load(Ordering::Relaxed) { Err("gone".to_owned()) } else { Ok(()) },
    );
    assert!(!health.readiness().is_ready(), "what is wrong at the start is wrong at once");
    bad.store(false, Ordering::Relaxed);

    let stop = CancellationToken::new();
    let watch = tokio::spawn({
        let (health, stop) = (health.clone(), stop.clone());
        async move { health.watch(stop).await }
    });
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(health.readiness().is_ready(), "ten good seconds passed without any probe");
    stop.cancel();
    timeout(Duration::from_secs(1), watch).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_event_loop_that_stands_still_is_not_alive() {
    let health = health();
    assert_eq!(health.event_loop_lag(), Duration::ZERO);
    let watching = tokio::spawn({
        let health = health.clone();
        async move { health.watch(CancellationToken::new()).await }
    });
    tokio::time::sleep(Duration::from_millis(750)).await;
    assert!(get(&health, "/livez").await.0.is_success());

    // Time passes, and the watching task does not get to run in between.
    advance(Duration::from_secs(29)).await;
    let (status, body) = get(&health, "/livez").await;
    assert!(status.is_success(), "{body}");
    assert!(body["event_loop_lag_ms"].as_f64().unwrap() > 28_000.0, "{body}");

    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(health.event_loop_lag() < Duration::from_secs(1), "it runs again");

    watching.abort();
    assert!(watching.await.unwrap_err().is_cancelled());
    advance(Duration::from_secs(31)).await;
    let (status, body) = get(&health, "/livez").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body["detail"].as_str().unwrap().contains("late"), "{body}");
}

#[tokio::test(start_paused = true)]
async fn a_dependency_that_hangs_costs_its_own_timeout_and_nobody_elses() {
    let health = health();
    health.dependency("hangs", Duration::from_millis(200), async || std::future::pending().await);
    health.dependency("well", Duration::from_secs(60), async || Ok("15.8".to_owned()));
    health.dependency("panics", Duration::from_secs(1), async || panic!("a bug in the check"));
    let start = tokio::time::Instant::now();
    let report = health.deep().await;
    assert_eq!(start.elapsed(), Duration::from_millis(200));
    let of = |name: &str| &report.dependencies[name];
    assert!(!of("hangs").ok && of("hangs").detail.contains("200ms"), "{report:?}");
    assert!(of("well").ok && of("well").detail == "15.8", "{report:?}");
    assert!(!of("panics").ok && of("panics").detail.contains("panicked"), "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn a_crowd_that_looks_costs_a_dependency_one_question_per_cache_time() {
    let health = health();
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    health.dependency("database", Duration::from_secs(1), move || {
        count.fetch_add(1, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok(String::new())
        }
    });
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let health = health.clone();
        crowd.spawn(async move { health.deep().await });
    }
    crowd.join_all().await;
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    advance(Duration::from_secs(4)).await;
    health.deep().await;
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    advance(Duration::from_secs(2)).await;
    health.deep().await;
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn who_leaves_while_the_checks_run_leaves_no_lock_behind() {
    let health = health();
    health.dependency("slow", Duration::from_secs(10), async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(String::new())
    });
    assert!(timeout(Duration::from_millis(10), health.deep()).await.is_err());
    assert!(health.deep().await.dependencies["slow"].ok);
}
