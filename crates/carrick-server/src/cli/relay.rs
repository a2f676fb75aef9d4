//! `carrick relay`: somebody's own outbox, to a hub.

use std::{io::IsTerminal, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use carrick_core::{
    clock::{Clock, SystemClock},
    config::duration,
};
use carrick_message::{
    inbox,
    outbox::{Outbox, OutboxError, Relay, RelayConfig, RelayOptions, Replay},
};
use carrick_ops::{
    drain::{Drain, DrainConfig, DrainOptions},
    health::{Health, HealthConfig},
    telemetry::{Telemetry, TelemetryOptions},
};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;
use tokio::task::JoinSet;

use super::{Usage, span};
use crate::{client::Client, config::LimitOptions, serve::Listener};

/// Carries the outbox of your own database to a hub. Run as many as you like: they share the work,
/// and take over from one that died.
#[derive(Debug, Args)]
pub(super) struct RelayArguments {
    /// The database with the table `carrick_outbox`: postgres://… or sqlite://file. Its tables are
    /// made if they are not there.
    #[arg(long, value_name = "URL")]
    database: String,
    /// The hub's URL.
    #[arg(long, value_name = "URL", env = "CARRICK_URL", default_value = "http://127.0.0.1:7070")]
    to: String,
    /// A bearer token of the hub.
    #[arg(long, env = "CARRICK_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// A PEM file with the certificates to trust, instead of the system's.
    #[arg(long, env = "CARRICK_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Makes the tables of outbox and inbox, and ends: a consumer's own database needs it too.
    #[arg(long)]
    migrate_only: bool,
    /// Ends once everything is published.
    #[arg(long, conflicts_with = "migrate_only")]
    once: bool,
    /// Publishes again what was published in a range of time, and ends:
    /// 2026-12-01T08:00:00Z..2026-12-01T09:00:00Z, or 1h..  for the last hour.
    #[arg(long, value_name = "FROM..TO", conflicts_with_all = ["migrate_only", "once"])]
    replay: Option<String>,
    /// Replays so many events a second.
    #[arg(long, default_value_t = 500, requires = "replay")]
    per_second: u32,
    /// Lists rows that cannot be published, and ends.
    #[arg(long, conflicts_with_all = ["migrate_only", "once", "replay"])]
    failures: bool,
    /// How long a bucket stays with a relay that died.
    #[arg(long, value_parser = span, default_value = "30s")]
    lease: Duration,
    /// Answers /livez, /readyz, /debug/deep and /metrics here; loopback only.
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<SocketAddr>,
    /// Output for machines.
    #[arg(long)]
    json: bool,
}

impl RelayArguments {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let config =
            RelayConfig::try_from(RelayOptions { lease: self.lease, ..RelayOptions::default() })?;
        if self.admin.is_some_and(|address| !address.ip().is_loopback()) {
            let wrong = anyhow::anyhow!("--admin must be a loopback address");
            return Err(Usage(wrong).into());
        }
        let client =
            Client::new(&self.to, self.token.as_deref(), self.ca.as_deref()).map_err(Usage)?;
        let telemetry = Telemetry::start(&TelemetryOptions::default())?;
        let outbox = Outbox::open(&self.database).await.map_err(|error| match error {
            error @ OutboxError::Invalid { .. } => anyhow::Error::new(Usage(error.into())),
            error => anyhow::Error::new(error).context("cannot open the outbox"),
        })?;
        let done = if self.migrate_only {
            inbox::make_tables(&self.database).await.context("cannot make the inbox")?;
            println!("{}", if self.json { r#"{"migrated":true}"# } else { "the tables are there" });
            Ok(())
        } else if let Some(range) = &self.replay {
            self.replay(&outbox, client, range).await
        } else if self.failures {
            self.failures(&outbox).await
        } else {
            self.carry(&outbox, client, config, &telemetry).await
        };
        outbox.close().await;
        telemetry.stop(Duration::from_secs(5)).await;
        done
    }

    async fn carry(
        &self,
        outbox: &Outbox,
        client: Client,
        config: RelayConfig,
        telemetry: &Telemetry,
    ) -> anyhow::Result<()> {
        let drain = Drain::new(DrainConfig::try_from(DrainOptions {
            window: Duration::ZERO,
            ..DrainOptions::default()
        })?);
        let ended = drain.run().context("cannot take over the signals")?;
        let health = Health::new(HealthConfig::default());
        health.follow(&drain);
        let mut tasks = JoinSet::new();
        if let Some(address) = self.admin {
            let listener = Listener::bind(address, None, &LimitOptions::default()).await?;
            let router = health.routes().merge(telemetry.metrics.routes());
            tasks.spawn(listener.serve(router, drain.clone()));
        }
        let (watched, forced) = (health.clone(), drain.forced());
        tasks.spawn(async move { watched.watch(forced).await });
        let (metrics, forced) = (telemetry.metrics.clone(), drain.forced());
        tasks.spawn(async move { metrics.upkeep(forced).await });

        let relay = Relay::spawn(outbox, Arc::new(client), config);
        tracing::info!(to = self.to, "relaying");
        let stop = async {
            if self.once {
                self.until_empty(&relay).await;
            } else {
                drain.announced().cancelled().await;
            }
        };
        tokio::pin!(ended);
        tokio::select! {
            () = stop => {}
            _ = &mut ended => {}
        }
        let published = relay.status().published;
        relay.stop().await;
        tasks.shutdown().await;
        let line = json!({ "published": published });
        println!("{}", if self.json { line.to_string() } else { format!("{published} published") });
        Ok(())
    }

    /// Waits until nothing is left to publish, showing how far it is.
    async fn until_empty(&self, relay: &Relay) {
        let bar = if std::io::stderr().is_terminal() && !self.json {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        let mut quiet = 0;
        let mut before = 0;
        while quiet < QUIET {
            // The relay tells its state, not its end: an outbox has none.
            tokio::time::sleep(LOOK).await;
            let status = relay.status();
            bar.set_message(format!("{} published", status.published));
            bar.tick();
            let idle = status.in_memory == 0
                && status.oldest_unpublished.is_none()
                && status.buckets > 0
                && status.published == before;
            quiet = if idle { quiet + 1 } else { 0 };
            before = status.published;
        }
        bar.finish_and_clear();
    }

    async fn replay(&self, outbox: &Outbox, client: Client, range: &str) -> anyhow::Result<()> {
        let (from, to) = self.range(range).map_err(Usage)?;
        let replay = Replay { from, to, topic: None, per_second: self.per_second.max(1), after: 0 };
        let done = outbox.replay(Arc::new(client), &replay).await?;
        let line = json!({
            "published": done.published, "remembered": done.remembered,
            "unreadable": done.unreadable, "last": done.last,
        });
        if self.json {
            println!("{line}");
        } else {
            println!(
                "{} published again, {} the hub still remembered and dropped, {} unreadable",
                done.published, done.remembered, done.unreadable
            );
        }
        Ok(())
    }

    fn range(&self, text: &str) -> anyhow::Result<(jiff::Timestamp, jiff::Timestamp)> {
        let now = SystemClock.wall();
        let moment = |text: &str, empty: jiff::Timestamp| -> anyhow::Result<jiff::Timestamp> {
            if text.is_empty() {
                return Ok(empty);
            }
            if let Ok(ago) = duration::parse(text) {
                return Ok(now.checked_sub(ago)?);
            }
            text.parse().with_context(|| format!("{text:?} is neither a time nor a duration"))
        };
        let Some((from, to)) = text.split_once("..") else {
            bail!("--replay takes FROM..TO, not {text:?}");
        };
        let (from, to) = (moment(from.trim(), jiff::Timestamp::MIN)?, moment(to.trim(), now)?);
        if from >= to {
            bail!("--replay must go forward, not from {from} to {to}");
        }
        Ok((from, to))
    }

    async fn failures(&self, outbox: &Outbox) -> anyhow::Result<()> {
        let mut after = 0;
        loop {
            let page = outbox.failures(after, 1000).await?;
            for row in &page {
                if self.json {
                    let line = json!({
                        "seq": row.seq, "topic": row.topic, "key": row.key, "id": row.id,
                        "attempts": row.attempts, "error": row.error,
                        "next_attempt_at": row.next_attempt_at, "created_at": row.created_at,
                    });
                    println!("{line}");
                } else {
                    let key = row.key.as_deref().unwrap_or("-");
                    println!(
                        "{} {} {key} {} {} attempts: {}",
                        row.seq, row.topic, row.id, row.attempts, row.error
                    );
                }
            }
            match page.last() {
                Some(last) if page.len() == 1000 => after = last.seq,
                _ => return Ok(()),
            }
        }
    }
}

/// How often the relay is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// So many quiet looks are the end: longer than the relay's own look for its oldest row.
const QUIET: u32 = 30;
