//! A subscription: a reader's place in its topics.

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use carrick_core::name::Topic;
use carrick_store::{
    StoreError,
    log::{MAX_BATCH, ReadLimit, Seq},
};

use super::{
    Entry, Feed, Filter, PURPOSE, Start, entry::Scope, ring::Found, scope_of, tail::Watching,
};
use crate::{sse::Frame, websocket};

/// How much one read gives at most; at least one event if there is one.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// Events, 1..=1000.
    pub events: usize,
    /// Bytes of events.
    pub bytes: usize,
}

/// What a read found.
#[derive(Debug)]
pub enum Batch {
    /// These come next, in the order of their topic. None of them, when the filter wanted none of
    /// what was there: read again.
    Events(Vec<Item>),
    /// What comes next is gone, or was never here: the subscription goes on from the oldest event
    /// that is kept, and whoever reads it must forget what it knew of this topic.
    Reset(Topic),
    /// There is nothing yet: wait.
    UpToDate,
}

/// An event with the position after it.
#[derive(Clone, Debug)]
pub struct Item {
    /// The event, shared by all readers.
    pub entry: Arc<Entry>,
    /// The subscription's position once this event was taken, if it is not the entry's own.
    position: Option<Arc<str>>,
}

impl Item {
    /// Where to go on after this event.
    pub fn position(&self) -> &Arc<str> {
        self.position.as_ref().unwrap_or_else(|| self.entry.position())
    }

    /// Its WebSocket message.
    pub(crate) fn message(&self) -> Bytes {
        match &self.position {
            None => self.entry.message().clone(),
            Some(position) => {
                websocket::event(&self.entry, position, Some(self.entry.topic().name()))
            }
        }
    }

    /// Its frame of Server-Sent Events.
    pub(crate) fn frame(&self) -> Frame {
        match &self.position {
            None => self.entry.frame().clone(),
            Some(position) => Frame::event(self.entry.ty(), position, self.entry.body()),
        }
    }
}

/// One topic of a subscription.
#[derive(Debug)]
struct Source {
    scope: Arc<Scope>,
    after: Seq,
    lost: bool,
    live: Option<Live>,
}

#[derive(Debug)]
struct Live {
    watching: Watching,
    /// Bytes of the ring that passed up to `after`; `None` until the reader was up to date.
    passed: Option<u64>,
}

/// A reader's place in its topics. It buffers nothing.
#[derive(Debug)]
pub struct Subscription {
    feed: Feed,
    sources: Vec<Source>,
    filter: Filter,
    /// Which topic is looked at first: each in turn.
    turn: usize,
}

impl Subscription {
    pub(super) async fn start(
        feed: Feed,
        topics: &[Topic],
        start: Start,
        filter: Filter,
    ) -> Result<Self, StoreError> {
        let mut sources = Vec::with_capacity(topics.len());
        for (index, topic) in topics.iter().enumerate() {
            let after = match &start {
                Start::At(resume) => resume.0[index],
                Start::Latest => feed.0.store.bounds(topic).await?.last,
                Start::Earliest | Start::Lost => feed.0.store.bounds(topic).await?.first - 1,
            };
            let (scope, lost) = (feed.scope(topic), start == Start::Lost);
            sources.push(Source { scope, after, lost, live: None });
        }
        Ok(Self { feed, sources, filter, turn: 0 })
    }

    /// Reads on, without waiting for anything but the store.
    ///
    /// # Errors
    /// The store cannot be read; the place is kept, so that a later read goes on.
    ///
    /// # Cancel safety
    /// Safe to drop: the place moves only when the events are handed over.
    pub async fn read(&mut self, limit: Limit) -> Result<Batch, StoreError> {
        let topics = self.sources.len();
        for offset in 0..topics {
            let index = (self.turn + offset) % topics;
            let (source, feed) = (&mut self.sources[index], &self.feed);
            match source.read(feed, limit).await? {
                Read::Nothing => {}
                Read::Reset => {
                    metrics::counter!("carrick_feed_resets_total").increment(1);
                    return Ok(Batch::Reset(self.sources[index].scope.topic.clone()));
                }
                Read::Entries(entries) => {
                    self.turn = (index + 1) % topics;
                    return Ok(Batch::Events(self.take(index, entries)));
                }
            }
        }
        Ok(Batch::UpToDate)
    }

    /// Moves over entries, and keeps those that are wanted.
    fn take(&mut self, index: usize, entries: Vec<Arc<Entry>>) -> Vec<Item> {
        let alone = self.sources.len() == 1;
        let mut items = Vec::with_capacity(entries.len());
        for entry in entries {
            self.sources[index].pass(&entry);
            if entry.fits(&self.filter) {
                let position = (!alone).then(|| self.position().into());
                items.push(Item { entry, position });
            }
        }
        items
    }

    /// Waits until there may be more, or until it is time to leave.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn changed(&mut self) {
        match &mut *self.sources {
            [Source { live: Some(live), .. }] => live.watching.changed().await,
            // Not up to date yet: there may be more at once.
            sources if sources.iter().any(|source| source.live.is_none()) => {}
            sources => {
                let watching = sources.iter_mut().filter_map(|source| source.live.as_mut());
                let waits: Vec<_> =
                    watching.map(|live| Box::pin(live.watching.changed())).collect();
                let mut waits = pin!(waits);
                poll_fn(|cx| {
                    let ready = waits.iter_mut().any(|wait| wait.as_mut().poll(cx).is_ready());
                    if ready { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            }
        }
    }

    /// Where it is now, as the text that a client hands back.
    pub fn position(&self) -> String {
        match &*self.sources {
            [source] => source.scope.position(source.after),
            sources => {
                let epoch = self.feed.0.store.epoch();
                let numbers = sources.iter().map(|source| source.after);
                let payload: Vec<u8> =
                    std::iter::once(epoch).chain(numbers).flat_map(u64::to_be_bytes).collect();
                let topics: Vec<_> =
                    sources.iter().map(|source| source.scope.topic.clone()).collect();
                self.feed.0.seal.seal(PURPOSE, &scope_of(&topics), &payload)
            }
        }
    }

    /// Whether it begins with a [`Batch::Reset`] that was not read yet.
    pub fn is_lost(&self) -> bool {
        self.sources.iter().any(|source| source.lost)
    }

    /// Bytes of events that wait for a reader that was up to date once. One that still reads its way
    /// through the store has none: it goes at its own pace.
    pub fn waiting_bytes(&self) -> u64 {
        let behind = |live: &Live| Some(live.watching.passed().saturating_sub(live.passed?));
        self.sources.iter().filter_map(|source| source.live.as_ref().and_then(behind)).sum()
    }

    /// How long leaving may take, once the feed drains.
    pub fn leave_within(&self) -> Option<Duration> {
        self.feed.leave_within()
    }

    /// The feed it reads.
    pub fn feed(&self) -> &Feed {
        &self.feed
    }
}

enum Read {
    Entries(Vec<Arc<Entry>>),
    Reset,
    Nothing,
}

impl Source {
    async fn read(&mut self, feed: &Feed, limit: Limit) -> Result<Read, StoreError> {
        if self.lost {
            self.lost = false;
            return Ok(Read::Reset);
        }
        if let Some(live) = &mut self.live {
            match live.watching.after(self.after, limit.events, limit.bytes) {
                Some(Found::Entries(entries)) => return Ok(Read::Entries(entries)),
                Some(Found::UpToDate) if live.passed.is_some() => {
                    live.passed = Some(live.watching.passed());
                    return Ok(Read::Nothing);
                }
                // Up to date with the ring is up to date with the store only after one look at it.
                Some(Found::UpToDate | Found::Behind) | None => {}
            }
        }
        let records = limit.events.clamp(1, MAX_BATCH);
        let read = ReadLimit { records, bytes: limit.bytes };
        let store = &feed.0.store;
        let records = match store.read(&self.scope.topic, self.after, read).await {
            Ok(records) => records,
            Err(StoreError::Trimmed { bounds, .. } | StoreError::Beyond { bounds, .. }) => {
                self.after = bounds.first - 1;
                if let Some(live) = &mut self.live {
                    live.passed = None;
                }
                return Ok(Read::Reset);
            }
            Err(error) => return Err(error),
        };
        if !records.is_empty() {
            let entry = |record| Arc::new(Entry::new(Arc::clone(&self.scope), record));
            return Ok(Read::Entries(records.into_iter().map(entry).collect()));
        }
        match &mut self.live {
            Some(live) => live.passed = Some(live.watching.passed()),
            // Looked at once more once it is attached: what came in between is not missed.
            None => {
                let watching = feed.watch(&self.scope);
                self.live = Some(Live { watching, passed: None });
                return Box::pin(self.read(feed, limit)).await;
            }
        }
        Ok(Read::Nothing)
    }

    fn pass(&mut self, entry: &Entry) {
        self.after = entry.seq();
        if let Some(passed) = self.live.as_mut().and_then(|live| live.passed.as_mut()) {
            *passed += entry.body().len() as u64;
        }
    }
}
