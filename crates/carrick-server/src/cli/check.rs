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
        let sums = [
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
        ];
        if self.json {
            let sums: serde_json::Map<_, _> =
                sums.into_iter().map(|(name, sum)| (name.to_owned(), json!(sum))).collect();
            println!("{}", json!({ "ok": true, "sums": sums }));
        } else {
            for (name, sum) in sums {
                println!("{name}\n    {sum}");
            }
            println!("ok");
        }
        Ok(())
    }
}
