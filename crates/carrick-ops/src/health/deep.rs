//! The report on dependencies: each with its own timeout, one run for all who ask.

use std::{collections::BTreeMap, future::Future, pin::Pin, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::{task::JoinSet, time::Instant};

type CheckFuture = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;
type Check = Arc<dyn Fn() -> CheckFuture + Send + Sync>;

/// How all dependencies were at one time.
#[derive(Clone, Debug, Serialize)]
pub struct DeepReport {
    /// By name.
    pub dependencies: BTreeMap<&'static str, DependencyReport>,
}

/// How one dependency was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DependencyReport {
    /// Whether it answered well and in time.
    pub ok: bool,
    /// What it said, or what is wrong.
    pub detail: String,
    /// How long it took, in milliseconds.
    pub took_ms: f64,
}

#[derive(Clone)]
struct Dependency {
    name: &'static str,
    timeout: Duration,
    check: Check,
}

pub(super) struct Deep {
    keep: Duration,
    /// Registered by the program at start: bounded by its source.
    dependencies: Mutex<Vec<Dependency>>,
    /// Held while the checks run, so that a crowd that asks costs one run.
    latest: tokio::sync::Mutex<Option<(Instant, Arc<DeepReport>)>>,
}

impl Deep {
    pub(super) fn new(keep: Duration) -> Self {
        Self { keep, dependencies: Mutex::default(), latest: tokio::sync::Mutex::default() }
    }

    pub(super) fn register<F, Fut>(&self, name: &'static str, timeout: Duration, check: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<String, String>> + Send + 'static,
    {
        let check: Check = Arc::new(move || Box::pin(check()));
        self.dependencies.lock().push(Dependency { name, timeout, check });
    }

    pub(super) async fn report(&self) -> Arc<DeepReport> {
        let mut latest = self.latest.lock().await;
        if let Some((made_at, report)) = &*latest
            && made_at.elapsed() < self.keep
        {
            return Arc::clone(report);
        }
        let report = Arc::new(self.run().await);
        *latest = Some((Instant::now(), Arc::clone(&report)));
        report
    }

    async fn run(&self) -> DeepReport {
        let dependencies = self.dependencies.lock().clone();
        // The set owns the checks: dropping this future aborts them.
        let mut running = JoinSet::new();
        let mut reports: BTreeMap<_, _> = dependencies
            .iter()
            .map(|dependency| {
                // Stands if the check panics and so says nothing.
                let detail = "the check panicked".to_owned();
                (dependency.name, DependencyReport { ok: false, detail, took_ms: 0.0 })
            })
            .collect();
        for dependency in dependencies {
            running.spawn(ask(dependency));
        }
        while let Some(answer) = running.join_next().await {
            if let Ok((name, report)) = answer {
                reports.insert(name, report);
            }
        }
        DeepReport { dependencies: reports }
    }
}

async fn ask(dependency: Dependency) -> (&'static str, DependencyReport) {
    let Dependency { name, timeout, check } = dependency;
    let start = Instant::now();
    let found = tokio::time::timeout(timeout, check())
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {timeout:?}")));
    let took_ms = start.elapsed().as_secs_f64() * 1e3;
    let ok = found.is_ok();
    let (Ok(detail) | Err(detail)) = found;
    (name, DependencyReport { ok, detail, took_ms })
}
