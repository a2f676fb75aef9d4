//! What runs for each event.

use std::future::Future;

use carrick_core::{context::Context, event::Event};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::HandlerError;

/// An event as its handler gets it. A clone is the same delivery.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The event.
    pub event: Event,
    /// Its deadline and trace; also in scope while the handler runs
    /// ([`Context::current`](carrick_core::context::Context::current)).
    pub context: Context,
    /// Grows with every delivery in the group: put it into your own writes (`where fence <= ?`),
    /// and a handler that was stopped too late changes nothing. `None` if the broker has no such
    /// number.
    pub fence: Option<u64>,
    /// How often the event was delivered, this time included; from 1.
    pub attempt: u32,
    /// When it was first delivered, by the broker's clock.
    pub first_delivered_at: Timestamp,
    /// Cancelled when the lease is lost, the time is over or the consumer gives up. The handler's
    /// future is polled once more and then dropped; work that it has spawned must watch this.
    pub cancelled: CancellationToken,
}

/// Does the work for an event. Closures of the same shape are handlers.
///
/// Returning `Ok` acknowledges; an error decides by its kind; a panic counts as a transient
/// failure. The same event may come again after either, so its effect must be idempotent: see
/// [`inbox`](crate::inbox).
///
/// ```
/// use carrick_message::consumer::{Handler, HandlerError, Incoming};
///
/// struct Ledger;
///
/// impl Handler for Ledger {
///     async fn handle(&self, incoming: Incoming) -> Result<(), HandlerError> {
///         println!("{} is attempt {}", incoming.event.id(), incoming.attempt);
///         Ok(())
///     }
/// }
///
/// fn is_handler(_: impl Handler) {}
/// is_handler(Ledger);
/// is_handler(|incoming: Incoming| async move {
///     println!("{}", incoming.event.ty());
///     Ok(())
/// });
/// ```
pub trait Handler: Send + Sync + 'static {
    /// Handles one event.
    ///
    /// # Errors
    /// [`HandlerError`], whose kind decides what becomes of the event.
    ///
    /// # Cancel safety
    /// The future is dropped when the lease is lost, the time is over or the consumer gives up:
    /// an effect must then be whole or absent, as in one transaction.
    fn handle(&self, incoming: Incoming) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

impl<F, R> Handler for F
where
    F: Fn(Incoming) -> R + Send + Sync + 'static,
    R: Future<Output = Result<(), HandlerError>> + Send,
{
    fn handle(&self, incoming: Incoming) -> impl Future<Output = Result<(), HandlerError>> + Send {
        self(incoming)
    }
}
