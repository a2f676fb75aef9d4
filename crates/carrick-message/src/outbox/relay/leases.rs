//! Which buckets a relay works on: a fair share, under leases that are renewed at one third.
//!
//! Each relay says now and then that it lives, counts those that do, and aims at an equal share of
//! the buckets: one that has too many lets some go, once what was under way in them is marked, and
//! one that has too few takes what is free. A relay that died is not counted any more when its
//! leases have ended, so its buckets have a new relay within two lease times.

use std::{sync::Arc, time::Duration};

use carrick_store::fence::FenceToken;
use hashbrown::HashMap;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::core::{Bucket, Holding};
use crate::{
    consumer::log_limit::LogLimit,
    outbox::{OutboxError, store::OutboxStore},
};

pub(super) type Holdings = HashMap<Bucket, Holding>;

/// Keeps a relay's leases, and tells the relay of them.
#[derive(Debug)]
pub(super) struct Leases {
    store: Arc<dyn OutboxStore>,
    relay: String,
    ttl: Duration,
    live: usize,
    held: Holdings,
    told: watch::Sender<Holdings>,
    quiet: mpsc::Receiver<(Bucket, FenceToken)>,
    log: LogLimit,
}

impl Leases {
    pub(super) fn new(
        store: Arc<dyn OutboxStore>,
        relay: String,
        ttl: Duration,
        told: watch::Sender<Holdings>,
        quiet: mpsc::Receiver<(Bucket, FenceToken)>,
    ) -> Self {
        let held = HashMap::new();
        Self { store, relay, ttl, live: 1, held, told, quiet, log: LogLimit::default() }
    }

    /// Runs until it is stopped, then gives everything back.
    pub(super) async fn keep(mut self, stop: CancellationToken) {
        let third = self.ttl / 3;
        let mut next = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = sleep_until(next) => {
                    next = Instant::now() + third;
                    // No call may take so long that the next renewal comes too late.
                    match timeout(third, self.round()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => self.complain(&error),
                        Err(_) => self.complain(&OutboxError::TimedOut),
                    }
                    self.tell();
                }
                Some((bucket, token)) = self.quiet.recv() => {
                    if let Err(error) = self.let_go(bucket, token).await {
                        self.complain(&error); // it ends by itself
                    }
                    self.tell();
                }
            }
        }
        let held = self.tokens(|_| true);
        let given_back = async {
            self.store.release(&held).await?;
            self.store.leave(&self.relay).await
        };
        if !matches!(timeout(third, given_back).await, Ok(Ok(()))) {
            info!("leases were not given back and end by themselves");
        }
    }

    async fn round(&mut self) -> Result<(), OutboxError> {
        self.renew().await?;
        self.live = self.store.heartbeat(&self.relay, self.ttl).await?.max(1);
        let target = usize::from(self.store.buckets()).div_ceil(self.live);
        let kept = self.held.values().filter(|holding| !holding.leaving).count();
        if kept > target {
            let surplus = self.held.values_mut().filter(|holding| !holding.leaving);
            surplus.take(kept - target).for_each(|holding| holding.leaving = true);
        } else if kept < target {
            let back = self.held.values_mut().filter(|holding| holding.leaving);
            let back = back.take(target - kept).map(|holding| holding.leaving = false).count();
            self.acquire(target - kept - back).await?;
        }
        Ok(())
    }

    async fn renew(&mut self) -> Result<(), OutboxError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let sent = Instant::now();
        let renewed = self.store.renew(&self.tokens(|_| true), self.ttl).await?;
        let before = self.held.len();
        self.held.retain(|bucket, _| renewed.contains(bucket));
        let until = self.end(sent);
        self.held.values_mut().for_each(|holding| holding.until = until);
        self.count_lost(before - self.held.len());
        Ok(())
    }

    async fn acquire(&mut self, wanted: usize) -> Result<(), OutboxError> {
        if wanted == 0 {
            return Ok(());
        }
        let others = (0..self.store.buckets()).filter(|bucket| !self.held.contains_key(bucket));
        let others: Vec<Bucket> = others.collect();
        let sent = Instant::now();
        let granted = self.store.acquire(&others, wanted, self.ttl).await?;
        let until = self.end(sent);
        for (bucket, token) in granted {
            self.held.insert(bucket, Holding { token, until, leaving: false });
        }
        Ok(())
    }

    /// Before the lease ends by anybody's clock: counted from before the call, and a tenth earlier.
    fn end(&self, sent: Instant) -> Instant {
        sent + self.ttl * 9 / 10
    }

    async fn let_go(&mut self, bucket: Bucket, token: FenceToken) -> Result<(), OutboxError> {
        // What was said of an earlier lease on the bucket says nothing of this one.
        let is_the_one = |holding: &Holding| holding.leaving && holding.token == token;
        if !self.held.get(&bucket).is_some_and(is_the_one) {
            return Ok(());
        }
        self.held.remove(&bucket);
        self.store.release(&[(bucket, token)]).await
    }

    fn tokens(&self, which: impl Fn(&Holding) -> bool) -> Vec<(Bucket, FenceToken)> {
        let held = self.held.iter().filter(|(_, holding)| which(holding));
        held.map(|(bucket, holding)| (*bucket, holding.token)).collect()
    }

    /// Tells the relay what it holds; what has ended meanwhile is held no more.
    fn tell(&mut self) {
        let now = Instant::now();
        let before = self.held.len();
        self.held.retain(|_, holding| holding.until > now);
        self.count_lost(before - self.held.len());
        metrics::gauge!("carrick_outbox_buckets_held").set(self.held.len() as f64);
        metrics::gauge!("carrick_outbox_live_relays").set(self.live as f64);
        self.told.send_if_modified(|told| {
            let changed = *told != self.held;
            told.clone_from(&self.held);
            changed
        });
    }

    fn count_lost(&mut self, lost: usize) {
        if lost > 0 {
            metrics::counter!("carrick_outbox_leases_lost_total").increment(lost as u64);
            warn!(lost, "leases were lost; others may publish those buckets now");
        }
    }

    fn complain(&mut self, error: &OutboxError) {
        metrics::counter!("carrick_outbox_lease_errors_total").increment(1);
        if let Some(more) = self.log.pass(Instant::now()) {
            let error = crate::outbox::error::chain(error);
            warn!(%error, more, "leases cannot be renewed");
        }
    }
}
