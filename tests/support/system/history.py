"""The checker: compares what a shop committed with the effects that a ledger shows.

It knows nothing of databases or processes: committed orders and effects go in, complaints come out.
A checker that cannot complain proves nothing, so `self_test` feeds it spoilt histories and insists
on the complaint; every suite runs that first.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

ENOUGH = 10
"""Complaints of one kind that are told in full; a broken run would otherwise print thousands."""


@dataclass(frozen=True)
class Order:
    """What the shop's own table says: the last committed version, and the sum of all amounts."""

    version: int
    total: int


@dataclass(frozen=True)
class Effect:
    """One applied event, in the order of application."""

    key: str
    version: int
    amount: int
    event: str


def check(orders, effects):
    """Returns the complaints; none means: nothing lost, doubled, reordered or made up.

    * `orders`: key → `Order`, what was committed.
    * `effects`: every `Effect`, in the order in which they were applied.
    """
    complaints = defaultdict(list)
    seen = defaultdict(set)
    last = defaultdict(int)
    total = defaultdict(int)
    events = set()

    for effect in effects:
        key, version = effect.key, effect.version
        total[key] += effect.amount
        if effect.event in events:
            complaints["doubled"].append(f"event {effect.event} of {key} took effect twice")
        events.add(effect.event)
        if key not in orders or version > orders[key].version:
            complaints["phantom"].append(f"{key} version {version} took effect, never committed")
            continue
        if version in seen[key]:
            complaints["doubled"].append(f"{key} version {version} took effect twice")
            continue
        if version != last[key] + 1:
            complaints["order"].append(f"{key} version {version} came after {last[key]}")
        seen[key].add(version)
        last[key] = version

    for key, order in orders.items():
        missing = [v for v in range(1, order.version + 1) if v not in seen[key]]
        if missing:
            complaints["lost"].append(f"{key} lacks {len(missing)} versions, first {missing[0]}")
        if total[key] != order.total:
            complaints["total"].append(f"{key} adds up to {total[key]}, not {order.total}")

    told = []
    for kind, items in complaints.items():
        told += [f"{kind}: {item}" for item in items[:ENOUGH]]
        if len(items) > ENOUGH:
            told.append(f"{kind}: and {len(items) - ENOUGH} more")
    return told


def kinds(complaints):
    """The kinds of complaint, without their details."""
    return {complaint.split(":")[0] for complaint in complaints}


def self_test(seed):
    """Checks the checker: a good history passes, and each way to spoil it is found.

    Returns the number of spoilt histories tried; raises `AssertionError` where one passed.
    """
    rng = random.Random(seed)
    rounds = 50
    for _ in range(rounds):
        orders, good = _good_history(rng)
        assert check(orders, good) == [], "a good history must pass"
        for name, spoil, kind in _SPOILERS:
            found = kinds(check(orders, spoil(rng, list(good))))
            assert kind in found, f"{name}: expected a complaint '{kind}', got {found or 'none'}"
    return rounds * len(_SPOILERS)


def _good_history(rng):
    """Orders of 2 to 9 versions, their effects interleaved at random but each in its own order."""
    queues, orders = {}, {}
    for number in range(rng.randint(2, 8)):
        key = f"order-{number}"
        amounts = [rng.randint(1, 999) for _ in range(rng.randint(2, 9))]
        orders[key] = Order(len(amounts), sum(amounts))
        queues[key] = [Effect(key, v, a, f"{key}/{v}") for v, a in enumerate(amounts, start=1)]
    effects = []
    while queues:
        key = rng.choice(sorted(queues))
        effects.append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
    return orders, effects


def _lose_any(rng, effects):
    effects.pop(rng.randrange(len(effects)))
    return effects


def _lose_last(rng, effects):
    effects.pop()
    return effects


def _double(rng, effects):
    effects.append(rng.choice(effects))
    return effects


def _double_under_new_id(rng, effects):
    twin = rng.choice(effects)
    effects.append(Effect(twin.key, twin.version, twin.amount, "another-id"))
    return effects


def _swap(rng, effects):
    key = rng.choice(effects).key
    first, second = [i for i, effect in enumerate(effects) if effect.key == key][:2]
    effects[first], effects[second] = effects[second], effects[first]
    return effects


def _make_up_order(rng, effects):
    effects.insert(rng.randrange(len(effects)), Effect("rolled-back", 1, 5, "ghost"))
    return effects


def _make_up_version(rng, effects):
    key = effects[-1].key
    effects.append(Effect(key, 1000, 5, "ghost"))
    return effects


def _falsify(rng, effects):
    at = rng.randrange(len(effects))
    true = effects[at]
    effects[at] = Effect(true.key, true.version, true.amount + 1, true.event)
    return effects


_SPOILERS = [
    ("an effect is missing", _lose_any, "lost"),
    ("the last effect is missing", _lose_last, "lost"),
    ("an effect happened twice", _double, "doubled"),
    ("a version happened twice under two ids", _double_under_new_id, "doubled"),
    ("two versions changed places", _swap, "order"),
    ("an order that was never committed", _make_up_order, "phantom"),
    ("a version that was never committed", _make_up_version, "phantom"),
    ("an amount of a transaction that was rolled back", _falsify, "total"),
]
