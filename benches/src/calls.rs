//! What do the policies cost a client? Judge it by the bare pooled client of hyper-util against the
//! same server in the same run.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use carrick_call::client::{Client, DependencyConfig, DependencyOptions};
use clap::Args;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::{client::legacy, rt::TokioExecutor};
use tokio::time::Instant;

use crate::{
    process::Server,
    table::{Table, median, rate},
};

/// How to measure.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Calls at a time.
    #[arg(long, default_value_t = 32)]
    callers: usize,
    /// Seconds a measurement takes.
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// Measures the bare client and ours in turn.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let server = Server::floor()?;
    let address = server.address;
    let length = Duration::from_secs(options.seconds);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut bare, mut ours) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bare.push(runtime.block_on(async {
            let client = legacy::Client::builder(TokioExecutor::new()).build_http();
            drive(options.callers, length, move || {
                let client: legacy::Client<_, Empty<Bytes>> = client.clone();
                let request = Request::get(format!("http://{address}/")).body(Empty::new());
                async move {
                    let answer = client.request(request?).await?;
                    answer.into_body().collect().await?;
                    anyhow::Ok(())
                }
            })
            .await
        })?);
        ours.push(runtime.block_on(async {
            let url = format!("http://{address}");
            let config = DependencyOptions { url, ..DependencyOptions::default() };
            let client = Client::new(DependencyConfig::new("bench", config)?)?;
            drive(options.callers, length, move || {
                let client = client.clone();
                let request = Request::get("/").body(Empty::<Bytes>::new());
                async move {
                    let answer = client.call(request?).await?;
                    answer.into_body().collect().await?;
                    anyhow::Ok(())
                }
            })
            .await
        })?);
    }
    let ratio = median(ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect());
    let mut table = Table::new(&["client over HTTP/1.1", "requests/s", "of bare", "target"]);
    table.row(vec!["hyper-util".to_owned(), rate(median(bare)), "1".to_owned(), String::new()]);
    let name = "ours, every policy on".to_owned();
    table.row(vec![name, rate(median(ours)), format!("{ratio:.2}"), "0.9".to_owned()]);
    println!(
        "{} callers, {} rounds of {} s, medians; ratios within a round\n",
        options.callers, options.rounds, options.seconds
    );
    println!("{table}");
    Ok(())
}

/// Has so many callers call for so long; returns calls per second.
async fn drive<F, A>(callers: usize, length: Duration, call: F) -> anyhow::Result<f64>
where
    F: Fn() -> A + Send + Sync + 'static,
    A: Future<Output = anyhow::Result<()>> + Send,
{
    let start = Instant::now();
    let call = Arc::new(call);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..callers {
        let call = Arc::clone(&call);
        tasks.spawn(async move {
            let mut calls = 0_u64;
            while start.elapsed() < length {
                call().await?;
                calls += 1;
            }
            anyhow::Ok(calls)
        });
    }
    let mut calls = 0;
    for done in tasks.join_all().await {
        calls += done?;
    }
    Ok(calls as f64 / start.elapsed().as_secs_f64())
}
