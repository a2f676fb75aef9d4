use std::collections::BTreeMap;

use carrick_core::event::Event;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;

fn limits() -> Limits {
    Limits {
        batch: 10,
        batch_bytes: 1024 * 1024,
        window: 4,
        page: 50,
        buffer: 200,
        buffer_bytes: 1024 * 1024,
        busy_poll: Duration::from_millis(5),
        idle_poll: Duration::from_millis(250),
        sweep: Duration::from_secs(30),
        retry: Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) },
        outage: Backoff { base: Duration::from_millis(50), cap: Duration::from_secs(5) },
    }
}

fn holding(now: Instant) -> HashMap<Bucket, Holding> {
    let until = now + Duration::from_secs(86_400);
    HashMap::from_iter([(0, Holding { token: 1, until, leaving: false })])
}

fn keyed(key: &str) -> LaneKey {
    LaneKey::Keyed { topic: "orders".into(), key: key.into() }
}

fn row(seq: Seq, key: &str) -> Found {
    let event = Event::builder("order.placed.v1").source("/test").id(seq.to_string());
    let content = Ok((Topic::new("orders").unwrap(), event.build().unwrap()));
    let row = Row { seq, bucket: 0, attempts: 0, content };
    let lane = if key.is_empty() { LaneKey::Single(seq) } else { keyed(key) };
    Found { row, lane, wait: None }
}

fn page(rows: Vec<Found>) -> Page {
    Page { last: rows.last().map(|found| found.row.seq), rows, ..Page::default() }
}

fn ids(batch: &Batch) -> Vec<u64> {
    batch.events.iter().map(|outgoing| outgoing.event.id().parse().unwrap()).collect()
}

/// A core that has read these rows.
fn core_with(rows: Vec<Found>, now: Instant) -> Core {
    let mut core = Core::new(limits(), now);
    core.set_holdings(holding(now), now);
    assert!(matches!(core.next_read(now), Some(Read::Scan(_))));
    core.scanned(page(rows), now);
    core
}

fn refuse(kind: RefusalKind) -> Refusal {
    Refusal { error: "no".to_owned(), kind }
}

#[test]
fn m1_rows_of_a_key_are_never_in_two_publishes_at_a_time() {
    let now = Instant::now();
    let rows = (1..=25).map(|seq| row(seq, if seq % 2 == 0 { "a" } else { "" })).collect();
    let mut core = core_with(rows, now);
    let first = core.next_batch(now).unwrap();
    let mut all: Vec<Vec<u64>> = vec![ids(&first)];
    while let Some(batch) = core.next_batch(now) {
        all.push(ids(&batch));
    }
    let with_a = all.iter().filter(|ids| ids.iter().any(|id| id % 2 == 0)).count();
    assert_eq!(with_a, 1, "{all:?}");
    let of_a: Vec<u64> = all.concat().into_iter().filter(|id| id % 2 == 0).collect();
    assert!(of_a.is_sorted() && of_a[0] == 2, "{of_a:?}");
    core.published(first.id, now);
    assert!(core.next_batch(now).is_some(), "the rest of the key follows its first part");
}

#[test]
fn a_refused_row_blocks_its_own_key_and_no_other() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(1);
    let mut core = core_with(vec![row(1, "a"), row(2, "b"), row(3, "a"), row(4, "c")], now);
    // The batch is taken apart until the bad one is alone.
    let mut accepted = Vec::new();
    while let Some(batch) = core.next_batch(now) {
        let ids = ids(&batch);
        if ids.contains(&1) {
            core.refused(batch.id, refuse(RefusalKind::Permanent), now, &mut rng);
        } else {
            accepted.extend(ids);
            core.published(batch.id, now);
        }
    }
    assert_eq!(accepted, [2, 4], "3 waits behind 1");
    assert_eq!(core.blocked(), 1);
    let marks = core.next_marks(now).unwrap();
    assert_eq!(marks.accepted.iter().map(|row| row.seq).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(marks.failed.iter().map(|row| row.seq).collect::<Vec<_>>(), [1]);
}

#[test]
fn m1_one_failed_publish_leaves_the_marks_of_the_others_alone() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(1);
    let mut core = core_with((1..=20).map(|seq| row(seq, "")).collect(), now);
    let (good, bad) = (core.next_batch(now).unwrap(), core.next_batch(now).unwrap());
    core.published(good.id, now);
    core.refused(bad.id, refuse(RefusalKind::Transient), now, &mut rng);
    let marks = core.next_marks(now).unwrap();
    assert_eq!((marks.accepted.len(), marks.failed.len()), (10, 0));
}

#[test]
fn a_broker_that_is_away_is_tried_with_one_batch_at_a_time_and_a_pause() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(1);
    let mut core = core_with((1..=40).map(|seq| row(seq, "")).collect(), now);
    let all: Vec<Batch> = std::iter::from_fn(|| core.next_batch(now)).collect();
    assert_eq!(all.len(), 4);
    for batch in all {
        core.refused(batch.id, refuse(RefusalKind::Transient), now, &mut rng);
    }
    assert!(core.next_batch(now).is_none(), "paused");
    let later = now + Duration::from_secs(5);
    assert!(core.next_batch(later).is_some(), "one tries");
    assert!(core.next_batch(later).is_none(), "the others wait for it");
}

#[test]
fn an_overloaded_broker_is_left_alone_as_long_as_it_asks() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(1);
    let mut core = core_with((1..=10).map(|seq| row(seq, "")).collect(), now);
    let batch = core.next_batch(now).unwrap();
    let wait = Duration::from_secs(3);
    core.refused(batch.id, refuse(RefusalKind::Overload(wait)), now, &mut rng);
    assert!(core.next_batch(now + wait - Duration::from_millis(1)).is_none());
    let again = core.next_batch(now + wait).unwrap();
    assert_eq!(ids(&again).len(), 10, "its size was not at fault");
}

#[test]
fn nothing_is_published_after_the_lease_has_ended_here() {
    let now = Instant::now();
    let mut core = core_with(vec![row(1, "a")], now);
    assert!(core.next_batch(now + Duration::from_secs(86_401)).is_none());
    // And a row whose publish was under way is left to the next holder when it fails.
    let mut core = core_with(vec![row(1, "a")], now);
    let batch = core.next_batch(now).unwrap();
    core.set_holdings(HashMap::new(), now);
    core.refused(batch.id, refuse(RefusalKind::Transient), now, &mut StdRng::seed_from_u64(1));
    assert_eq!(core.held(), 0);
    assert!(core.is_settled());
}

#[test]
fn a_lease_that_comes_back_cannot_overtake_what_was_under_way() {
    let now = Instant::now();
    let mut core = core_with(vec![row(1, "a"), row(2, "a")], now);
    let batch = core.next_batch(now).unwrap();
    core.set_holdings(HashMap::new(), now);
    let mut again = holding(now);
    again.get_mut(&0).unwrap().token = 2;
    core.set_holdings(again, now);
    core.next_read(now).unwrap();
    core.scanned(page(vec![row(1, "a"), row(2, "a"), row(3, "a")]), now);
    assert!(core.next_batch(now).is_none(), "1 and 2 may still fail");
    core.published(batch.id, now);
    assert_eq!(ids(&core.next_batch(now).unwrap()), [3]);
    let marks = core.next_marks(now).unwrap();
    assert!(marks.accepted.iter().all(|row| row.token == 1), "marked under the old fence");
}

#[test]
fn m1_a_read_from_before_a_lease_was_granted_does_not_hide_that_buckets_rows() {
    let now = Instant::now();
    let mut core = Core::new(limits(), now);
    core.set_holdings(holding(now), now);
    core.next_read(now).unwrap();
    let mut both = holding(now);
    both.insert(1, Holding { token: 7, ..both[&0] });
    core.set_holdings(both, now);
    core.scanned(page(vec![row(50, "a")]), now);
    let Some(Read::Scan(scan)) = core.next_read(now) else { panic!("it reads on") };
    assert_eq!((scan.after, scan.buckets.len()), (0, 2), "rows 1 to 49 may be of the new bucket");
}

#[test]
fn a_bucket_that_leaves_is_quiet_once_its_rows_are_marked() {
    let now = Instant::now();
    let mut core = core_with((1..=15).map(|seq| row(seq, "a")).collect(), now);
    let batch = core.next_batch(now).unwrap();
    let mut leaving = holding(now);
    leaving.get_mut(&0).unwrap().leaving = true;
    core.set_holdings(leaving, now);
    assert!(core.next_batch(now).is_none());
    assert!(!core.is_quiet(0));
    core.published(batch.id, now);
    assert!(core.next_batch(now).is_none());
    let marks = core.next_marks(now).unwrap();
    assert!(!core.is_quiet(0));
    core.marked(&marks, marks.accepted.len() + marks.failed.len(), now);
    assert!(core.is_quiet(0));
}

#[test]
fn a_read_that_began_before_a_mark_does_not_bring_its_rows_back() {
    let now = Instant::now();
    let mut core = core_with(vec![row(1, "a")], now);
    let batch = core.next_batch(now).unwrap();
    let later = now + Duration::from_secs(1);
    core.next_read(later).unwrap();
    core.published(batch.id, later);
    let marks = core.next_marks(later).unwrap();
    core.marked(&marks, marks.accepted.len() + marks.failed.len(), now);
    core.scanned(page(vec![row(1, "a")]), later);
    assert!(core.next_batch(later).is_none(), "it was published a moment ago");
}

#[test]
fn a_row_that_is_no_event_is_told_and_blocks_its_key_only() {
    let now = Instant::now();
    let mut bad = row(1, "a");
    bad.row.content = Err("extensions: \"Bad\" is no name".to_owned());
    let mut core = core_with(vec![bad, row(2, "a"), row(3, "b")], now);
    assert_eq!(ids(&core.next_batch(now).unwrap()), [3]);
    assert!(core.next_batch(now).is_none());
    let marks = core.next_marks(now).unwrap();
    assert!(marks.failed[0].error.contains("Bad"));
    assert_eq!(core.blocked(), 1);
}

#[test]
fn a_mended_row_is_tried_at_the_next_sweep() {
    let now = Instant::now();
    let mut bad = row(1, "a");
    bad.row.content = Err("bad".to_owned());
    let mut core = core_with(vec![bad], now);
    let marks = core.next_marks(now).unwrap();
    core.marked(&marks, marks.accepted.len() + marks.failed.len(), now);
    let later = now + Duration::from_secs(31);
    // The scan first, which is due as well.
    assert!(matches!(core.next_read(later), Some(Read::Scan(_) | Read::Lanes(_))));
    core.scanned(Page::default(), later);
    let heading = Heading { seq: 1, bucket: 0, lane: keyed("a"), wait: None };
    let sweep = loop {
        match core.next_read(later) {
            Some(Read::Sweep(sweep)) => break sweep,
            Some(Read::Lanes(fetch)) => core.fetched(&fetch, Fetched::default(), later),
            other => panic!("{other:?}"),
        }
    };
    core.swept(&sweep, vec![heading], later);
    let Some(Read::Lanes(fetch)) = core.next_read(later) else { panic!("its lane is fetched") };
    assert_eq!((fetch.wanted.len(), fetch.wanted[0].from), (1, 1));
    let fetched = Fetched { rows: vec![row(1, "a")], full: false };
    core.fetched(&fetch, fetched, later);
    assert_eq!(ids(&core.next_batch(later).unwrap()), [1]);
}

#[test]
fn memory_is_bounded_whatever_the_backlog() {
    let now = Instant::now();
    let mut core = Core::new(limits(), now);
    core.set_holdings(holding(now), now);
    let mut next = 1;
    while let Some(read) = core.next_read(now) {
        let Read::Scan(scan) = read else { panic!("{read:?}") };
        let rows = (next..next + scan.rows as u64).map(|seq| row(seq, "")).collect();
        next += scan.rows as u64;
        core.scanned(Page { full: true, ..page(rows) }, now);
        assert!(core.held() <= 200);
    }
    assert!(core.held() > 150);
}

#[test]
fn a_database_that_refuses_is_left_alone_for_longer_and_longer() {
    // Field report 29: 30 000 lines in 20 s, while a database was read-only.
    let start = Instant::now();
    let mut rng = StdRng::seed_from_u64(7);
    let mut core = core_with((1..=10).map(|seq| row(seq, "")).collect(), start);
    let batch = core.next_batch(start).unwrap();
    core.published(batch.id, start);
    let (mut reads, mut marks, mut now) = (0, 0, start);
    while now < start + Duration::from_secs(20) {
        if let Some(read) = core.next_read(now) {
            reads += 1;
            core.read_failed(&read, now, &mut rng);
        }
        if let Some(failed) = core.next_marks(now) {
            marks += 1;
            core.mark_failed(failed, now, &mut rng);
        }
        now = core.next_time(now).max(now + Duration::from_millis(1));
    }
    assert!((5..50).contains(&reads), "{reads} reads");
    assert!((5..50).contains(&marks), "{marks} marks");
    let later = now + Duration::from_secs(5);
    assert_eq!(core.next_marks(later).unwrap().accepted.len(), 10, "nothing is forgotten");
}

/// A database and a broker, both made up.
struct World {
    rows: BTreeMap<Seq, Sim>,
    accepted: Vec<Seq>,
    rng: StdRng,
}

struct Sim {
    key: String,
    published: bool,
    attempts: u32,
    due: Option<Instant>,
    /// Refusals to come before the broker takes it.
    poison: u32,
}

impl World {
    fn found(&self, seq: Seq, now: Instant) -> Found {
        let sim = &self.rows[&seq];
        let mut found = row(seq, &sim.key);
        found.row.attempts = sim.attempts;
        found.wait = sim.due.map(|due| due.saturating_duration_since(now)).filter(|d| !d.is_zero());
        found
    }

    fn unpublished(&self) -> impl Iterator<Item = Seq> {
        self.rows.iter().filter(|(_, sim)| !sim.published).map(|(seq, _)| *seq)
    }

    fn scan(&self, scan: &Scan, now: Instant) -> Page {
        let new = self.unpublished().filter(|seq| *seq > scan.after && !scan.known.contains(seq));
        let rows: Vec<Found> = new.take(scan.rows).map(|seq| self.found(seq, now)).collect();
        let full = rows.len() == scan.rows;
        Page { full, ..page(rows) }
    }

    fn fetch(&mut self, fetch: &Fetch, now: Instant) -> Fetched {
        let mut rows = Vec::new();
        for one in &fetch.wanted {
            let of_lane = self
                .unpublished()
                .filter(|seq| *seq >= one.from && row(*seq, &self.rows[seq].key).lane == *one.lane);
            rows.extend(of_lane.take(fetch.rows).map(|seq| self.found(seq, now)));
        }
        // Sometimes they are too large to come all at once.
        let full = rows.len() > 1 && self.rng.random_range(0..3u32) == 0;
        if full {
            rows.truncate(self.rng.random_range(1..rows.len()));
        }
        Fetched { rows, full }
    }

    fn sweep(&self, sweep: &Sweep, now: Instant) -> Vec<Heading> {
        let range = self.unpublished().filter(|seq| *seq > sweep.after && *seq <= sweep.upto);
        let heading = |seq| {
            let Found { row, lane, wait } = self.found(seq, now);
            Heading { seq: row.seq, bucket: 0, lane, wait }
        };
        range.take(sweep.rows).map(heading).collect()
    }
}

#[test]
fn whatever_fails_every_row_is_published_in_the_order_of_its_key() {
    for seed in 0..20u64 {
        let mut now = Instant::now();
        let mut rng = StdRng::seed_from_u64(seed);
        let count: u64 = 600;
        let rows = (1..=count).map(|seq| {
            let key = match rng.random_range(0..10u32) {
                0..=1 => String::new(),
                2..=4 => "hot".to_owned(),
                _ => format!("k{}", rng.random_range(0..40)),
            };
            let poison = if rng.random_range(0..50) == 0 { rng.random_range(1..4) } else { 0 };
            (seq, Sim { key, published: false, attempts: 0, due: None, poison })
        });
        let mut world = World { rows: rows.collect(), accepted: Vec::new(), rng };
        let mut core = Core::new(limits(), now);
        core.set_holdings(holding(now), now);
        let mut flying: Vec<Batch> = Vec::new();
        // An answer is made when the question is asked, and arrives some time later.
        let mut read: Option<(Read, Page, Fetched, Vec<Heading>)> = None;
        let mut marks: Option<Marks> = None;
        let mut token = 1;
        let mut steps = 0;
        while world.unpublished().next().is_some() {
            steps += 1;
            assert!(steps < 200_000, "seed {seed}: {} left", world.unpublished().count());
            while let Some(batch) = core.next_batch(now) {
                flying.push(batch);
            }
            if read.is_none()
                && let Some(asked) = core.next_read(now)
            {
                let mut answer = (asked, Page::default(), Fetched::default(), Vec::new());
                match &answer.0 {
                    Read::Scan(scan) => answer.1 = world.scan(scan, now),
                    Read::Lanes(fetch) => answer.2 = world.fetch(fetch, now),
                    Read::Sweep(sweep) => answer.3 = world.sweep(sweep, now),
                }
                read = Some(answer);
            }
            if marks.is_none() {
                marks = core.next_marks(now);
            }
            match world.rng.random_range(0..100u32) {
                0..40 if !flying.is_empty() => {
                    let at = world.rng.random_range(0..flying.len());
                    let batch = flying.swap_remove(at);
                    let away = world.rng.random_range(0..20) == 0;
                    let poisoned = ids(&batch).into_iter().any(|seq| world.rows[&seq].poison > 0);
                    if away {
                        // It may have been stored nevertheless.
                        if world.rng.random_range(0..2) == 0 && !poisoned {
                            world.accepted.extend(ids(&batch));
                        }
                        let kind = RefusalKind::Transient;
                        core.refused(batch.id, refuse(kind), now, &mut world.rng);
                    } else if poisoned {
                        if let [seq] = ids(&batch)[..] {
                            world.rows.get_mut(&seq).unwrap().poison -= 1;
                        }
                        let kind = RefusalKind::Permanent;
                        core.refused(batch.id, refuse(kind), now, &mut world.rng);
                    } else {
                        world.accepted.extend(ids(&batch));
                        core.published(batch.id, now);
                    }
                }
                40..70 => match read.take() {
                    Some((Read::Scan(_), page, ..)) => core.scanned(page, now),
                    Some((Read::Lanes(fetch), _, rows, _)) => core.fetched(&fetch, rows, now),
                    Some((Read::Sweep(sweep), .., headings)) => core.swept(&sweep, headings, now),
                    None => {}
                },
                70..75 => {
                    if let Some((asked, ..)) = read.take() {
                        core.read_failed(&asked, now, &mut world.rng);
                    }
                }
                75..95 => {
                    if let Some(marks) = marks.take() {
                        let mut written = 0;
                        for row in marks.accepted.iter().filter(|row| row.token == token) {
                            written += 1;
                            world.rows.get_mut(&row.seq).unwrap().published = true;
                        }
                        for row in marks.failed.iter().filter(|row| row.token == token) {
                            written += 1;
                            let sim = world.rows.get_mut(&row.seq).unwrap();
                            sim.attempts += 1;
                            sim.due = Some(now + row.delay);
                        }
                        core.marked(&marks, written, now);
                    }
                }
                95 if world.rng.random_range(0..3u32) == 0 => {
                    // The lease is lost, and held again under another token, at once or later.
                    let held = core.holdings.is_empty() || world.rng.random_range(0..2u32) == 0;
                    let mut new = holding(now);
                    token += u64::from(held);
                    new.get_mut(&0).unwrap().token = token;
                    core.set_holdings(if held { new } else { HashMap::new() }, now);
                }
                96..97 => {
                    if let Some(failed) = marks.take() {
                        core.mark_failed(failed, now, &mut world.rng);
                    }
                }
                _ => {
                    now += Duration::from_millis(1);
                    if flying.is_empty() && read.is_none() && marks.is_none() {
                        now = now.max(core.next_time(now));
                    }
                }
            }
            assert!(core.held() <= 200, "seed {seed}");
        }
        // The first time that the broker took each event is what counts: repeats are dropped.
        let mut last: HashMap<&str, Seq> = HashMap::new();
        let mut seen = HashSet::new();
        for seq in &world.accepted {
            let key = world.rows[seq].key.as_str();
            if seen.insert(*seq) && !key.is_empty() {
                let before = last.insert(key, *seq).unwrap_or(0);
                assert!(before < *seq, "seed {seed}: {seq} of {key} came after {before}");
            }
        }
        assert_eq!(seen.len() as u64, count, "seed {seed}");
    }
}
