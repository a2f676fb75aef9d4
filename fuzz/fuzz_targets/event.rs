#![no_main]
//! See `carrick_core::fuzz::event`.

libfuzzer_sys::fuzz_target!(|input: &[u8]| carrick_core::fuzz::event(input));
