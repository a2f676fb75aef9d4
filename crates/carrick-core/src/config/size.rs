//! Sizes as text: `"100KiB"`, `"64MiB"`, `"1GB"`, `"512"`. For `#[serde(with = …)]`.

use std::fmt;

use serde::{Deserializer, Serializer, de::Visitor};

/// A text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a size must be a number with a unit B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, not {0:?}")]
pub struct InvalidSize(String);

const UNITS: [(&str, u64); 10] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("B", 1),
];

/// Reads a size in bytes.
///
/// # Errors
/// [`InvalidSize`] if it is none, or is more than 64 bits hold.
pub fn parse(text: &str) -> Result<u64, InvalidSize> {
    let invalid = || InvalidSize(text.chars().take(80).collect());
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let count: u64 = trimmed[..digits].parse().map_err(|_| invalid())?;
    let unit = trimmed[digits..].trim_start();
    let factor = match unit {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?.1,
    };
    count.checked_mul(factor).ok_or_else(invalid)
}

/// Writes a size so that [`parse`] gives it back, in the largest unit that divides it.
pub fn format(size: u64) -> String {
    match UNITS.iter().find(|(_, factor)| size > 0 && size.is_multiple_of(*factor)) {
        Some((unit, factor)) => format!("{}{unit}", size / factor),
        None => "0B".to_owned(),
    }
}

/// Writes it as text.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<T: Copy + TryInto<u64>, S: Serializer>(
    size: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format((*size).try_into().unwrap_or(u64::MAX)))
}

/// Reads it from text, or from a number of bytes.
///
/// # Errors
/// A message with the text and the units that are allowed.
pub fn deserialize<'de, T: TryFrom<u64>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Text;
    impl Visitor<'_> for Text {
        type Value = u64;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size such as \"64MiB\"")
        }
        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<u64, E> {
            parse(text).map_err(E::custom)
        }
        fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<u64, E> {
            Ok(bytes)
        }
        fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<u64, E> {
            u64::try_from(bytes).map_err(|_| E::custom("a size is not negative"))
        }
    }
    let bytes = deserializer.deserialize_any(Text)?;
    T::try_from(bytes).map_err(|_| serde::de::Error::custom(format!("{bytes} is too large")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse("64MiB"), Ok(64 << 20));
        assert_eq!(parse("1 GB"), Ok(1_000_000_000));
        assert_eq!(parse("512"), Ok(512));
        for text in ["", "MiB", "-1B", "1.5MiB", "1XB", "99999999TiB", "1é"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(size: u64) {
            prop_assert_eq!(parse(&format(size)), Ok(size));
        }
    }
}
