//! Wake-ups: hints that spare a relay its next pause. None is needed for a row to be found.

use std::sync::Arc;

use tokio::sync::Notify;

/// Tells a relay of this process that rows were committed.
///
/// A clone wakes the same relay. Any number of calls while the relay looks become one more look.
///
/// ```
/// # use carrick_message::outbox::Waker;
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let waker = Waker::default();
/// waker.wake(); // after tx.commit()
/// waker.woken().await;
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Waker(Arc<Notify>);

impl Waker {
    /// Wakes the relay; call it after the commit.
    pub fn wake(&self) {
        self.0.notify_one();
    }

    /// Waits for the next wake-up; one that came before is not lost.
    ///
    /// # Cancel safety
    /// Safe to drop: a wake-up that was not taken stays.
    pub async fn woken(&self) {
        self.0.notified().await;
    }
}
