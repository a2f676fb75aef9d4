//! A transaction pooler, as strict as the strictest: it looks at every message that would pass
//! through it, and notes those that a pooler in `transaction` mode refuses or mixes up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use carrick_core::name::Group;
use carrick_store::{
    engine::postgres::{PostgresConfig, PostgresOptions, PostgresStore},
    fence::{Acquired, Fence},
    lease::{Claim, Queue, Select, Settle, Start},
    log::{Log, ReadLimit, Trim},
    once::{Once, OnceKey, Reserved},
};
use parking_lot::Mutex;
use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::{Scratch, record, stream};

/// What PgBouncer knows of a connection; it refuses one that asks for anything else.
const PARAMETERS: [&str; 6] =
    ["user", "database", "client_encoding", "DateStyle", "TimeZone", "application_name"];

type Noted = Arc<Mutex<Vec<String>>>;

/// Starts the pooler before the server of `url`; returns its own URL.
async fn pooler(url: &str, noted: Noted) -> String {
    let server: PgConnectOptions = url.parse().unwrap();
    let address = format!("{}:{}", server.get_host(), server.get_port());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (address, noted) = (address.clone(), noted.clone());
            // An error is the end of a connection.
            tokio::spawn(async move { carry(client, &address, noted).await.ok() });
        }
    });
    server.host("127.0.0.1").port(port).to_url_lossy().to_string()
}

async fn carry(mut client: TcpStream, address: &str, noted: Noted) -> std::io::Result<()> {
    let mut server = TcpStream::connect(address).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    // A start is a length and a body; one of eight bytes asks for encryption, and is told no.
    let start = loop {
        let length = client.read_u32().await?;
        let mut body = vec![0; length as usize - 4];
        client.read_exact(&mut body).await?;
        if length != 8 {
            break body;
        }
        client.write_all(b"N").await?;
    };
    let mut words = start[4..].split(|byte| *byte == 0).map(String::from_utf8_lossy);
    while let (Some(name), Some(_)) = (words.next(), words.next()) {
        if !name.is_empty() && !PARAMETERS.contains(&&*name) {
            noted.lock().push(format!("the connection asks for {name}"));
        }
    }
    server.write_u32(start.len() as u32 + 4).await?;
    server.write_all(&start).await?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let state = Arc::new(AtomicU8::new(0));
    let seen = state.clone();
    let answers = messages(from_server, to_client, move |kind, body| {
        if kind == b'Z' {
            seen.store(body[0], Ordering::SeqCst);
        }
    });
    let requests = messages(from_client, to_server, move |kind, body| {
        let idle = state.load(Ordering::SeqCst) == b'I';
        let text = String::from_utf8_lossy(body).replace('\0', " ");
        let wrong = match kind {
            b'Q' if idle => !text.starts_with("BEGIN"),
            b'Q' => text.starts_with("SET ") && !text.starts_with("SET LOCAL"),
            // A statement with a name is not there in another session; one outside a transaction
            // would run without our timeouts and in another schema.
            b'P' => body[0] != 0 || idle,
            _ => false,
        };
        if wrong || text.contains("LISTEN") {
            noted.lock().push(format!("{}: {text}", kind as char));
        }
    });
    tokio::try_join!(answers, requests)?;
    Ok(())
}

/// Carries messages one way, and shows each.
async fn messages(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut show: impl FnMut(u8, &[u8]),
) -> std::io::Result<()> {
    loop {
        let kind = from.read_u8().await?;
        let length = from.read_u32().await?;
        let mut body = vec![0; length as usize - 4];
        from.read_exact(&mut body).await?;
        show(kind, &body);
        let mut message = vec![kind];
        message.extend(length.to_be_bytes());
        message.extend(body);
        to.write_all(&message).await?;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Postgres: ./test starts one"]
async fn behind_a_transaction_pooler_no_session_state_is_left() {
    let scratch = Scratch::new();
    let noted = Noted::default();
    let url = pooler(&scratch.url, noted.clone()).await;
    let options = PostgresOptions { pooler: true, max_connections: 2, ..scratch.options() };
    let config = PostgresConfig::try_from(options).unwrap();
    let store = PostgresStore::connect(&url, config).await.unwrap();
    let (orders, billing) = (stream("orders"), Group::new("billing").unwrap());
    let minute = Duration::from_secs(60);

    for n in 0..5 {
        store.append(&orders, vec![record("k", n.to_string())]).await.unwrap();
    }
    assert_eq!(store.read(&orders, 0, ReadLimit::default()).await.unwrap().len(), 5);
    assert_eq!(store.streams(None, 10).await.unwrap().len(), 1);
    store.create_group(&orders, &billing, Start::Earliest).await.unwrap();
    let claim = Claim { records: 2, bytes: 1000, lease: minute };
    let claimed = store.claim(&orders, &billing, claim).await.unwrap().claimed;
    let cause = "x".to_owned();
    let settle = vec![(claimed[0].token, Settle::Ack), (claimed[1].token, Settle::Bury { cause })];
    store.settle(settle).await.unwrap();
    assert_eq!(store.dead_letters(&orders, &billing, 0, 10).await.unwrap().len(), 1);
    assert_eq!(store.redrive(&orders, &billing, &Select::All, 10).await.unwrap(), 1);
    assert_eq!(store.groups(&orders).await.unwrap()[0].1.backlog, 4);
    let trim = Trim { stored_before: jiff::Timestamp::MAX, limit: 10 };
    assert_eq!(store.trim(&orders, trim).await.unwrap(), 1);

    let key = OnceKey { scope: "s".into(), key: "k".into(), fingerprint: 1 };
    let Reserved::New(token) = store.reserve(&key, minute).await.unwrap() else { panic!() };
    assert!(store.complete(&key, token, "done".into(), minute).await.unwrap());
    assert_eq!(store.reserve(&key, minute).await.unwrap(), Reserved::Done("done".into()));
    let Acquired::Held(fence) = store.acquire("lease", minute).await.unwrap() else { panic!() };
    assert!(store.renew("lease", fence, minute).await.unwrap());
    assert!(store.release_lease("lease", fence).await.unwrap());
    store.close().await;
    assert_eq!(*noted.lock(), [""; 0]);
    scratch.drop().await;
}
