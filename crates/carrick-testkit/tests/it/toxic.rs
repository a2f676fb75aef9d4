use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use carrick_testkit::toxic::{Counts, MOST_CONNECTIONS, Toxic, Toxics, Way};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{Instant, timeout},
};

const SECOND: Duration = Duration::from_secs(1);

/// A test that hangs has failed; nothing here takes a tenth of it.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that sends back what it gets, until its task is aborted.
async fn echo() -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut clients = tokio::task::JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            clients.spawn(async move {
                let (mut from, mut to) = client.split();
                tokio::io::copy(&mut from, &mut to).await.ok();
                to.shutdown().await.ok();
            });
        }
    });
    (address, task)
}

async fn proxy(toxics: Toxics) -> Toxic {
    Toxic::with(echo().await.0, toxics, 1).await.unwrap()
}

async fn connect(proxy: &Toxic) -> TcpStream {
    TcpStream::connect(proxy.address()).await.unwrap()
}

/// Sends and gets back a few bytes.
async fn ping(client: &mut TcpStream) -> std::io::Result<()> {
    client.write_all(b"ping").await?;
    let mut answer = [0; 4];
    timeout(PATIENCE, client.read_exact(&mut answer)).await.expect("it answers")?;
    assert_eq!(&answer, b"ping");
    Ok(())
}

/// How a read that does not hang ends.
async fn read(client: &mut TcpStream) -> Result<usize, ErrorKind> {
    let read = timeout(PATIENCE, client.read(&mut [0; 16])).await.expect("it ends");
    read.map_err(|error| error.kind())
}

/// Waits for the proxy's tasks.
async fn until(proxy: &Toxic, holds: impl Fn(Counts) -> bool) {
    let wait = async {
        while !holds(proxy.counts()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{:?}", proxy.counts()));
}

#[tokio::test]
async fn without_harm_everything_goes_through_to_the_byte() {
    let proxy = proxy(Toxics::default()).await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n ^ n >> 9) as u8).collect();
    let (mut from, mut to) = connect(&proxy).await.into_split();
    let expected = sent.clone();
    let writer = tokio::spawn(async move {
        to.write_all(&sent).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut found = Vec::new();
    timeout(PATIENCE, from.read_to_end(&mut found)).await.unwrap().unwrap();
    writer.await.unwrap();
    assert!(found == expected, "{} bytes of {}", found.len(), expected.len());
    until(&proxy, |counts| counts.open == 0).await;
    let bytes = expected.len() as u64;
    let expected = Counts { accepted: 1, up: bytes, down: bytes, ..Counts::default() };
    assert_eq!(proxy.counts(), expected);
}

#[tokio::test(start_paused = true)]
async fn latency_is_added_in_each_direction() {
    let way = Way { latency: SECOND, ..Way::default() };
    let proxy = proxy(Toxics::both(way)).await;
    let (mut client, start) = (connect(&proxy).await, Instant::now());
    client.write_all(b"ping").await.unwrap();
    client.read_exact(&mut [0; 4]).await.unwrap();
    assert!(start.elapsed() >= 2 * SECOND, "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn toxiproxy_148_no_connection_escapes_a_harm_that_was_set() {
    let proxy = proxy(Toxics::default()).await;
    for _ in 0..20 {
        let mut before = Vec::new();
        for _ in 0..5 {
            before.push(connect(&proxy).await);
        }
        proxy.set(Toxics { down: Way { limit: Some(0), ..Way::default() }, ..Toxics::default() });
        for mut client in before {
            client.write_all(b"ping").await.ok();
            assert!(!matches!(read(&mut client).await, Ok(1..)), "present connections too");
        }
        let mut after = connect(&proxy).await;
        assert!(!matches!(read(&mut after).await, Ok(1..)));
        proxy.set(Toxics::default());
        ping(&mut connect(&proxy).await).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_resets_all_that_are_there_and_none_that_comes_later() {
    let proxy = proxy(Toxics::default()).await;
    for round in 0..50 {
        // Some that the proxy knows well, and some that it may not have accepted yet.
        let mut known = connect(&proxy).await;
        ping(&mut known).await.unwrap();
        let mut fresh = connect(&proxy).await;
        proxy.cut();
        let mut later = connect(&proxy).await;
        assert_eq!(read(&mut known).await, Err(ErrorKind::ConnectionReset), "round {round}");
        assert_eq!(read(&mut fresh).await, Err(ErrorKind::ConnectionReset), "round {round}");
        ping(&mut later).await.unwrap();
        drop(later);
        until(&proxy, |counts| counts.open == 0).await; // or the next cut would count it too
    }
    assert_eq!((proxy.counts().accepted, proxy.counts().reset), (150, 100));
}

#[tokio::test]
async fn a_refused_connection_is_told_so_and_present_ones_go_on() {
    let proxy = proxy(Toxics::default()).await;
    let mut present = connect(&proxy).await;
    for _ in 0..10 {
        ping(&mut present).await.unwrap();
        proxy.refuse();
        let refused = TcpStream::connect(proxy.address()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        ping(&mut present).await.unwrap();
        proxy.accept().unwrap();
        proxy.accept().unwrap();
        ping(&mut connect(&proxy).await).await.unwrap();
    }
}

#[tokio::test]
async fn connect_es_463_a_black_hole_accepts_and_answers_nothing() {
    let proxy = proxy(Toxics::black_hole()).await;
    let mut client = connect(&proxy).await;
    client.write_all(b"anybody there?").await.unwrap();
    until(&proxy, |counts| counts.swallowed == 14).await;
    assert!(timeout(SECOND / 50, client.read(&mut [0])).await.is_err(), "neither answer nor end");
    assert_eq!((proxy.counts().up, proxy.counts().open), (0, 1));
    proxy.set(Toxics::default());
    assert_eq!(read(&mut client).await, Err(ErrorKind::ConnectionReset), "bytes are missing");
    ping(&mut connect(&proxy).await).await.unwrap();
}

#[tokio::test]
async fn a_reset_comes_when_a_connection_is_old_enough() {
    let proxy = proxy(Toxics::default()).await;
    let mut client = connect(&proxy).await;
    ping(&mut client).await.unwrap();
    proxy.set(Toxics { reset: Some(3600 * SECOND), ..Toxics::default() });
    ping(&mut client).await.unwrap();
    proxy.set(Toxics { reset: Some(Duration::MAX), ..Toxics::default() });
    ping(&mut client).await.unwrap();
    proxy.set(Toxics { reset: Some(Duration::ZERO), toxicity: 0.0, ..Toxics::default() });
    ping(&mut client).await.unwrap();
    proxy.set(Toxics { reset: Some(Duration::ZERO), ..Toxics::default() });
    assert_eq!(read(&mut client).await, Err(ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn an_answer_can_be_cut_short() {
    let limit = Way { limit: Some(6), ..Way::default() };
    let proxy = proxy(Toxics { down: limit, ..Toxics::default() }).await;
    let mut client = connect(&proxy).await;
    ping(&mut client).await.unwrap();
    client.write_all(b"ping").await.unwrap();
    let mut rest = Vec::new();
    let end = timeout(PATIENCE, client.read_to_end(&mut rest)).await.unwrap();
    assert_eq!((end.unwrap(), &rest[..]), (2, &b"pi"[..]));
}

#[tokio::test]
async fn a_share_of_the_connections_is_the_same_share_for_the_same_seed() {
    let limit = Way { limit: Some(0), ..Way::default() };
    let mut found = Vec::new();
    for _ in 0..2 {
        let proxy = proxy(Toxics { up: limit, toxicity: 0.4, ..Toxics::default() }).await;
        let mut harmed = Vec::new();
        for _ in 0..40 {
            let mut client = connect(&proxy).await;
            client.write_all(b"ping").await.ok();
            harmed.push(!matches!(read(&mut client).await, Ok(1..)));
        }
        found.push(harmed);
    }
    assert_eq!(found[0], found[1]);
    let share = found[0].iter().filter(|harmed| **harmed).count();
    assert!((6..=26).contains(&share), "{share} of 40");
}

#[tokio::test]
async fn a_server_that_is_not_there_resets_the_client() {
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let proxy = Toxic::start(nobody).await.unwrap();
    let mut client = connect(&proxy).await;
    assert_eq!(read(&mut client).await, Err(ErrorKind::ConnectionReset));
    assert_eq!(proxy.counts().unreachable, 1);
}

#[tokio::test]
async fn more_connections_than_it_has_places_for_are_reset_and_places_come_back() {
    let proxy = proxy(Toxics::black_hole()).await;
    let mut clients = Vec::new();
    for _ in 0..MOST_CONNECTIONS {
        clients.push(connect(&proxy).await);
    }
    let mut extra = connect(&proxy).await;
    assert_eq!(read(&mut extra).await, Err(ErrorKind::ConnectionReset));
    proxy.set(Toxics::default());
    drop(clients);
    until(&proxy, |counts| counts.open == 0).await;
    ping(&mut connect(&proxy).await).await.unwrap();
}

#[tokio::test]
async fn a_dropped_proxy_leaves_nothing_behind() {
    let proxy = proxy(Toxics::both(Way { latency: 3600 * SECOND, ..Way::default() })).await;
    let mut client = connect(&proxy).await;
    client.write_all(b"ping").await.unwrap();
    until(&proxy, |counts| counts.open == 1).await;
    let address = proxy.address();
    drop(proxy);
    assert!(!matches!(read(&mut client).await, Ok(1..)), "its connections are closed");
    assert!(TcpStream::connect(address).await.is_err(), "and so is its port");
}

#[test]
fn it_can_be_told_from_outside_of_its_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let proxy = runtime.block_on(proxy(Toxics::default()));
    proxy.cut();
    proxy.refuse();
    proxy.accept().unwrap();
    proxy.set(Toxics::default());
    runtime.block_on(async { ping(&mut connect(&proxy).await).await.unwrap() });
    drop(runtime);
    proxy.cut();
    drop(proxy);
}
