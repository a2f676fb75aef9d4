//! Readers: a few connections beside the writer, which see what was committed and block nobody.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::flusher::Horizon;
use crate::StoreError;

/// Connections for reading, made when they are first needed.
#[derive(Debug)]
pub(super) struct Readers {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
    places: Arc<Semaphore>,
    horizon: Arc<Horizon>,
}

impl Readers {
    pub(super) fn new(path: &Path, most: usize, horizon: Arc<Horizon>) -> Self {
        let idle = Mutex::new(Vec::with_capacity(most));
        Self { path: path.to_owned(), idle, places: Arc::new(Semaphore::new(most)), horizon }
    }

    /// Runs a read on a thread that may block, and answers when what it may have seen is on the disk.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let place = Arc::clone(&self.places).acquire_owned();
        let place = place.await.map_err(|_| StoreError::Closed)?;
        let readers = Arc::clone(self);
        let blocking = tokio::task::spawn_blocking(move || {
            // A caller that leaves does not stop the read, so the place is the read's.
            let _place = place;
            let idle = readers.idle.lock().pop();
            let mut conn = match idle {
                Some(conn) => conn,
                None => super::connect(&readers.path).map_err(super::failed)?,
            };
            // One snapshot for all statements of a read; it ends with it.
            let snapshot = conn.transaction().map_err(super::failed)?;
            let answer = work(&snapshot);
            drop(snapshot);
            let seen = readers.horizon.seen();
            if !readers.places.is_closed() {
                readers.idle.lock().push(conn);
            }
            answer.map(|answer| (answer, seen))
        });
        let (answer, seen) = blocking.await.map_err(|error| StoreError::Engine(error.into()))??;
        self.horizon.wait(seen).await?;
        Ok(answer)
    }

    pub(super) fn close(&self) {
        self.places.close();
        self.idle.lock().clear();
    }
}
