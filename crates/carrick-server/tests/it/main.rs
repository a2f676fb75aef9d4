//! The hub and the command line, from outside.

mod cli;
mod edge;
mod feed;
mod groups;
mod kit;
mod life;
mod topics;
mod websocket;
