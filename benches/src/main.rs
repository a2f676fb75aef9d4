//! How fast is it, beside the bare alternative? Each subcommand answers one question
//! and prints one table; ratios within a run count, absolute rates drift with the machine.
//!
//! `cargo run --release -p carrick-benches -- hub` needs the release binary of `carrick`
//! (`cargo build --release`), which it starts as a child so that CPU and memory are its own.

mod calls;
mod hub;
mod load;
mod process;
mod store;
mod table;

use clap::{Parser, Subcommand};

/// Measurements that span crates.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// The embedded broker in process, beside bare SQLite.
    Store(store::Options),
    /// The hub over HTTP: single events, batches, lease and ack; beside a bare HTTP server.
    Hub(hub::Options),
    /// Resident memory of the hub: idle, and with a backlog.
    Memory(hub::MemoryOptions),
    /// The client with every policy on, beside the bare client of hyper-util.
    Calls(calls::Options),
    /// The bare HTTP server that `hub` measures beside ours; not for use by itself.
    #[command(hide = true)]
    Floor,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().bench {
        Bench::Store(options) => store::run(&options),
        Bench::Hub(options) => hub::run(&options),
        Bench::Memory(options) => hub::memory(&options),
        Bench::Calls(options) => calls::run(&options),
        Bench::Floor => hub::floor(),
    }
}
