//! The hub and the command line, from outside.

mod edge;
