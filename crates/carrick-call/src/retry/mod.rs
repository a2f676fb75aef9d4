//! Retry: whether to try again, when, and with what body.
//!
//! One pure function decides ([`decide`]), in an order in which the cheap and the safe questions come
//! first and money comes last: attempts left, worth it, safe, not yet answered, not told to stop, in
//! time, paid for. Its answer says why, with the numbers that decided. [`ReplayBody`] sends a body
//! again byte for byte, as long as it is small enough to be kept. [`RetryLayer`] does both for any
//! service that speaks HTTP; the [`stack`](crate::stack) does them for a dependency with several hosts.
//!
//! What is retried is bounded three times: by attempts, by the deadline, and by the
//! [`budget`](crate::budget) that all calls to a dependency share. A server below that has retried
//! already says so ([`RETRIED`]), so that retries do not multiply from layer to layer.
//!
//! Source: pattern document, retries; gRFC A6 for pushback; linkerd2-proxy for replaying bodies.
//! Differs: a retry needs time to be useful, a replayable body, and a request that may be repeated;
//! a wait that the server asked for gets jitter that only lengthens it.

mod body;
mod config;
mod core;
mod layer;

use http::{HeaderMap, HeaderName, Method};

pub use self::{
    body::{BodyError, ReplayBody},
    config::{RetryConfig, RetryOptions},
    core::{Attempt, Decision, Pushback, Repeat, Stop, decide},
    layer::{RetryFuture, RetryLayer, RetryService},
};

/// Request header: which attempt this is, from 1.
pub const ATTEMPT: HeaderName = HeaderName::from_static("x-carrick-attempt");

/// Response header: how many retries were made below. Whoever sees it does not retry.
pub const RETRIED: HeaderName = HeaderName::from_static("x-carrick-retried");

/// Request header that makes any method safe to repeat: the server knows what it has done.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Marks a request, in its extensions, as one that may be sent twice although its method does not say
/// so: a read by POST, as all of gRPC's are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idempotent;

/// gRPC's wish of when to retry, in milliseconds; negative: do not.
pub(crate) const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// Whether the request may be sent twice: by its method, or since it carries an idempotency key.
pub fn is_idempotent_request(method: &Method, headers: &HeaderMap) -> bool {
    let by_method = matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    );
    by_method || headers.get(IDEMPOTENCY_KEY).is_some_and(|key| !key.is_empty())
}

/// What gRPC's server wishes, if it says so.
pub fn pushback(headers: &HeaderMap) -> Option<Pushback> {
    let value = headers.get(PUSHBACK)?;
    // Junk means "do not": a server that pushes back in a way we cannot read is no server to press.
    let millis = value.to_str().ok().and_then(|text| text.trim().parse::<u32>().ok());
    Some(millis.map_or(Pushback::Stop, |millis| {
        Pushback::After(std::time::Duration::from_millis(millis.into()))
    }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn istio_13851_50506_17145_an_unsafe_method_is_repeated_only_with_a_key() {
        let is_idempotent = |method: Method, key: Option<&str>| {
            let mut request = http::Request::builder().method(method);
            if let Some(key) = key {
                request = request.header(IDEMPOTENCY_KEY, key);
            }
            let request = request.body(()).unwrap();
            is_idempotent_request(request.method(), request.headers())
        };
        for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS] {
            assert!(is_idempotent(method, None));
        }
        for method in [Method::POST, Method::PATCH, Method::CONNECT] {
            assert!(!is_idempotent(method.clone(), None));
            assert!(!is_idempotent(method.clone(), Some("")));
            assert!(is_idempotent(method, Some("k-1")));
        }
    }

    #[test]
    fn pushback_is_read_exactly_and_what_cannot_be_read_means_stop() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(PUSHBACK, value.parse().unwrap());
            pushback(&headers)
        };
        assert_eq!(read("250"), Some(Pushback::After(Duration::from_millis(250))));
        for junk in ["-1", "", "soon", "1.5", "99999999999"] {
            assert_eq!(read(junk), Some(Pushback::Stop), "{junk:?}");
        }
        assert_eq!(pushback(&HeaderMap::new()), None);
    }
}
