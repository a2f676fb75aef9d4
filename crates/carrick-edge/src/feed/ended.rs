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
    /// The client said something that the protocol does not allow.
    Protocol,
    /// What the client sent cannot be published now.
    Busy,
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
            Self::Protocol => "protocol",
            Self::Busy => "busy",
        }
    }

    pub(crate) fn count(self, door: &'static str) {
        metrics::counter!("carrick_feed_ended_total", "door" => door, "reason" => self.label())
            .increment(1);
    }
}
