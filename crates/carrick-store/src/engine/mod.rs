//! Engines: what implements the primitives.
