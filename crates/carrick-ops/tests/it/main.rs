//! Health, drain and telemetry from outside.

mod drain;
mod health;
#[cfg(feature = "otlp")]
mod otlp;
mod signals;
mod telemetry;
