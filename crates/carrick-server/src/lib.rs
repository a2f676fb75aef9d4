//! The hub and the command line of Carrick, as a library, so that tests and benches use them without
//! a process of their own. The binary only parses, wires and reports.
//!
//! * [`config`]: `carrick.toml`, checked as a whole.
//! * [`hub`]: a store, a broker and their upkeep, behind the HTTP interface of [`api`].
//! * [`serve`]: listeners, TLS, connections and their drain.
//! * [`client`]: a hub as a [`Broker`](carrick_message::broker::Broker), over HTTP.
//! * [`cli`]: the commands.

pub mod api;
pub mod cli;
pub mod client;
pub mod config;
pub mod hub;
pub mod serve;
