//! Real signals to this very process, which would die of them if they were not taken over.
#![cfg(unix)]

use std::{process::Command, time::Duration};

use carrick_ops::drain::{Drain, DrainConfig, Phase, Trigger};
use tokio::time::timeout;

fn signal(name: &str) {
    let pid = std::process::id().to_string();
    assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
}

#[tokio::test]
async fn sigterm_begins_the_drain_and_the_second_one_ends_it() {
    let drain = Drain::new(DrainConfig::default());
    let _stuck = drain.work("request").begin();
    // Taken over by the call: the signal comes before anybody waits.
    let run = drain.run().unwrap();
    signal("TERM");
    let end = tokio::spawn(run);
    timeout(Duration::from_secs(20), drain.announced().cancelled()).await.unwrap();
    assert_eq!(drain.phase(), Phase::Announcing);
    signal("INT");
    timeout(Duration::from_secs(20), drain.forced().cancelled()).await.unwrap();
    let report = timeout(Duration::from_secs(20), end).await.unwrap().unwrap();
    assert_eq!((report.trigger, report.forced), (Trigger::Terminate, true));
    assert_eq!(report.left, [("request", 1)].into());
}
