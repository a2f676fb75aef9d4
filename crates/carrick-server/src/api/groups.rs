//! Groups: leasing events, and settling the leases.

use std::{fmt::Write, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, Response, StatusCode},
};
use carrick_core::{
    clock::{Clock, SystemClock},
    config::duration,
    name::{Group, Topic},
    problem::Problem,
};
use carrick_message::broker::{Broker, Delivery, LeaseId, LeaseRequest, Verdict, Verdicted};
use carrick_store::{lease::Start, log::MAX_BATCH};
use serde_json::json as value;
use tokio::time::Instant;

use super::{
    Api, Named,
    answer::{Answer, json},
    fields::Fields,
    topics::MAX_WAIT,
};
use crate::config::Scope;

/// Bytes of events in one answer, unless one event alone has more.
const ANSWER_BYTES: usize = 4 * 1024 * 1024;

const SECOND: Duration = Duration::from_secs(1);

/// The longest lease, as in SQS.
const MAX_LEASE: Duration = Duration::from_secs(12 * 3600);

/// The longest pause before a retry.
const MAX_DELAY: Duration = Duration::from_secs(30 * 86_400);

pub(super) async fn list(
    State(api): State<Api>,
    Named(topic): Named<String>,
    headers: HeaderMap,
) -> Answer {
    let topic = api.0.guard.caller(&headers)?.topic(&topic, Scope::Admin)?;
    let groups = api.0.hub.store().groups(&topic).await?;
    let now = SystemClock.wall();
    let rows: Vec<_> = groups
        .into_iter()
        .map(|(group, stats)| {
            let age = stats.oldest.map(|oldest| {
                let age = Duration::try_from(now.duration_since(oldest)).unwrap_or_default();
                duration::format(Duration::from_millis(age.as_millis() as u64))
            });
            value!({
                "group": group.as_str(), "backlog": stats.backlog, "leased": stats.leased,
                "waiting": stats.waiting, "dead": stats.dead, "oldest": age,
            })
        })
        .collect();
    Ok(json(StatusCode::OK, value!({ "groups": rows }).to_string()))
}

/// `PUT …/groups/{group}`: makes a group, so that it gets events from now on.
pub(super) async fn create(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    request: Request,
) -> Answer {
    let (topic, group) = api.group(request.headers(), &topic, &group, Scope::Consume)?;
    let (_, fields) = api.fields(request).await?;
    let start = match fields.text("start")?.unwrap_or("earliest") {
        "earliest" => Start::Earliest,
        "latest" => Start::Latest,
        other => return Err(Problem::invalid("start", "earliest or latest", other).into()),
    };
    let made = api.0.hub.broker.create_group(&topic, &group, start).await?;
    let status = if made { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json(status, value!({ "group": group.as_str(), "created": made }).to_string()))
}

/// `POST …/lease`: deliveries under lease, or a wait for them.
pub(super) async fn lease(
    State(api): State<Api>,
    Named((topic, group)): Named<(String, String)>,
    request: Request,
) -> Answer {
    let (topic, group) = api.group(request.headers(), &topic, &group, Scope::Consume)?;
    let (headers, fields) = api.fields(request).await?;
    let wait = fields.duration("wait", Duration::ZERO, Duration::ZERO..=MAX_WAIT)?;
    let ask = LeaseRequest {
        max: fields.count("max", 10, 1..=MAX_BATCH)?,
        max_bytes: ANSWER_BYTES,
        lease: fields.duration("lease", 30 * SECOND, SECOND..=MAX_LEASE)?,
        wait,
    };
    let deliveries = api.deliveries(&headers, &topic, &group, ask).await?;
    Ok(api.told(&topic, &deliveries, ask.lease))
}

impl Api {
    pub(super) fn group(
        &self,
        headers: &HeaderMap,
        topic: &str,
        group: &str,
        scope: Scope,
    ) -> Answer<(Topic, Group)> {
        let topic = self.0.guard.caller(headers)?.topic(topic, scope)?;
        Ok((topic, Group::new(group)?))
    }

    /// Leases until there is something whose attempts are not used up, or the wait is over.
    async fn deliveries(
        &self,
        headers: &HeaderMap,
        topic: &Topic,
        group: &Group,
        mut ask: LeaseRequest,
    ) -> Answer<Vec<Delivery>> {
        let until = Instant::now() + ask.wait;
        let announced = self.0.drain.announced();
        let mut place = None;
        loop {
            // The first look needs no place among those who wait.
            let wait = if place.is_some() { until - Instant::now() } else { Duration::ZERO };
            ask.wait = if announced.is_cancelled() { Duration::ZERO } else { wait };
            let leased = tokio::select! {
                leased = self.0.hub.broker.lease(topic, group, ask) => leased?,
                () = announced.cancelled(), if !ask.wait.is_zero() => return Ok(Vec::new()),
            };
            let none = leased.is_empty();
            let deliveries = self.bury_spent(topic, group, leased).await?;
            let over = Instant::now() >= until || announced.is_cancelled();
            if !deliveries.is_empty() || (none && over) {
                return Ok(deliveries);
            }
            if place.is_none() && !over {
                place = Some(self.place(headers)?);
            }
        }
    }

    /// Puts aside what was delivered too often: its consumer never got to say so.
    async fn bury_spent(
        &self,
        topic: &Topic,
        group: &Group,
        leased: Vec<Delivery>,
    ) -> Answer<Vec<Delivery>> {
        let max = self.0.max_attempts;
        let (spent, fresh): (Vec<_>, Vec<_>) =
            leased.into_iter().partition(|delivery| delivery.attempt > max);
        if !spent.is_empty() {
            let cause = format!("given up after {max} deliveries that were not acknowledged");
            tracing::warn!(%topic, %group, count = spent.len(), "{cause}");
            let bury =
                |delivery: Delivery| (delivery.lease, Verdict::DeadLetter { cause: cause.clone() });
            metrics::counter!("carrick_hub_spent_total").increment(spent.len() as u64);
            self.0.hub.broker.settle(spent.into_iter().map(bury).collect()).await?;
        }
        Ok(fresh)
    }

    fn told(&self, topic: &Topic, deliveries: &[Delivery], lease: Duration) -> Response<Body> {
        let bytes: usize = deliveries.iter().map(|one| one.event.as_json().len() + 160).sum();
        let mut body = String::with_capacity(bytes + 32);
        body.push_str("{\"deliveries\":[");
        // In seconds where they are whole: the form that clients of the interface were promised.
        let whole = lease.subsec_nanos() == 0;
        let lease = if whole { format!("{}s", lease.as_secs()) } else { duration::format(lease) };
        for (index, delivery) in deliveries.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let sealed = self.seal_lease(topic.tenant(), delivery);
            let attempt = delivery.attempt;
            let event = std::str::from_utf8(delivery.event.as_json()).expect("an event is UTF-8");
            write!(
                body,
                r#"{comma}{{"lease":"{sealed}","attempt":{attempt},"expires_in":"{lease}","event":{event}}}"#
            )
            .expect("a String takes all");
        }
        body.push_str("]}");
        json(StatusCode::OK, body)
    }

    /// The lease as its holder keeps it: bound to the tenant, and with the attempt, so that a nack
    /// needs no look-up.
    fn seal_lease(&self, tenant: &str, delivery: &Delivery) -> String {
        let payload = format!("{} {}", delivery.attempt, delivery.lease.0);
        self.0.hub.seal.seal("lease", tenant, payload.as_bytes())
    }

    fn open_lease(&self, tenant: &str, text: &str) -> Option<(u32, LeaseId)> {
        let payload = self.0.hub.seal.open("lease", tenant, text).ok()?;
        let payload = String::from_utf8(payload).ok()?;
        let (attempt, lease) = payload.split_once(' ')?;
        Some((attempt.parse().ok()?, LeaseId(lease.to_owned())))
    }
}

pub(super) async fn ack(State(api): State<Api>, request: Request) -> Answer {
    settle(&api, request, "acked", |_| Ok(Box::new(|_| Verdict::Ack))).await
}

pub(super) async fn nack(State(api): State<Api>, request: Request) -> Answer {
    let max = api.0.max_attempts;
    settle(&api, request, "nacked", |fields| {
        let delay = fields.duration("delay", Duration::ZERO, Duration::ZERO..=MAX_DELAY)?;
        let counted = fields.flag("counted", true)?;
        let dead = fields.flag("dead", false)?;
        let reason = fields.text("reason")?.unwrap_or("the consumer gave no reason").to_owned();
        Ok(Box::new(move |attempt| {
            if dead || (counted && attempt >= max) {
                Verdict::DeadLetter { cause: reason.clone() }
            } else {
                Verdict::Nack { delay, counted }
            }
        }))
    })
    .await
}

pub(super) async fn extend(State(api): State<Api>, request: Request) -> Answer {
    settle(&api, request, "extended", |fields| {
        let lease = fields.duration("lease", 30 * SECOND, SECOND..=MAX_LEASE)?;
        Ok(Box::new(move |_| Verdict::Extend { lease }))
    })
    .await
}

/// What is said of a lease, by its attempt.
type Say = Box<dyn Fn(u32) -> Verdict + Send>;

/// Settles leases; those that are not held any more are told, and 409 if none is.
async fn settle(
    api: &Api,
    request: Request,
    done: &'static str,
    say: impl FnOnce(&Fields) -> Answer<Say>,
) -> Answer {
    let caller = api.0.guard.caller(request.headers())?;
    caller.any(Scope::Consume)?;
    let tenant = caller.tenant().to_owned();
    let (_, fields) = api.fields(request).await?;
    let say = say(&fields)?;
    let leases = fields.texts("leases", MAX_BATCH)?;
    let (mut held, mut verdicts) = (Vec::new(), Vec::new());
    let mut stale = Vec::new();
    for lease in leases {
        match api.open_lease(&tenant, lease) {
            Some((attempt, id)) => {
                held.push(lease);
                verdicts.push((id, say(attempt)));
            }
            None => stale.push(lease),
        }
    }
    let answers = api.0.hub.broker.settle(verdicts).await?;
    let mut settled = Vec::with_capacity(held.len());
    for (lease, answer) in held.into_iter().zip(answers) {
        match answer {
            Verdicted::Done => settled.push(lease),
            Verdicted::Stale => stale.push(lease),
        }
    }
    if settled.is_empty() {
        let detail =
            "none of these leases is held any more: the events were or will be delivered again";
        let problem = Problem::new(StatusCode::CONFLICT, detail);
        return Err(problem.with(done, value!([])).with("stale", value!(stale)).into());
    }
    Ok(json(StatusCode::OK, value!({ done: settled, "stale": stale }).to_string()))
}
