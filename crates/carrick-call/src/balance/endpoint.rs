//! A host as discovery tells it.

use std::sync::Arc;

/// A host as discovery tells it. Its address is its identity: the same address in the next set is the
/// same host, with what is known of it.
///
/// ```
/// # use carrick_call::balance::Endpoint;
/// let canary = Endpoint::new("10.0.0.7:80").with_weight(5).with_zone("eu-1");
/// assert_eq!(&*canary.address, "10.0.0.7:80");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Endpoint {
    /// Where it is, in whatever form the caller connects with.
    pub address: Arc<str>,
    /// Its share of the calls against the others' weights; 0 is none. Default 1.
    pub weight: u16,
    /// Where it stands, for whoever connects to it; hosts are not chosen by it.
    pub zone: Option<Arc<str>>,
    /// Whether it is about to go and takes no new calls. Default false.
    pub draining: bool,
}

impl Endpoint {
    /// A host of weight 1.
    pub fn new(address: impl Into<Arc<str>>) -> Self {
        Self { address: address.into(), weight: 1, zone: None, draining: false }
    }

    /// The same with a weight.
    #[must_use]
    pub fn with_weight(self, weight: u16) -> Self {
        Self { weight, ..self }
    }

    /// The same in a zone.
    #[must_use]
    pub fn with_zone(self, zone: impl Into<Arc<str>>) -> Self {
        Self { zone: Some(zone.into()), ..self }
    }

    /// The same, about to go.
    #[must_use]
    pub fn with_draining(self, draining: bool) -> Self {
        Self { draining, ..self }
    }
}
