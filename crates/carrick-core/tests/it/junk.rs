//! Junk never panics: the functions that the fuzz targets drive, on a seeded stream of mutations.

use carrick_core::fuzz;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const SEEDS: [&[u8]; 9] = [
    br#"{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"a":[1,"\ud83d\ude00"]}}"#,
    br#"[{"specversion":"1.0","id":"1","source":"/s","type":"t","data_base64":"AAEC"}]"#,
    br#"{"specversion":"1.0","id":"1","source":"/s","type":"t","expirytime":"2026-12-01T00:00:00Z"}"#,
    b"ce-specversion:1.0\nce-id:%41\nce-source:\"/s\"\nce-type:t\ncontent-type:text/plain\n\nbody",
    b"x-request-timeout-ms:250\nx-request-deadline-unix-ms:1796083200000\n\n",
    b"grpc-timeout:99999999H\n\n",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"Tue, 01 Dec 2026 00:01:00 GMT",
    b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
];

/// One change of a kind that finds bugs: a byte, a piece lost, a piece doubled, a join.
fn mutate(seed: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..=bytes.len());
        let end = rng.random_range(at..=bytes.len());
        match rng.random_range(0..4) {
            0 if at < bytes.len() => bytes[at] = rng.random(),
            1 => drop(bytes.drain(at..end)),
            2 => bytes.extend_from_within(at..end),
            _ => {
                let other = SEEDS[rng.random_range(0..SEEDS.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(other);
            }
        }
    }
    bytes
}

#[test]
fn no_input_panics() {
    let mut rng = StdRng::seed_from_u64(4471);
    for round in 0..20_000 {
        let seed = SEEDS[round % SEEDS.len()];
        let input = if round < SEEDS.len() { seed.to_vec() } else { mutate(seed, &mut rng) };
        fuzz::event(&input);
        fuzz::headers(&input);
        fuzz::position(&input);
    }
}
