//! `carrick tail`: a topic as it grows.

use std::{io::Write, time::Duration};

use carrick_core::{backoff::Backoff, config::duration, event::Event};
use clap::Args;
use http::{Method, StatusCode};

use super::{Hub, Refused, name};
use crate::client::{Answer, Client};

/// How long one request waits for events.
const WAIT: Duration = Duration::from_secs(25);

/// Between tries while the hub does not answer: full jitter, 1 s doubling to 30 s.
const RECONNECT: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(30) };

/// Follows a topic; goes on by itself when the hub was away.
#[derive(Debug, Args)]
pub(super) struct Tail {
    /// The topic.
    #[arg(value_parser = name)]
    topic: String,
    /// Where to start: earliest, latest, or a position.
    #[arg(long, default_value = "latest")]
    after: String,
    /// Stops after so many events.
    #[arg(long)]
    count: Option<u64>,
    /// Stops at the end of the topic instead of waiting for more.
    #[arg(long)]
    no_follow: bool,
    #[command(flatten)]
    hub: Hub,
}

#[derive(serde::Deserialize)]
struct Page<'a> {
    #[serde(borrow)]
    events: Vec<&'a serde_json::value::RawValue>,
}

impl Tail {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let mut after = self.after.clone();
        let mut left = self.count.unwrap_or(u64::MAX);
        let mut failures = 0;
        while left > 0 {
            let answer = match self.ask(&client, &after, left).await {
                Ok(answer) if answer.status.is_server_error() => Err(answer.retry_after()),
                Ok(answer) => Ok(answer),
                // The first look tells a wrong URL; later ones are a hub that comes back.
                Err(error) if failures == 0 && after == self.after => return Err(error.into()),
                Err(_) => Err(None),
            };
            let answer = match answer {
                Ok(answer) => answer,
                Err(floor) => {
                    let pause = RECONNECT.delay(failures, &mut rand::rng());
                    failures += 1;
                    tokio::time::sleep(pause.max(floor.unwrap_or_default())).await;
                    continue;
                }
            };
            failures = 0;
            match answer.status {
                StatusCode::OK => left = left.saturating_sub(self.print(&answer)?),
                StatusCode::NO_CONTENT if self.no_follow => return Ok(()),
                StatusCode::NO_CONTENT => {}
                StatusCode::GONE => {
                    let problem = answer.problem();
                    eprintln!("carrick: {problem}");
                    match problem.extensions.get("position").and_then(|value| value.as_str()) {
                        Some(position) => after = position.to_owned(),
                        None => return Err(Refused(answer).into()),
                    }
                    continue;
                }
                _ => return Err(Refused(answer).into()),
            }
            if let Some(position) =
                answer.headers.get("carrick-position").and_then(|value| value.to_str().ok())
            {
                after = position.to_owned();
            }
        }
        Ok(())
    }

    async fn ask(
        &self,
        client: &Client,
        after: &str,
        left: u64,
    ) -> Result<Answer, crate::client::Unreachable> {
        let wait = if self.no_follow { Duration::ZERO } else { WAIT };
        let path = format!(
            "/v1/topics/{}/events?after={after}&limit={}&wait={}",
            self.topic,
            left.min(1000),
            duration::format(wait)
        );
        client.call(Method::GET, &path, "application/json", "", wait + super::PATIENCE).await
    }

    fn print(&self, answer: &Answer) -> anyhow::Result<u64> {
        let page: Page<'_> = serde_json::from_slice(&answer.body)?;
        let mut out = std::io::stdout().lock();
        for raw in &page.events {
            if self.hub.json {
                writeln!(out, "{}", raw.get().replace('\n', " "))?;
                continue;
            }
            let event = Event::parse(raw.get().to_owned())?;
            let time = event.time().map(|time| time.to_string()).unwrap_or_default();
            let key = event.partition_key().unwrap_or_default();
            write!(out, "{time:<30} {} {key} {} ", event.ty(), event.id())?;
            match event.data() {
                Some(data) => writeln!(out, "{}", String::from_utf8_lossy(&data.bytes))?,
                None => writeln!(out)?,
            }
        }
        Ok(page.events.len() as u64)
    }
}
