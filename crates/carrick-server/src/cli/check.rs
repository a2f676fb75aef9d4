//! `carrick check`: a configuration, and its arithmetic.

use carrick_core::config::duration::format;
use carrick_ops::drain::Trigger;
use clap::Args;
use serde_json::json;

use super::up::Settings;

/// Checks a configuration, and shows its arithmetic; fails if something does not fit.
#[derive(Debug, Args)]
pub(super) struct Check {
    #[command(flatten)]
    settings: Settings,
    /// Output for machines.
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let config = self.settings.load()?;
        let drain = &config.drain;
        let total = drain.window(Trigger::Terminate) + drain.grace() + drain.force();
        let mut sums = [
            (
                "drain: window + grace + force",
                format!(
                    "{} + {} + {} = {}; give the process at least that before it is killed",
                    format(drain.window(Trigger::Terminate)),
                    format(drain.grace()),
                    format(drain.force()),
                    format(total)
                ),
            ),
            (
                "inbox: keep ids for longer than an event can come again",
                format!(
                    "retention.age {} + retention.dead-age {} = {}; the inbox's default is 40d",
                    format(config.retention.age),
                    format(config.retention.dead_age),
                    format(config.retention.age + config.retention.dead_age)
                ),
            ),
            (
                "delivery: attempts before an event is a dead letter",
                config.delivery.max_attempts.to_string(),
            ),
            ("listen", config.listen.to_string()),
            ("tokens", config.tokens.len().to_string()),
        ]
        .map(|(name, text)| (name.to_owned(), text, true))
        .to_vec();
        for (name, dependency) in &config.dependencies {
            for sum in dependency.sums() {
                sums.push((format!("dependency.{name}: {}", sum.name), sum.text, sum.fits));
            }
        }
        let ok = sums.iter().all(|(_, _, fits)| *fits);
        if self.json {
            let faults: Vec<_> = sums
                .iter()
                .filter(|(_, _, fits)| !fits)
                .map(|(name, text, _)| format!("{name}: {text}"))
                .collect();
            let sums: serde_json::Map<_, _> =
                sums.into_iter().map(|(name, text, _)| (name, json!(text))).collect();
            println!("{}", json!({ "ok": ok, "sums": sums, "faults": faults }));
        } else {
            for (name, text, fits) in sums {
                let mark = if fits { "" } else { "  does not fit" };
                println!("{name}\n    {text}{mark}");
            }
            println!("{}", if ok { "ok" } else { "settings do not fit each other: see above" });
        }
        if ok { Ok(()) } else { Err(DoesNotFit.into()) }
    }
}

/// Each setting is in its range, and together they do not work.
#[derive(Debug, thiserror::Error)]
#[error("settings do not fit each other")]
struct DoesNotFit;
