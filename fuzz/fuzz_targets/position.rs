#![no_main]
//! See `carrick_core::fuzz::position`.

libfuzzer_sys::fuzz_target!(|input: &[u8]| carrick_core::fuzz::position(input));
