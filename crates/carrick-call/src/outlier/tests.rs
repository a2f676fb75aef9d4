use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
const SWEEP: Duration = Duration::from_secs(10);
const BAD: Verdict = Verdict::peer(Outcome::Transient);
const GOOD: Verdict = Verdict::peer(Outcome::Success);

/// A detector without jitter, so that ends are exact.
fn fleet(hosts: usize, options: OutlierOptions) -> (Detector, Vec<Member>, Instant) {
    let config = OutlierConfig::try_from(OutlierOptions { jitter: 0.0, ..options }).unwrap();
    let (detector, now) = (Detector::seeded("test", config, 1), Instant::now());
    let members = (0..hosts).map(|n| detector.add(&format!("host-{n}"), now)).collect();
    (detector, members, now)
}

fn record(host: &Member, verdict: Verdict, times: usize, now: Instant) {
    for _ in 0..times {
        host.record(verdict, MS, now);
    }
}

fn out(members: &[Member]) -> Vec<usize> {
    let out = members.iter().enumerate().filter(|(_, member)| member.is_ejected());
    out.map(|(n, _)| n).collect()
}

/// How many of `hosts` go when all of them fail, for caps of 10, 33, 50, 67 and 100 %.
#[track_caller]
fn check_cap(hosts: usize, expected: [usize; 5]) {
    for (max_ejected, expected) in [0.1, 0.33, 0.5, 0.67, 1.0].into_iter().zip(expected) {
        let options =
            OutlierOptions { max_ejected, min_serving: 0, panic_below: 0.0, ..Default::default() };
        let (detector, members, now) = fleet(hosts, options);
        members.iter().for_each(|member| record(member, BAD, 5, now));
        assert_eq!(detector.ejected(), expected, "{hosts} hosts, {max_ejected}");
        assert_eq!(out(&members).len(), expected);
    }
}

#[test]
fn envoy_26877_27066_3263_17504_the_cap_is_the_share_after_the_ejection() {
    check_cap(1, [0, 0, 0, 0, 1]);
    check_cap(2, [0, 0, 1, 1, 2]);
    check_cap(3, [0, 0, 1, 2, 3]);
    check_cap(4, [0, 1, 2, 2, 4]);
    check_cap(5, [0, 1, 2, 3, 5]);
    check_cap(6, [0, 1, 3, 4, 6]);
    check_cap(7, [0, 2, 3, 4, 7]);
    check_cap(8, [0, 2, 4, 5, 8]);
    check_cap(9, [0, 2, 4, 6, 9]);
    check_cap(10, [1, 3, 5, 6, 10]);
}

#[track_caller]
fn check_one(hosts: usize, always_allow_one: bool, min_serving: usize, expected: bool) {
    let options =
        OutlierOptions { max_ejected: 0.1, always_allow_one, min_serving, ..Default::default() };
    assert_eq!(may_eject(&options, hosts, 0), expected, "{hosts} {always_allow_one} {min_serving}");
}

#[test]
fn one_host_may_always_go_if_that_is_asked_for_and_enough_stay() {
    check_one(3, false, 1, false);
    check_one(3, true, 1, true);
    check_one(3, true, 3, false);
    check_one(1, true, 1, false);
    check_one(1, true, 0, true);
    check_one(0, true, 0, false);
}

#[track_caller]
fn check_panic(hosts: usize, ejected: usize, panic_below: f64, expected: bool) {
    let options = OutlierOptions { panic_below, ..Default::default() };
    assert_eq!(panics(&options, hosts, ejected), expected, "{ejected} of {hosts}, {panic_below}");
}

#[test]
fn at_half_nobody_panics_below_half_everybody_does() {
    for hosts in 1..=10 {
        check_panic(hosts, hosts / 2, 0.5, false);
        check_panic(hosts, hosts / 2 + 1, 0.5, true);
        check_panic(hosts, hosts, 0.0, false);
    }
    check_panic(0, 0, 1.0, false);
}

#[test]
fn in_a_panic_ejections_are_ignored_until_enough_serve() {
    let options = OutlierOptions { max_ejected: 0.75, ..Default::default() };
    let (detector, members, now) = fleet(4, options);
    record(&members[0], BAD, 5, now);
    record(&members[1], BAD, 5, now);
    assert_eq!(out(&members), [0, 1]);
    record(&members[2], BAD, 5, now);
    assert!(detector.is_panicking());
    assert_eq!((detector.ejected(), out(&members)), (3, vec![]), "all are tried");
    detector.sweep(now + Duration::from_secs(31));
    assert!(!detector.is_panicking());
}

#[test]
fn the_fifth_failure_in_a_row_ejects_at_once_and_a_success_starts_again() {
    let (_detector, members, now) = fleet(4, Default::default());
    record(&members[0], BAD, 4, now);
    record(&members[0], GOOD, 1, now);
    record(&members[0], BAD, 4, now);
    assert_eq!(out(&members), [0usize; 0]);
    let change = members[0].record(BAD, MS, now).unwrap();
    assert_eq!(change.host, members[0].id());
    let (kind, time) = (Kind::ConsecutiveFailures, Duration::from_secs(30));
    assert_eq!(change.what, What::Ejected { kind, time });
    assert_eq!(out(&members), [0]);
}

#[test]
fn envoy_40697_failures_in_a_row_survive_a_sweep() {
    let (detector, members, now) = fleet(4, Default::default());
    for n in 0..5 {
        let now = now + SWEEP * n;
        assert!(!members[0].is_ejected());
        record(&members[0], BAD, 1, now);
        detector.sweep(now);
    }
    assert!(members[0].is_ejected());
}

#[test]
fn envoy_22395_41985_timeouts_count_as_calls_without_an_answer() {
    let (_detector, members, now) = fleet(4, Default::default());
    record(&members[0], Verdict::local(Outcome::Expired), 5, now);
    assert_eq!(out(&members), [0]);
}

#[test]
fn answers_and_calls_without_an_answer_are_counted_apart() {
    let (_detector, members, now) = fleet(4, Default::default());
    for _ in 0..4 {
        record(&members[0], BAD, 1, now);
        record(&members[0], Verdict::local(Outcome::Transient), 4, now);
    }
    assert_eq!(out(&members), [0usize; 0], "four answers; between them never five without one");
    record(&members[0], BAD, 1, now);
    assert_eq!(out(&members), [0], "calls without an answer do not forgive the answers");
}

#[test]
fn only_gateway_errors_in_a_row_count_as_such() {
    let options =
        OutlierOptions { consecutive_gateway: 3, consecutive_failures: 0, ..Default::default() };
    let (_detector, members, now) = fleet(4, options);
    let gateway = Verdict::from_status(StatusCode::BAD_GATEWAY);
    record(&members[0], gateway, 2, now);
    record(&members[0], BAD, 1, now);
    record(&members[0], gateway, 2, now);
    assert_eq!(out(&members), [0usize; 0]);
    record(&members[0], gateway, 1, now);
    assert_eq!(out(&members), [0]);
}

#[test]
fn what_says_nothing_about_a_host_is_not_charged_to_it() {
    let (_detector, members, now) = fleet(4, Default::default());
    for outcome in [Outcome::Rejected, Outcome::Cancelled, Outcome::Permanent] {
        record(&members[0], Verdict::peer(outcome), 50, now);
    }
    assert_eq!(out(&members), [0usize; 0]);
}

#[test]
fn ejections_get_longer_up_to_a_cap_and_the_count_decays_with_healthy_sweeps() {
    let (detector, members, start) = fleet(4, Default::default());
    let mut now = start;
    let eject = |now: &mut Instant| -> u64 {
        record(&members[0], BAD, 4, *now);
        let What::Ejected { time, .. } = members[0].record(BAD, MS, *now).unwrap().what else {
            panic!("not ejected");
        };
        *now += time;
        detector.sweep(*now);
        assert!(!members[0].is_ejected());
        time.as_secs()
    };
    let times: Vec<_> = (0..12).map(|_| eject(&mut now)).collect();
    assert_eq!(times, [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]);
    for _ in 0..8 {
        now += SWEEP;
        detector.sweep(now);
    }
    assert_eq!(eject(&mut now), 90, "ten less eight, and this one");
}

#[test]
fn jitter_only_lengthens_and_differs_by_host() {
    let detector = Detector::seeded("test", OutlierConfig::default(), 7);
    let now = Instant::now();
    let hosts: Vec<_> = (0..20).map(|n| detector.add(&n.to_string(), now)).collect();
    let time = |host: &Member| {
        record(host, BAD, 4, now);
        match host.record(BAD, MS, now).unwrap().what {
            What::Ejected { time, .. } => time,
            other => panic!("{other:?}"),
        }
    };
    let times: HashSet<_> = hosts[..10].iter().map(time).collect();
    assert_eq!(times.len(), 10);
    let range = Duration::from_secs(30)..=Duration::from_secs(33);
    assert!(times.iter().all(|time| range.contains(time)), "{times:?}");
}

#[test]
fn a_host_that_comes_back_starts_with_nothing_held_against_it() {
    let (detector, members, now) = fleet(4, Default::default());
    record(&members[0], BAD, 5, now);
    record(&members[0], BAD, 4, now);
    detector.sweep(now + Duration::from_secs(30));
    record(&members[0], BAD, 4, now);
    assert!(!members[0].is_ejected());
}

#[test]
fn a_host_that_the_cap_spared_goes_when_there_is_room() {
    let (detector, members, now) = fleet(2, Default::default());
    record(&members[0], BAD, 5, now);
    record(&members[1], BAD, 4, now);
    let change = members[1].record(BAD, MS, now).unwrap();
    assert_eq!(change.what, What::Capped { kind: Kind::ConsecutiveFailures });
    let changes = detector.sweep(now + Duration::from_secs(30));
    assert_eq!(changes.len(), 2, "{changes:?}");
    assert_eq!(out(&members), [1]);
}

#[test]
fn when_the_fleet_shrinks_the_least_bad_comes_back() {
    let (detector, members, now) = fleet(4, Default::default());
    record(&members[0], BAD, 5, now);
    let now = now + Duration::from_secs(30);
    detector.sweep(now);
    record(&members[0], BAD, 5, now);
    record(&members[1], BAD, 5, now);
    assert_eq!(out(&members), [0, 1]);
    let changes = detector.remove(&members[3]);
    assert_eq!((changes.len(), changes[0].what), (1, What::Spared));
    assert_eq!(out(&members), [0], "of three one may be out, and this one was out before");
    assert!(members[3].record(BAD, MS, now).is_none());
    record(&members[3], BAD, 9, now);
    assert_eq!(detector.hosts(), 3);
    assert!(detector.remove(&members[3]).is_empty(), "a second removal does nothing");
}

#[track_caller]
fn check_rates(options: OutlierOptions, bad_of_100: &[usize], expected: &[usize]) {
    let options = OutlierOptions { consecutive_failures: 0, ..options };
    let (detector, members, now) = fleet(bad_of_100.len(), options);
    for (member, bad) in members.iter().zip(bad_of_100) {
        record(member, BAD, *bad, now);
        record(member, GOOD, 100 - bad, now);
    }
    detector.sweep(now + SWEEP);
    assert_eq!(out(&members), expected, "{bad_of_100:?}");
}

#[test]
fn a_success_rate_far_below_the_mean_ejects() {
    check_rates(Default::default(), &[30, 0, 0, 0, 0], &[0]);
    check_rates(Default::default(), &[30, 0, 0, 0], &[]);
    check_rates(Default::default(), &[30, 30, 30, 30, 30], &[]);
    check_rates(Default::default(), &[0; 6], &[]);
    check_rates(Default::default(), &[5, 3, 4, 5, 3, 4], &[]);
    let off = OutlierOptions { success_rate_deviations: 0.0, ..Default::default() };
    check_rates(off, &[100, 0, 0, 0, 0], &[]);
    let more = OutlierOptions { success_rate_requests: 101, ..Default::default() };
    check_rates(more, &[100, 0, 0, 0, 0], &[]);
}

#[test]
fn a_share_of_failures_ejects_the_worst_first_and_only_if_asked_for() {
    let options = OutlierOptions {
        failure_percentage: true,
        success_rate_deviations: 0.0,
        ..Default::default()
    };
    check_rates(options.clone(), &[85, 84, 0, 0, 0], &[0]);
    check_rates(options.clone(), &[90, 99, 95, 0, 0], &[1, 2]);
    check_rates(options.clone(), &[99, 0, 0, 0], &[]);
    check_rates(OutlierOptions { failure_percentage: false, ..options }, &[99, 0, 0, 0, 0], &[]);
}

#[track_caller]
fn check_slow(millis: &[u64], calls: usize, expected: &[usize]) {
    let options = OutlierOptions { latency: true, ..Default::default() };
    let (detector, members, now) = fleet(millis.len(), options);
    for (member, millis) in members.iter().zip(millis) {
        for _ in 0..calls {
            member.record(GOOD, Duration::from_millis(*millis), now);
        }
    }
    detector.sweep(now + SWEEP);
    assert_eq!(out(&members), expected, "{millis:?}");
}

#[test]
fn a_host_much_slower_than_its_peers_is_ejected() {
    check_slow(&[400, 50, 50, 50, 50], 100, &[0]);
    check_slow(&[100, 50, 50, 50, 50], 100, &[]);
    check_slow(&[400, 50, 50, 50, 50], 99, &[]);
    check_slow(&[400, 50, 50, 50], 100, &[]);
    check_slow(&[8, 1, 1, 1, 1], 100, &[]);
    check_slow(&[400, 900, 800, 50, 50, 50, 50], 100, &[0, 1, 2]);
}

#[test]
fn in_observe_mode_ejections_are_counted_and_nobody_is_left_out() {
    let options = OutlierOptions { mode: crate::Mode::Observe, ..Default::default() };
    let (detector, members, now) = fleet(4, options);
    record(&members[0], BAD, 5, now);
    assert_eq!((detector.ejected(), out(&members)), (1, vec![]));
}

#[test]
fn a_tick_sweeps_when_the_interval_is_over_and_not_before() {
    let (detector, members, now) = fleet(4, Default::default());
    record(&members[0], BAD, 5, now);
    for (seconds, expected) in [(1, true), (29, true), (29, true), (31, true), (39, false)] {
        detector.tick(now + Duration::from_secs(seconds));
        assert_eq!(members[0].is_ejected(), expected, "{seconds} s");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add,
    Remove(usize),
    Record(usize, bool),
    Sweep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => Just(Step::Add),
        1 => (0..12usize).prop_map(Step::Remove),
        20 => (0..12usize, prop::bool::weighted(0.8)).prop_map(|(n, bad)| Step::Record(n, bad)),
        2 => (1..60u64).prop_map(Step::Sweep),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_no_more_are_out_than_may_be(
        steps in prop::collection::vec(step(), 0..400),
        max_ejected in prop::sample::select(vec![0.0, 0.1, 0.5, 0.8, 1.0]),
        always_allow_one: bool,
        min_serving in 0..3usize,
    ) {
        let options =
            OutlierOptions { max_ejected, always_allow_one, min_serving, ..Default::default() };
        let (detector, mut members, mut now) = fleet(3, options.clone());
        for step in steps {
            match step {
                Step::Add if members.len() < 12 => members.push(detector.add("more", now)),
                Step::Remove(n) if n < members.len() => {
                    detector.remove(&members.swap_remove(n));
                }
                Step::Record(n, bad) if n < members.len() => {
                    record(&members[n], if bad { BAD } else { GOOD }, 1, now);
                }
                Step::Sweep(seconds) => {
                    now += Duration::from_secs(seconds);
                    detector.sweep(now);
                }
                _ => {}
            }
            let (hosts, ejected) = (detector.hosts(), detector.ejected());
            prop_assert_eq!(hosts, members.len());
            prop_assert!(ejected == 0 || may_eject(&options, hosts, ejected - 1));
            let shown = if detector.is_panicking() { 0 } else { ejected };
            prop_assert_eq!(out(&members).len(), shown);
        }
        now += Duration::from_secs(400);
        detector.sweep(now);
        // A host that the cap spared may go in the sweep that made room for it.
        now += Duration::from_secs(400);
        members.iter().for_each(|member| record(member, GOOD, 1, now));
        detector.sweep(now);
        prop_assert_eq!(detector.ejected(), 0, "every ejection ends");
    }
}
