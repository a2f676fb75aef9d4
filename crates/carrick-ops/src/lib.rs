//! What keeps a running process honest towards whoever runs it.
//!
//! * [`health`]: is the process alive, may it have traffic, how are its dependencies. Three
//!   questions, three answers, never mixed.
//! * [`drain`]: from the first signal to the last request, without dropping one.
//! * [`telemetry`]: logs with trace ids, metrics for Prometheus, traces for a collector.
//!
//! Each is usable alone. None of them knows what the process does.

pub mod drain;
pub mod health;
pub mod telemetry;
