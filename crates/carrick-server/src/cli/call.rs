//! `carrick call`: one call through the policies of a dependency.

use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use bytes::Bytes;
use carrick_call::{
    client::{AnswerBody, Client, DependencyConfig, DependencyOptions, tls_config},
    explain::Explain,
};
use clap::Args;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::time::Instant;

use super::{span, up};
use crate::client::certificates;

/// Wrong flags or configuration.
pub(super) const BAD_USAGE: u8 = 3;
const NO_RESPONSE: u8 = 2;

/// Bytes of an answer that are kept until the end, where JSON is wished: it tells how many came.
const PIECE: usize = 64 * 1024;

/// Makes one call through the policies of a dependency.
///
/// Exit code 0 for a 2xx, 1 for another status, 2 without a response, 3 for wrong flags.
#[derive(Debug, Args)]
pub(super) struct Call {
    /// A URL, or NAME/path of a dependency in the configuration.
    #[arg(value_name = "URL|DEPENDENCY/PATH")]
    target: String,
    /// How long it may take in all.
    #[arg(long, value_parser = span, value_name = "TIME")]
    timeout: Option<Duration>,
    /// How long one attempt may take.
    #[arg(long, value_parser = span, value_name = "TIME")]
    per_try_timeout: Option<Duration>,
    /// Attempts, the first among them.
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// The method; POST where there is --data.
    #[arg(long, short = 'X')]
    method: Option<Method>,
    /// A header; may be given several times.
    #[arg(long, short = 'H', value_name = "NAME:VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// The body, or @file, or @- for standard input.
    #[arg(long, short = 'd')]
    data: Option<String>,
    /// Tells on standard error what was decided, and why.
    #[arg(long)]
    explain: bool,
    /// Tells how the call went, as JSON, instead of the answer.
    #[arg(long)]
    json: bool,
    /// A PEM file with the certificates to trust, instead of the system's.
    #[arg(long, env = "CARRICK_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The configuration; `carrick.toml` of this folder if it is there.
    #[arg(long, env = "CARRICK_CONFIG")]
    config: Option<PathBuf>,
}

/// Whether the command line names this command.
pub(super) fn is_asked_for() -> bool {
    std::env::args_os().nth(1).is_some_and(|command| command == "call")
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("a header is NAME:VALUE")?;
    let name = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header"))?;
    let value = value.trim().parse().map_err(|_| format!("{value:?} is no value of a header"))?;
    Ok((name, value))
}

impl Call {
    pub(super) async fn run(self) -> ExitCode {
        let (client, request) = match self.prepare() {
            Ok(prepared) => prepared,
            Err(error) => {
                eprintln!("carrick: {error:#}");
                return ExitCode::from(BAD_USAGE);
            }
        };
        let start = Instant::now();
        let explain = Explain::new(start);
        let mut request = request;
        request.extensions_mut().insert(explain.clone());
        let result = client.call(request).await;
        let result = match result {
            Ok(answer) => self.read(answer).await,
            Err(error) => Err(chain(&error)),
        };
        let elapsed = start.elapsed();
        if self.explain && !self.json {
            for attempt in explain.attempts() {
                let host = attempt.host.unwrap_or_default();
                let millis = attempt.elapsed.as_secs_f64() * 1e3;
                eprintln!(
                    "attempt {} at {host}: {} after {millis:.1} ms",
                    attempt.n, attempt.outcome
                );
            }
            for decision in explain.decisions() {
                eprintln!("{:.1} ms: {decision}", decision.at.as_secs_f64() * 1e3);
            }
        }
        if self.json {
            let decisions: Vec<_> = explain.decisions().iter().map(ToString::to_string).collect();
            let mut told = json!({
                "status": result.as_ref().ok().map(http::StatusCode::as_u16),
                "elapsed_ms": (elapsed.as_secs_f64() * 1e6).round() / 1e3,
                "attempts": explain.attempts(),
                "decisions": decisions,
            });
            if let Err(error) = &result {
                told["error"] = json!(error);
            }
            println!("{told}");
        }
        match result {
            Ok(status) if status.is_success() => ExitCode::SUCCESS,
            Ok(status) => {
                if !self.json {
                    eprintln!("carrick: the answer is {status}");
                }
                ExitCode::FAILURE
            }
            Err(error) => {
                if !self.json {
                    eprintln!("carrick: {error}");
                }
                ExitCode::from(NO_RESPONSE)
            }
        }
    }

    /// Writes the answer's body to standard output as it comes, or with JSON reads over it.
    async fn read(&self, answer: Response<AnswerBody>) -> Result<http::StatusCode, String> {
        let (parts, mut body) = answer.into_parts();
        let mut out = std::io::BufWriter::with_capacity(PIECE, std::io::stdout().lock());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| chain(&error))?;
            if let Some(data) = frame.data_ref().filter(|_| !self.json) {
                // A reader that has gone, as `head` does, wants no more.
                if out.write_all(data).is_err() {
                    return Ok(parts.status);
                }
            }
        }
        out.flush().ok();
        Ok(parts.status)
    }

    fn prepare(&self) -> anyhow::Result<(Client, Request<Full<Bytes>>)> {
        let (name, mut options, path) = self.dependency()?;
        if let Some(timeout) = self.timeout {
            options.timeout = timeout;
        }
        if self.per_try_timeout.is_some() {
            options.per_try_timeout = self.per_try_timeout;
        }
        if let Some(attempts) = self.max_attempts {
            options.max_attempts = attempts;
        }
        let is_tls = options.url.starts_with("https:");
        let config = DependencyConfig::new(&name, options)?;
        for sum in config.sums().into_iter().filter(|sum| !sum.fits) {
            eprintln!("carrick: warning: {}: {}", sum.name, sum.text);
        }
        let mut builder = Client::builder(config);
        if is_tls {
            let trusted = certificates(self.ca.as_deref())?;
            let tls = tls_config(trusted, true).context("name the certificates with --ca")?;
            builder = builder.tls(tls);
        }
        let body = match self.data.as_deref() {
            None => Bytes::new(),
            Some("@-") => {
                let mut body = Vec::new();
                std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut body)
                    .context("--data: cannot read standard input")?;
                body.into()
            }
            Some(data) => match data.strip_prefix('@') {
                Some(file) => std::fs::read(file)
                    .with_context(|| format!("--data: cannot read {file}"))?
                    .into(),
                None => data.as_bytes().to_vec().into(),
            },
        };
        let method = match (&self.method, &self.data) {
            (Some(method), _) => method.clone(),
            (None, Some(_)) => Method::POST,
            (None, None) => Method::GET,
        };
        let mut request = Request::builder().method(method).uri(path).body(Full::new(body))?;
        for (name, value) in &self.header {
            request.headers_mut().append(name, value.clone());
        }
        Ok((builder.build()?, request))
    }

    /// The dependency that is meant, and the path there.
    fn dependency(&self) -> anyhow::Result<(String, DependencyOptions, Uri)> {
        if self.target.contains("://") {
            let uri: Uri =
                self.target.parse().with_context(|| format!("{:?} is no URL", self.target))?;
            let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
                bail!("{:?} has no host", self.target);
            };
            let url = format!("{scheme}://{authority}");
            let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
            let options = DependencyOptions { url, ..DependencyOptions::default() };
            return Ok((authority.host().to_owned(), options, path.parse()?));
        }
        let (name, path) = self.target.split_once('/').unwrap_or((&self.target, ""));
        let options = up::dependencies(self.config.as_deref())?;
        let known: Vec<_> = options.keys().cloned().collect();
        let Some(options) = options.get(name) else {
            bail!(
                "{name:?} is no dependency of the configuration (it has: {}) and no URL",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            );
        };
        let path = format!("/{path}");
        let uri = path.parse().with_context(|| format!("{path:?} is no path"))?;
        Ok((name.to_owned(), options.clone(), uri))
    }
}

/// An error with its sources, each once.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
