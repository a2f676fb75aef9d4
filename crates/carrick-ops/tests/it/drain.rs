use std::time::Duration;

use carrick_ops::drain::{Drain, DrainConfig, DrainOptions, Phase, Trigger};
use tokio::{
    task::yield_now,
    time::{Instant, advance, sleep},
};

fn drain() -> Drain {
    Drain::new(DrainConfig::default())
}

fn finished(drain: &Drain) -> tokio::task::JoinHandle<carrick_ops::drain::DrainReport> {
    let drain = drain.clone();
    tokio::spawn(async move { drain.finished().await })
}

#[tokio::test(start_paused = true)]
async fn s10_readiness_fails_at_once_and_work_is_accepted_for_the_window() {
    let drain = drain();
    let requests = drain.work("request");
    let end = finished(&drain);
    let start = Instant::now();
    drain.trigger(Trigger::Terminate);
    assert!(drain.is_draining() && drain.announced().is_cancelled());
    assert!(!drain.closing().is_cancelled());

    sleep(Duration::from_secs(9)).await;
    assert_eq!(drain.phase(), Phase::Announcing);
    let late = requests.begin();
    drain.closing().cancelled().await;
    assert_eq!(start.elapsed(), Duration::from_secs(10));

    sleep(Duration::from_secs(3)).await;
    assert!(!drain.forced().is_cancelled());
    drop(late);
    let report = end.await.unwrap();
    assert_eq!((report.took, report.forced), (Duration::from_secs(13), false));
    assert!(report.left.is_empty());
    assert!(drain.forced().is_cancelled(), "what served the work ends with it");
}

#[tokio::test(start_paused = true)]
async fn work_that_never_ends_is_cut_off_named_and_not_waited_for() {
    let drain = drain();
    let _stuck = drain.work("request").begin();
    let _also = drain.work("request").begin();
    let _consumer = drain.work("delivery").begin();
    let end = finished(&drain);
    drain.trigger(Trigger::Requested);
    drain.forced().cancelled().await;
    let report = end.await.unwrap();
    assert_eq!(report.took, DrainConfig::default().total());
    assert!(report.forced);
    assert_eq!(report.left, [("delivery", 1), ("request", 2)].into());
}

#[tokio::test(start_paused = true)]
async fn work_that_lets_go_when_it_is_cut_off_ends_the_drain() {
    let drain = drain();
    let guard = drain.work("request").begin();
    let end = finished(&drain);
    let work = tokio::spawn({
        let forced = drain.forced();
        async move {
            forced.cancelled().await;
            drop(guard);
        }
    });
    drain.trigger(Trigger::Terminate);
    let report = end.await.unwrap();
    assert_eq!((report.took, report.forced), (Duration::from_secs(40), true));
    assert!(report.left.is_empty());
    work.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_means_now() {
    let drain = drain();
    let guard = drain.work("request").begin();
    let end = finished(&drain);
    drain.trigger(Trigger::Terminate);
    sleep(Duration::from_secs(1)).await;
    drain.trigger(Trigger::Terminate);
    assert!(drain.closing().is_cancelled() && drain.forced().is_cancelled());
    drop(guard);
    let report = end.await.unwrap();
    assert_eq!((report.took, report.forced), (Duration::from_secs(1), true));
}

#[tokio::test(start_paused = true)]
async fn a_third_signal_waits_for_nothing() {
    let drain = drain();
    let _stuck = drain.work("request").begin();
    let end = finished(&drain);
    (0..3).for_each(|_| drain.trigger(Trigger::Interrupt));
    let report = end.await.unwrap();
    assert_eq!((report.took, report.left), (Duration::ZERO, [("request", 1)].into()));
}

#[tokio::test(start_paused = true)]
async fn ctrl_c_at_a_terminal_ends_at_once_when_nothing_runs() {
    let drain = drain();
    drain.trigger(Trigger::Interrupt);
    assert_eq!(drain.finished().await.took, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_was_dropped_is_taken_up_by_the_next() {
    let drain = drain();
    let end = finished(&drain);
    yield_now().await;
    end.abort();
    assert!(end.await.unwrap_err().is_cancelled());
    drain.trigger(Trigger::Terminate);
    advance(Duration::from_secs(10)).await;
    assert!(!drain.finished().await.forced);
    assert_eq!(drain.finished().await.trigger, Trigger::Terminate, "and who comes late learns it");
}

#[test]
fn settings_out_of_their_range_are_all_named() {
    let options = DrainOptions {
        window: Duration::from_secs(301),
        grace: Duration::from_secs(3_601),
        force: Duration::ZERO,
        ..Default::default()
    };
    let invalid = DrainConfig::try_from(options).unwrap_err().to_string();
    for key in ["window", "grace", "force"] {
        assert!(invalid.contains(key), "{invalid}");
    }
    assert!(!invalid.contains("interrupt-window"), "{invalid}");
}

#[test]
fn settings_are_read_as_they_are_written() {
    let config: DrainConfig =
        serde_json::from_str(r#"{ "window": "15s", "grace": "1m" }"#).unwrap();
    assert_eq!(config.window(Trigger::Terminate), Duration::from_secs(15));
    assert_eq!(config.total(), Duration::from_secs(15 + 60 + 2));
    let unknown = serde_json::from_str::<DrainConfig>(r#"{ "windwo": "15s" }"#).unwrap_err();
    assert!(unknown.to_string().contains("windwo"), "{unknown}");
}
