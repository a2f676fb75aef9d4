//! Connections killed and a server crashed in the middle of work: nothing acknowledged is lost, and
//! the work goes on by itself.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use carrick_core::name::Group;
use carrick_store::{
    engine::postgres::{PostgresOptions, PostgresStore},
    fence::{Acquired, Fence},
    lease::{Claim, Queue, Settle, Settled},
    log::{Log, NewRecord, ReadLimit},
    wake::Wake,
};
use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

use super::{Scratch, record, server::OwnServer, stream, until};

/// Publishes until it is told to stop, each record again until it is acknowledged; returns the
/// bodies that were, with the number each was told.
fn publisher(
    store: PostgresStore,
    name: u32,
    stop: Arc<AtomicBool>,
) -> JoinHandle<Vec<(u64, String)>> {
    tokio::spawn(async move {
        let mut acknowledged = Vec::new();
        for n in 0.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let body = format!("{name}.{n}");
            let dedupe = Some(u128::from(name) << 64 | n as u128);
            let record = NewRecord { dedupe, ..record(&format!("k{}", n % 7), &body) };
            let seq = loop {
                match store.append(&stream("orders"), vec![record.clone()]).await {
                    Ok(appended) => break appended[0].seq(),
                    Err(error) => assert!(error.is_transient(), "{error:?}"),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            acknowledged.push((seq, body));
        }
        acknowledged
    })
}

/// Claims and acknowledges until it is told to stop; returns the numbers whose acknowledgement was
/// acknowledged.
fn worker(store: PostgresStore, stop: Arc<AtomicBool>) -> JoinHandle<Vec<u64>> {
    tokio::spawn(async move {
        let group = Group::new("billing").unwrap();
        let claim = Claim { records: 50, bytes: usize::MAX, lease: Duration::from_secs(2) };
        let mut finished = Vec::new();
        loop {
            let claimed = match store.claim(&stream("orders"), &group, claim).await {
                Ok(claims) => claims.claimed,
                Err(error) => {
                    assert!(error.is_transient(), "{error:?}");
                    Vec::new()
                }
            };
            if claimed.is_empty() {
                if stop.load(Ordering::Relaxed) {
                    return finished;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
                continue;
            }
            let acks = claimed.iter().map(|one| (one.token, Settle::Ack)).collect();
            match store.settle(acks).await {
                Ok(settled) => {
                    let done = claimed.iter().zip(settled);
                    let done = done.filter(|(_, settled)| *settled == Settled::Done);
                    finished.extend(done.map(|(one, _)| one.record.seq));
                }
                Err(error) => assert!(error.is_transient(), "{error:?}"),
            }
        }
    })
}

/// Runs publishers and workers while `disturb` does its harm, and checks what is left.
async fn survives(scratch: &Scratch, disturb: impl AsyncFn(u32)) {
    let stores = [scratch.store().await, scratch.store().await];
    let (stop, drained) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let publishers: Vec<_> = (0..6)
        .map(|name| publisher(stores[name as usize % 2].clone(), name, stop.clone()))
        .collect();
    let workers: Vec<_> =
        (0..4).map(|worker_no| worker(stores[worker_no % 2].clone(), drained.clone())).collect();
    for round in 0..4 {
        let before = stores[0].bounds(&stream("orders")).await.map_or(0, |bounds| bounds.last);
        disturb(round).await;
        until("work goes on", async || {
            let bounds = stores[0].bounds(&stream("orders")).await;
            bounds.is_ok_and(|bounds| bounds.last > before + 50)
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = Vec::new();
    for publisher in publishers {
        acknowledged.extend(publisher.await.unwrap());
    }

    let mut log = Vec::new();
    loop {
        let limit = ReadLimit { records: 1000, bytes: usize::MAX };
        let after = log.len() as u64;
        let read = stores[1].read(&stream("orders"), after, limit).await.unwrap();
        if read.is_empty() {
            break;
        }
        for record in read {
            assert_eq!(record.seq, log.len() as u64 + 1);
            log.push(String::from_utf8(record.body.to_vec()).unwrap());
        }
    }
    for (seq, body) in &acknowledged {
        assert_eq!(log[*seq as usize - 1], *body, "acknowledged under {seq}");
    }
    let distinct: BTreeSet<&String> = log.iter().collect();
    assert_eq!(distinct.len(), log.len(), "a repeated publish was stored twice");

    until("all is finished", async || {
        let groups = stores[0].groups(&stream("orders")).await.unwrap();
        groups[0].1.backlog == 0
    })
    .await;
    drained.store(true, Ordering::Relaxed);
    let mut finished = Vec::new();
    for worker in workers {
        finished.extend(worker.await.unwrap());
    }
    let distinct: BTreeSet<u64> = finished.iter().copied().collect();
    assert_eq!(distinct.len(), finished.len(), "an acknowledged record was delivered again");
    for store in stores {
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn nothing_acknowledged_is_lost_when_the_server_crashes() {
    let server = OwnServer::start();
    let scratch = Scratch::on(server.url());
    survives(&scratch, async |_| {
        tokio::task::block_in_place(|| server.crash_and_restart());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn nothing_acknowledged_is_lost_when_connections_are_killed() {
    let mut scratch = Scratch::new();
    scratch.name_connections();
    survives(&scratch, async |_| {
        for _ in 0..5 {
            scratch.kill_connections().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    scratch.drop().await;
}

/// A network before the server of `url`, which passes nothing on while it is frozen.
async fn network(url: &str, mut frozen: watch::Receiver<bool>) -> String {
    let server: PgConnectOptions = url.parse().unwrap();
    let address = format!("{}:{}", server.get_host(), server.get_port());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            frozen.wait_for(|frozen| !frozen).await.ok();
            let Ok((client, _)) = listener.accept().await else { return };
            let Ok(server) = TcpStream::connect(&address).await else { return };
            client.set_nodelay(true).ok();
            server.set_nodelay(true).ok();
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::spawn(pass(from_client, to_server, frozen.clone()));
            tokio::spawn(pass(from_server, to_client, frozen.clone()));
        }
    });
    server.host("127.0.0.1").port(port).to_url_lossy().to_string()
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut frozen: watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        frozen.wait_for(|frozen| !frozen).await.ok();
        if to.write_all(&bytes[..length]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn nobody_waits_for_ever_when_the_network_goes_silent() {
    let mut scratch = Scratch::new();
    let direct = scratch.url.clone();
    let (freeze, frozen) = watch::channel(false);
    scratch.url = network(&direct, frozen).await;
    let short = Duration::from_millis(300);
    let options = PostgresOptions {
        statement_timeout: short,
        lock_timeout: short,
        acquire_timeout: short,
        ..scratch.options()
    };
    let store = scratch.store_with(options).await;
    let (orders, billing) = (stream("orders"), Group::new("billing").unwrap());
    let claim = Claim { records: 1, bytes: 100, lease: Duration::from_secs(60) };
    store.append(&orders, vec![record("", "x")]).await.unwrap();
    let claimed = store.claim(&orders, &billing, claim).await.unwrap().claimed;
    let Acquired::Held(token) = store.acquire("lease", short * 100).await.unwrap() else {
        panic!()
    };
    freeze.send(true).unwrap();
    let patience = Duration::from_secs(10);
    let (append, claims, settle, read, renew) = tokio::join!(
        timeout(patience, store.append(&orders, vec![record("", "y")])),
        timeout(patience, store.claim(&orders, &billing, claim)),
        timeout(patience, store.settle(vec![(claimed[0].token, Settle::Ack)])),
        timeout(patience, store.bounds(&orders)),
        timeout(patience, store.renew("lease", token, short)),
    );
    assert!(append.expect("told in time").unwrap_err().is_transient());
    assert!(claims.expect("told in time").unwrap_err().is_transient());
    assert!(settle.expect("told in time").unwrap_err().is_transient());
    assert!(read.expect("told in time").unwrap_err().is_transient());
    assert!(renew.expect("told in time").unwrap_err().is_transient());
    freeze.send(false).unwrap();
    until("work goes on", async || {
        store.append(&orders, vec![record("", "z")]).await.is_ok()
            && store.claim(&orders, &billing, claim).await.is_ok()
    })
    .await;
    store.close().await;
    scratch.url = direct;
    scratch.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn a_killed_listener_listens_again() {
    let mut scratch = Scratch::new();
    scratch.name_connections();
    let options = || PostgresOptions { poll: Duration::from_secs(10), ..scratch.options() };
    let (here, there) = (scratch.store_with(options()).await, scratch.store_with(options()).await);
    let waiter = here.waiter(&stream("orders"));
    for _ in 0..3 {
        until("a notice arrives", async || {
            let woken = waiter.woken();
            // A connection that was killed is told by an error; the next append has a new one.
            there.append(&stream("orders"), vec![record("", "x")]).await.ok();
            tokio::time::timeout(Duration::from_millis(200), woken).await.is_ok()
        })
        .await;
        let woken = waiter.woken();
        scratch.kill_connections().await;
        // Whoever waits is woken when the listener is back: something may have been missed.
        tokio::time::timeout(Duration::from_secs(9), woken).await.expect("woken after the loss");
    }
    here.close().await;
    there.close().await;
    scratch.drop().await;
}
