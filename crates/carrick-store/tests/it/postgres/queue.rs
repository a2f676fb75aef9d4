//! Claims, settlements and dead letters, where the engine differs from others: several processes,
//! snapshots that stay open, and the journal.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use carrick_core::name::Group;
use carrick_store::{
    engine::postgres::PostgresStore,
    lease::{Claim, Claimed, LeaseToken, Queue, Select, Settle, Settled, Start},
    log::{Log, ReadLimit, Trim},
};
use jiff::Timestamp;
use sqlx::{AssertSqlSafe, Connection};
use tokio::time::Instant;

use super::{Beside, Scratch, median, record, stream, until};

const LEASE: Duration = Duration::from_secs(60);

fn group(name: &str) -> Group {
    Group::new(name).unwrap()
}

fn claim(records: usize) -> Claim {
    Claim { records, bytes: usize::MAX, lease: LEASE }
}

async fn claimed(store: &PostgresStore, records: usize) -> Vec<Claimed> {
    store.claim(&stream("orders"), &group("billing"), claim(records)).await.unwrap().claimed
}

fn acks(claimed: &[Claimed]) -> Vec<(LeaseToken, Settle)> {
    claimed.iter().map(|one| (one.token, Settle::Ack)).collect()
}

fn seqs(claimed: &[Claimed]) -> Vec<u64> {
    claimed.iter().map(|one| one.record.seq).collect()
}

fn release(one: &Claimed, delay: Duration, counted: bool) -> (LeaseToken, Settle) {
    (one.token, Settle::Release { delay, counted })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_failed_head_blocks_its_key_and_no_other_whoever_claims() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.store().await, scratch.store().await);
    let orders = stream("orders");
    let records = ["a", "a", "b", "", "a"].map(|key| record(key, key)).to_vec();
    one.append(&orders, records).await.unwrap();

    let first = claimed(&one, 2).await;
    assert_eq!(seqs(&first), [1, 2], "one claim may hold several of a key");
    let second = claimed(&two, 10).await;
    assert_eq!(seqs(&second), [3, 4], "another process gets the others");

    let settled =
        one.settle(vec![release(&first[0], Duration::ZERO, true), (first[1].token, Settle::Ack)]);
    assert_eq!(settled.await.unwrap(), [Settled::Done, Settled::Stale]);
    let again = claimed(&two, 10).await;
    assert_eq!(seqs(&again), [1, 2, 5]);
    assert_eq!(again.iter().map(|one| one.attempt).collect::<Vec<_>>(), [2, 1, 1]);
    assert!(again[0].token.fence > first[0].token.fence);
    assert_eq!(again[0].first_claimed_at, first[0].first_claimed_at);

    let settled = two.settle(vec![
        (again[0].token, Settle::Bury { cause: "no \0 good".to_owned() }),
        (again[1].token, Settle::Ack),
    ]);
    assert_eq!(settled.await.unwrap(), [Settled::Done, Settled::Stale]);
    let dead = one.dead_letters(&orders, &group("billing"), 0, 10).await.unwrap();
    assert_eq!(dead.len(), 1);
    assert_eq!((dead[0].record.seq, dead[0].attempts), (1, 2));
    assert_eq!((dead[0].cause.as_str(), dead[0].fence), ("no \0 good", again[0].token.fence));

    let none = Select::Cause("other".to_owned());
    assert_eq!(one.redrive(&orders, &group("billing"), &none, 10).await.unwrap(), 0);
    let good = Select::Cause("good".to_owned());
    assert_eq!(one.redrive(&orders, &group("billing"), &good, 10).await.unwrap(), 1);
    let redriven = claimed(&two, 10).await;
    assert_eq!(seqs(&redriven), [1, 2, 5], "it re-enters its key's order at its own number");
    assert_eq!(redriven[0].attempt, 1);
    two.settle(acks(&redriven)).await.unwrap();
    two.settle(acks(&second)).await.unwrap();
    let stats = one.groups(&orders).await.unwrap();
    assert_eq!(stats[0].1, Default::default(), "nothing is left");
    one.close().await;
    two.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_blocked_key_is_listed_and_skipped() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let (orders, billing) = (stream("orders"), group("billing"));
    let records = ["a", "a", "b", "b"].map(|key| record(key, key)).to_vec();
    store.append(&orders, records).await.unwrap();
    let first = claimed(&store, 10).await;
    store.settle(vec![release(&first[0], LEASE, true)]).await.unwrap();
    let keys = store.blocked_keys(&orders, &billing, 0, 10).await.unwrap();
    let told: Vec<_> = keys.iter().map(|key| (key.key.as_str(), key.head, key.behind)).collect();
    assert_eq!(told, [("a", 1, 1), ("b", 3, 1)]);
    assert!(keys[0].ready_at.is_some() && keys[1].ready_at.is_none());
    let skip = store.skip(&orders, &billing, &Select::All, "by hand").await.unwrap();
    assert_eq!(skip, 1, "what is under lease is not skipped");
    assert_eq!(seqs(&claimed(&store, 10).await), [2]);
    let key = Select::Key("a".to_owned());
    assert_eq!(store.purge(&orders, &billing, &key, 10).await.unwrap(), 1);
    assert_eq!(store.dead_letters(&orders, &billing, 0, 10).await.unwrap(), []);
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_lease_that_ran_out_is_handed_out_again_and_its_token_is_stale() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.store().await, scratch.store().await);
    let orders = stream("orders");
    one.append(&orders, vec![record("a", "x"), record("a", "y")]).await.unwrap();
    let short = Claim { lease: Duration::from_secs(1), ..claim(10) };
    let claims = one.claim(&orders, &group("billing"), short).await.unwrap();
    let next = two.claim(&orders, &group("billing"), short).await.unwrap();
    assert!(next.claimed.is_empty());
    assert!(next.next_ready.is_some(), "it tells when to come again");
    until("the lease runs out", async || {
        let again = claimed(&two, 10).await;
        let over = seqs(&again) == [1, 2];
        assert!(over || again.is_empty());
        assert!(!over || again.iter().all(|one| one.attempt == 2));
        over
    })
    .await;
    let stale = one.settle(acks(&claims.claimed)).await.unwrap();
    assert_eq!(stale, [Settled::Stale; 2]);
    one.close().await;
    two.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_trim_leaves_what_is_unfinished_or_dead() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let (orders, billing) = (stream("orders"), group("billing"));
    store.create_group(&orders, &billing, Start::Earliest).await.unwrap();
    store.append(&orders, vec![record("", "x"); 6]).await.unwrap();
    let all = || Trim { stored_before: Timestamp::MAX, limit: 100 };
    assert_eq!(store.trim(&orders, all()).await.unwrap(), 0, "never claimed");
    let first = claimed(&store, 4).await;
    store
        .settle(vec![
            (first[0].token, Settle::Bury { cause: "x".into() }),
            (first[1].token, Settle::Ack),
            (first[3].token, Settle::Ack),
        ])
        .await
        .unwrap();
    assert_eq!(store.trim(&orders, all()).await.unwrap(), 1, "only 2: 1 is dead, 3 under lease");
    assert_eq!(store.bounds(&orders).await.unwrap().first, 3);
    let read = store.read(&orders, 2, ReadLimit::default()).await.unwrap();
    assert_eq!(read.len(), 4);
    assert!(store.read(&orders, 0, ReadLimit::default()).await.is_err());
    store.settle(vec![(first[2].token, Settle::Ack)]).await.unwrap();
    let rest = claimed(&store, 10).await;
    store.settle(acks(&rest)).await.unwrap();
    let none = Trim { stored_before: Timestamp::UNIX_EPOCH, limit: 100 };
    assert_eq!(store.trim(&orders, none).await.unwrap(), 0, "too young");
    assert_eq!(store.trim(&orders, Trim { limit: 3, ..all() }).await.unwrap(), 3);
    assert_eq!(store.trim(&orders, all()).await.unwrap(), 1);
    let bounds = store.bounds(&orders).await.unwrap();
    assert_eq!((bounds.first, bounds.last), (7, 6), "empty, and it knows where it was");
    // The dead letter is still there, and what is redriven is not trimmed before it is done.
    assert_eq!(store.redrive(&orders, &billing, &Select::All, 1).await.unwrap(), 1);
    assert_eq!(store.trim(&orders, all()).await.unwrap(), 0);
    let redriven = claimed(&store, 10).await;
    assert_eq!(seqs(&redriven), [1]);
    store.settle(acks(&redriven)).await.unwrap();
    assert_eq!(store.trim(&orders, all()).await.unwrap(), 1);
    let appended = store.append(&orders, vec![record("", "x")]).await.unwrap();
    assert_eq!(appended[0].seq(), 7);
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn several_processes_keep_the_order_of_keys_and_lose_nothing() {
    let scratch = Scratch::new();
    let orders = stream("orders");
    let stores = [scratch.store().await, scratch.store().await, scratch.store().await];
    const TOTAL: usize = 3000;
    let records = |from: usize| {
        (from..from + 100).map(|n| record(&format!("k{}", n % 40), n.to_string())).collect()
    };
    let writer = {
        let (store, orders) = (stores[0].clone(), orders.clone());
        tokio::spawn(async move {
            for from in (0..TOTAL).step_by(100) {
                store.append(&orders, records(from)).await.unwrap();
            }
        })
    };
    let (done, mut finished) = tokio::sync::mpsc::channel(TOTAL * 2);
    let workers: Vec<_> = (0..6)
        .map(|worker| {
            let (store, done) = (stores[worker % 3].clone(), done.clone());
            tokio::spawn(async move {
                let mut turn = worker;
                loop {
                    let claimed = claimed(&store, 20).await;
                    turn += 1;
                    if let Some(first) = claimed.first()
                        && turn % 5 == 0
                    {
                        // A failure now and then: the key's later ones come back with it.
                        store.settle(vec![release(first, Duration::ZERO, true)]).await.unwrap();
                    }
                    // What is done is told before it is acknowledged: the order of effects.
                    let fence: HashMap<_, _> =
                        claimed.iter().map(|one| (one.record.seq, one.token.fence)).collect();
                    let settled = store.settle(acks(&claimed)).await.unwrap();
                    for (one, settled) in claimed.iter().zip(settled) {
                        if settled == Settled::Done {
                            let key = one.record.key.clone().unwrap();
                            let seq = one.record.seq;
                            done.send((key, seq, fence[&seq])).await.unwrap();
                        }
                    }
                    if claimed.is_empty() {
                        tokio::task::yield_now().await;
                    }
                }
            })
        })
        .collect();
    writer.await.unwrap();
    let mut by_key: HashMap<String, Vec<(u64, u64)>> = HashMap::new();
    let mut seen = BTreeSet::new();
    while seen.len() < TOTAL {
        let next = tokio::time::timeout(Duration::from_secs(60), finished.recv());
        let (key, seq, fence) = next.await.expect("in time").unwrap();
        assert!(seen.insert(seq), "{seq} was finished twice");
        by_key.entry(key).or_default().push((seq, fence));
    }
    for worker in workers {
        assert!(!worker.is_finished(), "a worker was told of an error");
        worker.abort();
    }
    for (key, mut done) in by_key {
        // Reports of different workers may overtake each other; fences may not.
        done.sort_unstable();
        assert!(done.is_sorted_by_key(|(_, fence)| *fence), "{key}: {done:?}");
    }
    let stats = stores[1].groups(&orders).await.unwrap();
    assert_eq!(stats[0].1.backlog, 0);
    for store in stores {
        store.close().await;
    }
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn whoever_looks_in_vain_sees_what_others_did_since() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.store().await, scratch.store().await);
    let (orders, billing) = (stream("orders"), group("billing"));
    one.create_group(&orders, &billing, Start::Earliest).await.unwrap();
    let in_vain = async || {
        for _ in 0..3 {
            assert!(claimed(&one, 10).await.is_empty());
        }
    };
    in_vain().await;
    two.append(&orders, vec![record("a", "x"), record("a", "y")]).await.unwrap();
    let first = claimed(&one, 1).await;
    assert_eq!(seqs(&first), [1], "an append");
    in_vain().await;
    two.settle(acks(&first)).await.unwrap();
    let second = claimed(&one, 1).await;
    assert_eq!(seqs(&second), [2], "an acknowledgement");
    two.settle(vec![(second[0].token, Settle::Bury { cause: "x".into() })]).await.unwrap();
    in_vain().await;
    two.redrive(&orders, &billing, &Select::All, 10).await.unwrap();
    let short = Claim { lease: Duration::from_secs(1), ..claim(1) };
    let third = one.claim(&orders, &billing, short).await.unwrap().claimed;
    assert_eq!(seqs(&third), [2], "a redrive");
    until("a lease runs out", async || !claimed(&one, 1).await.is_empty()).await;
    one.close().await;
    two.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_claim_with_something_in_hand_does_not_look_through_the_whole_log() {
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let orders = stream("orders");
    let mut records = vec![record("k", "x"); 900];
    records[1] = record("", "free");
    store.append(&orders, records).await.unwrap();
    assert_eq!(seqs(&claimed(&store, 1).await), [1]);
    let claims = store.claim(&orders, &group("billing"), claim(10)).await.unwrap();
    assert_eq!(seqs(&claims.claimed), [2]);
    let now = claims.claimed[0].first_claimed_at;
    assert!(claims.next_ready.is_some_and(|at| at <= now), "there is more to look at");
    let stats = store.groups(&orders).await.unwrap()[0].1;
    assert_eq!((stats.leased, stats.waiting, stats.backlog), (2, 100, 900));
    // With nothing in hand it looks further, for there might be something.
    assert!(claimed(&store, 10).await.is_empty());
    assert_eq!(store.groups(&orders).await.unwrap()[0].1.waiting, 898);
    store.close().await;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_journal_stays_short_and_who_fell_behind_reads_it_anew() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.store().await, scratch.store().await);
    let orders = stream("orders");
    one.append(&orders, vec![record("a", "x"); 1000]).await.unwrap();
    let ahead = claimed(&two, 1).await;
    assert_eq!(seqs(&ahead), [1]);
    two.settle(acks(&ahead)).await.unwrap();
    // More transactions than the journal keeps, while the other process knows an early state.
    for seq in 2..402 {
        let next = claimed(&one, 1).await;
        assert_eq!(seqs(&next), [seq]);
        one.settle(acks(&next)).await.unwrap();
    }
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM carrick_journal")
        .fetch_one(&mut scratch.operator().await)
        .await
        .unwrap();
    assert!(rows <= 512, "{rows} rows");
    assert_eq!(seqs(&claimed(&two, 1).await), [402]);
    // A process that starts knows as much.
    let three = scratch.store().await;
    let stats = three.groups(&orders).await.unwrap()[0].1;
    assert_eq!((stats.backlog, stats.leased, stats.waiting), (1000 - 401, 1, 0));
    for store in [one, two, three] {
        store.close().await;
    }
    scratch.drop().await;
}

/// The third thing the message path must show: a snapshot that stays open for a whole run does not
/// slow the claim path by more than twice.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_snapshot_held_open_does_not_slow_claims() {
    const EVENTS: usize = 20_000;
    let scratch = Scratch::new();
    let store = scratch.store().await;
    let mut beside = Beside::new(&scratch).await;
    let mut run = async |topic: &str, pinned: bool| {
        let topic = stream(topic);
        let group = group("billing");
        let mut operator = scratch.operator().await;
        let mut snapshot = None;
        if pinned {
            let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM carrick_group";
            snapshot = Some(operator.begin_with(AssertSqlSafe(begin.to_owned())).await.unwrap());
        }
        for batch in 0..EVENTS / 500 {
            let records =
                (0..500).map(|n| record(&format!("k{}", (batch * 500 + n) % 500), "x".repeat(200)));
            store.append(&topic, records.collect()).await.unwrap();
        }
        let (mut times, mut ratios, mut done) = (Vec::new(), Vec::new(), 0);
        while done < EVENTS {
            let start = Instant::now();
            let claimed = store.claim(&topic, &group, claim(50)).await.unwrap().claimed;
            let time = start.elapsed().as_secs_f64();
            times.push(time);
            ratios.push(time / beside.time().await.as_secs_f64());
            done += claimed.len();
            let settled = store.settle(acks(&claimed)).await.unwrap();
            assert!(settled.iter().all(|settled| *settled == Settled::Done));
        }
        if let Some(snapshot) = snapshot {
            snapshot.rollback().await.unwrap();
        }
        // The end of the run is where what piled up would be felt.
        let last = times.len() * 3 / 4;
        (median(times.split_off(last)), median(ratios.split_off(last)))
    };
    run("warm", false).await;
    let (without, without_by_bare) = run("without", false).await;
    let (with, with_by_bare) = run("with", true).await;
    let ratio = with_by_bare / without_by_bare;
    eprintln!(
        "claim of 50: median {:.2} ms without a snapshot, {:.2} ms with one; beside bare \
         insertions {ratio:.2}x",
        without * 1e3,
        with * 1e3,
    );
    assert!(ratio <= 2.0);
    store.close().await;
    scratch.drop().await;
}
