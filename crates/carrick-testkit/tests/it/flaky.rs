use std::time::Duration;

use carrick_testkit::flaky::{Flaky, Injected, Step};
use tokio::time::{Instant, timeout};

async fn outcomes(flaky: &Flaky, calls: usize) -> Vec<bool> {
    let mut outcomes = Vec::new();
    for _ in 0..calls {
        outcomes.push(flaky.call(async || ()).await.is_ok());
    }
    outcomes
}

#[tokio::test]
async fn a_stub_follows_its_script_and_then_does_the_rest() {
    let flaky = Flaky::script([Step::Pass, Step::Fail, Step::LoseAnswer], Step::Pass);
    assert_eq!(outcomes(&flaky, 4).await, [true, false, false, true]);
    assert_eq!(flaky.calls(), 4);
    assert_eq!(flaky.effects(), 3, "a lost answer has its effect");
    flaky.set(Step::Fail);
    assert_eq!(flaky.call(async || ()).await, Err(Injected { call: 5 }));
}

#[tokio::test]
async fn always_never_and_the_first_few() {
    assert_eq!(outcomes(&Flaky::failing(), 3).await, [false; 3]);
    assert_eq!(outcomes(&Flaky::passing(), 3).await, [true; 3]);
    assert_eq!(outcomes(&Flaky::failing_first(2), 4).await, [false, false, true, true]);
}

#[tokio::test(start_paused = true)]
async fn a_slow_stub_takes_its_time_and_counts_who_is_inside() {
    let flaky = Flaky::passing().with_delay(Duration::from_secs(3));
    let start = Instant::now();
    let (a, b) = tokio::join!(flaky.call(async || 1), flaky.call(async || 2));
    assert_eq!((a, b), (Ok(1), Ok(2)));
    assert_eq!(start.elapsed(), Duration::from_secs(3));
    assert_eq!(flaky.most_at_once(), 2);
    flaky.call(async || ()).await.unwrap();
    assert_eq!(flaky.most_at_once(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_stub_hangs_and_lets_go_when_its_caller_leaves() {
    let flaky = Flaky::script([Step::Hang], Step::Pass);
    assert!(timeout(Duration::from_secs(60), flaky.call(async || ())).await.is_err());
    flaky.call(async || ()).await.unwrap();
    assert_eq!((flaky.calls(), flaky.effects(), flaky.most_at_once()), (2, 1, 1));
}
