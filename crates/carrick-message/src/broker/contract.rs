//! The contract of [`Broker`] as checks: every backend runs all of them.
//!
//! Nothing here sleeps to let time pass: a check that waits for a lease to end or a delay to be over
//! waits with a long poll, as a consumer would. On a paused clock that takes no time.
//!
//! ```text
//! mod memory {
//!     async fn subject() -> Subject { … }
//!     carrick_message::broker_contract!(subject, #[tokio::test(start_paused = true)]);
//! }
//! ```

use std::{
    any::Any, cell::Cell, collections::HashMap, fmt, future::Future, sync::Arc, time::Duration,
};

use carrick_core::{
    event::{Event, HARD_LIMIT},
    name::{Group, Topic},
};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{Broker, BrokerError, Delivery, LeaseId, LeaseRequest, Outgoing, Verdict, Verdicted};
use crate::dead_letter::{DeadLetters, Redrive, Select};

/// Makes a test of each check: `broker_contract!(subject, #[tokio::test])`, where `subject` is an
/// async function that returns a [`Subject`].
#[macro_export]
macro_rules! broker_contract {
    ($subject:path, $(#[$test:meta])+) => {
        $crate::broker_contract! { @each $subject, [$(#[$test])+]
            a_batch_arrives_whole_and_in_order_in_every_group
            a_repeated_source_and_id_is_published_once
            an_event_is_the_same_bytes_through_retry_dead_letter_and_redrive
            order_per_key_holds_between_two_consumers
            a_failed_head_ends_the_later_leases_of_its_key_uncounted
            a_key_that_is_stuck_holds_up_no_other
            an_event_that_is_not_due_waits
            a_short_delay_is_not_held_up_by_a_longer_one
            an_expired_event_is_not_delivered
            deliveries_are_counted_through_a_crash_loop
            a_return_that_does_not_count_gives_the_attempt_back
            a_late_acknowledgement_of_an_earlier_delivery_changes_nothing
            an_extended_lease_holds_from_now_on
            fences_grow_with_every_delivery
            a_dead_letter_lets_its_key_move_on_and_can_be_purged
            a_blocked_key_is_listed_and_skipped
            a_redrive_keeps_to_its_pace_and_its_selection
            a_long_poll_is_woken_by_a_publish_and_by_a_settlement
            a_long_poll_without_events_ends_in_time
            a_dropped_lease_call_loses_nothing
            many_waiters_share_what_comes
            arguments_out_of_range_are_refused_by_name
            an_event_over_the_limit_is_refused_whole
        }
    };
    (@each $subject:path, $tests:tt $($check:ident)+) => {
        $($crate::broker_contract! { @one $subject, $tests $check })+
    };
    (@one $subject:path, [$(#[$test:meta])+] $check:ident) => {
        $(#[$test])+
        async fn $check() {
            $crate::broker::contract::$check($subject().await).await;
        }
    };
}

/// A backend under test.
pub struct Subject {
    /// The broker.
    pub broker: Arc<dyn Broker>,
    /// Its dead letters, if it keeps them.
    pub letters: Option<Arc<dyn DeadLetters>>,
    /// What must live as long as it does, such as a temporary folder.
    pub keep: Box<dyn Any + Send>,
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.broker.fmt(f)
    }
}

/// The longest that any check waits for something that must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// The shortest lease, for checks that wait for its end.
const SHORT: Duration = Duration::from_secs(1);

fn topic() -> Topic {
    // Backends on a real server share it between runs.
    Topic::new(&format!("contract-{:016x}", rand::random::<u64>())).expect("a name")
}

fn group(name: &str) -> Group {
    Group::new(name).expect("a name")
}

fn event(id: &str, key: Option<&str>) -> Event {
    let event = Event::builder("contract.checked.v1").id(id).source("/contract");
    let event = match key {
        Some(key) => event.extension("partitionkey", key),
        None => event,
    };
    event.build().expect("an event")
}

async fn publish(subject: &Subject, topic: &Topic, events: impl IntoIterator<Item = Event>) {
    let events: Vec<Outgoing> = events.into_iter().map(Outgoing::from).collect();
    subject.broker.publish(topic, events).await.expect("published");
}

/// Up to `max` at once, or whatever comes first within the patience.
async fn lease(subject: &Subject, topic: &Topic, group: &Group, max: usize) -> Vec<Delivery> {
    let request = LeaseRequest { max, wait: PATIENCE, ..LeaseRequest::default() };
    subject.broker.lease(topic, group, request).await.expect("leased")
}

/// What is ready at once.
async fn ready(subject: &Subject, topic: &Topic, group: &Group) -> Vec<Delivery> {
    let request = LeaseRequest::default();
    subject.broker.lease(topic, group, request).await.expect("leased")
}

async fn lease_briefly(subject: &Subject, topic: &Topic, group: &Group) -> Delivery {
    let request = LeaseRequest { max: 1, wait: PATIENCE, lease: SHORT, ..LeaseRequest::default() };
    let mut deliveries = subject.broker.lease(topic, group, request).await.expect("leased");
    deliveries.pop().expect("an event within the patience")
}

async fn settle(subject: &Subject, delivery: &Delivery, verdict: Verdict) -> Verdicted {
    let verdicts = vec![(delivery.lease.clone(), verdict)];
    subject.broker.settle(verdicts).await.expect("settled")[0]
}

fn nack(delay: Duration) -> Verdict {
    Verdict::Nack { delay, counted: true }
}

fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| delivery.event.id().to_string()).collect()
}

/// Contract: a batch is stored in the order given, and each group gets every event.
pub async fn a_batch_arrives_whole_and_in_order_in_every_group(subject: Subject) {
    let topic = topic();
    let events: Vec<Event> = (0..250).map(|n| event(&n.to_string(), Some("one key"))).collect();
    let sent: Vec<String> = events.iter().map(|event| event.id().to_string()).collect();
    publish(&subject, &topic, events).await;
    for group in [group("a"), group("b")] {
        let mut got = Vec::new();
        while got.len() < sent.len() {
            let deliveries = lease(&subject, &topic, &group, 100).await;
            assert!(!deliveries.is_empty(), "only {} of {} came", got.len(), sent.len());
            got.extend(ids(&deliveries));
            let acks = deliveries.into_iter().map(|one| (one.lease, Verdict::Ack)).collect();
            let answers = subject.broker.settle(acks).await.expect("settled");
            assert!(answers.iter().all(|answer| *answer == Verdicted::Done));
        }
        assert_eq!(got, sent, "group {group}");
        assert!(ready(&subject, &topic, &group).await.is_empty(), "acknowledged is finished");
    }
}

/// Contract: `(source, id)` deduplicates within the window, also within one batch.
pub async fn a_repeated_source_and_id_is_published_once(subject: Subject) {
    if subject.broker.capabilities().dedupe_window.is_none() {
        return; // declared, so there is nothing to check
    }
    let (topic, group) = (topic(), group("g"));
    let twice = vec![event("1", None).into(), event("1", None).into(), event("2", None).into()];
    let first = subject.broker.publish(&topic, twice).await.expect("published");
    assert_eq!(first.fresh, [true, false, true]);
    let again = vec![event("2", None).into()];
    let again = subject.broker.publish(&topic, again).await.expect("published");
    assert_eq!((again.fresh, again.position), (vec![false], first.position));
    assert_eq!(ids(&lease(&subject, &topic, &group, 10).await), ["1", "2"]);
}

/// Contract: id, key, trace and extensions are the same bytes through every move.
///
/// Source: quarkusio/quarkus#20537, MassTransit#5255, ServiceControl#913.
pub async fn an_event_is_the_same_bytes_through_retry_dead_letter_and_redrive(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let document: &[u8] = br#"{ "specversion":"1.0","type":"contract.checked.v1", "source":"/c",
        "id":"a-1","partitionkey":"k","traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate":"x=1", "unknownext":"kept", "data":{"big":123456789012345678901234567890,"a":1,"a":2} }"#;
    let sent = Event::parse(document).expect("an event");
    publish(&subject, &topic, [sent.clone()]).await;

    let first = lease(&subject, &topic, &group, 1).await.remove(0);
    assert_eq!(first.event.as_json(), sent.as_json(), "as delivered");
    settle(&subject, &first, nack(Duration::ZERO)).await;
    let second = lease(&subject, &topic, &group, 1).await.remove(0);
    assert_eq!(second.event.as_json(), sent.as_json(), "as retried");
    assert_eq!(second.attempt, 2);
    let aside = Verdict::DeadLetter { cause: "cannot".to_owned() };
    assert_eq!(settle(&subject, &second, aside).await, Verdicted::Done);
    let Some(letters) = &subject.letters else { return };
    let letter = letters.letters(&topic, &group, 0, 10).await.expect("listed").remove(0);
    assert_eq!(&letter.body, sent.as_json(), "as a dead letter");
    assert_eq!((letter.attempts, letter.cause.as_str()), (2, "cannot"));
    assert_eq!((letter.key.as_deref(), letter.fence), (Some("k"), second.fence.unwrap_or(0)));
    assert_eq!(letter.traceparent().as_deref(), sent.traceparent().as_deref());
    let redriven = letters.redrive(&topic, &group, &Redrive::new(Select::All)).await;
    assert_eq!(redriven.expect("redriven"), 1);
    let third = lease(&subject, &topic, &group, 1).await.remove(0);
    assert_eq!(third.event.as_json(), sent.as_json(), "as redriven");
    assert_eq!(third.attempt, 1, "a redrive starts over");
}

/// Contract: no event of a key while an earlier one is unfinished, whoever asks.
pub async fn order_per_key_holds_between_two_consumers(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let sent: Vec<(usize, usize)> = (0..10).flat_map(|n| (0..5).map(move |key| (key, n))).collect();
    let name = |(key, n): &(usize, usize)| event(&format!("{key}:{n}"), Some(&key.to_string()));
    publish(&subject, &topic, sent.iter().map(name)).await;

    // Numbered when it is taken up: the next of its key is delivered only after that.
    let taken = Cell::new(0);
    let consume = async || {
        let mut order = Vec::new();
        loop {
            let request = LeaseRequest { max: 3, wait: SHORT, ..LeaseRequest::default() };
            let deliveries = subject.broker.lease(&topic, &group, request).await.expect("leased");
            if deliveries.is_empty() {
                return order;
            }
            for delivery in deliveries {
                let at = taken.get();
                taken.set(at + 1);
                let id = delivery.event.id().to_string();
                // Two of each key fail at first, and their key must wait for them.
                let fails = delivery.attempt == 1 && id.ends_with(['3', '6']);
                let verdict = if fails { nack(Duration::ZERO) } else { Verdict::Ack };
                if settle(&subject, &delivery, verdict).await == Verdicted::Done && !fails {
                    order.push((at, id));
                }
                tokio::task::yield_now().await;
            }
        }
    };
    let (one, two) = tokio::join!(consume(), consume());
    let mut all: Vec<_> = one.into_iter().chain(two).collect();
    all.sort_by_key(|(at, _)| *at);
    let mut seen: HashMap<String, usize> = HashMap::new();
    assert_eq!(all.len(), sent.len(), "each is finished once");
    for (_, id) in &all {
        let (key, n) = id.split_once(':').expect("as named");
        let last = seen.entry(key.to_owned()).or_default();
        assert_eq!(n.parse::<usize>().expect("as named"), *last, "key {key}: {all:?}");
        *last += 1;
    }
}

/// Contract: the later leases of a key in one call end with their failed head, uncounted.
pub async fn a_failed_head_ends_the_later_leases_of_its_key_uncounted(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, ["1", "2", "3"].map(|id| event(id, Some("k")))).await;
    let together = lease(&subject, &topic, &group, 10).await;
    assert_eq!(ids(&together), ["1", "2", "3"], "one call may take several of a key");
    assert_eq!(settle(&subject, &together[0], nack(Duration::ZERO)).await, Verdicted::Done);
    assert_eq!(settle(&subject, &together[1], Verdict::Ack).await, Verdicted::Stale);
    assert_eq!(settle(&subject, &together[2], Verdict::Ack).await, Verdicted::Stale);
    let again = lease(&subject, &topic, &group, 10).await;
    assert_eq!(ids(&again), ["1", "2", "3"]);
    let attempts: Vec<u32> = again.iter().map(|delivery| delivery.attempt).collect();
    assert_eq!(attempts, [2, 1, 1], "only the head was tried");
}

/// Contract: a failed head blocks its own key and no other.
///
/// Source: apache/pulsar#25706, where one stuck consumer starved all healthy keys.
pub async fn a_key_that_is_stuck_holds_up_no_other(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, (0..200).map(|n| event(&format!("s{n}"), Some("stuck")))).await;
    publish(&subject, &topic, (0..5).map(|n| event(&format!("h{n}"), Some("healthy")))).await;
    publish(&subject, &topic, [event("none", None)]).await;
    let head = lease(&subject, &topic, &group, 1).await.remove(0);
    assert_eq!(head.event.id(), "s0");
    settle(&subject, &head, nack(Duration::from_secs(3600))).await;
    let mut others = Vec::new();
    while others.len() < 6 {
        let deliveries = lease(&subject, &topic, &group, 2).await;
        assert!(!deliveries.is_empty(), "the other keys must flow; got {others:?}");
        for delivery in &deliveries {
            settle(&subject, delivery, Verdict::Ack).await;
        }
        others.extend(ids(&deliveries));
    }
    assert_eq!(others, ["h0", "h1", "h2", "h3", "h4", "none"]);
    assert!(ready(&subject, &topic, &group).await.is_empty(), "the stuck key waits");
}

/// Contract: an event is not delivered before it is due.
pub async fn an_event_that_is_not_due_waits(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let delay = Duration::from_millis(1500);
    // Due by the broker's clock, which a stamped event tells: read it from a first delivery.
    publish(&subject, &topic, [event("clock", None)]).await;
    let clock = lease(&subject, &topic, &group, 1).await.remove(0);
    settle(&subject, &clock, Verdict::Ack).await;
    let due = clock.first_delivered_at + delay;
    let later = Outgoing { event: event("later", None), due: Some(due) };
    subject.broker.publish(&topic, vec![later]).await.expect("published");
    assert!(ready(&subject, &topic, &group).await.is_empty(), "not due yet");
    let delivery = lease(&subject, &topic, &group, 1).await.remove(0);
    assert!(delivery.first_delivered_at >= due, "{} < {due}", delivery.first_delivered_at);
}

/// Contract: delays are times, not a queue.
///
/// Source: smallrye/smallrye-reactive-messaging#3321.
pub async fn a_short_delay_is_not_held_up_by_a_longer_one(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, ["long", "short"].map(|id| event(id, None))).await;
    let both = lease(&subject, &topic, &group, 2).await;
    assert_eq!(ids(&both), ["long", "short"]);
    settle(&subject, &both[0], nack(Duration::from_secs(3600))).await;
    settle(&subject, &both[1], nack(SHORT)).await;
    assert!(ready(&subject, &topic, &group).await.is_empty(), "both wait");
    assert_eq!(ids(&lease(&subject, &topic, &group, 2).await), ["short"]);
}

/// Contract: an event whose `expirytime` has passed is dropped.
pub async fn an_expired_event_is_not_delivered(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let expiring = |id: &str, at: &str| {
        let event = Event::builder("contract.checked.v1").id(id).source("/contract");
        event.extension("expirytime", at).build().expect("an event")
    };
    let events =
        [expiring("past", "2001-01-01T00:00:00Z"), expiring("future", "2999-01-01T00:00:00Z")];
    publish(&subject, &topic, events).await;
    assert_eq!(ids(&lease(&subject, &topic, &group, 10).await), ["future"]);
}

/// Contract: a delivery is counted when it is made, so a consumer that dies is counted too.
pub async fn deliveries_are_counted_through_a_crash_loop(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, [event("1", Some("k")), event("2", Some("k"))]).await;
    let mut first_delivered: Option<Timestamp> = None;
    for attempt in 1..=3 {
        // Each consumer takes the head and dies.
        let delivery = lease_briefly(&subject, &topic, &group).await;
        assert_eq!((&*delivery.event.id(), delivery.attempt), ("1", attempt));
        let first = *first_delivered.get_or_insert(delivery.first_delivered_at);
        assert_eq!(delivery.first_delivered_at, first);
    }
}

/// Contract: `counted: false` gives the attempt back.
pub async fn a_return_that_does_not_count_gives_the_attempt_back(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, [event("1", None)]).await;
    for (expected, counted) in [(1, false), (1, false), (1, true), (2, true), (3, false), (3, true)]
    {
        let delivery = lease(&subject, &topic, &group, 1).await.remove(0);
        assert_eq!(delivery.attempt, expected);
        settle(&subject, &delivery, Verdict::Nack { delay: Duration::ZERO, counted }).await;
    }
}

/// Contract: a lease that is not the current one changes nothing.
///
/// Source: nats-io/nats-server#4786, where the late ack of attempt 1 was taken for attempt 2.
pub async fn a_late_acknowledgement_of_an_earlier_delivery_changes_nothing(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, [event("1", None)]).await;
    let first = lease_briefly(&subject, &topic, &group).await;
    let second = lease_briefly(&subject, &topic, &group).await; // waits for the first to run out
    assert_eq!(second.attempt, 2);
    assert_ne!(first.lease, second.lease);
    for verdict in [
        Verdict::Ack,
        nack(Duration::ZERO),
        Verdict::Extend { lease: Duration::from_secs(60) },
        Verdict::DeadLetter { cause: "late".to_owned() },
    ] {
        assert_eq!(
            settle(&subject, &first, verdict.clone()).await,
            Verdicted::Stale,
            "{verdict:?}"
        );
    }
    let third = lease_briefly(&subject, &topic, &group).await;
    assert_eq!((third.attempt, &*third.event.id()), (3, "1"), "still there, and not held longer");
    assert_eq!(settle(&subject, &third, Verdict::Ack).await, Verdicted::Done);
    assert_eq!(settle(&subject, &third, Verdict::Ack).await, Verdicted::Stale, "only once");
    for nonsense in ["", "1", "0.0.0", "no lease at all", "99999999999.1.1"] {
        let verdicts = vec![(LeaseId(nonsense.to_owned()), Verdict::Ack)];
        let answers = subject.broker.settle(verdicts).await.expect("an answer");
        assert_eq!(answers, [Verdicted::Stale], "{nonsense:?}");
    }
    assert!(subject.broker.settle(Vec::new()).await.expect("an answer").is_empty());
}

/// Contract: an extension is "now + lease", longer or shorter than what was left.
///
/// Source: bbc/sqs-consumer#313.
pub async fn an_extended_lease_holds_from_now_on(subject: Subject) {
    if !subject.broker.capabilities().extend {
        return; // declared, so there is nothing to check
    }
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, [event("longer", None), event("other", None)]).await;
    let longer = lease_briefly(&subject, &topic, &group).await;
    let extend = |lease| Verdict::Extend { lease };
    let hour = Duration::from_secs(3600);
    assert_eq!(settle(&subject, &longer, extend(hour)).await, Verdicted::Done);
    let other = lease_briefly(&subject, &topic, &group).await;
    assert_eq!(other.event.id(), "other");
    // Longer than both leases were: when the other one is back, this one would be too.
    let again = lease_briefly(&subject, &topic, &group).await;
    assert_eq!(again.event.id(), "other", "the extended one is held");
    settle(&subject, &again, Verdict::Ack).await;
    assert_eq!(settle(&subject, &longer, extend(SHORT)).await, Verdicted::Done);
    let back = lease_briefly(&subject, &topic, &group).await;
    assert_eq!(back.event.id(), "longer", "an extension may also shorten");
}

/// Contract: a fence grows with every call that delivers, within the group.
pub async fn fences_grow_with_every_delivery(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, (0..5).map(|n| event(&n.to_string(), None))).await;
    let mut before = None;
    for _ in 0..4 {
        let deliveries = lease(&subject, &topic, &group, 3).await;
        for delivery in &deliveries {
            if delivery.fence.is_none() {
                return; // declared by the delivery itself
            }
            assert!(delivery.fence > before, "{:?} after {before:?}", delivery.fence);
            settle(&subject, delivery, nack(Duration::ZERO)).await;
        }
        before = deliveries.iter().map(|delivery| delivery.fence).max().expect("some came");
    }
}

/// Contract: a dead letter is finished for its group; an operator may forget it.
pub async fn a_dead_letter_lets_its_key_move_on_and_can_be_purged(subject: Subject) {
    let Some(letters) = &subject.letters else { return };
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, (0..4).map(|n| event(&n.to_string(), Some("k")))).await;
    for n in 0..3 {
        let head = lease(&subject, &topic, &group, 1).await.remove(0);
        assert_eq!(&*head.event.id(), n.to_string());
        let aside = Verdict::DeadLetter { cause: format!("cause {n}") };
        assert_eq!(settle(&subject, &head, aside).await, Verdicted::Done);
    }
    let last = lease(&subject, &topic, &group, 10).await;
    assert_eq!(ids(&last), ["3"]);
    settle(&subject, &last[0], Verdict::Ack).await;

    let first = letters.letters(&topic, &group, 0, 2).await.expect("listed");
    let rest = letters.letters(&topic, &group, first[1].seq, 2).await.expect("listed");
    let causes: Vec<&str> = first.iter().chain(&rest).map(|one| one.cause.as_str()).collect();
    assert_eq!(causes, ["cause 0", "cause 1", "cause 2"], "page after page");
    let one = Select::Cause("cause 1".to_owned());
    assert_eq!(letters.purge(&topic, &group, &one, 10).await.expect("purged"), 1);
    assert_eq!(letters.purge(&topic, &group, &Select::All, 1).await.expect("purged"), 1);
    let left = letters.letters(&topic, &group, 0, 10).await.expect("listed");
    assert_eq!(left.iter().map(|one| one.cause.as_str()).collect::<Vec<_>>(), ["cause 2"]);
    assert!(ready(&subject, &topic, &group).await.is_empty(), "a purge delivers nothing");
}

/// Contract: blocked keys are listed with their heads, and skipped so that they move on.
pub async fn a_blocked_key_is_listed_and_skipped(subject: Subject) {
    let Some(letters) = &subject.letters else { return };
    let (topic, group) = (topic(), group("g"));
    let blocked = ["1", "2", "3"].map(|id| event(id, Some("blocked")));
    publish(&subject, &topic, blocked).await;
    let head = lease(&subject, &topic, &group, 1).await.remove(0);
    settle(&subject, &head, nack(Duration::from_secs(3600))).await;
    let listed = letters.blocked_keys(&topic, &group, 0, 10).await.expect("listed");
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((listed[0].key.as_str(), listed[0].attempts), ("blocked", 1));
    assert!(listed[0].ready_at.is_some(), "it waits for a retry");
    let select = Select::Key("blocked".to_owned());
    let skipped = letters.skip(&topic, &group, &select, "by an operator").await;
    assert_eq!(skipped.expect("skipped"), 1);
    assert_eq!(ids(&lease(&subject, &topic, &group, 10).await), ["2", "3"]);
    let letter = letters.letters(&topic, &group, 0, 10).await.expect("listed").remove(0);
    assert_eq!(letter.cause, "by an operator");
}

/// Contract: a redrive takes what is selected, each once, no faster than asked.
pub async fn a_redrive_keeps_to_its_pace_and_its_selection(subject: Subject) {
    let Some(letters) = &subject.letters else { return };
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, (0..30).map(|n| event(&n.to_string(), None))).await;
    let all = lease(&subject, &topic, &group, 30).await;
    let cause = |n: usize| if n < 25 { "timeout".to_owned() } else { "poison".to_owned() };
    let aside = |(n, one): (usize, Delivery)| (one.lease, Verdict::DeadLetter { cause: cause(n) });
    let verdicts = all.into_iter().enumerate().map(aside).collect();
    subject.broker.settle(verdicts).await.expect("settled");

    let started = Instant::now();
    let select = Select::Cause("timeout".to_owned());
    let redrive = Redrive { per_second: 50, ..Redrive::new(select) };
    let redriven = letters.redrive(&topic, &group, &redrive).await.expect("redriven");
    assert_eq!(redriven, 25);
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(400), "25 at 50 a second took {took:?}");
    let back = lease(&subject, &topic, &group, 30).await;
    assert_eq!(ids(&back), (0..25).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(letters.letters(&topic, &group, 0, 30).await.expect("listed").len(), 5);
    for per_second in [0, 10_001] {
        let wrong = Redrive { per_second, ..Redrive::new(Select::All) };
        let refused = letters.redrive(&topic, &group, &wrong).await;
        assert!(matches!(refused, Err(BrokerError::Invalid { field: "per-second", .. })));
    }
}

/// Contract: a wait ends when there is something: published, or freed by another consumer.
pub async fn a_long_poll_is_woken_by_a_publish_and_by_a_settlement(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let waiting = lease(&subject, &topic, &group, 1);
    let publishing = async {
        tokio::task::yield_now().await;
        publish(&subject, &topic, [event("1", Some("k")), event("2", Some("k"))]).await;
    };
    let (head, ()) = tokio::join!(waiting, publishing);
    assert_eq!(ids(&head), ["1"]);
    let started = Instant::now();
    let waiting = lease(&subject, &topic, &group, 1);
    let settling = async {
        tokio::task::yield_now().await;
        settle(&subject, &head[0], Verdict::Ack).await;
    };
    let (next, _) = tokio::join!(waiting, settling);
    assert_eq!(ids(&next), ["2"], "its key moved on");
    let took = started.elapsed();
    assert!(took < Duration::from_secs(5), "before the head's lease would have ended: {took:?}");
}

/// Contract: a wait is bounded, and an empty answer is one.
pub async fn a_long_poll_without_events_ends_in_time(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let started = Instant::now();
    let request = LeaseRequest { wait: SHORT, ..LeaseRequest::default() };
    let deliveries = subject.broker.lease(&topic, &group, request).await.expect("leased");
    assert!(deliveries.is_empty());
    let took = started.elapsed();
    assert!((SHORT..SHORT * 5).contains(&took), "{took:?}");
}

/// Contract: dropping a lease call at any point loses nothing.
pub async fn a_dropped_lease_call_loses_nothing(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    publish(&subject, &topic, [event("1", None)]).await;
    for polls in 0..6 {
        let request = LeaseRequest { lease: SHORT, ..LeaseRequest::default() };
        let mut call = Box::pin(subject.broker.lease(&topic, &group, request));
        for _ in 0..polls {
            let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(call.as_mut().poll(cx)));
            if polled.await.is_ready() {
                break; // what it brought is dropped, too, and its lease runs out
            }
            tokio::task::yield_now().await;
        }
        drop(call);
    }
    let delivery = lease_briefly(&subject, &topic, &group).await;
    assert_eq!(delivery.event.id(), "1");
    assert_eq!(settle(&subject, &delivery, Verdict::Ack).await, Verdicted::Done);
}

/// Contract: however many wait, each event goes to one of them, and soon.
pub async fn many_waiters_share_what_comes(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let waiters = (0..50).map(|_| lease(&subject, &topic, &group, 1));
    let waiters = futures_util::future::join_all(waiters);
    let publishing = async {
        for n in 0..50 {
            tokio::task::yield_now().await;
            publish(&subject, &topic, [event(&n.to_string(), None)]).await;
        }
    };
    let started = Instant::now();
    let (got, ()) = tokio::join!(waiters, publishing);
    let mut got: Vec<u32> =
        got.iter().flat_map(|one| ids(one)).map(|id| id.parse().expect("a number")).collect();
    got.sort_unstable();
    assert_eq!(got, (0..50).collect::<Vec<_>>(), "each once");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

/// Contract: an argument out of its range is refused, and the refusal names it.
pub async fn arguments_out_of_range_are_refused_by_name(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let good = LeaseRequest::default();
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    for (field, request) in [
        ("max", LeaseRequest { max: 0, ..good }),
        ("max", LeaseRequest { max: 1001, ..good }),
        ("max-bytes", LeaseRequest { max_bytes: 0, ..good }),
        ("lease", LeaseRequest { lease: Duration::from_millis(999), ..good }),
        ("lease", LeaseRequest { lease: hours(13), ..good }),
        ("wait", LeaseRequest { wait: hours(1), ..good }),
    ] {
        let refused = subject.broker.lease(&topic, &group, request).await;
        let Err(BrokerError::Invalid { field: named, .. }) = refused else {
            panic!("{field}: {refused:?}")
        };
        assert_eq!(named, field);
    }
    for good in [
        LeaseRequest { max: 1, lease: SHORT, max_bytes: 1, ..good },
        LeaseRequest { max: 1000, lease: hours(12), ..good },
    ] {
        assert!(subject.broker.lease(&topic, &group, good).await.is_ok(), "{good:?}");
    }
    let nothing = subject.broker.publish(&topic, Vec::new()).await.expect("nothing is fine");
    assert!(nothing.fresh.is_empty());
    let many = (0..1001).map(|n| event(&n.to_string(), None).into()).collect();
    let refused = subject.broker.publish(&topic, many).await;
    assert!(matches!(refused, Err(BrokerError::Invalid { field: "events", .. })), "{refused:?}");
}

/// Contract: the limit on an event's size holds to the byte, and a batch is refused whole.
pub async fn an_event_over_the_limit_is_refused_whole(subject: Subject) {
    let (topic, group) = (topic(), group("g"));
    let sized = |id: &str, size: usize| {
        let frame = format!(
            r#"{{"specversion":"1.0","type":"contract.checked.v1","source":"/c","id":"{id}","data":""}}"#
        );
        let data = "x".repeat(size - frame.len());
        let document = frame.replace(r#""data":"""#, &format!(r#""data":"{data}""#));
        assert_eq!(document.len(), size);
        Event::parse(document)
    };
    let largest = sized("largest", HARD_LIMIT).expect("within the limit");
    if let Ok(huge) = sized("huge", HARD_LIMIT + 1) {
        let batch = vec![event("small", None).into(), huge.into()];
        let refused = subject.broker.publish(&topic, batch).await;
        assert!(matches!(refused, Err(BrokerError::TooLarge { .. })), "{refused:?}");
    }
    publish(&subject, &topic, [largest.clone()]).await;
    let delivered = lease(&subject, &topic, &group, 10).await;
    assert_eq!(ids(&delivered), ["largest"], "larger than `max_bytes`, and alone");
    assert_eq!(delivered[0].event.as_json(), largest.as_json());
}
