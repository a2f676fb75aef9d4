//! A load generator that costs little: keep-alive connections, requests built by hand, answers
//! scanned and not parsed. What it uses is not the server's to use, on the same two cores.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

/// One keep-alive connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, request: Vec::new(), answer: vec![0; 256 * 1024] })
    }

    /// Sends a POST and returns the body of its answer, which must be a 2xx.
    pub(crate) async fn post(
        &mut self,
        path: &str,
        content_type: &str,
        body: &[u8],
    ) -> anyhow::Result<&[u8]> {
        use std::io::Write;
        self.request.clear();
        write!(
            self.request,
            "POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )?;
        self.request.extend_from_slice(body);
        self.stream.write_all(&self.request).await?;

        let mut filled = 0;
        let mut whole = None;
        loop {
            if filled == self.answer.len() {
                self.answer.resize(filled * 2, 0);
            }
            let read = self.stream.read(&mut self.answer[filled..]).await?;
            if read == 0 {
                bail!("the server closed the connection");
            }
            filled += read;
            if whole.is_none() {
                whole = head(&self.answer[..filled])?;
            }
            if let Some((start, length)) = whole
                && filled >= start + length
            {
                if self.answer[9] != b'2' {
                    bail!("{}", String::from_utf8_lossy(&self.answer[..filled]));
                }
                return Ok(&self.answer[start..start + length]);
            }
        }
    }
}

/// Where the body starts and how long it is, once the head is complete.
fn head(answer: &[u8]) -> anyhow::Result<Option<(usize, usize)>> {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let text = std::str::from_utf8(&answer[..end])?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    Ok(Some((end + 4, length.context("the answer has no content-length")?)))
}

/// A CloudEvent of about 1 KiB with a unique id and one of 500 keys.
pub(crate) fn event(id: &str, number: u64) -> String {
    let filler = "x".repeat(760);
    format!(
        r#"{{"specversion":"1.0","id":"{id}-{number}","source":"/bench","type":"bench.measured.v1","partitionkey":"key-{}","time":"2026-12-01T00:00:00Z","datacontenttype":"application/json","data":{{"number":{number},"filler":"{filler}"}}}}"#,
        number % 500
    )
}

/// What one connection does over and over: takes its number and its turn, returns events done.
pub(crate) trait Work: Send + Sync + 'static {
    fn step(
        &self,
        connection: &mut Connection,
        worker: usize,
        turn: u64,
    ) -> impl Future<Output = anyhow::Result<u64>> + Send;
}

/// Runs `work` on `connections` connections for `length`; returns events per second.
pub(crate) async fn drive(
    address: SocketAddr,
    connections: usize,
    length: Duration,
    work: Arc<impl Work>,
) -> anyhow::Result<(u64, f64)> {
    let start = Instant::now();
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..connections {
        let mut connection = Connection::open(address).await?;
        let work = Arc::clone(&work);
        workers.spawn(async move {
            let mut done = 0;
            for turn in 0.. {
                if start.elapsed() >= length {
                    break;
                }
                done += work.step(&mut connection, worker, turn).await?;
            }
            anyhow::Ok(done)
        });
    }
    let mut events = 0;
    while let Some(done) = workers.join_next().await {
        events += done??;
    }
    Ok((events, start.elapsed().as_secs_f64()))
}
