//! A client with the policies of `carrick-call`.

use std::{sync::Arc, time::Duration};

use carrick_call::{
    Policy as Who, Refusal,
    balance::{BalanceConfig, Balancer, Endpoint, HostId, Pick},
    breaker::{Breaker, BreakerConfig, Ticket},
    budget::{Budget, BudgetConfig, Deposit, Paid},
    outlier::{Detector, OutlierConfig, Verdict},
    retry::{Attempt, Decision, Repeat, RetryConfig, decide},
    throttle::{self, Throttle, ThrottleConfig},
};
use carrick_core::{deadline::Deadline, outcome::Outcome};
use tokio::time::Instant;

use super::{Client, Dice, Ended, Next, Policy, Sent};

/// Which policies a client has. What is `None` is left out, to see what it is good for.
#[derive(Clone, Debug)]
pub struct Guards {
    /// How long a call may take in all. Without it the servers are told of no deadline. Default 2 s.
    pub timeout: Option<Duration>,
    /// How long one attempt may take; the last that is allowed takes what is left of a `timeout`.
    /// Default 1 s.
    pub per_try_timeout: Duration,
    /// Whether and when to try again.
    pub retry: RetryConfig,
    /// What retries are paid from.
    pub budget: Option<BudgetConfig>,
    /// The circuit.
    pub breaker: Option<BreakerConfig>,
    /// Asks less of servers that refuse. Default none.
    pub throttle: Option<ThrottleConfig>,
    /// How a host is chosen.
    pub balance: BalanceConfig,
    /// Which hosts are left out.
    pub outlier: Option<OutlierConfig>,
}

impl Default for Guards {
    fn default() -> Self {
        Self {
            timeout: Some(Duration::from_secs(2)),
            per_try_timeout: Duration::from_secs(1),
            retry: RetryConfig::default(),
            budget: Some(BudgetConfig::default()),
            breaker: Some(BreakerConfig::default()),
            throttle: None,
            balance: BalanceConfig::default(),
            outlier: None,
        }
    }
}

/// A client whose calls go through deadline, retry with budget, balancer, throttle and breaker: the
/// decisions are those of the cores, and their order is that of [`carrick_call::stack`].
#[derive(Debug)]
pub struct Guarded {
    guards: Arc<Guards>,
    budget: Option<Budget>,
    breaker: Option<Breaker>,
    throttle: Option<Throttle>,
    balancer: Balancer<usize>,
}

/// A call of a [`Guarded`] client.
#[derive(Debug)]
pub struct GuardedCall {
    deadline: Option<Deadline>,
    n: u32,
    backoff: u32,
    avoid: Option<HostId>,
    open: Option<Open>,
    deposit: Option<Deposit>,
    paid: Option<Paid>,
}

/// What an attempt holds.
#[derive(Debug)]
struct Open {
    pick: Pick<usize>,
    throttle: Option<throttle::Permit>,
    breaker: Option<Ticket>,
}

const DAY: Duration = Duration::from_secs(86_400);

const LATE: Refusal = Refusal::new(Who::Deadline, "too little time is left");

impl Guarded {
    /// A client with these policies, each of which is its own.
    pub fn new(client: Client, guards: &Arc<Guards>) -> Self {
        let Client { hosts, seed, start, .. } = client;
        let detector = guards.outlier.clone().map(|config| Detector::seeded("fleet", config, seed));
        let number = |endpoint: &Endpoint| endpoint.address.parse().expect("made below");
        let balancer = Balancer::with("fleet", guards.balance.clone(), detector, number);
        let endpoint = |host: usize| Endpoint::new(host.to_string());
        balancer.update((0..hosts).map(endpoint).collect(), start);
        let breaker = |config| Breaker::seeded("fleet", config, seed);
        Self {
            budget: guards.budget.clone().map(|config| Budget::new("fleet", config)),
            breaker: guards.breaker.clone().map(breaker),
            throttle: guards.throttle.clone().map(|config| Throttle::new("fleet", config)),
            guards: Arc::clone(guards),
            balancer,
        }
    }

    /// Asks those that may refuse, the throttle before the circuit: it holds nothing.
    fn admit(&self, now: Instant, dice: &mut Dice) -> Result<Permits, Refusal> {
        let throttle = self.throttle.as_ref().map(|throttle| throttle.admit(now, dice));
        let throttle = throttle.transpose()?;
        match self.breaker.as_ref().map(|breaker| breaker.enter(now)).transpose() {
            Ok(ticket) => Ok((throttle, ticket)),
            Err(refusal) => {
                if let Some(permit) = throttle {
                    permit.settle(Outcome::Rejected, now);
                }
                Err(refusal)
            }
        }
    }
}

type Permits = (Option<throttle::Permit>, Option<Ticket>);

impl Policy for Guarded {
    type Call = GuardedCall;

    fn begin(&mut self, now: Instant) -> GuardedCall {
        GuardedCall {
            deadline: self.guards.timeout.map(|timeout| Deadline::at(now + timeout)),
            n: 0,
            backoff: 0,
            avoid: None,
            open: None,
            deposit: None,
            paid: None,
        }
    }

    fn send(
        &mut self,
        call: &mut GuardedCall,
        now: Instant,
        dice: &mut Dice,
    ) -> Result<Sent, Refusal> {
        let Guards { retry, per_try_timeout, .. } = &*self.guards;
        let left = call.deadline.map(|deadline| deadline.remaining(now));
        if left.is_some_and(|left| left < retry.min_useful()) {
            return Err(LATE);
        }
        let pick = self.balancer.pick(now, dice, call.avoid)?;
        let (throttle, breaker) = match self.admit(now, dice) {
            Ok(permits) => permits,
            Err(refusal) => {
                pick.settle(Verdict::local(Outcome::Rejected), Duration::ZERO, now);
                return Err(refusal);
            }
        };
        if call.deposit.is_none() {
            call.deposit = self.budget.as_ref().map(|budget| budget.deposit(now));
        }
        call.n += 1;
        let is_last = call.n >= retry.max_attempts();
        let patience = match left {
            Some(left) if is_last => left,
            Some(left) => left.min(*per_try_timeout),
            None => *per_try_timeout,
        };
        let host = *pick.host().value();
        call.open = Some(Open { pick, throttle, breaker });
        Ok(Sent { host, patience, deadline: left.map(|_| now + patience) })
    }

    fn ended(
        &mut self,
        call: &mut GuardedCall,
        ended: Ended,
        now: Instant,
        dice: &mut Dice,
    ) -> Next {
        let Ended { outcome, timed_out, elapsed } = ended;
        if let Some(Open { pick, throttle, breaker }) = call.open.take() {
            if let Some((circuit, ticket)) = self.breaker.as_ref().zip(breaker) {
                circuit.leave(ticket, Some((outcome, elapsed)), now);
            }
            if let Some(permit) = throttle {
                permit.settle(outcome, now);
            }
            let verdict = if timed_out { Verdict::local(outcome) } else { Verdict::peer(outcome) };
            call.avoid = Some(pick.host().id());
            pick.settle(verdict, elapsed, now);
        }
        call.paid = None;
        if let Some(budget) = &self.budget {
            budget.settle(outcome);
        }
        if outcome == Outcome::Success {
            return Next::Stop;
        }
        let attempt = Attempt {
            n: call.n,
            outcome,
            timed_out_here: timed_out,
            repeat: Repeat::Idempotent,
            answered: false,
            retried_below: false,
            pushback: None,
            backoff: call.backoff,
            // Without one, a day is as good as none.
            deadline: call.deadline.unwrap_or_else(|| Deadline::at(now + DAY)),
        };
        let withdraw = || match &self.budget {
            Some(budget) => budget.withdraw(now).map(Some),
            None => Some(None),
        };
        match decide(&attempt, &self.guards.retry, now, dice, withdraw) {
            Decision::Stop(_) => Next::Stop,
            Decision::Retry { delay, asked, paid } => {
                call.backoff = if asked { 0 } else { call.backoff + 1 };
                call.paid = paid;
                Next::Retry(delay)
            }
        }
    }
}
