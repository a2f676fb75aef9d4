//! `carrick dead`: dead letters and blocked keys.

use std::{collections::HashMap, io::IsTerminal, time::Duration};

use anyhow::Context;
use clap::{Args, Subcommand};
use http::{Method, header::LINK};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json, value::RawValue};

use super::{Hub, PATIENCE, Usage, accepted, name};
use crate::client::Client;

/// Looks at what is stuck, and un-sticks it.
#[derive(Debug, Args)]
pub(super) struct Dead {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Lists dead letters.
    Ls(List),
    /// Lists keys that cannot move on, because their first event failed or is being worked on.
    Blocked(List),
    /// Delivers dead letters again, with their attempts reset.
    Redrive(Redrive),
    /// Puts the first events of blocked keys aside, so that the keys move on.
    Skip(Skip),
    /// Forgets dead letters for good.
    Purge(Purge),
}

#[derive(Debug, Args)]
struct Place {
    /// The topic.
    #[arg(value_parser = name)]
    topic: String,
    /// The group.
    #[arg(value_parser = name)]
    group: String,
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    place: Place,
    /// Lists so many at most.
    #[arg(long, default_value_t = 100)]
    limit: usize,
    #[command(flatten)]
    hub: Hub,
}

/// Which ones; one of these is needed.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Selection {
    /// By number, several with commas.
    #[arg(long, value_delimiter = ',')]
    seq: Vec<u64>,
    /// By ordering key.
    #[arg(long)]
    key: Option<String>,
    /// By a part of the cause.
    #[arg(long)]
    cause: Option<String>,
    /// All of them.
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Args)]
struct Redrive {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    selection: Selection,
    /// So many a second.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    per_second: u32,
    #[command(flatten)]
    hub: Hub,
}

#[derive(Debug, Args)]
struct Skip {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    selection: Selection,
    /// Why; whoever finds the dead letter reads it.
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    hub: Hub,
}

#[derive(Debug, Args)]
struct Purge {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    hub: Hub,
}

impl Dead {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Ls(list) => list.run("dead", LETTERS).await,
            Action::Blocked(list) => list.run("blocked", KEYS).await,
            Action::Redrive(redrive) => redrive.run().await,
            Action::Skip(skip) => skip.run().await,
            Action::Purge(purge) => purge.run().await,
        }
    }
}

/// Columns of a list: heading, and member.
type Columns = &'static [(&'static str, &'static str)];

const LETTERS: Columns = &[
    ("SEQ", "seq"),
    ("ID", "id"),
    ("KEY", "key"),
    ("ATTEMPTS", "attempts"),
    ("DEAD SINCE", "dead_at"),
    ("CAUSE", "cause"),
];

const KEYS: Columns = &[
    ("KEY", "key"),
    ("HEAD", "head"),
    ("ATTEMPTS", "attempts"),
    ("READY AT", "ready_at"),
    ("BEHIND", "behind"),
];

impl Place {
    fn path(&self, rest: &str) -> String {
        format!("/v1/topics/{}/groups/{}/{rest}", self.topic, self.group)
    }
}

/// What is read of a group.
#[derive(serde::Deserialize)]
struct Group {
    group: String,
    dead: u64,
}

impl Place {
    /// How many dead letters there are.
    async fn dead(&self, client: &Client) -> anyhow::Result<u64> {
        #[derive(serde::Deserialize)]
        struct Told {
            groups: Vec<Group>,
        }
        let path = format!("/v1/topics/{}/groups", self.topic);
        let answer = client.call(Method::GET, &path, "application/json", "", PATIENCE).await?;
        let told: Told = serde_json::from_slice(&accepted(answer)?.body)?;
        let group = told.groups.into_iter().find(|group| group.group == self.group);
        Ok(group.map_or(0, |group| group.dead))
    }
}

impl List {
    async fn run(self, what: &str, columns: Columns) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let mut next =
            Some(format!("{}?limit={}", self.place.path(what), self.limit.clamp(1, 100)));
        // As they came: an event's numbers and members are not ours to change.
        let mut rows: Vec<Box<RawValue>> = Vec::new();
        while let Some(path) = next.take().filter(|_| rows.len() < self.limit) {
            let answer = client.call(Method::GET, &path, "application/json", "", PATIENCE).await?;
            let answer = accepted(answer)?;
            let mut page: HashMap<String, Vec<Box<RawValue>>> =
                serde_json::from_slice(&answer.body)?;
            rows.extend(page.remove(what).unwrap_or_default());
            let link = answer.headers.get(LINK).and_then(|link| link.to_str().ok());
            let target = link.and_then(|link| link.strip_prefix('<')?.split_once('>'));
            next = target.map(|(path, _)| path.to_owned());
        }
        rows.truncate(self.limit);
        if self.hub.json {
            for row in rows {
                // A line each, whatever line breaks the event's author put between its members.
                println!("{}", row.get().replace(['\n', '\r'], " "));
            }
        } else {
            let rows: Result<Vec<Value>, _> =
                rows.iter().map(|row| serde_json::from_str(row.get())).collect();
            table(&rows?, columns);
        }
        Ok(())
    }
}

fn table(rows: &[Value], columns: Columns) {
    let cell = |row: &Value, member: &str| match &row[member] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.chars().take(80).collect(),
        other => other.to_string(),
    };
    let widths: Vec<usize> = columns
        .iter()
        .map(|(heading, member)| {
            rows.iter()
                .map(|row| cell(row, member).chars().count())
                .max()
                .unwrap_or(0)
                .max(heading.len())
        })
        .collect();
    let line = |cells: Vec<String>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        println!("{}", padded.collect::<Vec<_>>().join("  ").trim_end());
    };
    line(columns.iter().map(|(heading, _)| (*heading).to_owned()).collect());
    for row in rows {
        line(columns.iter().map(|(_, member)| cell(row, member)).collect());
    }
    if rows.is_empty() {
        println!("(none)");
    }
}

impl Selection {
    fn to_json(&self) -> Value {
        if !self.seq.is_empty() {
            json!({ "seqs": self.seq })
        } else if let Some(key) = &self.key {
            json!({ "key": key })
        } else if let Some(cause) = &self.cause {
            json!({ "cause": cause })
        } else {
            json!({ "all": true })
        }
    }
}

async fn act(
    client: &Client,
    path: &str,
    mut body: Value,
    more: Value,
    counted: &str,
) -> anyhow::Result<u64> {
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    let answer = accepted(client.post_json(path, &body, PATIENCE).await?)?;
    let told: Value = serde_json::from_slice(&answer.body)?;
    told[counted].as_u64().with_context(|| format!("the hub's answer does not count {counted}"))
}

fn tell(hub: &Hub, counted: &str, count: u64) {
    if hub.json {
        println!("{}", json!({ counted: count }));
    } else {
        println!("{count} {counted}");
    }
}

impl Redrive {
    /// In steps of a second, so that there is something to see and Ctrl-C stops it soon.
    async fn run(self) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let path = self.place.path("dead/redrive");
        let bar = if std::io::stderr().is_terminal() && !self.hub.json {
            let style = ProgressStyle::with_template("{spinner} {pos} redriven ({per_sec})");
            ProgressBar::new_spinner().with_style(style.map_err(|error| Usage(error.into()))?)
        } else {
            ProgressBar::hidden()
        };
        let step = self.per_second.min(1000);
        // What dies again meanwhile must not be driven in circles.
        let most = self.place.dead(&client).await?;
        let mut redriven = 0;
        loop {
            let began = tokio::time::Instant::now();
            let more = json!({ "limit": step, "per_second": self.per_second });
            let count = act(&client, &path, self.selection.to_json(), more, "redriven").await?;
            redriven += count;
            bar.set_position(redriven);
            if count < u64::from(step) || redriven >= most {
                break;
            }
            let second =
                Duration::from_secs(1).mul_f64(f64::from(step) / f64::from(self.per_second));
            tokio::time::sleep_until(began + second).await;
        }
        bar.finish_and_clear();
        tell(&self.hub, "redriven", redriven);
        Ok(())
    }
}

impl Skip {
    async fn run(self) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let more = json!({ "reason": self.reason });
        let path = self.place.path("dead/skip");
        let count = act(&client, &path, self.selection.to_json(), more, "skipped").await?;
        tell(&self.hub, "skipped", count);
        Ok(())
    }
}

impl Purge {
    async fn run(self) -> anyhow::Result<()> {
        let client = self.hub.client()?;
        let path = self.place.path("dead/purge");
        let mut purged = 0;
        loop {
            let count = act(&client, &path, self.selection.to_json(), json!({}), "purged").await?;
            purged += count;
            if count == 0 {
                break;
            }
        }
        tell(&self.hub, "purged", purged);
        Ok(())
    }
}
