//! The messaging patterns on real engines.

mod broker;
mod consumer;
mod paused;
mod watched;
