//! The one classifier: what became of an attempt, decided once and read by everybody.
//!
//! Breaker, outlier detector, balancer, limiter, budget and metrics must not each have their own idea
//! of failure, or they work against each other.

use std::time::Duration;

use jiff::{Timestamp, fmt::rfc2822};

/// The longest `Retry-After` that is believed: a longer one is a mistake or an attack.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// What became of one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It worked.
    Success,
    /// It failed, and may work at another time or place.
    Transient,
    /// It failed, and would fail again.
    Permanent,
    /// The other side has too much to do.
    Overload {
        /// When it asks to be left alone until.
        retry_after: Option<Duration>,
    },
    /// It never left this process.
    Rejected,
    /// Its time was over.
    Expired,
    /// Its caller does not want it any more.
    Cancelled,
}

impl Outcome {
    /// Whether the same call may work when it is made again.
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Transient | Self::Overload { .. })
    }

    /// Whether it speaks against the other side's health.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Transient | Self::Overload { .. } | Self::Expired)
    }

    /// Classifies an HTTP answer by its status.
    pub fn from_status(status: http::StatusCode, retry_after: Option<Duration>) -> Self {
        match status.as_u16() {
            200..400 => Self::Success,
            429 | 503 => Self::Overload { retry_after },
            408 | 425 | 500 | 502 => Self::Transient,
            504 => Self::Expired,
            _ => Self::Permanent,
        }
    }

    /// Classifies a gRPC answer by its code.
    pub fn from_grpc(code: i32, retry_after: Option<Duration>) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::Cancelled,
            4 => Self::Expired,
            8 => Self::Overload { retry_after },
            2 | 10 | 13 | 14 => Self::Transient,
            _ => Self::Permanent,
        }
    }
}

/// Reads `Retry-After` in both its forms: seconds, or a date. Junk is `None`; a date in the past is
/// zero; nothing is longer than a day.
pub fn parse_retry_after(value: &str, wall: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a number holds are still "very long".
        let seconds = value.parse().unwrap_or(u64::MAX);
        return Some(Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    }
    let date = rfc2822::DateTimeParser::new().parse_timestamp(value).ok()?;
    let left = Duration::try_from(date.duration_since(wall)).unwrap_or_default();
    Some(left.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(value: &str, expected: Option<u64>) {
        let wall = "2026-12-01T00:00:00Z".parse().unwrap();
        assert_eq!(parse_retry_after(value, wall), expected.map(Duration::from_secs), "{value:?}");
    }

    #[test]
    fn retry_after_is_read_in_both_forms_and_bounded() {
        check("120", Some(120));
        check("0", Some(0));
        check("99999999999999999999999", Some(86_400));
        check("Tue, 01 Dec 2026 00:01:00 GMT", Some(60));
        check("Tue, 01 Dec 2020 00:01:00 GMT", Some(0));
        for junk in ["", "-1", "1.5", "soon", "é"] {
            check(junk, None);
        }
    }

    #[test]
    fn a_status_has_one_verdict() {
        let verdict =
            |status| Outcome::from_status(http::StatusCode::from_u16(status).unwrap(), None);
        assert_eq!(verdict(201), Outcome::Success);
        assert_eq!(verdict(404), Outcome::Permanent);
        assert_eq!(verdict(503), Outcome::Overload { retry_after: None });
        assert!(verdict(502).is_retryable() && !verdict(501).is_retryable());
        assert_eq!(verdict(504), Outcome::Expired);
        assert_eq!(Outcome::from_grpc(4, None), Outcome::Expired);
    }
}
