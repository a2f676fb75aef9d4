//! The commands. Exit codes: 0 done, 1 failed, 2 wrong flags or configuration, 4 the hub or the
//! database cannot be reached. `call` has its own: 0 for a 2xx, 1 for another status, 2 without a
//! response, 3 for wrong flags or configuration.

mod call;
mod check;
mod dead;
mod publish;
mod relay;
mod tail;
mod up;

use std::{fmt, path::PathBuf, process::ExitCode, time::Duration};

use carrick_core::config::InvalidConfig;
use carrick_message::outbox::OutboxError;
use clap::{Args, Parser, Subcommand};

use crate::client::{Answer, Client, Unreachable};

/// Joins services: without losing, doubling, reordering or hanging anything.
#[derive(Debug, Parser)]
#[command(name = "carrick", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Starts the hub.
    Up(up::Up),
    /// Carries the outbox of your own database to a hub.
    Relay(relay::RelayArguments),
    /// Publishes events, from arguments or line by line from standard input.
    Publish(publish::Publish),
    /// Follows a topic.
    Tail(tail::Tail),
    /// Looks at what is stuck, and un-sticks it.
    Dead(dead::Dead),
    /// Makes one call through the policies of a dependency.
    Call(call::Call),
    /// Checks a configuration, and shows its arithmetic.
    Check(check::Check),
}

/// How to reach a hub.
#[derive(Debug, Args)]
struct Hub {
    /// The hub's URL.
    #[arg(long, env = "CARRICK_URL", default_value = "http://127.0.0.1:7070")]
    hub: String,
    /// A bearer token of the hub.
    #[arg(long, env = "CARRICK_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// A PEM file with the certificates to trust, instead of the system's.
    #[arg(long, env = "CARRICK_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Output for machines.
    #[arg(long)]
    json: bool,
}

impl Hub {
    fn client(&self) -> anyhow::Result<Client> {
        Client::new(&self.hub, self.token.as_deref(), self.ca.as_deref())
            .map_err(|error| Usage(error).into())
    }
}

/// Wrong flags or configuration.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Usage(#[from] anyhow::Error);

/// How long a request of the command line may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    let Arguments { command } = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // Its codes are an answer of their own: 2 is "no response" there.
        Err(error) if call::is_asked_for() && error.use_stderr() => {
            eprint!("{}", error.render());
            return ExitCode::from(call::BAD_USAGE);
        }
        Err(error) => error.exit(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Reads of the store block; they are few at a time by the store's own bound.
        .max_blocking_threads(32)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error).context("cannot start")),
    };
    let command = match command {
        Command::Call(call) => {
            let code = runtime.block_on(call.run());
            runtime.shutdown_timeout(Duration::from_secs(1));
            return code;
        }
        other => other,
    };
    let result = runtime.block_on(async {
        match command {
            Command::Up(up) => up.run().await,
            Command::Relay(relay) => relay.run().await,
            Command::Publish(publish) => publish.run().await,
            Command::Tail(tail) => tail.run().await,
            Command::Dead(dead) => dead.run().await,
            Command::Check(check) => check.run(),
            Command::Call(_) => unreachable!("run above, for its exit codes"),
        }
    });
    // Reads that block must not hold the process up.
    runtime.shutdown_timeout(Duration::from_secs(1));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("carrick: {error:#}");
    let is = |code: fn(&(dyn std::error::Error + 'static)) -> bool| error.chain().any(code);
    if is(|error| error.is::<Usage>() || error.is::<InvalidConfig>()) {
        ExitCode::from(2)
    } else if is(|error| error.is::<Unreachable>() || is_away(error)) {
        ExitCode::from(4)
    } else {
        ExitCode::FAILURE
    }
}

fn is_away(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(OutboxError::Disconnected(_) | OutboxError::TimedOut))
}

/// An answer that is not what was hoped for.
#[derive(Debug)]
struct Refused(Answer);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the hub says {}: {}", self.0.status.as_u16(), self.0.problem())
    }
}

impl std::error::Error for Refused {}

/// The body of an answer that is a 2xx.
fn accepted(answer: Answer) -> anyhow::Result<Answer> {
    if answer.status.is_success() { Ok(answer) } else { Err(Refused(answer).into()) }
}

/// A name that goes into a path.
fn name(text: &str) -> Result<String, String> {
    carrick_core::name::Topic::new(text)
        .map(|topic| topic.name().to_owned())
        .map_err(|error| error.to_string())
}

fn span(text: &str) -> Result<Duration, String> {
    carrick_core::config::duration::parse(text).map_err(|error| error.to_string())
}
