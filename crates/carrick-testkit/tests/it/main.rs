//! Tests of the test patterns: each check is shown to be able to fail.

mod crash;
mod flaky;
mod fleet;
mod history;
mod servers;
mod toxic;
