//! What does the hub do over HTTP, and what of that is HTTP's own price?

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;

use crate::{
    load::{self, Connection, Work},
    process::Server,
    table::{Table, median, rate},
};

/// How to measure.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Connections that publish or consume at the same time.
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Seconds a measurement takes.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// How to fill the backlog.
#[derive(Debug, Args)]
pub(crate) struct MemoryOptions {
    /// Events of 1 KiB in the backlog.
    #[arg(long, default_value_t = 1_000_000)]
    events: u64,
}

struct Singles(String);

impl Work for Singles {
    async fn step(&self, to: &mut Connection, worker: usize, turn: u64) -> anyhow::Result<u64> {
        let event = load::event(&format!("{}-{worker}", self.0), turn);
        to.post("/v1/topics/bench/events", "application/cloudevents+json", event.as_bytes())
            .await?;
        Ok(1)
    }
}

struct Batches(String);

impl Work for Batches {
    async fn step(&self, to: &mut Connection, worker: usize, turn: u64) -> anyhow::Result<u64> {
        let run = format!("{}-{worker}", self.0);
        let events: Vec<_> = (0..100).map(|index| load::event(&run, turn * 100 + index)).collect();
        let batch = format!("[{}]", events.join(","));
        to.post("/v1/topics/bench/events", "application/cloudevents-batch+json", batch.as_bytes())
            .await?;
        Ok(100)
    }
}

struct LeaseAndAck;

impl Work for LeaseAndAck {
    async fn step(&self, to: &mut Connection, _worker: usize, _turn: u64) -> anyhow::Result<u64> {
        let ask = br#"{"max":100,"wait":"1s","lease":"60s"}"#;
        let answer =
            to.post("/v1/topics/bench/groups/bench/lease", "application/json", ask).await?;
        let mut leases = String::new();
        let mut count = 0;
        for lease in std::str::from_utf8(answer)?.split("\"lease\":\"").skip(1) {
            let end = lease.find('"').unwrap_or(lease.len());
            leases.push_str(if count == 0 { "\"" } else { ",\"" });
            leases.push_str(&lease[..end]);
            leases.push('"');
            count += 1;
        }
        if count > 0 {
            let ack = format!("{{\"leases\":[{leases}]}}");
            to.post("/v1/leases/ack", "application/json", ack.as_bytes()).await?;
        }
        Ok(count)
    }
}

/// One measured kind of work, on our hub or on the bare server.
struct Figures {
    rate: Vec<f64>,
    cpu: Vec<f64>,
}

impl Figures {
    fn new() -> Self {
        Self { rate: Vec::new(), cpu: Vec::new() }
    }

    fn measure(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        server: &Server,
        connections: usize,
        length: Duration,
        work: impl Work,
    ) -> anyhow::Result<()> {
        let before = server.cpu_seconds()?;
        let (events, seconds) =
            runtime.block_on(load::drive(server.address, connections, length, Arc::new(work)))?;
        let used = server.cpu_seconds()? - before;
        self.rate.push(events as f64 / seconds);
        self.cpu.push(used * 1e6 / events.max(1) as f64);
        Ok(())
    }

    fn row(self, name: &str, target: &str) -> Vec<String> {
        vec![
            name.to_owned(),
            rate(median(self.rate)),
            format!("{:.1}", median(self.cpu)),
            target.to_owned(),
        ]
    }
}

/// Measures singles, batches, and lease with ack, each round on a new store.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let &Options { connections, seconds, rounds } = options;
    let length = Duration::from_secs(seconds);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let [mut bare, mut singles, mut bare_batches, mut batches, mut leases] =
        std::array::from_fn(|_| Figures::new());
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        let floor = Server::floor()?;
        let id = format!("r{round}");
        bare.measure(&runtime, &floor, connections, length, Singles(format!("{id}f")))?;
        bare_batches.measure(&runtime, &floor, connections, length, Batches(format!("{id}g")))?;
        drop(floor);

        let folder = tempfile::tempdir()?;
        let hub = Server::hub(&format!("sqlite://{}/bench.db", folder.path().display()))?;
        singles.measure(&runtime, &hub, connections, length, Singles(format!("{id}s")))?;
        batches.measure(&runtime, &hub, connections, length, Batches(format!("{id}b")))?;
        leases.measure(&runtime, &hub, connections, length, LeaseAndAck)?;
    }
    let mut table = Table::new(&["over HTTP", "events/s", "server CPU µs/event", "target"]);
    table.row(bare.row("bare hyper server, 1 event a request, nothing stored", "-"));
    table.row(singles.row("hub, 1 event a request, durable", "25k"));
    table.row(bare_batches.row("bare hyper server, 100 a request, nothing stored", "-"));
    table.row(batches.row("hub, 100 a request, durable", "60k"));
    table.row(leases.row("hub, lease 100 and ack 100", "40k"));
    println!("{connections} connections, 1 KiB events, {rounds} rounds of {seconds} s, medians\n");
    println!("{table}");
    Ok(())
}

/// Measures resident memory, idle and with a backlog.
pub(crate) fn memory(options: &MemoryOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let folder = tempfile::tempdir()?;
    let store = format!("sqlite://{}/bench.db", folder.path().display());
    let hub = Server::hub(&store)?;
    let idle = hub.resident_mib()?;
    runtime.block_on(async {
        let mut connection = Connection::open(hub.address).await?;
        LeaseAndAck.step(&mut Connection::open(hub.address).await?, 0, 0).await?;
        for turn in 0..options.events / 100 {
            Batches("m".to_owned()).step(&mut connection, 0, turn).await?;
            if turn % 1000 == 0 {
                eprintln!("{} of {} events", turn * 100, options.events);
            }
        }
        anyhow::Ok(())
    })?;
    let filled = hub.resident_mib()?;
    drop(hub);
    let reopened = Server::hub(&store)?;
    let after = reopened.resident_mib()?;
    let mut table = Table::new(&["resident memory of the hub", "MiB", "target"]);
    table.row(vec!["idle".to_owned(), format!("{idle:.1}"), "25".to_owned()]);
    let backlog = format!("with a backlog of {} events of 1 KiB", options.events);
    table.row(vec![backlog, format!("{filled:.1}"), "80".to_owned()]);
    table.row(vec!["started on that backlog".to_owned(), format!("{after:.1}"), "80".to_owned()]);
    println!("{table}");
    Ok(())
}

/// Serves 201 to whatever comes, having read it: what HTTP alone costs on this machine.
pub(crate) fn floor() -> anyhow::Result<()> {
    async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let _whole = request.into_body().collect().await;
        let mut response = Response::new(Full::new(Bytes::from_static(
            br#"{"accepted":1,"duplicates":0,"position":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}"#,
        )));
        *response.status_mut() = hyper::StatusCode::CREATED;
        Ok(response)
    }
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let serving = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(answer));
            // Ends with its connection, and the process is killed by its parent.
            drop(tokio::spawn(serving));
        }
    })
}
