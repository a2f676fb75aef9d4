//! Time as engines store it: microseconds since 1970.

use std::time::Duration;

use jiff::Timestamp;

use crate::lease::core::Micros;

/// A span of time. A century is for ever, and far from overflowing a sum with the present.
pub(crate) fn of(span: Duration) -> Micros {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX).min(100 * 366 * 86_400 * 1_000_000)
}

/// A stored time.
pub(crate) fn time(micros: Micros) -> Timestamp {
    Timestamp::from_microsecond(micros).unwrap_or(Timestamp::MAX)
}
