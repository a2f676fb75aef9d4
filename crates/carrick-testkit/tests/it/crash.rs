//! The explorer on a relay in miniature: rows to publish, a queue that deduplicates nothing, and a
//! ledger that may or may not guard its effects.

use std::{collections::BTreeSet, time::Duration};

use async_trait::async_trait;
use carrick_testkit::crash::{Explorer, Scenario, Steps};
use parking_lot::Mutex;

/// What survives: the rows still to publish, the queue, the inbox and the ledger.
#[derive(Default)]
struct World {
    unpublished: Mutex<Vec<u32>>,
    queue: Mutex<Vec<u32>>,
    inbox: Mutex<BTreeSet<u32>>,
    ledger: Mutex<Vec<u32>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    MarksBeforeItPublishes,
    AcknowledgesBeforeItApplies,
    AppliesWithoutInbox,
    WritesInboxAndEffectApart,
    NeverFinishes,
}

struct Path {
    mistake: Mistake,
}

#[async_trait]
impl Scenario for Path {
    type World = World;

    async fn world(&self) -> World {
        World { unpublished: Mutex::new(vec![1, 2]), ..World::default() }
    }

    async fn run(&self, world: &World, steps: &Steps) -> Result<(), String> {
        loop {
            let Some(row) = world.unpublished.lock().first().copied() else { break };
            if self.mistake == Mistake::MarksBeforeItPublishes {
                world.unpublished.lock().remove(0);
                steps.done(format!("mark {row}")).await;
                world.queue.lock().push(row);
                steps.done(format!("publish {row}")).await;
            } else {
                world.queue.lock().push(row);
                steps.done(format!("publish {row}")).await;
                world.unpublished.lock().remove(0);
                steps.done(format!("mark {row}")).await;
            }
        }
        loop {
            let Some(event) = world.queue.lock().first().copied() else { break };
            if self.mistake == Mistake::AcknowledgesBeforeItApplies {
                world.queue.lock().remove(0);
                steps.done(format!("acknowledge {event}")).await;
                self.apply(world, steps, event).await;
            } else {
                self.apply(world, steps, event).await;
                world.queue.lock().remove(0);
                steps.done(format!("acknowledge {event}")).await;
            }
        }
        if self.mistake == Mistake::NeverFinishes {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn check(&self, world: &World) -> Result<(), String> {
        let ledger = world.ledger.lock().clone();
        if ledger == [1, 2] { Ok(()) } else { Err(format!("the ledger is {ledger:?}")) }
    }
}

impl Path {
    async fn apply(&self, world: &World, steps: &Steps, event: u32) {
        let is_new = match self.mistake {
            Mistake::AppliesWithoutInbox => true,
            _ => world.inbox.lock().insert(event),
        };
        if self.mistake == Mistake::WritesInboxAndEffectApart {
            steps.done(format!("inbox {event}")).await;
        }
        if is_new {
            world.ledger.lock().push(event);
        }
        steps.done(format!("apply {event}")).await;
    }
}

#[tokio::test]
async fn the_right_order_of_steps_survives_a_crash_after_each() {
    let explored = Explorer::new().explore(&Path { mistake: Mistake::None }).await.unwrap();
    let steps = [
        "publish 1",
        "mark 1",
        "publish 2",
        "mark 2",
        "apply 1",
        "acknowledge 1",
        "apply 2",
        "acknowledge 2",
    ];
    assert_eq!(explored.steps, steps);
    assert_eq!(explored.runs, 1 + 8);
}

#[tokio::test]
async fn and_crashes_of_the_recovery_too() {
    let explorer = Explorer::new().with_crashes(2);
    let explored = explorer.explore(&Path { mistake: Mistake::None }).await.unwrap();
    assert!(explored.runs > 1 + 8 + 8, "{explored:?}");
}

#[track_caller]
fn check(failure: &str, mistake: Mistake) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let explorer = Explorer::new().with_patience(Duration::from_secs(60));
    let explored = runtime.unwrap().block_on(explorer.explore(&Path { mistake }));
    assert_eq!(explored.unwrap_err().to_string(), failure);
}

#[test]
fn each_wrong_order_of_steps_is_found_where_it_breaks() {
    check("crashed after step 1 (mark 1), the ledger is [2]", Mistake::MarksBeforeItPublishes);
    check(
        "crashed after step 5 (acknowledge 1), the ledger is [2]",
        Mistake::AcknowledgesBeforeItApplies,
    );
    check(
        "crashed after step 1 (publish 1), the ledger is [1, 1, 2]",
        Mistake::AppliesWithoutInbox,
    );
    check("crashed after step 5 (inbox 1), the ledger is [2]", Mistake::WritesInboxAndEffectApart);
    check("without any crash: not finished after 60s", Mistake::NeverFinishes);
}

/// Nothing to do, so nothing to crash.
struct Idle;

#[async_trait]
impl Scenario for Idle {
    type World = ();

    async fn world(&self) {}

    async fn run(&self, (): &(), _: &Steps) -> Result<(), String> {
        Ok(())
    }

    async fn check(&self, (): &()) -> Result<(), String> {
        Ok(())
    }
}

#[tokio::test]
async fn a_scenario_without_steps_does_not_pass_unseen() {
    let failure = Explorer::new().explore(&Idle).await.unwrap_err();
    assert!(failure.cause.contains("nothing was explored"), "{failure}");
}
