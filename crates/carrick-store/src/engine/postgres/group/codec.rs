//! Changes as bytes: numbers of variable length, sequence numbers as differences. An acknowledgement
//! of a hundred adjacent records takes about a hundred bytes.
//!
//! The first byte is the form's number; a reader refuses one it does not know.

use std::sync::Arc;

use crate::lease::core::{Change, Item, Place};

const FORM: u8 = 1;

const LEASED: u64 = 1;
const KEYED: u64 = 2;
const CLAIMED: u64 = 4;
const EXPIRES: u64 = 8;

pub(super) fn encode(change: &Change) -> Vec<u8> {
    let mut out = Vec::with_capacity(32 + change.put.len() * 32 + change.gone.len() * 2);
    out.push(FORM);
    number(&mut out, change.cursor);
    number(&mut out, change.fence);
    number(&mut out, change.gone.len() as u64);
    let mut before = 0;
    for seq in &change.gone {
        number(&mut out, seq - before);
        before = *seq;
    }
    number(&mut out, change.put.len() as u64);
    before = 0;
    for (seq, item) in &change.put {
        number(&mut out, seq - before);
        before = *seq;
        let (place, at) = match item.place {
            Place::Leased(at) => (LEASED, at),
            Place::Waiting(at) => (0, at),
        };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        number(
            &mut out,
            place
                | flag(item.key.is_some(), KEYED)
                | flag(item.first_claimed != 0, CLAIMED)
                | flag(item.expires.is_some(), EXPIRES),
        );
        number(&mut out, at.cast_unsigned());
        number(&mut out, item.fence);
        number(&mut out, u64::from(item.attempt));
        number(&mut out, item.stored.cast_unsigned());
        number(&mut out, u64::from(item.size));
        if item.first_claimed != 0 {
            number(&mut out, item.first_claimed.cast_unsigned());
        }
        if let Some(expires) = item.expires {
            number(&mut out, expires.cast_unsigned());
        }
        if let Some(key) = &item.key {
            number(&mut out, key.len() as u64);
            out.extend_from_slice(key.as_bytes());
        }
    }
    out
}

/// Reads a change; `None` if it is not one that [`encode`] wrote.
pub(super) fn decode(bytes: &[u8]) -> Option<Change> {
    let (&form, mut rest) = bytes.split_first()?;
    if form != FORM {
        return None;
    }
    let input = &mut rest;
    let mut change = Change { cursor: take(input)?, fence: take(input)?, ..Change::default() };
    let mut before: u64 = 0;
    for _ in 0..take(input)? {
        before = before.checked_add(take(input)?)?;
        change.gone.push(before);
    }
    before = 0;
    for _ in 0..take(input)? {
        before = before.checked_add(take(input)?)?;
        change.put.push((before, item(input)?));
    }
    input.is_empty().then_some(change)
}

fn item(input: &mut &[u8]) -> Option<Item> {
    let flags = take(input)?;
    let at = take(input)?.cast_signed();
    let place = if flags & LEASED == 0 { Place::Waiting(at) } else { Place::Leased(at) };
    Some(Item {
        place,
        fence: take(input)?,
        attempt: take(input)?.try_into().ok()?,
        stored: take(input)?.cast_signed(),
        size: take(input)?.try_into().ok()?,
        first_claimed: if flags & CLAIMED == 0 { 0 } else { take(input)?.cast_signed() },
        expires: if flags & EXPIRES == 0 { None } else { Some(take(input)?.cast_signed()) },
        key: if flags & KEYED == 0 { None } else { Some(text(input)?) },
    })
}

fn text(input: &mut &[u8]) -> Option<Arc<str>> {
    let length = usize::try_from(take(input)?).ok()?;
    let (text, rest) = input.split_at_checked(length)?;
    *input = rest;
    std::str::from_utf8(text).ok().map(Arc::from)
}

/// Writes seven bits a byte, the lowest first.
fn number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take(input: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        *input = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_item() -> impl Strategy<Value = Item> {
        let place = prop_oneof![
            any::<i64>().prop_map(Place::Leased),
            any::<i64>().prop_map(Place::Waiting)
        ];
        let key = proptest::option::of(".{0,20}").prop_map(|key| key.map(Arc::from));
        (
            key,
            place,
            any::<u64>(),
            any::<u32>(),
            any::<i64>(),
            any::<i64>(),
            any::<Option<i64>>(),
            any::<u32>(),
        )
            .prop_map(
                |(key, place, fence, attempt, first_claimed, stored, expires, size)| Item {
                    key,
                    place,
                    fence,
                    attempt,
                    first_claimed,
                    stored,
                    expires,
                    size,
                },
            )
    }

    proptest! {
        #[test]
        fn a_change_is_read_as_it_was_written(
            cursor: u64,
            fence: u64,
            gone in proptest::collection::btree_set(any::<u64>(), 0..20),
            put in proptest::collection::btree_map(any::<u64>(), any_item(), 0..20),
        ) {
            let change = Change {
                cursor, fence, gone: gone.into_iter().collect(), put: put.into_iter().collect(),
            };
            prop_assert_eq!(decode(&encode(&change)), Some(change));
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            bytes.insert(0, FORM);
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn acknowledging_neighbours_takes_a_byte_each() {
        let change = Change {
            cursor: 1_000_000,
            fence: 5_000,
            gone: (900_000..900_100).collect(),
            put: Vec::new(),
        };
        assert!(encode(&change).len() < 115, "{}", encode(&change).len());
    }
}
