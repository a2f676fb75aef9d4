//! The vocabulary that every Carrick crate shares. Nothing here does I/O or spawns a task.

pub mod name;
