//! Why a stream ended.

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The reader left, or its line broke.
    Gone,
    /// The reader took too little, too slowly.
    Slow,
    /// The hub drains.
    Drain,
    /// The reader's right to the topics ended.
    Expired,
    /// The store is closed.
    Closed,
}

impl Ended {
    /// For a label of a metric.
    pub fn label(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Slow => "slow",
            Self::Drain => "drain",
            Self::Expired => "expired",
            Self::Closed => "closed",
        }
    }
}
