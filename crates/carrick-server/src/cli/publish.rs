//! `carrick publish`.

use std::io::IsTerminal;

use anyhow::{Context, bail};
use bytes::Bytes;
use carrick_core::{
    clock::{Clock, SystemClock},
    event::{BATCH, Event},
};
use clap::Args;
use http::Method;
use indicatif::ProgressBar;
use tokio::io::{AsyncBufReadExt, BufReader};

use super::{Hub, PATIENCE, Usage, accepted, name};
use crate::client::Client;

/// Events in one request.
const TOGETHER: usize = 100;

/// Publishes one event made of flags; or, with `--stdin`, one event a line: CloudEvents in JSON.
#[derive(Debug, Args)]
pub(super) struct Publish {
    /// The topic.
    #[arg(value_parser = name)]
    topic: String,
    /// What happened, such as order.placed.v1.
    #[arg(long, required_unless_present = "stdin")]
    r#type: Option<String>,
    /// Where it happened.
    #[arg(long, default_value = "/carrick/cli")]
    source: String,
    /// Its id; a random one if not given.
    #[arg(long)]
    id: Option<String>,
    /// Its ordering key.
    #[arg(long)]
    key: Option<String>,
    /// Its data: JSON, or else text.
    #[arg(long)]
    data: Option<String>,
    /// Reads events from standard input, one a line.
    #[arg(long, conflicts_with_all = ["type", "id", "key", "data"])]
    stdin: bool,
    #[command(flatten)]
    hub: Hub,
}

#[derive(Default)]
struct Told {
    accepted: u64,
    duplicates: u64,
    position: String,
}

impl Publish {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let told = if self.stdin {
            self.lines(&client).await?
        } else {
            let event = self.event().map_err(Usage)?;
            for lint in event.lints() {
                eprintln!("note: {lint}");
            }
            let mut told = Told::default();
            send(&client, &self.topic, &[event], &mut told).await?;
            told
        };
        let Told { accepted, duplicates, position } = told;
        if self.hub.json {
            let told = serde_json::json!({
                "accepted": accepted, "duplicates": duplicates, "position": position,
            });
            println!("{told}");
        } else {
            println!("{accepted} published, {duplicates} were there already");
        }
        Ok(())
    }

    fn event(&self) -> anyhow::Result<Event> {
        let ty = self.r#type.clone().context("--type is needed")?;
        let mut event = Event::builder(ty).source(&self.source).time(SystemClock.wall());
        if let Some(id) = &self.id {
            event = event.id(id);
        }
        if let Some(key) = &self.key {
            event = event.extension("partitionkey", key.as_str());
        }
        if let Some(data) = &self.data {
            let is_json = serde_json::from_str::<serde::de::IgnoredAny>(data).is_ok();
            let content_type = if is_json { "application/json" } else { "text/plain" };
            event = event.data(data.as_bytes(), content_type);
        }
        Ok(event.build()?)
    }

    async fn lines(&self, client: &Client) -> anyhow::Result<Told> {
        let bar = if std::io::stderr().is_terminal() && !self.hub.json {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        let (mut batch, mut number) = (Vec::with_capacity(TOGETHER), 0_u64);
        let mut told = Told::default();
        loop {
            let line = lines.next_line().await.context("cannot read standard input")?;
            let ended = line.is_none();
            if let Some(line) = line {
                number += 1;
                if line.trim().is_empty() {
                    continue;
                }
                let event = Event::parse(line).with_context(|| {
                    format!(
                        "line {number} is no event ({} were published before it)",
                        told.accepted
                    )
                })?;
                batch.push(event);
            }
            if batch.len() == TOGETHER || (ended && !batch.is_empty()) {
                send(client, &self.topic, &batch, &mut told).await?;
                batch.clear();
                bar.set_message(format!("{} published", told.accepted));
                bar.inc(1);
            }
            if ended {
                bar.finish_and_clear();
                return Ok(told);
            }
        }
    }
}

async fn send(
    client: &Client,
    topic: &str,
    events: &[Event],
    told: &mut Told,
) -> anyhow::Result<()> {
    let documents: Vec<&[u8]> = events.iter().map(|event| &event.as_json()[..]).collect();
    let mut body = vec![b'['];
    body.extend_from_slice(&documents.join(&b','));
    body.push(b']');
    let path = format!("/v1/topics/{topic}/events");
    let answer = client.call(Method::POST, &path, BATCH, Bytes::from(body), PATIENCE).await?;
    let answer = accepted(answer)?;
    #[derive(serde::Deserialize)]
    struct Body {
        accepted: u64,
        duplicates: u64,
        position: String,
    }
    let Ok(body) = serde_json::from_slice::<Body>(&answer.body) else {
        bail!("the hub's answer cannot be read; is {topic} served by a hub?");
    };
    told.accepted += body.accepted;
    told.duplicates += body.duplicates;
    told.position = body.position;
    Ok(())
}
