//! Dead letters and blocked keys: what an operator looks at, and does about it.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, Uri},
};
use carrick_core::{name::Topic, problem::Problem};
use carrick_message::dead_letter::{DeadLetters, Letter, Redrive, Select};
use carrick_store::log::{MAX_BATCH, Seq};
use serde_json::{json as value, value::RawValue};

use super::{
    Api, Named,
    answer::{Answer, json},
    fields::Fields,
    topics::link,
};
use crate::config::Scope;

/// Dead letters that one request redrives at most: at the usual pace that takes ten seconds.
const REDRIVEN: usize = 1000;

/// Letters of one page: each has its event with it.
const PAGE: usize = 100;

#[derive(serde::Serialize)]
struct Row<'a> {
    seq: Seq,
    id: Option<String>,
    key: Option<&'a str>,
    cause: &'a str,
    attempts: u32,
    traceparent: Option<String>,
    published_at: jiff::Timestamp,
    first_delivered_at: jiff::Timestamp,
    dead_at: jiff::Timestamp,
    event: Option<&'a RawValue>,
}

impl<'a> Row<'a> {
    fn new(letter: &'a Letter) -> Self {
        let event = letter.event.as_ref();
        Self {
            seq: letter.seq,
            id: event.map(|event| event.id().into_owned()),
            key: letter.key.as_deref(),
            cause: &letter.cause,
            attempts: letter.attempts,
            traceparent: letter.traceparent(),
            published_at: letter.published_at,
            first_delivered_at: letter.first_delivered_at,
            dead_at: letter.buried_at,
            event: event.and_then(|event| serde_json::from_slice(event.as_json()).ok()),
        }
    }
}

pub(super) async fn list(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    headers: HeaderMap,
    uri: Uri,
) -> Answer {
    let (topic, group) = api.group(&headers, &topic, &group, Scope::Admin)?;
    let page = Page::new(&api, &topic, group.as_str(), "dead", &uri)?;
    let letters = api.0.hub.broker.letters(&topic, &group, page.after, page.limit).await?;
    let rows: Vec<_> = letters.iter().map(Row::new).collect();
    let body = serde_json::to_vec(&Rows { dead: rows }).expect("rows are JSON");
    let mut response = json(StatusCode::OK, body);
    if let Some(last) = letters.last().filter(|_| letters.len() == page.limit) {
        link(&mut response, &page.next(&api, last.seq));
    }
    Ok(response)
}

#[derive(serde::Serialize)]
struct Rows<'a> {
    dead: Vec<Row<'a>>,
}

pub(super) async fn blocked(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    headers: HeaderMap,
    uri: Uri,
) -> Answer {
    let (topic, group) = api.group(&headers, &topic, &group, Scope::Admin)?;
    let page = Page::new(&api, &topic, group.as_str(), "blocked", &uri)?;
    let keys = api.0.hub.broker.blocked_keys(&topic, &group, page.after, page.limit).await?;
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            value!({
                "key": key.key, "head": key.head, "attempts": key.attempts,
                "ready_at": key.ready_at, "behind": key.behind,
            })
        })
        .collect();
    let mut response = json(StatusCode::OK, value!({ "blocked": rows }).to_string());
    if let Some(last) = keys.last().filter(|_| keys.len() == page.limit) {
        link(&mut response, &page.next(&api, last.head));
    }
    Ok(response)
}

/// Where a page starts and how long it is; the cursor is bound to what is listed.
struct Page {
    path: String,
    scope: String,
    after: Seq,
    limit: usize,
}

impl Page {
    fn new(api: &Api, topic: &Topic, group: &str, what: &str, uri: &Uri) -> Answer<Self> {
        let query = Fields::from_query(uri.query());
        let limit = query.count("limit", PAGE, 1..=PAGE)?;
        let scope = format!("{topic}/{group}/{what}");
        let after = match query.text("cursor")? {
            None => 0,
            Some(cursor) => {
                let opened = api.0.hub.seal.open("cursor", &scope, cursor).ok();
                let number =
                    opened.and_then(|bytes| Some(Seq::from_be_bytes(bytes.try_into().ok()?)));
                let wrong =
                    || Problem::invalid("cursor", "one that a page of this list gave", cursor);
                number.ok_or_else(wrong)?
            }
        };
        Ok(Self { path: uri.path().to_owned(), scope, after, limit })
    }

    fn next(&self, api: &Api, last: Seq) -> String {
        let cursor = api.0.hub.seal.seal("cursor", &self.scope, &last.to_be_bytes());
        format!("{}?limit={}&cursor={cursor}", self.path, self.limit)
    }
}

/// Which ones: by number, key or cause, or explicitly all.
fn select(fields: &Fields) -> Answer<Select> {
    let mut selects = Vec::new();
    selects.extend(fields.numbers("seqs", MAX_BATCH)?.map(Select::Seqs));
    selects.extend(fields.text("key")?.map(|key| Select::Key(key.to_owned())));
    selects.extend(fields.text("cause")?.map(|cause| Select::Cause(cause.to_owned())));
    if fields.flag("all", false)? {
        selects.push(Select::All);
    }
    match selects.pop() {
        Some(select) if selects.is_empty() => Ok(select),
        found => {
            let count = selects.len() + usize::from(found.is_some());
            let range = "exactly one of seqs, key, cause, or all: true";
            Err(Problem::invalid("selection", range, format!("{count} of them")).into())
        }
    }
}

fn counted(name: &str, count: usize) -> Answer {
    Ok(json(StatusCode::OK, value!({ name: count }).to_string()))
}

pub(super) async fn redrive(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    request: Request,
) -> Answer {
    let (topic, group) = api.group(request.headers(), &topic, &group, Scope::Admin)?;
    let (_, fields) = api.fields(request).await?;
    let redrive = Redrive {
        per_second: u32::try_from(fields.count("per_second", 100, 1..=10_000)?).unwrap_or(100),
        limit: fields.count("limit", REDRIVEN, 1..=REDRIVEN)?,
        ..Redrive::new(select(&fields)?)
    };
    counted("redriven", api.0.hub.broker.redrive(&topic, &group, &redrive).await?)
}

pub(super) async fn skip(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    request: Request,
) -> Answer {
    let (topic, group) = api.group(request.headers(), &topic, &group, Scope::Admin)?;
    let (_, fields) = api.fields(request).await?;
    let reason = fields.text("reason")?.unwrap_or("skipped by an operator").to_owned();
    let select = select(&fields)?;
    counted("skipped", api.0.hub.broker.skip(&topic, &group, &select, &reason).await?)
}

pub(super) async fn purge(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    request: Request,
) -> Answer {
    let (topic, group) = api.group(request.headers(), &topic, &group, Scope::Admin)?;
    let (_, fields) = api.fields(request).await?;
    let limit = fields.count("limit", 10_000, 1..=100_000)?;
    let select = select(&fields)?;
    counted("purged", api.0.hub.broker.purge(&topic, &group, &select, limit).await?)
}
