//! Trace context: W3C `traceparent` and `tracestate`.

use std::{fmt, str::FromStr, sync::OnceLock};

use rand::Rng;

/// The longest `tracestate` that is carried on, as the recommendation asks for at least.
const MAX_STATE: usize = 512;

/// Why a text is no trace context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a W3C traceparent")]
pub struct InvalidTrace;

/// A trace's id.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId(pub u128);

/// A span's id.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub u64);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A span and the trace it is in. Its text form is a `traceparent`.
///
/// ```
/// # use carrick_core::trace::TraceContext;
/// let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// let trace: TraceContext = text.parse()?;
/// assert_eq!(trace.to_string(), text);
/// assert_eq!(trace.child().trace_id(), trace.trace_id());
/// # Ok::<(), carrick_core::trace::InvalidTrace>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    trace: TraceId,
    span: SpanId,
    sampled: bool,
    state: Option<String>,
}

impl TraceContext {
    /// A new trace, sampled, with random ids of the thread's generator.
    #[expect(clippy::new_without_default, reason = "two defaults would be two traces")]
    pub fn new() -> Self {
        Self::from_rng(&mut rand::rng())
    }

    /// A new trace with ids from `rng`.
    pub fn from_rng(rng: &mut (impl Rng + ?Sized)) -> Self {
        let trace = u128::from(rng.next_u64()) << 64 | u128::from(some_u64(rng));
        Self { trace: TraceId(trace), span: SpanId(some_u64(rng)), sampled: true, state: None }
    }

    /// A new span in the same trace.
    #[must_use]
    pub fn child(&self) -> Self {
        self.child_from_rng(&mut rand::rng())
    }

    /// A new span in the same trace, with its id from `rng`.
    #[must_use]
    pub fn child_from_rng(&self, rng: &mut (impl Rng + ?Sized)) -> Self {
        Self { span: SpanId(some_u64(rng)), ..self.clone() }
    }

    /// With a `tracestate`; one that is too long or not visible ASCII is dropped, as the
    /// recommendation allows, and the trace goes on.
    #[must_use]
    pub fn with_state(mut self, state: &str) -> Self {
        let visible = state.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        self.state =
            (!state.is_empty() && state.len() <= MAX_STATE && visible).then(|| state.to_owned());
        self
    }

    /// The trace's id.
    pub fn trace_id(&self) -> TraceId {
        self.trace
    }

    /// The span's id.
    pub fn span_id(&self) -> SpanId {
        self.span
    }

    /// Whether the trace is recorded.
    pub fn is_sampled(&self) -> bool {
        self.sampled
    }

    /// The `tracestate`.
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref()
    }
}

/// Tells the span that is being recorded around its caller.
pub type Recorder = fn() -> Option<TraceContext>;

static RECORDER: OnceLock<Recorder> = OnceLock::new();

/// Names who records spans in this process, so that what is sent on continues the span that a collector
/// gets, and not one that nobody has seen. Only the first call counts; it is told whether it was that.
pub fn set_recorder(recorder: Recorder) -> bool {
    RECORDER.set(recorder).is_ok()
}

/// The span that is being recorded around the caller; `None` where nobody records.
pub fn recorded() -> Option<TraceContext> {
    RECORDER.get().and_then(|recorder| recorder())
}

/// Ids of zero mean "none".
fn some_u64(rng: &mut (impl Rng + ?Sized)) -> u64 {
    rng.next_u64().max(1)
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

impl FromStr for TraceContext {
    type Err = InvalidTrace;

    fn from_str(text: &str) -> Result<Self, InvalidTrace> {
        let mut parts = text.splitn(5, '-');
        let mut next = |digits| hex(parts.next(), digits);
        let (version, trace, span, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        // Version ff is forbidden; a later version may say more after what we know, version 0 not.
        let more = parts.next().is_some();
        if version == 0xff || (version == 0 && more) || trace == 0 || span == 0 {
            return Err(InvalidTrace);
        }
        let span = SpanId(u64::try_from(span).map_err(|_| InvalidTrace)?);
        Ok(Self { trace: TraceId(trace), span, sampled: flags & 1 == 1, state: None })
    }
}

/// Exactly so many lower-case hexadecimal digits.
fn hex(part: Option<&str>, digits: usize) -> Result<u128, InvalidTrace> {
    let part = part.filter(|part| part.len() == digits).ok_or(InvalidTrace)?;
    if !part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(InvalidTrace);
    }
    u128::from_str_radix(part, 16).map_err(|_| InvalidTrace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, valid: bool) {
        assert_eq!(text.parse::<TraceContext>().is_ok(), valid, "{text:?}");
    }

    #[test]
    fn only_what_the_recommendation_allows_is_a_traceparent() {
        const IDS: &str = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";
        check(&format!("00-{IDS}-00"), true);
        check(&format!("cc-{IDS}-01-what-comes-later"), true);
        check(&format!("00-{IDS}-01-more"), false);
        check(&format!("ff-{IDS}-01"), false);
        check(&format!("00-{}-01", IDS.to_uppercase()), false);
        check(&format!("00-{IDS}-1"), false);
        check("00-00000000000000000000000000000000-b7ad6b7169203331-01", false);
        check("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", false);
        check("", false);
        check("00-é-é-é", false);
    }

    #[test]
    fn a_child_keeps_the_trace_and_its_state() {
        let parent = TraceContext::new().with_state("vendor=1");
        let child = parent.child();
        assert_eq!((child.trace_id(), child.state()), (parent.trace_id(), Some("vendor=1")));
        assert_ne!(child.span_id(), parent.span_id());
        assert_eq!(parent.with_state("é").state(), None);
    }
}
