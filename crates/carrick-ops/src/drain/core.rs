//! The phases of a drain: time and counts are arguments.

use tokio::time::Instant;

use super::{DrainConfig, Trigger};

/// How far a drain is. Phases only move forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Nobody asked for an end.
    Serving,
    /// Readiness has failed, and work is still accepted: the load balancer has not looked yet.
    Announcing,
    /// Nothing new is accepted; what runs may finish.
    Finishing,
    /// What still runs is being cut off.
    Forcing,
    /// Over: the process may exit.
    Done,
}

/// Decides when a drain moves on.
#[derive(Clone, Debug)]
pub struct Core {
    config: DrainConfig,
    phase: Phase,
    /// When the present phase ends by itself; `None` in the phases that do not.
    until: Option<Instant>,
    forced: bool,
}

impl Core {
    /// A process that serves.
    pub fn new(config: DrainConfig) -> Self {
        Self { config, phase: Phase::Serving, until: None, forced: false }
    }

    /// How far the drain is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When [`Core::tick`] must be called at the latest.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether the work was, or is being, cut off.
    pub fn was_forced(&self) -> bool {
        self.forced
    }

    /// Somebody asks for an end. The first time begins the drain, the second time cuts it short, and
    /// a third time does not wait for what was cut off either.
    pub fn trigger(&mut self, now: Instant, trigger: Trigger) -> Phase {
        match self.phase {
            Phase::Serving => {
                let window = self.config.window(trigger);
                self.enter(Phase::Announcing, Some(now + window));
            }
            Phase::Announcing | Phase::Finishing => self.force(now),
            Phase::Forcing | Phase::Done => self.enter(Phase::Done, None),
        }
        self.phase
    }

    /// Moves on as far as time and the count of unfinished work allow.
    pub fn tick(&mut self, now: Instant, in_flight: usize) -> Phase {
        loop {
            let over = self.until.is_some_and(|until| now >= until);
            match self.phase {
                Phase::Announcing if over => {
                    self.enter(Phase::Finishing, Some(now + self.config.grace()));
                }
                Phase::Finishing | Phase::Forcing if in_flight == 0 => {
                    self.enter(Phase::Done, None);
                }
                Phase::Finishing if over => self.force(now),
                Phase::Forcing if over => self.enter(Phase::Done, None),
                _ => return self.phase,
            }
        }
    }

    fn force(&mut self, now: Instant) {
        self.forced = true;
        self.enter(Phase::Forcing, Some(now + self.config.force()));
    }

    fn enter(&mut self, phase: Phase, until: Option<Instant>) {
        self.phase = phase;
        self.until = until;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn core() -> (Core, Instant) {
        (Core::new(DrainConfig::default()), Instant::now())
    }

    const fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn s10_the_window_stays_open_even_when_nothing_runs() {
        let (mut core, start) = core();
        assert_eq!(core.trigger(start, Trigger::Terminate), Phase::Announcing);
        assert_eq!(core.tick(start + seconds(9), 0), Phase::Announcing);
        assert_eq!(core.tick(start + seconds(10), 3), Phase::Finishing);
        assert_eq!(core.tick(start + seconds(11), 0), Phase::Done);
        assert!(!core.was_forced());
    }

    #[test]
    fn work_that_outstays_the_grace_is_cut_off() {
        let (mut core, start) = core();
        core.trigger(start, Trigger::Terminate);
        core.tick(start + seconds(10), 1);
        assert_eq!(core.tick(start + seconds(39), 1), Phase::Finishing);
        assert_eq!(core.tick(start + seconds(40), 1), Phase::Forcing);
        assert_eq!(core.until(), Some(start + seconds(42)));
        assert_eq!(core.tick(start + seconds(42), 1), Phase::Done, "it is not waited for for ever");
        assert!(core.was_forced());
    }

    #[test]
    fn a_second_signal_means_now_and_a_third_means_this_instant() {
        for before in [Phase::Announcing, Phase::Finishing] {
            let (mut core, start) = core();
            core.trigger(start, Trigger::Terminate);
            if before == Phase::Finishing {
                core.tick(start + seconds(10), 1);
            }
            assert_eq!(core.phase(), before);
            assert_eq!(core.trigger(start + seconds(11), Trigger::Terminate), Phase::Forcing);
            assert_eq!(core.trigger(start + seconds(11), Trigger::Terminate), Phase::Done);
        }
    }

    #[test]
    fn a_person_at_a_terminal_does_not_wait_for_a_load_balancer() {
        let (mut core, start) = core();
        core.trigger(start, Trigger::Interrupt);
        assert_eq!(core.tick(start, 0), Phase::Done);
    }

    #[test]
    fn a_late_tick_passes_through_every_phase_that_is_over() {
        let (mut core, start) = core();
        core.trigger(start, Trigger::Requested);
        // The grace counts from when the window was seen to be over, so one late tick cuts nothing.
        assert_eq!(core.tick(start + seconds(1_000), 1), Phase::Finishing);
        assert_eq!(core.until(), Some(start + seconds(1_030)));
    }

    #[test]
    fn phases_only_move_forward() {
        // Every sequence of six steps over {trigger, time passes, work ends} keeps the order.
        for sequence in 0..3_u32.pow(6) {
            let (mut core, start) = core();
            let (mut now, mut in_flight, mut code, mut last) = (start, 1, sequence, Phase::Serving);
            for _ in 0..6 {
                match code % 3 {
                    0 => _ = core.trigger(now, Trigger::Terminate),
                    1 => now += seconds(31),
                    _ => in_flight = 0,
                }
                code /= 3;
                let phase = core.tick(now, in_flight);
                assert!(phase >= last, "sequence {sequence}: {last:?} then {phase:?}");
                assert_eq!(core.until().is_none(), matches!(phase, Phase::Serving | Phase::Done));
                last = phase;
            }
        }
    }
}
