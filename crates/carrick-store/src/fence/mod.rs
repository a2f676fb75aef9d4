//! Fence: named leases whose tokens only grow.
//!
//! A lease cannot exclude a holder that was paused past its end; the guarded resource can, by
//! refusing tokens older than the newest it has seen. So the token is the point, and the lease is
//! only a way to keep holders from getting in each other's way.

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;

use crate::{
    StoreError,
    schema::{Component, Migration},
};

/// The table of named leases, `carrick_fence`.
pub const COMPONENT: Component = Component {
    name: "fence",
    migrations: &[Migration {
        version: 1,
        name: "named leases",
        #[cfg(feature = "sqlite")]
        sqlite: sqlite::CREATE,
        #[cfg(not(feature = "sqlite"))]
        sqlite: "",
        #[cfg(feature = "postgres")]
        postgres: postgres::CREATE,
        #[cfg(not(feature = "postgres"))]
        postgres: "",
    }],
};

/// A fencing token: the higher one is the later holder.
pub type FenceToken = u64;

/// What an acquisition found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// Held under this token.
    Held(FenceToken),
    /// Somebody else holds it for this long.
    Busy(Duration),
}

/// Named leases.
///
/// # Contract
/// * Tokens of one name only grow, across holders and across restarts of the store.
/// * A lease ends by itself `ttl` after its grant or renewal: a holder that died blocks nobody.
/// * Time is the engine's: clocks of holders are never compared.
#[async_trait]
pub trait Fence {
    /// Grants lease `name` (1..=200 bytes) for `ttl`, or tells how long its holder still has.
    async fn acquire(&self, name: &str, ttl: Duration) -> Result<Acquired, StoreError>;

    /// Sets the end of a lease to `ttl` from now; `false` if the token is not the current one.
    async fn renew(&self, name: &str, token: FenceToken, ttl: Duration)
    -> Result<bool, StoreError>;

    /// Ends a lease early; `false` if the token is not the current one.
    async fn release_lease(&self, name: &str, token: FenceToken) -> Result<bool, StoreError>;
}
