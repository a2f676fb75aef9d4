//! A store whose claims are counted, and slow on demand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use carrick_core::name::Group;
use carrick_store::{
    Store, StoreError, Stream,
    engine::memory::MemoryStore,
    fence::{Acquired, Fence, FenceToken},
    lease::{
        BlockedKey, Claim, Claims, DeadLetter, GroupStats, LeaseToken, Queue, Select, Settle,
        Settled, Start,
    },
    log::{Appended, Bounds, Log, NewRecord, ReadLimit, Record, Seq, Trim},
    once::{Once, OnceKey, OnceToken, Reserved},
    wake::{Waiter, Wake},
};

#[derive(Debug)]
pub(crate) struct Watched {
    inner: Arc<MemoryStore>,
    claims: AtomicUsize,
    answer_after_ms: AtomicU64,
}

impl Watched {
    pub(crate) fn new(inner: Arc<MemoryStore>) -> Arc<Self> {
        Arc::new(Self { inner, claims: AtomicUsize::new(0), answer_after_ms: AtomicU64::new(0) })
    }

    pub(crate) fn claims(&self) -> usize {
        self.claims.load(Ordering::Relaxed)
    }

    /// From now on claims take effect at once and answer later, as over a slow network.
    pub(crate) fn answer_after(&self, delay: Duration) {
        self.answer_after_ms.store(delay.as_millis() as u64, Ordering::Relaxed);
    }
}

#[async_trait]
impl Queue for Watched {
    async fn claim(
        &self,
        stream: &Stream,
        group: &Group,
        claim: Claim,
    ) -> Result<Claims, StoreError> {
        self.claims.fetch_add(1, Ordering::Relaxed);
        let claims = self.inner.claim(stream, group, claim).await;
        let delay = self.answer_after_ms.load(Ordering::Relaxed);
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        claims
    }

    async fn create_group(
        &self,
        stream: &Stream,
        group: &Group,
        start: Start,
    ) -> Result<bool, StoreError> {
        self.inner.create_group(stream, group, start).await
    }

    async fn settle(
        &self,
        settlements: Vec<(LeaseToken, Settle)>,
    ) -> Result<Vec<Settled>, StoreError> {
        self.inner.settle(settlements).await
    }

    async fn group_of(&self, token: LeaseToken) -> Result<Option<(Stream, Group)>, StoreError> {
        self.inner.group_of(token).await
    }

    async fn groups(&self, stream: &Stream) -> Result<Vec<(Group, GroupStats)>, StoreError> {
        self.inner.groups(stream).await
    }

    async fn dead_letters(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        self.inner.dead_letters(stream, group, after, limit).await
    }

    async fn redrive(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        self.inner.redrive(stream, group, select, limit).await
    }

    async fn purge(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        limit: usize,
    ) -> Result<usize, StoreError> {
        self.inner.purge(stream, group, select, limit).await
    }

    async fn skip(
        &self,
        stream: &Stream,
        group: &Group,
        select: &Select,
        cause: &str,
    ) -> Result<usize, StoreError> {
        self.inner.skip(stream, group, select, cause).await
    }

    async fn blocked_keys(
        &self,
        stream: &Stream,
        group: &Group,
        after: Seq,
        limit: usize,
    ) -> Result<Vec<BlockedKey>, StoreError> {
        self.inner.blocked_keys(stream, group, after, limit).await
    }
}

#[async_trait]
impl Log for Watched {
    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    fn dedupe_window(&self) -> Duration {
        self.inner.dedupe_window()
    }

    async fn append(
        &self,
        stream: &Stream,
        records: Vec<NewRecord>,
    ) -> Result<Vec<Appended>, StoreError> {
        self.inner.append(stream, records).await
    }

    async fn read(
        &self,
        stream: &Stream,
        after: Seq,
        limit: ReadLimit,
    ) -> Result<Vec<Record>, StoreError> {
        self.inner.read(stream, after, limit).await
    }

    async fn bounds(&self, stream: &Stream) -> Result<Bounds, StoreError> {
        self.inner.bounds(stream).await
    }

    async fn streams(
        &self,
        after: Option<&Stream>,
        limit: usize,
    ) -> Result<Vec<(Stream, Bounds)>, StoreError> {
        self.inner.streams(after, limit).await
    }

    async fn trim(&self, stream: &Stream, trim: Trim) -> Result<usize, StoreError> {
        self.inner.trim(stream, trim).await
    }
}

#[async_trait]
impl Once for Watched {
    async fn reserve(&self, key: &OnceKey, hold: Duration) -> Result<Reserved, StoreError> {
        self.inner.reserve(key, hold).await
    }

    async fn complete(
        &self,
        key: &OnceKey,
        token: OnceToken,
        answer: Bytes,
        keep: Duration,
    ) -> Result<bool, StoreError> {
        self.inner.complete(key, token, answer, keep).await
    }

    async fn release(&self, key: &OnceKey, token: OnceToken) -> Result<(), StoreError> {
        Once::release(&*self.inner, key, token).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, StoreError> {
        self.inner.sweep(limit).await
    }
}

#[async_trait]
impl Fence for Watched {
    async fn acquire(&self, name: &str, ttl: Duration) -> Result<Acquired, StoreError> {
        self.inner.acquire(name, ttl).await
    }

    async fn renew(
        &self,
        name: &str,
        token: FenceToken,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        self.inner.renew(name, token, ttl).await
    }

    async fn release_lease(&self, name: &str, token: FenceToken) -> Result<bool, StoreError> {
        self.inner.release_lease(name, token).await
    }
}

impl Wake for Watched {
    fn waiter(&self, stream: &Stream) -> Waiter {
        self.inner.waiter(stream)
    }

    fn backstop(&self) -> Duration {
        self.inner.backstop()
    }
}

#[async_trait]
impl Store for Watched {
    async fn close(&self) {
        self.inner.close().await;
    }
}
