//! Tests of the public interface.

mod event;
mod junk;
