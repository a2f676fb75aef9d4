//! Patterns put together, through their public interfaces.
