//! Patterns put together, through their public interfaces.

mod balance;
