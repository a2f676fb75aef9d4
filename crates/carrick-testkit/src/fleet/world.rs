//! The run itself.

use std::time::Duration;

use carrick_core::outcome::Outcome;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;

use super::{
    Client, Dice, Ended, Fleet, Next, Policy, Report, Second, Sent,
    agenda::Agenda,
    server::{Job, Server, Taken, exponential},
};

/// How long calls of the last second are watched.
const REST: Duration = Duration::from_secs(10);

/// The longest run, which bounds what is remembered: a few dozen bytes a call.
const LONGEST: Duration = Duration::from_secs(3600);

/// The most clients and the most servers.
const MOST: usize = 1 << 16;

/// After so many calls no more are made: some gigabytes.
const MOST_CALLS: usize = 20_000_000;

/// Something that happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A client makes a call.
    Call { client: usize },
    /// A wait before another attempt is over.
    Again { call: u32 },
    /// An attempt reaches its server.
    Reaches { host: usize, job: Job },
    /// Whoever waits in this place of a line has waited for too long.
    Late { host: usize, number: u64 },
    /// A server has finished work.
    Worked { host: usize, taken: Taken },
    /// An answer reaches the client.
    Answer { call: u32, n: u32, outcome: Outcome },
    /// A client's patience ends.
    Timeout { call: u32, n: u32 },
}

struct Caller<P> {
    policy: P,
    /// Moments of calls come from their own dice, so that no policy can move them.
    arrivals: Dice,
    dice: Dice,
}

/// A call and, while it is under way, what its policy keeps.
struct Call<C> {
    client: usize,
    second: usize,
    /// Number of the attempt that is awaited; 0 if none is.
    awaited: u32,
    sent: u32,
    since: Instant,
    kept: Option<C>,
}

struct World<'a, P: Policy> {
    fleet: &'a Fleet,
    start: Instant,
    agenda: Agenda<Event>,
    callers: Vec<Caller<P>>,
    calls: Vec<Call<P::Call>>,
    servers: Vec<(Server, Dice)>,
    report: Report,
}

pub(super) fn run<P: Policy>(
    fleet: &Fleet,
    seed: u64,
    make: impl FnMut(Client) -> P,
    mut note: impl FnMut(u64, &Event),
) -> Report {
    // Cores that note when they were made must all find the same moment, or the time since then would
    // differ from run to run.
    let frozen = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O asks nothing of the system");
    let entered = frozen.enter();
    let mut world = World::new(fleet, seed, make, Instant::now());
    let end = nanos(fleet.lasts.min(LONGEST).saturating_add(REST));
    while let Some((at, event)) = world.agenda.next() {
        if at > end {
            break;
        }
        note(at, &event);
        world.report.events += 1;
        world.happen(at, event);
    }
    let report = std::mem::take(&mut world.report);
    drop(world);
    drop(entered);
    // A runtime must not be waited for within another, where a test may run this.
    frozen.shutdown_background();
    report
}

impl<'a, P: Policy> World<'a, P> {
    fn new(fleet: &'a Fleet, seed: u64, mut make: impl FnMut(Client) -> P, start: Instant) -> Self {
        let mut seeds = Dice::seed_from_u64(seed);
        let hosts = fleet.servers.clamp(1, MOST);
        let server = |_| (Server::new(&fleet.server), Dice::seed_from_u64(seeds.next_u64()));
        let servers = (0..hosts).map(server).collect();
        let caller = |id| {
            let client = Client { id, hosts, seed: seeds.next_u64(), start };
            Caller {
                policy: make(client),
                arrivals: Dice::seed_from_u64(seeds.next_u64()),
                dice: Dice::seed_from_u64(seeds.next_u64()),
            }
        };
        let callers: Vec<_> = (0..fleet.clients.min(MOST)).map(caller).collect();
        let seconds = fleet.lasts.min(LONGEST).as_secs() as usize + 1;
        let report = Report { seconds: vec![Second::default(); seconds], events: 0 };
        let (agenda, calls) = (Agenda::new(), Vec::new());
        let mut world = Self { fleet, start, agenda, callers, calls, servers, report };
        for client in 0..world.callers.len() {
            world.plan_call(client, 0);
        }
        world
    }

    fn happen(&mut self, at: u64, event: Event) {
        match event {
            Event::Call { client } => self.call(client, at),
            Event::Again { call } => self.send(call, at),
            Event::Reaches { host, job } => self.reach(host, job, at),
            Event::Late { host, number } => {
                let now = self.moment(at);
                if let Some((job, after)) = self.servers[host].0.leave(number, now) {
                    self.second(at).dropped += 1;
                    self.answer(job, Outcome::Overload { retry_after: Some(after) }, at);
                }
            }
            Event::Worked { host, taken } => {
                let now = self.moment(at);
                self.servers[host].0.done(taken, now);
                let is_awaited = self.calls[taken.job.call as usize].awaited == taken.job.n;
                let second = self.second(at);
                second.worked += 1;
                second.wasted += u32::from(!is_awaited);
                self.answer(taken.job, Outcome::Success, at);
                self.work(host, at);
            }
            Event::Answer { call, n, outcome } => self.end(call, n, outcome, false, at),
            Event::Timeout { call, n } => self.end(call, n, Outcome::Expired, true, at),
        }
    }

    fn plan_call(&mut self, client: usize, at: u64) {
        let wait = exponential(&mut self.callers[client].arrivals) / self.fleet.rate;
        let wait = Duration::try_from_secs_f64(wait).unwrap_or(Duration::MAX);
        let at = at.saturating_add(nanos(wait));
        if at < nanos(self.fleet.lasts.min(LONGEST)) && self.calls.len() < MOST_CALLS {
            self.agenda.add(at, Event::Call { client });
        }
    }

    fn call(&mut self, client: usize, at: u64) {
        self.plan_call(client, at);
        let since = self.moment(at);
        let kept = Some(self.callers[client].policy.begin(since));
        let second = self.index(at);
        self.report.seconds[second].calls += 1;
        let call =
            u32::try_from(self.calls.len()).expect("fewer than MOST_CALLS and a client's one each");
        self.calls.push(Call { client, second, awaited: 0, sent: 0, since, kept });
        self.send(call, at);
    }

    fn send(&mut self, number: u32, at: u64) {
        let now = self.moment(at);
        let call = &mut self.calls[number as usize];
        let caller = &mut self.callers[call.client];
        let Some(kept) = &mut call.kept else { return };
        let Ok(sent) = caller.policy.send(kept, now, &mut caller.dice) else {
            call.kept = None;
            self.report.seconds[call.second].refused += u32::from(call.sent == 0);
            return;
        };
        call.sent += 1;
        (call.awaited, call.since) = (call.sent, now);
        let Sent { host, patience, deadline } = sent;
        let job = Job { call: number, n: call.sent, deadline };
        let host = host % self.servers.len();
        self.second(at).attempts += 1;
        self.agenda.add(self.arrives(at), Event::Reaches { host, job });
        let until = at.saturating_add(nanos(patience));
        self.agenda.add(until, Event::Timeout { call: number, n: job.n });
    }

    fn reach(&mut self, host: usize, job: Job, at: u64) {
        let now = self.moment(at);
        match self.servers[host].0.arrive(job, now) {
            Ok(place) => {
                self.work(host, at);
                if let Some(place) = place {
                    let until =
                        at.saturating_add(nanos(place.until.saturating_duration_since(now)));
                    self.agenda.add(until, Event::Late { host, number: place.number });
                }
            }
            Err(after) => {
                self.second(at).shed += 1;
                self.answer(job, Outcome::Overload { retry_after: Some(after) }, at);
            }
        }
    }

    /// Gives work to whoever is free.
    fn work(&mut self, host: usize, at: u64) {
        let now = self.moment(at);
        let factor = self.factor(host, at);
        let (server, dice) = &mut self.servers[host];
        while let Some(taken) = server.turn(now) {
            let done = at.saturating_add(nanos(server.takes(factor, dice)));
            self.agenda.add(done, Event::Worked { host, taken });
        }
    }

    fn answer(&mut self, job: Job, outcome: Outcome, at: u64) {
        let Job { call, n, .. } = job;
        self.agenda.add(self.arrives(at), Event::Answer { call, n, outcome });
    }

    /// Ends an attempt, if it is the one that is awaited.
    fn end(&mut self, number: u32, n: u32, outcome: Outcome, timed_out: bool, at: u64) {
        let now = self.moment(at);
        let call = &mut self.calls[number as usize];
        if call.awaited != n {
            return;
        }
        let Some(kept) = &mut call.kept else { return };
        call.awaited = 0;
        let elapsed = now.saturating_duration_since(call.since);
        let caller = &mut self.callers[call.client];
        let ended = Ended { outcome, timed_out, elapsed };
        let next = caller.policy.ended(kept, ended, now, &mut caller.dice);
        match next {
            Next::Retry(wait) if outcome != Outcome::Success => {
                let again = at.saturating_add(nanos(wait));
                self.agenda.add(again, Event::Again { call: number });
            }
            _ => {
                call.kept = None;
                let answered = outcome == Outcome::Success;
                self.report.seconds[call.second].answered += u32::from(answered);
            }
        }
    }

    fn factor(&self, host: usize, at: u64) -> f64 {
        let at = Duration::from_nanos(at);
        let faults = self.fleet.faults.iter();
        let now =
            faults.filter(|fault| fault.servers.contains(&host) && fault.during.contains(&at));
        now.map(|fault| fault.factor.max(0.0)).product()
    }

    fn arrives(&self, at: u64) -> u64 {
        at.saturating_add(nanos(self.fleet.network))
    }

    fn moment(&self, at: u64) -> Instant {
        self.start + Duration::from_nanos(at)
    }

    fn index(&self, at: u64) -> usize {
        ((at / 1_000_000_000) as usize).min(self.report.seconds.len() - 1)
    }

    fn second(&mut self, at: u64) -> &mut Second {
        let index = self.index(at);
        &mut self.report.seconds[index]
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
