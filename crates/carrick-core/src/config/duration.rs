//! Durations as text: `"250ms"`, `"30s"`, `"1h30m"`, `"7d"`. For `#[serde(with = …)]`.

use std::{fmt, time::Duration};

use serde::{Deserializer, Serializer, de::Visitor};

/// A text that is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a duration must be numbers with units ns, us, ms, s, m, h or d, such as 1h30m, not {0:?}")]
pub struct InvalidDuration(String);

const UNITS: [(&str, u128); 7] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// The longest duration that a text can say: a hundred years, so that sums cannot overflow.
const MAX: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Reads a duration.
///
/// # Errors
/// [`InvalidDuration`] if it is none, or is longer than a hundred years.
pub fn parse(text: &str) -> Result<Duration, InvalidDuration> {
    let invalid = || InvalidDuration(text.chars().take(80).collect());
    let mut rest = text.trim();
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    let mut nanos: u128 = 0;
    if rest.is_empty() {
        return Err(invalid());
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        // Eighteen digits of days are still far from what 128 bits hold.
        let count: u128 = Some(&rest[..digits])
            .filter(|digits| digits.len() <= 18)
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(invalid)?;
        rest = &rest[digits..];
        let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let unit = UNITS.iter().find(|(unit, _)| *unit == &rest[..letters]).ok_or_else(invalid)?;
        nanos = nanos.saturating_add(count.saturating_mul(unit.1));
        rest = rest[letters..].trim_start();
    }
    if nanos > MAX.as_nanos() {
        return Err(invalid());
    }
    Ok(Duration::from_nanos_u128(nanos))
}

/// Writes a duration so that [`parse`] gives it back.
pub fn format(duration: Duration) -> String {
    let mut nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, length) in UNITS {
        let count = nanos / length;
        if count > 0 {
            text.push_str(&format!("{count}{unit}"));
            nanos %= length;
        }
    }
    text
}

/// Writes it as text.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*duration))
}

/// Reads it from text.
///
/// # Errors
/// A message with the text and the units that are allowed.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    struct Text;
    impl Visitor<'_> for Text {
        type Value = Duration;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a duration such as \"30s\"")
        }
        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Duration, E> {
            parse(text).map_err(E::custom)
        }
    }
    deserializer.deserialize_str(Text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_add_up() {
        assert_eq!(parse("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse(" 250ms "), Ok(Duration::from_millis(250)));
        assert_eq!(parse("7d"), Ok(Duration::from_secs(604_800)));
        assert_eq!(parse("0"), Ok(Duration::ZERO));
        let endless = "9".repeat(400) + "s";
        for text in
            ["", "30", "s", "-1s", "1.5s", "1 s", "1S", "1y", "999999999999d", "é", &endless]
        {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(nanos in 0..3_000_000_000_000_000_000_u64) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }

        #[test]
        fn junk_never_panics(text: String) {
            let _ = parse(&text);
        }
    }
}
