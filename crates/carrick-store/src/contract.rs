//! The contract suite: what every engine promises, checked on it.
//!
//! An engine's tests implement [`Subject`] and call [`store_contract!`](crate::store_contract). Each
//! check opens its own store.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use carrick_core::name::Group;
use jiff::Timestamp;

use crate::{
    Store, StoreError, Stream,
    fence::Acquired,
    lease::{Claim, Claims, LeaseToken, Select, Settle, Settled, Start},
    log::{Appended, MAX_BATCH, MAX_BODY, NewRecord, ReadLimit, Seq, Trim},
    once::{OnceKey, OnceToken, Reserved},
};

/// An engine under test, with a place of its own.
#[async_trait]
pub trait Subject: Send + Sync {
    /// Opens the store; opened again, it is the same one if the engine keeps anything.
    async fn open(&self) -> Arc<dyn Store>;

    /// Lets time pass for the engine.
    async fn pass(&self, time: Duration);

    /// The engine's present.
    async fn now(&self) -> Timestamp;

    /// Whether the engine keeps what it was given when it is closed.
    fn is_durable(&self) -> bool;
}

/// Makes a test of each check: `store_contract!(subject(), #[tokio::test])`.
#[macro_export]
macro_rules! store_contract {
    ($subject:expr, $(#[$attribute:meta])+) => {
        $crate::store_contract!(@checks $subject, $(#[$attribute])+;
            appends_are_adjacent_and_numbered_from_one
            a_repeat_is_a_duplicate_also_within_one_call_and_after_a_restart
            concurrent_appends_leave_no_gap
            reads_are_bounded_and_tell_what_is_gone
            a_dropped_append_is_whole_or_absent
            a_trim_spares_what_is_not_finished_or_dead
            a_trim_waits_for_every_group
            streams_are_listed_by_name
            a_claim_is_exclusive_and_an_ack_ends_it
            a_claim_is_bounded_by_bytes_and_never_empty_for_them
            settlements_of_one_call_are_answered_in_order
            a_lease_that_ran_out_comes_again_with_a_new_token
            a_stale_token_changes_nothing
            a_released_record_waits_and_counts_only_if_told
            an_extension_counts_from_now
            a_failed_head_blocks_its_key_and_no_other
            records_that_are_due_later_or_expired_wait_or_go
            groups_are_independent_and_start_where_they_are_told
            dead_letters_are_listed_redriven_and_purged
            blocked_keys_are_listed_and_skipped
            a_stuck_group_looks_no_further_than_ten_thousand
            several_claimers_keep_every_key_in_order_and_lose_nothing
            leases_survive_a_restart
            a_dropped_claim_loses_nothing
            arguments_are_checked
            one_reservation_wins_and_its_answer_is_kept
            a_reservation_that_ran_out_completes_nothing
            what_was_done_is_remembered_across_a_restart
            fence_tokens_only_grow
            of_simultaneous_acquisitions_one_is_held
            a_waiter_is_woken_by_an_append
        );
    };
    (@checks $subject:expr, $(#[$attribute:meta])+; ) => {};
    (@checks $subject:expr, $(#[$attribute:meta])+; $check:ident $($rest:ident)*) => {
        $(#[$attribute])+
        async fn $check() {
            $crate::contract::$check(&$subject).await;
        }
        $crate::store_contract!(@checks $subject, $(#[$attribute])+; $($rest)*);
    };
}

const SECOND: Duration = Duration::from_secs(1);

fn stream() -> Stream {
    Stream::new("orders").expect("a name")
}

fn group() -> Group {
    Group::new("billing").expect("a name")
}

fn record(text: &str) -> NewRecord {
    NewRecord { body: Bytes::copy_from_slice(text.as_bytes()), ..NewRecord::default() }
}

fn keyed(key: &str, text: &str) -> NewRecord {
    NewRecord { key: Some(key.to_owned()), ..record(text) }
}

async fn append(store: &Arc<dyn Store>, records: Vec<NewRecord>) -> Vec<Seq> {
    let appended = store.append(&stream(), records).await.expect("appends");
    appended.into_iter().map(Appended::seq).collect()
}

async fn claim(store: &Arc<dyn Store>, records: usize) -> Claims {
    let ask = Claim { records, bytes: 1 << 20, lease: 2 * SECOND };
    store.claim(&stream(), &group(), ask).await.expect("claims")
}

async fn settle(store: &Arc<dyn Store>, token: LeaseToken, settle: Settle) -> Settled {
    store.settle(vec![(token, settle)]).await.expect("settles")[0]
}

fn seqs(claims: &Claims) -> Vec<Seq> {
    claims.claimed.iter().map(|claimed| claimed.record.seq).collect()
}

fn release(delay: Duration, counted: bool) -> Settle {
    Settle::Release { delay, counted }
}

fn bury(cause: &str) -> Settle {
    Settle::Bury { cause: cause.to_owned() }
}

#[expect(missing_docs, reason = "the name of a check says what it checks")]
mod checks {
    use super::*;

    pub async fn appends_are_adjacent_and_numbered_from_one(subject: &dyn Subject) {
        let store = subject.open().await;
        assert_eq!(store.append(&stream(), Vec::new()).await.unwrap(), []);
        assert_eq!(append(&store, vec![record("a"), keyed("k", "b")]).await, [1, 2]);
        assert_eq!(append(&store, vec![record("")]).await, [3]);
        let read = store.read(&stream(), 0, ReadLimit::default()).await.unwrap();
        let bodies: Vec<_> = read.iter().map(|record| (record.seq, &record.body[..])).collect();
        assert_eq!(bodies, [(1, &b"a"[..]), (2, b"b"), (3, b"")]);
        assert_eq!(read[1].key.as_deref(), Some("k"));
        let other = Stream::in_tenant("acme", "orders").unwrap();
        assert_eq!(store.bounds(&other).await.unwrap().last, 0, "tenants are apart");
    }

    pub async fn a_repeat_is_a_duplicate_also_within_one_call_and_after_a_restart(
        subject: &dyn Subject,
    ) {
        let store = subject.open().await;
        let event = |id: u128| NewRecord { dedupe: Some(id), ..record("x") };
        let appended = store.append(&stream(), vec![event(1), event(1), event(2)]).await.unwrap();
        assert_eq!(appended, [Appended::Stored(1), Appended::Duplicate(1), Appended::Stored(2)]);
        let other = Stream::new("refunds").unwrap();
        let elsewhere = store.append(&other, vec![event(1)]).await.unwrap();
        assert_eq!(elsewhere, [Appended::Stored(1)], "another stream");
        let store = if subject.is_durable() {
            store.close().await;
            subject.open().await
        } else {
            store
        };
        let again = store.append(&stream(), vec![event(2), event(3)]).await.unwrap();
        assert_eq!(again, [Appended::Duplicate(2), Appended::Stored(3)]);
        assert!(store.dedupe_window() >= SECOND);
    }

    pub async fn concurrent_appends_leave_no_gap(subject: &dyn Subject) {
        let store = subject.open().await;
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..16 {
            let store = Arc::clone(&store);
            tasks.spawn(async move {
                let mut seqs = Vec::new();
                for n in 0..20 {
                    let pair =
                        vec![record(&format!("{task}.{n}a")), record(&format!("{task}.{n}b"))];
                    let appended = append(&store, pair).await;
                    assert_eq!(appended[0] + 1, appended[1], "records of one call are adjacent");
                    seqs.extend(appended);
                }
                seqs
            });
        }
        let mut all = Vec::new();
        while let Some(seqs) = tasks.join_next().await {
            all.extend(seqs.unwrap());
        }
        all.sort_unstable();
        assert_eq!(all, (1..=640).collect::<Vec<_>>());
        let limit = ReadLimit { records: MAX_BATCH, bytes: 1 << 20 };
        assert_eq!(store.read(&stream(), 0, limit).await.unwrap().len(), 640);
    }

    pub async fn reads_are_bounded_and_tell_what_is_gone(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, (0..10).map(|_| record(&"x".repeat(100))).collect()).await;
        let read = async |after, records, bytes| {
            let limit = ReadLimit { records, bytes };
            store.read(&stream(), after, limit).await.map(|read| read.len())
        };
        assert_eq!(read(0, 3, 1 << 20).await.unwrap(), 3);
        assert_eq!(read(0, 10, 250).await.unwrap(), 2, "bounded by bytes");
        assert_eq!(read(0, 10, 1).await.unwrap(), 1, "one at least");
        assert_eq!(read(10, 10, 1).await.unwrap(), 0);
        assert!(matches!(read(11, 1, 1).await, Err(StoreError::Beyond { after: 11, .. })));
        subject.pass(SECOND).await;
        let trim = Trim { stored_before: subject.now().await, limit: 4 };
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 4);
        assert!(matches!(read(3, 1, 1).await, Err(StoreError::Trimmed { after: 3, .. })));
        assert_eq!(read(4, 10, 1 << 20).await.unwrap(), 6);
        let bounds = store.bounds(&stream()).await.unwrap();
        assert_eq!((bounds.first, bounds.last), (5, 10));
        let all = Trim { limit: 100, ..trim };
        assert_eq!(store.trim(&stream(), all).await.unwrap(), 6);
        assert_eq!(append(&store, vec![record("next")]).await, [11], "numbers are not used again");
    }

    pub async fn a_trim_spares_what_is_not_finished_or_dead(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, (0..6).map(|n| record(&n.to_string())).collect()).await;
        let claims = claim(&store, 4).await;
        let token = |index: usize| claims.claimed[index].token;
        settle(&store, token(0), Settle::Ack).await;
        settle(&store, token(1), bury("bad")).await;
        settle(&store, token(2), Settle::Ack).await;
        subject.pass(SECOND).await;
        let trim = Trim { stored_before: subject.now().await, limit: 100 };
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 2, "1 and 3; 4 is under lease");
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 0);
        let dead = store.dead_letters(&stream(), &group(), 0, 10).await.unwrap();
        assert_eq!(dead[0].record.body, "1", "a dead letter keeps its record");
        store.purge(&stream(), &group(), &Select::All, 10).await.unwrap();
        settle(&store, token(3), Settle::Ack).await;
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 2, "2 and 4; 5 was never claimed");
    }

    pub async fn a_trim_waits_for_every_group(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a"), record("b"), record("c")]).await;
        for claimed in claim(&store, 9).await.claimed {
            settle(&store, claimed.token, Settle::Ack).await;
        }
        let slow = Group::new("slow").unwrap();
        store.create_group(&stream(), &slow, Start::Earliest).await.unwrap();
        subject.pass(SECOND).await;
        let trim = Trim { stored_before: subject.now().await, limit: 100 };
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 0, "one group has not begun");
        let ask = Claim { records: 2, bytes: 1 << 20, lease: 60 * SECOND };
        let claims = store.claim(&stream(), &slow, ask).await.unwrap();
        let retry = release(60 * SECOND, true);
        settle(&store, claims.claimed[1].token, retry).await;
        settle(&store, claims.claimed[0].token, Settle::Ack).await;
        assert_eq!(store.trim(&stream(), trim).await.unwrap(), 1, "2 waits for a retry");
        let none = Trim { stored_before: trim.stored_before - 60 * SECOND, ..trim };
        assert_eq!(store.trim(&stream(), none).await.unwrap(), 0, "nothing is that old");
    }

    pub async fn a_dropped_append_is_whole_or_absent(subject: &dyn Subject) {
        let store = subject.open().await;
        for n in 0..20 {
            let pair = vec![record(&format!("{n}a")), record(&format!("{n}b"))];
            let stream = stream();
            let appending = store.append(&stream, pair);
            // Polled once, and dropped in whatever state it then is.
            drop(futures_util::future::select(appending, std::future::ready(())).await);
        }
        // What is below a number that a reader may see is settled.
        let last = append(&store, vec![record("last")]).await[0];
        let read = store.read(&stream(), 0, ReadLimit::default()).await.unwrap();
        let texts: Vec<_> = read
            .iter()
            .take_while(|record| record.seq < last)
            .map(|record| String::from_utf8(record.body.to_vec()).unwrap())
            .collect();
        for pair in texts.chunks(2) {
            let [first, second] = pair else { panic!("half of a call: {texts:?}") };
            assert_eq!(first.trim_end_matches('a'), second.trim_end_matches('b'), "{texts:?}");
        }
    }

    pub async fn streams_are_listed_by_name(subject: &dyn Subject) {
        let store = subject.open().await;
        for name in ["b", "a", "c"] {
            store.append(&Stream::new(name).unwrap(), vec![record("x")]).await.unwrap();
        }
        // A group alone makes no stream.
        store.create_group(&Stream::new("aa").unwrap(), &group(), Start::Earliest).await.unwrap();
        let names = |listed: Vec<(Stream, _)>| {
            listed.into_iter().map(|(stream, _)| stream.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(store.streams(None, 2).await.unwrap()), ["a", "b"]);
        let after = Stream::new("b").unwrap();
        assert_eq!(names(store.streams(Some(&after), 2).await.unwrap()), ["c"]);
    }

    pub async fn a_claim_is_exclusive_and_an_ack_ends_it(subject: &dyn Subject) {
        let store = subject.open().await;
        assert!(claim(&store, 1).await.claimed.is_empty());
        append(&store, vec![record("a"), record("b"), record("c")]).await;
        let first = claim(&store, 2).await;
        assert_eq!(seqs(&first), [1, 2]);
        assert!(first.claimed.iter().all(|claimed| claimed.attempt == 1));
        assert_eq!(seqs(&claim(&store, 9).await), [3]);
        assert!(claim(&store, 9).await.claimed.is_empty());
        for claimed in &first.claimed {
            assert_eq!(settle(&store, claimed.token, Settle::Ack).await, Settled::Done);
            assert_eq!(settle(&store, claimed.token, Settle::Ack).await, Settled::Stale);
        }
        let (_, stats) = store.groups(&stream()).await.unwrap().remove(0);
        assert_eq!((stats.backlog, stats.leased), (1, 1));
        let named = store.group_of(first.claimed[0].token).await.unwrap();
        assert_eq!(named, Some((stream(), group())));
    }

    pub async fn a_claim_is_bounded_by_bytes_and_never_empty_for_them(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, (0..5).map(|_| record(&"x".repeat(100))).collect()).await;
        let ask = |bytes| Claim { records: 9, bytes, lease: 60 * SECOND };
        let claim = async |bytes| store.claim(&stream(), &group(), ask(bytes)).await.unwrap();
        assert_eq!(seqs(&claim(250).await), [1, 2]);
        let one = claim(1).await;
        assert_eq!(seqs(&one), [3], "one at least, or a large one would be stuck for ever");
        assert!(one.next_ready.is_some(), "more is ready");
        // What waits here already is bounded too.
        settle(&store, one.claimed[0].token, release(Duration::ZERO, false)).await;
        assert_eq!(seqs(&claim(150).await), [3]);
        assert_eq!(seqs(&claim(1 << 20).await), [4, 5]);
    }

    pub async fn settlements_of_one_call_are_answered_in_order(subject: &dyn Subject) {
        let store = subject.open().await;
        let records = vec![keyed("a", "1"), keyed("a", "2"), record("3"), record("4")];
        append(&store, records).await;
        let claims = claim(&store, 9).await;
        let token = |index: usize| claims.claimed[index].token;
        let asked = vec![
            (token(3), Settle::Ack),
            (token(0), release(60 * SECOND, true)),
            (token(1), Settle::Ack),
            (token(3), Settle::Ack),
            (token(2), bury("bad")),
        ];
        let settled = store.settle(asked).await.unwrap();
        use Settled::{Done, Stale};
        assert_eq!(settled, [Done, Done, Stale, Stale, Done], "2's lease ended with its head's");
        assert_eq!(store.settle(Vec::new()).await.unwrap(), []);
        let (_, stats) = store.groups(&stream()).await.unwrap().remove(0);
        assert_eq!((stats.backlog, stats.waiting, stats.dead), (2, 2, 1));
    }

    pub async fn a_lease_that_ran_out_comes_again_with_a_new_token(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a")]).await;
        let first = claim(&store, 1).await.claimed.remove(0);
        let waiting = claim(&store, 1).await;
        assert!(waiting.claimed.is_empty() && waiting.next_ready.is_some());
        subject.pass(2 * SECOND).await;
        let second = claim(&store, 1).await.claimed.remove(0);
        assert_eq!((second.record.seq, second.attempt), (1, 2));
        assert!(second.token.fence > first.token.fence, "a fence");
        assert_eq!(second.first_claimed_at, first.first_claimed_at);
        assert_eq!(settle(&store, first.token, Settle::Ack).await, Settled::Stale);
        assert_eq!(settle(&store, second.token, Settle::Ack).await, Settled::Done);
    }

    pub async fn a_stale_token_changes_nothing(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a")]).await;
        let stale = claim(&store, 1).await.claimed.remove(0).token;
        subject.pass(2 * SECOND).await;
        let held = claim(&store, 1).await.claimed.remove(0).token;
        let extend = Settle::Extend { lease: 60 * SECOND };
        for settlement in [Settle::Ack, release(SECOND, true), extend, bury("late")] {
            assert_eq!(settle(&store, stale, settlement).await, Settled::Stale);
        }
        let strange = LeaseToken { group: std::num::NonZeroU64::MAX, ..held };
        assert_eq!(settle(&store, strange, Settle::Ack).await, Settled::Stale);
        assert_eq!(settle(&store, held, Settle::Ack).await, Settled::Done);
        assert!(store.dead_letters(&stream(), &group(), 0, 9).await.unwrap().is_empty());
    }

    pub async fn a_released_record_waits_and_counts_only_if_told(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a")]).await;
        let token = claim(&store, 1).await.claimed[0].token;
        settle(&store, token, release(Duration::ZERO, false)).await;
        let again = claim(&store, 1).await.claimed.remove(0);
        assert_eq!(again.attempt, 1, "the attempt was given back");
        settle(&store, again.token, release(2 * SECOND, true)).await;
        let none = claim(&store, 1).await;
        assert!(none.claimed.is_empty() && none.next_ready.is_some());
        subject.pass(2 * SECOND).await;
        assert_eq!(claim(&store, 1).await.claimed[0].attempt, 2);
    }

    pub async fn an_extension_counts_from_now(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a")]).await;
        let token = claim(&store, 1).await.claimed[0].token;
        let extend = Settle::Extend { lease: 4 * SECOND };
        assert_eq!(settle(&store, token, extend).await, Settled::Done);
        subject.pass(3 * SECOND).await;
        assert!(claim(&store, 1).await.claimed.is_empty(), "held past the first lease");
        subject.pass(SECOND).await;
        assert_eq!(claim(&store, 1).await.claimed.len(), 1, "and not for the sum of both");
    }

    pub async fn a_failed_head_blocks_its_key_and_no_other(subject: &dyn Subject) {
        let store = subject.open().await;
        let records = vec![keyed("a", "1"), keyed("b", "2"), keyed("a", "3"), keyed("b", "4")];
        append(&store, records).await;
        let claims = claim(&store, 3).await;
        assert_eq!(seqs(&claims), [1, 2, 3], "one claim may have several of a key");
        assert!(claim(&store, 9).await.claimed.is_empty(), "4 is behind 2");
        settle(&store, claims.claimed[0].token, release(2 * SECOND, true)).await;
        let follower = settle(&store, claims.claimed[2].token, Settle::Ack).await;
        assert_eq!(follower, Settled::Stale, "its head failed");
        settle(&store, claims.claimed[1].token, Settle::Ack).await;
        let moved = claim(&store, 9).await;
        assert_eq!(seqs(&moved), [4], "the other key moves on");
        subject.pass(2 * SECOND).await;
        let back = claim(&store, 9).await;
        let attempts: Vec<_> =
            back.claimed.iter().map(|claimed| (claimed.record.seq, claimed.attempt)).collect();
        assert_eq!(attempts[..2], [(1, 2), (3, 1)], "the follower's attempt was given back");
    }

    pub async fn records_that_are_due_later_or_expired_wait_or_go(subject: &dyn Subject) {
        let store = subject.open().await;
        let now = subject.now().await;
        let late = NewRecord { due: Some(now + 2 * SECOND), ..record("late") };
        let gone = NewRecord { expires: Some(now - SECOND), ..record("gone") };
        append(&store, vec![late, gone, record("now")]).await;
        let claims = claim(&store, 9).await;
        assert_eq!((seqs(&claims), claims.expired), (vec![3], 1));
        assert!(claims.next_ready.is_some());
        subject.pass(2 * SECOND).await;
        assert!(seqs(&claim(&store, 9).await).contains(&1));
    }

    pub async fn groups_are_independent_and_start_where_they_are_told(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![record("a")]).await;
        let late = Group::new("late").unwrap();
        assert!(store.create_group(&stream(), &late, Start::Latest).await.unwrap());
        assert!(!store.create_group(&stream(), &late, Start::Earliest).await.unwrap());
        append(&store, vec![record("b")]).await;
        let ask = Claim { records: 9, bytes: 1 << 20, lease: SECOND };
        assert_eq!(seqs(&store.claim(&stream(), &late, ask).await.unwrap()), [2]);
        assert_eq!(seqs(&claim(&store, 9).await), [1, 2]);
        assert_eq!(store.groups(&stream()).await.unwrap().len(), 2);
    }

    pub async fn dead_letters_are_listed_redriven_and_purged(subject: &dyn Subject) {
        let store = subject.open().await;
        let records = ["a", "b", "a", "c"].map(|key| keyed(key, key)).to_vec();
        append(&store, records).await;
        for _ in 0..4 {
            for claimed in claim(&store, 1).await.claimed {
                let cause = format!("cause {}", claimed.record.key.unwrap_or_default());
                assert_eq!(settle(&store, claimed.token, bury(&cause)).await, Settled::Done);
            }
        }
        let dead = async |after, limit| {
            let dead = store.dead_letters(&stream(), &group(), after, limit).await.unwrap();
            dead.into_iter().map(|letter| letter.record.seq).collect::<Vec<_>>()
        };
        assert_eq!(dead(0, 9).await, [1, 2, 3, 4]);
        assert_eq!(dead(1, 2).await, [2, 3]);
        let letters = store.dead_letters(&stream(), &group(), 1, 1).await.unwrap();
        assert_eq!((letters[0].cause.as_str(), letters[0].attempts), ("cause b", 1));
        let redrive = async |select: Select, limit| {
            store.redrive(&stream(), &group(), &select, limit).await.unwrap()
        };
        assert_eq!(redrive(Select::Key("a".to_owned()), 9).await, 2);
        assert_eq!(redrive(Select::Seqs(vec![2]), 9).await, 1);
        let back = claim(&store, 9).await;
        assert_eq!(seqs(&back), [1, 2, 3]);
        assert!(back.claimed.iter().all(|claimed| claimed.attempt == 1), "attempts start over");
        assert_eq!(dead(0, 9).await, [4]);
        let cause = Select::Cause("ause c".to_owned());
        assert_eq!(store.purge(&stream(), &group(), &cause, 9).await.unwrap(), 1);
        assert_eq!(redrive(Select::All, 9).await, 0);
    }

    pub async fn blocked_keys_are_listed_and_skipped(subject: &dyn Subject) {
        let store = subject.open().await;
        let records = ["a", "a", "b", "a"].map(|key| keyed(key, key)).to_vec();
        append(&store, records).await;
        let claims = claim(&store, 9).await;
        settle(&store, claims.claimed[0].token, release(60 * SECOND, true)).await;
        settle(&store, claims.claimed[2].token, Settle::Ack).await;
        let keys = store.blocked_keys(&stream(), &group(), 0, 9).await.unwrap();
        assert_eq!(keys.len(), 1);
        assert_eq!((&*keys[0].key, keys[0].head, keys[0].attempts), ("a", 1, 1));
        assert_eq!(keys[0].behind, 2);
        assert!(keys[0].ready_at.is_some());
        let other = Select::Key("z".to_owned());
        assert_eq!(store.skip(&stream(), &group(), &other, "x").await.unwrap(), 0);
        let key = Select::Key("a".to_owned());
        assert_eq!(store.skip(&stream(), &group(), &key, "by hand").await.unwrap(), 1);
        let dead = store.dead_letters(&stream(), &group(), 0, 9).await.unwrap();
        assert_eq!((dead[0].record.seq, dead[0].cause.as_str()), (1, "by hand"));
        assert_eq!(seqs(&claim(&store, 9).await), [2, 4]);
    }

    pub async fn a_stuck_group_looks_no_further_than_ten_thousand(subject: &dyn Subject) {
        let store = subject.open().await;
        for _ in 0..11 {
            append(&store, (0..MAX_BATCH).map(|_| keyed("stuck", "")).collect()).await;
        }
        append(&store, vec![keyed("free", "")]).await;
        let ask = Claim { records: 1, bytes: 1 << 20, lease: 60 * SECOND };
        let head = store.claim(&stream(), &group(), ask).await.unwrap();
        assert_eq!(seqs(&head), [1]);
        // Whatever is asked for, what is behind the key is looked at up to the bound.
        assert!(claim(&store, MAX_BATCH).await.claimed.is_empty());
        let (_, stats) = store.groups(&stream()).await.unwrap().remove(0);
        assert_eq!((stats.waiting, stats.backlog), (10_000, 11_001));
        settle(&store, head.claimed[0].token, Settle::Ack).await;
        let mut seen = 1;
        while seen < 11_001 {
            let claims = claim(&store, MAX_BATCH).await;
            assert!(!claims.claimed.is_empty(), "stuck after {seen}");
            seen += claims.claimed.len();
            let acks = claims.claimed.iter().map(|claimed| (claimed.token, Settle::Ack));
            let settled = store.settle(acks.collect()).await.unwrap();
            assert!(settled.iter().all(|settled| *settled == Settled::Done));
        }
        assert!(claim(&store, 9).await.claimed.is_empty());
    }

    pub async fn several_claimers_keep_every_key_in_order_and_lose_nothing(subject: &dyn Subject) {
        const EVENTS: usize = 400;
        let store = subject.open().await;
        for chunk in (0..EVENTS).collect::<Vec<_>>().chunks(50) {
            let records = chunk.iter().map(|n| keyed(&format!("k{}", n % 13), &n.to_string()));
            append(&store, records.collect()).await;
        }
        let seen = Arc::new(parking_lot::Mutex::new(BTreeMap::<String, Vec<Seq>>::new()));
        let mut tasks = tokio::task::JoinSet::new();
        for worker in 0..4 {
            let (store, seen) = (Arc::clone(&store), Arc::clone(&seen));
            tasks.spawn(async move {
                for round in 0_usize.. {
                    let ask = Claim { records: 7 + worker, bytes: 1 << 20, lease: 60 * SECOND };
                    let claims = store.claim(&stream(), &group(), ask).await.unwrap();
                    let done = seen.lock().values().map(Vec::len).sum::<usize>() >= EVENTS;
                    if done || round > 10_000 {
                        break;
                    }
                    let mut failed = Vec::new();
                    for claimed in claims.claimed {
                        let key = claimed.record.key.clone().unwrap_or_default();
                        if failed.contains(&key) {
                            continue; // its lease ended with its head's
                        }
                        // Some fail at their first attempt, and come again in their place.
                        if claimed.record.seq % 11 == 3 && claimed.attempt == 1 {
                            settle(&store, claimed.token, release(Duration::ZERO, true)).await;
                            failed.push(key);
                            continue;
                        }
                        seen.lock().entry(key).or_default().push(claimed.record.seq);
                        assert_eq!(settle(&store, claimed.token, Settle::Ack).await, Settled::Done);
                    }
                    tokio::task::yield_now().await;
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        let seen = seen.lock();
        assert_eq!(seen.values().map(Vec::len).sum::<usize>(), EVENTS, "each once");
        for (key, seqs) in seen.iter() {
            assert!(seqs.is_sorted(), "{key}: {seqs:?}");
        }
    }

    /// An engine that declares that it keeps nothing begins anew, and says so by its epoch.
    async fn keeps_nothing(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, vec![keyed("a", "1")]).await;
        assert_eq!(claim(&store, 9).await.claimed.len(), 1);
        assert!(matches!(store.reserve(&key(1), 60 * SECOND).await, Ok(Reserved::New(_))));
        let epoch = store.epoch();
        store.close().await;
        let store = subject.open().await;
        assert_ne!(store.epoch(), epoch, "positions of the other are not taken for this one's");
        assert_eq!(store.bounds(&stream()).await.unwrap().last, 0);
        assert!(claim(&store, 9).await.claimed.is_empty());
        assert!(matches!(store.reserve(&key(1), 60 * SECOND).await, Ok(Reserved::New(_))));
    }

    pub async fn leases_survive_a_restart(subject: &dyn Subject) {
        if !subject.is_durable() {
            return keeps_nothing(subject).await;
        }
        let store = subject.open().await;
        let epoch = store.epoch();
        append(&store, vec![keyed("a", "1"), keyed("a", "2"), keyed("b", "3")]).await;
        let claims = claim(&store, 9).await;
        settle(&store, claims.claimed[2].token, bury("dead")).await;
        store.close().await;
        assert!(matches!(store.bounds(&stream()).await, Err(StoreError::Closed)));
        let store = subject.open().await;
        assert_eq!(store.epoch(), epoch);
        assert!(claim(&store, 9).await.claimed.is_empty(), "still under lease");
        assert_eq!(settle(&store, claims.claimed[0].token, Settle::Ack).await, Settled::Done);
        subject.pass(2 * SECOND).await;
        let again = claim(&store, 9).await.claimed.remove(0);
        assert_eq!((again.record.seq, again.attempt), (2, 2), "a crash loop is counted");
        assert!(again.token.fence > claims.claimed[1].token.fence);
        assert_eq!(store.dead_letters(&stream(), &group(), 0, 9).await.unwrap().len(), 1);
    }

    pub async fn a_dropped_claim_loses_nothing(subject: &dyn Subject) {
        let store = subject.open().await;
        append(&store, (0..20).map(|n| record(&n.to_string())).collect()).await;
        for _ in 0..10 {
            let ask = Claim { records: 2, bytes: 1 << 20, lease: SECOND };
            let (stream, group) = (stream(), group());
            let claiming = store.claim(&stream, &group, ask);
            // Polled once, and dropped in whatever state it then is.
            drop(futures_util::future::select(claiming, std::future::ready(())).await);
        }
        subject.pass(2 * SECOND).await;
        let mut all = Vec::new();
        while all.len() < 20 {
            let claims = claim(&store, 20).await;
            assert!(!claims.claimed.is_empty(), "only {} came back", all.len());
            all.extend(seqs(&claims));
        }
        all.sort_unstable();
        assert_eq!(all, (1..=20).collect::<Vec<_>>());
    }

    pub async fn arguments_are_checked(subject: &dyn Subject) {
        let store = subject.open().await;
        let invalid = |error: StoreError| {
            assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
        };
        let many = vec![record("x"); MAX_BATCH + 1];
        invalid(store.append(&stream(), many).await.unwrap_err());
        let large = NewRecord { body: vec![0; MAX_BODY + 1].into(), ..NewRecord::default() };
        invalid(store.append(&stream(), vec![record("a"), large]).await.unwrap_err());
        assert_eq!(store.bounds(&stream()).await.unwrap().last, 0, "nothing half-written");
        let largest = NewRecord { body: vec![0; MAX_BODY].into(), ..NewRecord::default() };
        append(&store, vec![largest]).await;
        for (records, lease) in
            [(0, SECOND), (MAX_BATCH + 1, SECOND), (1, SECOND / 2), (1, 50_000 * SECOND)]
        {
            let ask = Claim { records, bytes: 1, lease };
            invalid(store.claim(&stream(), &group(), ask).await.unwrap_err());
        }
        append(&store, vec![record(""); MAX_BATCH]).await;
        let limit = ReadLimit { records: MAX_BATCH + 1, bytes: 1 };
        invalid(store.read(&stream(), 0, limit).await.unwrap_err());
        let limit = ReadLimit { records: 0, bytes: 1 };
        invalid(store.read(&stream(), 0, limit).await.unwrap_err());
        let token = claim(&store, 1).await.claimed[0].token;
        let long = release(Duration::from_secs(31 * 86_400), true);
        invalid(store.settle(vec![(token, long)]).await.unwrap_err());
        let short = Settle::Extend { lease: SECOND / 2 };
        invalid(store.settle(vec![(token, Settle::Ack), (token, short)]).await.unwrap_err());
        let many = vec![(token, Settle::Ack); MAX_BATCH + 1];
        invalid(store.settle(many).await.unwrap_err());
        assert_eq!(settle(&store, token, bury(&"é".repeat(3000))).await, Settled::Done);
        let letter = store.dead_letters(&stream(), &group(), 0, 1).await.unwrap().remove(0);
        assert_eq!(letter.cause, "é".repeat(2048), "cut to 4 KiB");
        invalid(store.acquire("", SECOND).await.unwrap_err());
        invalid(store.acquire(&"n".repeat(201), SECOND).await.unwrap_err());
        let key = |scope: usize, key: usize| OnceKey {
            scope: "s".repeat(scope),
            key: "k".repeat(key),
            fingerprint: u128::MAX,
        };
        for wrong in [key(0, 1), key(1, 0), key(201, 1), key(1, 201)] {
            invalid(store.reserve(&wrong, SECOND).await.unwrap_err());
        }
        let longest = store.reserve(&key(200, 200), SECOND).await.unwrap();
        assert!(matches!(longest, Reserved::New(_)));
        let longest = store.acquire(&"n".repeat(200), SECOND).await.unwrap();
        assert!(matches!(longest, Acquired::Held(_)));
    }

    fn key(fingerprint: u128) -> OnceKey {
        OnceKey { scope: "acme/refund".to_owned(), key: "4471".to_owned(), fingerprint }
    }

    pub async fn one_reservation_wins_and_its_answer_is_kept(subject: &dyn Subject) {
        let store = subject.open().await;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let store = Arc::clone(&store);
            tasks.spawn(async move { store.reserve(&key(1), 60 * SECOND).await.unwrap() });
        }
        let mut tokens: Vec<OnceToken> = Vec::new();
        while let Some(reserved) = tasks.join_next().await {
            match reserved.unwrap() {
                Reserved::New(token) => tokens.push(token),
                Reserved::Busy(left) => assert!(left <= 60 * SECOND),
                other => panic!("{other:?}"),
            }
        }
        let [token] = tokens[..] else { panic!("{} won", tokens.len()) };
        let none = OnceToken(token.0 ^ 1);
        assert!(!store.complete(&key(1), none, "x".into(), SECOND).await.unwrap());
        store.release(&key(1), none).await.unwrap();
        assert!(store.complete(&key(1), token, "done".into(), 3600 * SECOND).await.unwrap());
        let again = store.reserve(&key(1), SECOND).await.unwrap();
        assert_eq!(again, Reserved::Done("done".into()));
        assert_eq!(store.reserve(&key(2), SECOND).await.unwrap(), Reserved::Mismatch);
        store.release(&key(1), token).await.unwrap();
        let kept = store.reserve(&key(1), SECOND).await.unwrap();
        assert_eq!(kept, Reserved::Done("done".into()), "what is done stays done");
    }

    pub async fn a_reservation_that_ran_out_completes_nothing(subject: &dyn Subject) {
        let store = subject.open().await;
        let Reserved::New(late) = store.reserve(&key(1), SECOND).await.unwrap() else {
            panic!("the first is new");
        };
        subject.pass(SECOND).await;
        assert!(!store.complete(&key(1), late, "late".into(), SECOND).await.unwrap());
        let Reserved::New(token) = store.reserve(&key(7), SECOND).await.unwrap() else {
            panic!("the key is free again");
        };
        store.release(&key(7), token).await.unwrap();
        assert!(matches!(store.reserve(&key(1), SECOND).await.unwrap(), Reserved::New(_)));
        subject.pass(SECOND).await;
        assert_eq!(store.sweep(10).await.unwrap(), 1);
        assert_eq!(store.sweep(10).await.unwrap(), 0);
    }

    pub async fn what_was_done_is_remembered_across_a_restart(subject: &dyn Subject) {
        if !subject.is_durable() {
            return keeps_nothing(subject).await;
        }
        let store = subject.open().await;
        let open = OnceKey { key: "open".to_owned(), ..key(1) };
        let Reserved::New(token) = store.reserve(&key(1), 60 * SECOND).await.unwrap() else {
            panic!("the first is new");
        };
        store.complete(&key(1), token, Bytes::new(), 60 * SECOND).await.unwrap();
        let Reserved::New(token) = store.reserve(&open, 60 * SECOND).await.unwrap() else {
            panic!("the first is new");
        };
        store.close().await;
        let store = subject.open().await;
        let again = store.reserve(&key(1), SECOND).await.unwrap();
        assert_eq!(again, Reserved::Done(Bytes::new()), "an empty answer is one");
        assert!(matches!(store.reserve(&open, SECOND).await.unwrap(), Reserved::Busy(_)));
        assert!(store.complete(&open, token, "late".into(), 60 * SECOND).await.unwrap());
    }

    pub async fn of_simultaneous_acquisitions_one_is_held(subject: &dyn Subject) {
        let store = subject.open().await;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let store = Arc::clone(&store);
            tasks.spawn(async move { store.acquire("leader", 60 * SECOND).await.unwrap() });
        }
        let held = tasks.join_all().await.into_iter();
        assert_eq!(held.filter(|one| matches!(one, Acquired::Held(_))).count(), 1);
    }

    pub async fn fence_tokens_only_grow(subject: &dyn Subject) {
        let store = subject.open().await;
        let Acquired::Held(first) = store.acquire("leader", 2 * SECOND).await.unwrap() else {
            panic!("nobody held it");
        };
        match store.acquire("leader", SECOND).await.unwrap() {
            Acquired::Busy(left) => assert!(left <= 2 * SECOND),
            Acquired::Held(_) => panic!("it is held"),
        }
        assert!(matches!(store.acquire("other", SECOND).await.unwrap(), Acquired::Held(_)));
        assert!(!store.renew("leader", first + 1, SECOND).await.unwrap());
        assert!(store.renew("leader", first, SECOND).await.unwrap());
        subject.pass(SECOND).await;
        assert!(!store.renew("leader", first, SECOND).await.unwrap(), "it had ended");
        let Acquired::Held(second) = store.acquire("leader", SECOND).await.unwrap() else {
            panic!("it had ended");
        };
        assert!(second > first);
        assert!(!store.release_lease("leader", first).await.unwrap());
        assert!(store.release_lease("leader", second).await.unwrap());
        let store = if subject.is_durable() {
            store.close().await;
            subject.open().await
        } else {
            store
        };
        match store.acquire("leader", SECOND).await.unwrap() {
            Acquired::Held(third) => assert!(third > second, "also after a restart"),
            Acquired::Busy(_) => panic!("it was released"),
        }
    }

    pub async fn a_waiter_is_woken_by_an_append(subject: &dyn Subject) {
        let store = subject.open().await;
        let waiter = store.waiter(&stream());
        let woken = waiter.woken();
        append(&store, vec![record("a")]).await;
        let patience = Duration::from_secs(10);
        tokio::time::timeout(patience, woken).await.expect("woken by an append before the wait");
        assert!(store.backstop() <= SECOND);
    }
}

pub use checks::*;
