use carrick_testkit::history::{Acknowledged, Fact, History, Violation};
use proptest::{collection::vec, prelude::*, sample::Index};

/// A history that keeps every promise: keys interleaved, some deliveries repeated.
fn honest() -> impl Strategy<Value = History> {
    let event = (0_u8..4, any::<bool>(), any::<bool>());
    vec(event, 2..60).prop_map(|events| {
        let mut versions = [0; 4];
        let mut history = History::default();
        for (n, (key, told, repeat)) in events.into_iter().enumerate() {
            let version = &mut versions[usize::from(key)];
            *version += 1;
            let fact = Fact::new(format!("e{n}"), format!("k{key}"), *version);
            let told = if told || n == 0 { Acknowledged::Yes } else { Acknowledged::Unknown };
            history.produced.push((fact.clone(), told));
            history.delivered.push(fact.clone());
            if repeat {
                // The repeat of something old, after something newer of its key: at least once.
                let old = history.delivered[n / 2].clone();
                history.delivered.push(old);
            }
            history.applied.push(fact);
        }
        history
    })
}

fn acknowledged(history: &History) -> Vec<Fact> {
    let told = history.produced.iter().filter(|(_, told)| *told == Acknowledged::Yes);
    told.map(|(fact, _)| fact.clone()).collect()
}

proptest! {
    #[test]
    fn an_honest_history_passes(history in honest()) {
        let summary = history.check().unwrap();
        prop_assert_eq!(summary.effects, history.applied.len());
        prop_assert_eq!(summary.acknowledged, acknowledged(&history).len());
    }

    #[test]
    fn a_lost_event_is_found(mut history in honest(), which: Index) {
        let lost = which.get(&acknowledged(&history)).clone();
        history.applied.retain(|fact| *fact != lost);
        prop_assert_eq!(history.check(), Err(Violation::NeverApplied(lost.clone())));
        history.delivered.retain(|fact| *fact != lost);
        prop_assert_eq!(history.check(), Err(Violation::NeverDelivered(lost)));
    }

    #[test]
    fn an_event_that_was_not_acknowledged_may_be_missing(mut history in honest()) {
        let acknowledged = acknowledged(&history);
        history.delivered.retain(|fact| acknowledged.contains(fact));
        history.applied.retain(|fact| acknowledged.contains(fact));
        prop_assert!(history.check().is_ok());
    }

    #[test]
    fn a_doubled_effect_is_found(mut history in honest(), which: Index, at: Index) {
        let doubled = which.get(&history.applied).clone();
        history.applied.insert(at.index(history.applied.len() + 1), doubled.clone());
        let found = history.check();
        let is_right = matches!(&found, Err(Violation::AppliedTwice { fact, .. }) if *fact == doubled);
        prop_assert!(is_right, "{:?}", found);
    }

    #[test]
    fn effects_of_a_key_that_swap_are_found(mut history in honest(), which: Index) {
        let at = which.index(history.applied.len());
        let later = history.applied[at + 1..].iter();
        let same_key = later.clone().position(|fact| fact.key == history.applied[at].key);
        let Some(distance) = same_key else { return Ok(()) };
        history.applied.swap(at, at + 1 + distance);
        let found = history.check();
        let is_right = matches!(&found, Err(Violation::OutOfOrder { what: "effect", .. }));
        prop_assert!(is_right, "{:?}", found);
    }

    #[test]
    fn an_invented_event_is_found(mut history in honest(), which: Index, what in 0..3) {
        let at = which.index(history.applied.len());
        match what {
            0 => history.applied[at].version += 1_000,
            1 => history.applied[at].key = None,
            _ => history.applied.insert(at, Fact::new("nobody's", "k0", 0)),
        }
        let found = history.check();
        let is_right = matches!(&found, Err(Violation::Invented { what: "effect", at: place, .. }) if *place == at);
        prop_assert!(is_right, "{:?}", found);
    }
}

#[test]
fn a_first_delivery_that_comes_too_late_is_named() {
    let [one, two] = [1, 2].map(|n| Fact::new(format!("e{n}"), "A", n));
    let history = History {
        produced: vec![(one.clone(), Acknowledged::Yes), (two.clone(), Acknowledged::Yes)],
        delivered: vec![two.clone(), one.clone()],
        applied: vec![one, two],
    };
    assert_eq!(
        history.check().unwrap_err().to_string(),
        "out of order: delivery 1 is event e1 (key A, version 1), but event e2 (key A, version 2) \
         came before it"
    );
}

#[test]
fn events_without_a_key_have_no_order_but_are_not_lost() {
    let facts = [1, 2].map(|n| Fact { id: n.to_string(), key: None, version: n });
    let mut history = History {
        produced: facts.iter().cloned().map(|fact| (fact, Acknowledged::Yes)).collect(),
        delivered: facts.iter().rev().cloned().collect(),
        applied: facts.iter().rev().cloned().collect(),
    };
    assert!(history.check().is_ok());
    history.applied.pop();
    assert_eq!(history.check(), Err(Violation::NeverApplied(facts[0].clone())));
}

#[test]
fn one_id_for_two_events_is_the_tests_own_mistake() {
    let fact = Fact::new("e", "A", 1);
    let told = (fact.clone(), Acknowledged::Yes);
    let history = History { produced: vec![told.clone(), told], ..History::default() };
    assert_eq!(history.check(), Err(Violation::AmbiguousId("e".to_owned())));
}

#[test]
fn an_empty_history_breaks_nothing() {
    assert_eq!(History::default().check().unwrap().effects, 0);
}
