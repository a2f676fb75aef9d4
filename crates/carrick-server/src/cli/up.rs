//! `carrick up`: the hub.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use carrick_call::client::DependencyOptions;
use carrick_core::config::{Layers, Origin};
use carrick_ops::{
    drain::Drain,
    health::{Health, HealthConfig},
    telemetry::Telemetry,
};
use clap::Args;
use tokio::task::JoinSet;

use super::Usage;
use crate::{
    api::Api,
    config::{HubConfig, HubOptions},
    hub::Hub,
    serve::Listener,
};

/// Variables that begin like settings and are none.
const NOT_SETTINGS: [&str; 6] = [
    "CARRICK_URL",
    "CARRICK_TOKEN",
    "CARRICK_CA",
    "CARRICK_CONFIG",
    "CARRICK_BIN",
    "CARRICK_TEST_POSTGRES",
];

/// Settings of the hub.
#[derive(Debug, Default, Args)]
pub(super) struct Settings {
    /// The configuration; `carrick.toml` of this folder if it is there.
    #[arg(long, env = "CARRICK_CONFIG")]
    config: Option<PathBuf>,
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Where to keep everything: sqlite://file, postgres://…, or memory:.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Listens on any address without tokens or TLS: whoever reaches it can do everything.
    #[arg(long)]
    danger_open_listener: bool,
    /// Sets any other key, such as `--set retention.age=3d`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Settings {
    /// Reads file, environment and flags, and checks the whole.
    pub(super) fn load(&self) -> anyhow::Result<HubConfig> {
        let mut layers = Layers::default();
        let options = self.read(&mut layers)?;
        HubConfig::try_from(options).map_err(|invalid| wrong(invalid.located(&layers).into()))
    }

    /// Reads file, environment and flags.
    fn options(&self) -> anyhow::Result<HubOptions> {
        self.read(&mut Layers::default())
    }

    fn read(&self, layers: &mut Layers) -> anyhow::Result<HubOptions> {
        let read = |layers: &mut Layers| -> anyhow::Result<HubOptions> {
            let default = PathBuf::from("carrick.toml");
            match &self.config {
                Some(path) => add_file(layers, path)?,
                None if default.exists() => add_file(layers, &default)?,
                None => {}
            }
            let variables = std::env::vars().filter(|(name, _)| !NOT_SETTINGS.contains(&&**name));
            layers.add_environment("CARRICK_", variables)?;
            for (key, value) in [("listen", &self.listen), ("store", &self.store)] {
                if let Some(value) = value {
                    layers.set(key, value, Origin::Flag(format!("--{key}")))?;
                }
            }
            if self.danger_open_listener {
                let origin = Origin::Flag("--danger-open-listener".to_owned());
                layers.set("danger-open-listener", "true", origin)?;
            }
            for pair in &self.set {
                let (key, value) = pair
                    .split_once('=')
                    .with_context(|| format!("--set takes KEY=VALUE, not {pair:?}"))?;
                layers.set(key, value, Origin::Flag(format!("--set {key}")))?;
            }
            Ok(layers.read()?)
        };
        read(layers).map_err(wrong)
    }
}

fn wrong(error: anyhow::Error) -> anyhow::Error {
    Usage(error.context("the configuration is wrong")).into()
}

/// The dependencies that a configuration names, whose other settings are not looked at.
pub(super) fn dependencies(
    config: Option<&std::path::Path>,
) -> anyhow::Result<std::collections::BTreeMap<String, DependencyOptions>> {
    let settings = Settings { config: config.map(PathBuf::from), ..Settings::default() };
    Ok(settings.options()?.dependency)
}

fn add_file(layers: &mut Layers, path: &std::path::Path) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let flat = layers.add_toml(path.to_owned(), &text);
    flat.map_err(|error| {
        let detail = std::error::Error::source(&error).map(ToString::to_string);
        anyhow::anyhow!("{error}: {}", detail.unwrap_or_default())
    })
}

/// Starts the hub.
#[derive(Debug, Args)]
pub(super) struct Up {
    #[command(flatten)]
    settings: Settings,
}

impl Up {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let config = self.settings.load()?;
        let telemetry = Telemetry::start(&config.telemetry)?;
        let drain = Drain::new(config.drain.clone());
        let ended = drain.run().context("cannot take over the signals")?;
        let health = Health::new(HealthConfig::default());
        let migrated = health.flag("migrated", "the store is not open yet");
        health.follow(&drain);

        let hub = Hub::open(&config).await?;
        migrated.raise();
        let store = hub.store().clone();
        health.dependency("store", Duration::from_secs(2), move || {
            let store = store.clone();
            async move {
                let one = store.streams(None, 1).await.map_err(|error| error.to_string())?;
                Ok(format!("answers; {} topic looked at", one.len()))
            }
        });

        let listener = Listener::bind(config.listen, config.tls.as_ref(), &config.limits).await?;
        let address = listener.address()?;
        let api = Api::new(hub.clone(), &config, drain.clone());
        let router = api.clone().router(&health, Some(&telemetry.metrics));

        // Each ends with its token, and all with the set.
        let mut tasks = JoinSet::new();
        let (looks, announced) = (hub.clone(), drain.announced());
        let retention = config.retention.clone();
        tasks.spawn(async move { looks.upkeep(&retention, announced).await });
        let (watched, forced) = (health.clone(), drain.forced());
        tasks.spawn(async move { watched.watch(forced).await });
        let (metrics, forced) = (telemetry.metrics.clone(), drain.forced());
        tasks.spawn(async move { metrics.upkeep(forced).await });
        tasks.spawn(api.farewell());
        tasks.spawn(listener.serve(router, drain.clone()));

        let scheme = if config.tls.is_some() { "https" } else { "http" };
        greet(&format!("{scheme}://{address}"), &config.store);
        let report = ended.await;
        tracing::info!(forced = report.forced, took = ?report.took, left = ?report.left, "stopped");
        tasks.shutdown().await;
        hub.close().await;
        telemetry.stop(Duration::from_secs(5)).await;
        Ok(())
    }
}

fn greet(url: &str, store: &str) {
    // A URL may hold a password.
    let store = match store
        .split_once("://")
        .and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1)))
    {
        Some((scheme, rest)) => format!("{scheme}://…@{rest}"),
        None => store.to_owned(),
    };
    println!(
        "Carrick is up at {url}, and keeps everything in {store}\n\
         \n\
         Try next, from another terminal:\n\
         \n\
         \x20 curl -i {url}/v1/topics/orders/events \\\n\
         \x20   -H 'content-type: application/cloudevents+json' \\\n\
         \x20   -d '{{\"specversion\":\"1.0\",\"id\":\"1\",\"source\":\"/shop\",\"type\":\"order.placed.v1\",\"data\":{{\"total\":1299}}}}'\n\
         \n\
         \x20 curl '{url}/v1/topics/orders/events?after=earliest'\n\
         \n\
         \x20 carrick tail orders          # follows the topic\n\
         \x20 {url}/    # what else there is\n\
         \n\
         Ctrl-C stops it."
    );
}
