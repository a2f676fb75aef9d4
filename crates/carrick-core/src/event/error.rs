//! What can be wrong with an event.

use http::StatusCode;

use crate::problem::Problem;

/// Why bytes are not an event, or an event cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// The document is not JSON, or not of the shape that is needed here.
    #[error("the event is not {expected}")]
    Json {
        /// What it should have been.
        expected: &'static str,
        /// Where it stops being that.
        #[source]
        source: serde_json::Error,
    },
    /// An attribute is missing or wrong.
    #[error("attribute `{name}` must be {rule}, not {value}")]
    Attribute {
        /// Which attribute, cut to 80 characters.
        name: String,
        /// What is allowed.
        rule: &'static str,
        /// What was found, cut to 80 characters.
        value: String,
    },
    /// An event, or a batch, is larger than allowed.
    #[error("the event has {size} bytes, and {limit} are allowed")]
    TooLarge {
        /// Its size in bytes.
        size: usize,
        /// The most that is allowed.
        limit: usize,
    },
    /// A batch has more events than allowed.
    #[error("the batch has more than {limit} events")]
    TooMany {
        /// The most that is allowed.
        limit: usize,
    },
    /// An event of a batch is wrong.
    #[error("event {index} of the batch is wrong")]
    InBatch {
        /// Which one, from 0.
        index: usize,
        /// What is wrong with it.
        #[source]
        source: Box<Self>,
    },
    /// The content type names no mode or format that is understood.
    #[error("the content type must be {expected}, not {found}")]
    ContentType {
        /// What is understood.
        expected: &'static str,
        /// What was found, cut to 80 characters.
        found: String,
    },
    /// The body is not UTF-8, which JSON is.
    #[error("the event is not UTF-8")]
    Utf8(#[source] std::str::Utf8Error),
}

impl EventError {
    pub(super) fn attribute(name: &str, rule: &'static str, value: &str) -> Self {
        Self::Attribute { name: cut(name), rule, value: cut(value) }
    }

    /// The attribute at fault, if one is.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Attribute { name, .. } => Some(name),
            Self::InBatch { source, .. } => source.field(),
            _ => None,
        }
    }

    /// Whether a size or a count is over its limit.
    pub fn is_too_large(&self) -> bool {
        match self {
            Self::TooLarge { .. } | Self::TooMany { .. } => true,
            Self::InBatch { source, .. } => source.is_too_large(),
            _ => false,
        }
    }
}

impl From<&EventError> for Problem {
    fn from(error: &EventError) -> Self {
        let mut detail = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            detail = format!("{detail}: {inner}");
            source = inner.source();
        }
        let status = match error {
            error if error.is_too_large() => StatusCode::PAYLOAD_TOO_LARGE,
            EventError::ContentType { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            _ => StatusCode::BAD_REQUEST,
        };
        let problem = Self::new(status, detail);
        match error.field() {
            Some(field) => problem.with("field", field),
            None => problem,
        }
    }
}

/// As much of an outside text as a message needs to be recognised by.
pub(super) fn cut(text: &str) -> String {
    const ENOUGH: usize = 80;
    match text.char_indices().nth(ENOUGH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
