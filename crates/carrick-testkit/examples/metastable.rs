//! Draws how a fleet gets over a slowdown, with and without policies, and tells it in numbers.
//!
//! `cargo run --release -p carrick-testkit --example metastable [seed]` writes
//! `docs/pictures/metastable.svg` anew; the same seed draws the same picture.

use std::{error::Error, fs, path::Path};

use carrick_testkit::fleet::{
    Report,
    metastable::{BEGINS, ENDS, LASTS, Stage},
    picture::{Curve, Picture},
};
use tokio::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let seed = std::env::args().nth(1).map_or(Ok(1), |seed| seed.parse())?;
    let began = Instant::now();
    let reports: Vec<_> = Stage::ALL.iter().map(|stage| (*stage, stage.run(seed))).collect();
    let (took, events) = (began.elapsed(), reports.iter().map(|(_, report)| report.events));
    print(&reports);
    let curve = |stage, name| {
        let report = reports.iter().find(|(other, _)| *other == stage);
        let goodput = |second| report.map_or(0.0, |(_, report)| report.goodput(second..second + 1));
        Curve { name, values: (0..LASTS).map(goodput).collect(), ours: stage == Stage::Carrick }
    };
    let picture = Picture {
        title: "A slowdown of 30 s, and what comes after it",
        shaded: BEGINS..ENDS,
        note: "servers take 5 times as long",
        curves: vec![
            curve(Stage::Naive, "naive retries"),
            curve(Stage::Carrick, "deadline, budget, breaker, queue"),
        ],
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures/metastable.svg");
    fs::create_dir_all(path.parent().ok_or("the path has a folder")?)?;
    fs::write(&path, picture.svg())?;
    let events = events.sum::<u64>();
    eprintln!("{events} events in {took:.1?}, {:.0} a second", events as f64 / took.as_secs_f64());
    Ok(())
}

fn print(reports: &[(Stage, Report)]) {
    println!(
        "| clients and servers | answered before | while slow | last minute | back after \
         | attempts a call, while slow | last minute | work in vain, last minute |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (stage, report) in reports {
        let last = LASTS - 60..LASTS;
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        println!(
            "| {} | {} | {} | {} | {} | {:.2} | {:.2} | {} |",
            stage.name(),
            percent(report.goodput(5..BEGINS)),
            percent(report.goodput(BEGINS..ENDS)),
            percent(report.goodput(last.clone())),
            report
                .recovers(ENDS, 0.95)
                .map_or_else(|| "never".to_owned(), |at| format!("{} s", at - ENDS)),
            report.amplification(BEGINS..ENDS),
            report.amplification(last.clone()),
            percent(report.waste(last)),
        );
    }
}
