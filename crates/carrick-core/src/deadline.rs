//! Deadlines: monotonic inside, "what remains" on the wire.
//!
//! HTTP carries `x-request-timeout-ms` (what remains) and `x-request-deadline-unix-ms` (absolute);
//! both are sent, and on receipt the relative one wins, since clocks of machines differ. gRPC
//! carries `grpc-timeout`. Whatever cannot be read means "our own maximum" and is counted: never an
//! error, and never "no deadline" (defects.md S8).
//!
//! Source: DESIGN §3; the gRPC protocol; Envoy's `x-envoy-expected-rq-timeout-ms` and Connect's
//! `connect-timeout-ms`, which are understood too.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use jiff::Timestamp;
use tokio::time::Instant;

/// What remains, in milliseconds; the one that wins.
pub const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");
/// The absolute form, in milliseconds of Unix time.
pub const UNIX: HeaderName = HeaderName::from_static("x-request-deadline-unix-ms");
/// gRPC's form.
pub const GRPC: HeaderName = HeaderName::from_static("grpc-timeout");

/// Other proxies' forms of what remains in milliseconds, in the order in which they are tried.
const RELATIVE: [HeaderName; 3] = [
    TIMEOUT,
    HeaderName::from_static("x-envoy-expected-rq-timeout-ms"),
    HeaderName::from_static("connect-timeout-ms"),
];

/// How a server bounds what callers ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest that any call may take. Default 2 s.
    pub max: Duration,
    /// With less than this left, work is not started. Default 50 ms.
    pub min_useful: Duration,
    /// An absolute deadline further in the past than this is a wrong clock, not an expiry. Default
    /// 5 s.
    pub skew: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max: Duration::from_secs(2),
            min_useful: Duration::from_millis(50),
            skew: Duration::from_secs(5),
        }
    }
}

/// When a piece of work is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

/// A deadline as it was found on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inbound {
    /// The deadline to keep: the caller's, at most our maximum from now.
    pub deadline: Deadline,
    /// What the request said of it.
    pub said: Said,
}

/// What a request said of its deadline; worth a counter each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Nothing.
    Nothing,
    /// Something that was kept, or cut to our maximum.
    Deadline,
    /// Something that cannot be read: not a number, negative, overflowing, empty, sent twice.
    Junk,
    /// An absolute time that only a wrong clock explains.
    Skewed,
}

impl Deadline {
    /// A deadline at a moment of monotonic time.
    pub fn at(moment: Instant) -> Self {
        Self(moment)
    }

    /// The moment.
    pub fn instant(self) -> Instant {
        self.0
    }

    /// What remains; zero when it has passed.
    pub fn remaining(self, now: Instant) -> Duration {
        self.0.saturating_duration_since(now)
    }

    /// The earlier of two.
    #[must_use]
    pub fn earlier(self, other: Self) -> Self {
        self.min(other)
    }

    /// Whether enough is left to start something.
    pub fn is_useful(self, now: Instant, limits: &Limits) -> bool {
        self.remaining(now) >= limits.min_useful
    }

    /// Reads the deadline of an HTTP or gRPC request.
    pub fn from_headers(
        headers: &HeaderMap,
        now: Instant,
        wall: Timestamp,
        limits: &Limits,
    ) -> Inbound {
        let own = Self(now + limits.max);
        let inbound = |said, remaining: Option<Duration>| {
            let deadline = remaining.map_or(own, |left| Self(now + left.min(limits.max)));
            Inbound { deadline, said }
        };
        if let Some(text) = only(headers, &GRPC) {
            return match text.ok().and_then(parse_grpc) {
                Some(left) => inbound(Said::Deadline, Some(left)),
                None => inbound(Said::Junk, None),
            };
        }
        for name in &RELATIVE {
            if let Some(text) = only(headers, name) {
                return match text.ok().and_then(parse_millis) {
                    Some(left) => inbound(Said::Deadline, Some(Duration::from_millis(left))),
                    None => inbound(Said::Junk, None),
                };
            }
        }
        let Some(text) = only(headers, &UNIX) else { return inbound(Said::Nothing, None) };
        let Some(unix) = text.ok().and_then(parse_millis) else { return inbound(Said::Junk, None) };
        let wall = u64::try_from(wall.as_millisecond()).unwrap_or(0);
        let past = Duration::from_millis(wall.saturating_sub(unix));
        if past > limits.skew {
            return inbound(Said::Skewed, None);
        }
        inbound(Said::Deadline, Some(Duration::from_millis(unix.saturating_sub(wall))))
    }

    /// Writes the deadline of an HTTP request, in both forms.
    pub fn to_headers(self, headers: &mut HeaderMap, now: Instant, wall: Timestamp) {
        let left = u64::try_from(self.remaining(now).as_millis()).unwrap_or(u64::MAX);
        let wall = u64::try_from(wall.as_millisecond()).unwrap_or(0);
        headers.insert(TIMEOUT, HeaderValue::from(left));
        headers.insert(UNIX, HeaderValue::from(wall.saturating_add(left)));
    }

    /// The value of `grpc-timeout`: at most eight digits, in the finest unit that fits, rounded up.
    pub fn to_grpc(self, now: Instant) -> String {
        const MOST: u128 = 99_999_999;
        let nanos = self.remaining(now).as_nanos();
        let units: [(u128, char); 6] = [
            (1, 'n'),
            (1_000, 'u'),
            (1_000_000, 'm'),
            (1_000_000_000, 'S'),
            (60_000_000_000, 'M'),
            (3_600_000_000_000, 'H'),
        ];
        let fits = units.iter().find(|(unit, _)| nanos.div_ceil(*unit) <= MOST);
        match fits {
            Some((unit, letter)) => format!("{}{letter}", nanos.div_ceil(*unit)),
            None => format!("{MOST}H"),
        }
    }
}

/// The value of a header that may be sent once: `Some(Err)` if it was sent twice or is no text.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<Result<&'a str, ()>> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    if values.next().is_some() {
        return Some(Err(()));
    }
    Some(first.to_str().map_err(|_| ()))
}

/// Digits only: `parse` alone would take a plus sign.
fn parse_millis(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

fn parse_grpc(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let count = parse_millis(digits)?;
    match unit {
        "n" => Some(Duration::from_nanos(count)),
        "u" => Some(Duration::from_micros(count)),
        "m" => Some(Duration::from_millis(count)),
        "S" => Some(Duration::from_secs(count)),
        "M" => Some(Duration::from_secs(count * 60)),
        "H" => Some(Duration::from_secs(count * 3600)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WALL: &str = "2026-12-01T00:00:00Z";

    fn read(headers: &[(&str, &str)]) -> (Said, u128) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value);
        }
        let (now, wall) = (Instant::now(), WALL.parse().unwrap());
        let inbound = Deadline::from_headers(&map, now, wall, &Limits::default());
        (inbound.said, inbound.deadline.remaining(now).as_millis())
    }

    fn unix(offset: i64) -> String {
        let wall: Timestamp = WALL.parse().unwrap();
        (wall.as_millisecond() + offset).to_string()
    }

    #[test]
    fn s8_junk_means_our_own_maximum() {
        for junk in ["", "NaN", "inf", "-5", "+5", "1.5", "1e3", "99999999999999999999", "5 "] {
            assert_eq!(read(&[("x-request-timeout-ms", junk)]), (Said::Junk, 2000), "{junk:?}");
            assert_eq!(read(&[("x-request-deadline-unix-ms", junk)]), (Said::Junk, 2000));
        }
        for junk in ["", "S", "5", "5x", "123456789S", "-1S", "é"] {
            assert_eq!(read(&[("grpc-timeout", junk)]), (Said::Junk, 2000), "{junk:?}");
        }
        let twice = [("x-request-timeout-ms", "5"), ("x-request-timeout-ms", "6")];
        assert_eq!(read(&twice), (Said::Junk, 2000));
    }

    #[test]
    fn s8_a_time_far_in_the_past_is_a_wrong_clock_and_a_near_one_an_expiry() {
        assert_eq!(read(&[("x-request-deadline-unix-ms", &unix(-5001))]), (Said::Skewed, 2000));
        assert_eq!(read(&[("x-request-deadline-unix-ms", &unix(-5000))]), (Said::Deadline, 0));
        assert_eq!(read(&[("x-request-deadline-unix-ms", &unix(300))]), (Said::Deadline, 300));
    }

    #[test]
    fn the_relative_form_wins_and_nothing_exceeds_our_maximum() {
        let both = [("x-request-deadline-unix-ms", &*unix(1500)), ("x-request-timeout-ms", "700")];
        assert_eq!(read(&both), (Said::Deadline, 700));
        assert_eq!(read(&[("x-request-timeout-ms", "3600000")]), (Said::Deadline, 2000));
        assert_eq!(read(&[("connect-timeout-ms", "20")]), (Said::Deadline, 20));
        assert_eq!(read(&[("x-envoy-expected-rq-timeout-ms", "30")]), (Said::Deadline, 30));
        assert_eq!(read(&[("grpc-timeout", "100m")]), (Said::Deadline, 100));
        assert_eq!(read(&[]), (Said::Nothing, 2000));
    }

    #[test]
    fn what_is_sent_is_what_remains() {
        let (now, wall) = (Instant::now(), WALL.parse().unwrap());
        let mut headers = HeaderMap::new();
        let deadline = Deadline::at(now + Duration::from_millis(250));
        deadline.to_headers(&mut headers, now, wall);
        let limits = Limits::default();
        assert_eq!(Deadline::from_headers(&headers, now, wall, &limits).deadline, deadline);
        assert_eq!(headers[UNIX].to_str().unwrap(), unix(250));
    }

    proptest! {
        #[test]
        fn a_grpc_timeout_is_never_shorter_than_what_remains(nanos: u64) {
            let now = Instant::now();
            let left = Duration::from_nanos(nanos);
            let text = Deadline::at(now + left).to_grpc(now);
            prop_assert!(text.len() <= 9);
            prop_assert!(parse_grpc(&text).unwrap() >= left);
        }
    }
}
