"""Publishers that write down what the hub acknowledged, and a hub that is killed meanwhile.

Every acknowledged event must be in the topic afterwards; none may be there twice, though publishers
repeat what got no answer; and each key's events must be in the order in which they were sent.
"""

import json
import random
import threading
import time

from system import database
from system.hub import Hub, Unavailable
from system.processes import Scene
from system.report import progress

TOPIC = "publishing"
PUBLISHERS = 4
KEYS_EACH = 5
KILLS = 6
UP_SECONDS = (0.3, 1.2)
"""How long the hub lives between two kills."""

LARGEST_BATCH = 20
GIVE_UP_SHARE = 0.3
"""Share of publishes that are not repeated after a failure: those events may be there or not."""


class Publisher(threading.Thread):
    """Publishes numbered events, one call at a time, until told to stop."""

    def __init__(self, hub, name, rng, stop):
        super().__init__(name=name, daemon=True)
        self.client, self.rng, self.stop = hub.client(), rng, stop
        self.next = {f"{name}-key-{number}": 0 for number in range(KEYS_EACH)}
        self.acknowledged = []
        self.given_up = 0
        self.error = None

    def run(self):
        """Publishes; an unexpected answer ends it, and fails the check."""
        try:
            while not self.stop.is_set():
                self.publish(self.some_events())
        except Exception as error:
            self.error = error

    def some_events(self):
        """One event, or a batch, of random keys; numbers of a key ascend."""
        events = []
        for _ in range(self.rng.choice([1, 1, self.rng.randint(2, LARGEST_BATCH)])):
            key = self.rng.choice(sorted(self.next))
            self.next[key] += 1
            number = self.next[key]
            events.append(
                {
                    "specversion": "1.0",
                    "id": f"{key}/{number}",
                    "source": "/publishing",
                    "type": "number.sent.v1",
                    "partitionkey": key,
                    "data": {"n": number},
                }
            )
        return events

    def publish(self, events):
        """Publishes until acknowledged, or gives up after the first failure."""
        batch = len(events) > 1
        body = json.dumps(events if batch else events[0])
        mode = "application/cloudevents-batch+json" if batch else "application/cloudevents+json"
        stubborn = self.rng.random() >= GIVE_UP_SHARE
        while True:
            try:
                account = self.client.publish(TOPIC, body, {"content-type": mode})
            except Unavailable:
                if not stubborn:
                    self.given_up += len(events)
                    return
                if self.stop.is_set():
                    return
                time.sleep(self.rng.uniform(0.01, 0.05))
                continue
            assert account["accepted"] + account["duplicates"] == len(events), account
            self.acknowledged += [event["id"] for event in events]
            return


def complaints(acknowledged, found):
    """Holds the topic's ids, in order, against the acknowledged ones."""
    told = []
    there = set(found)
    lost = [identity for identity in acknowledged if identity not in there]
    told += [f"lost: {identity} was acknowledged" for identity in lost[:10]]
    if len(there) != len(found):
        twice = sorted({identity for identity in found if found.count(identity) > 1})
        told += [f"doubled: {identity}" for identity in twice[:10]]
    last = {}
    for identity in found:
        key, number = identity.rsplit("/", 1)
        if int(number) < last.get(key, 0):
            told.append(f"order: {identity} came after {last[key]}")
        last[key] = int(number)
    return told


def self_test(seed):
    """The check must find what is lost, doubled or out of order."""
    rng = random.Random(seed)
    good = [f"a/{n}" for n in range(1, 20)]
    gaps = [identity for identity in good if identity != "a/7"]
    assert complaints(good, good) == []
    assert complaints(gaps, gaps) == [], "an event that was given up may be missing"
    assert complaints(gaps, good) == [], "an event that was given up may be there"
    victim = rng.randrange(1, len(good) - 1)
    swapped = list(good)
    swapped[victim - 1], swapped[victim] = swapped[victim], swapped[victim - 1]
    spoilt = {
        "lost": good[:victim] + good[victim + 1 :],
        "doubled": [*good, good[-1]],
        "order": swapped,
    }
    for kind, found in spoilt.items():
        told = complaints(good, found)
        assert any(text.startswith(kind) for text in told), f"{kind}: {told}"
    return len(spoilt)


def check(kind, seed):
    """Kills the hub while four publishers write to it, then reads everything back."""
    rng = random.Random(seed)
    with Scene(f"publishing-{kind}") as scene, progress("kills") as shown:
        hub = Hub(scene, database.create(kind, scene, "hub")).start()
        stop = threading.Event()
        publishers = [
            Publisher(hub, f"publisher-{n}", random.Random(rng.random()), stop)
            for n in range(PUBLISHERS)
        ]
        for publisher in publishers:
            publisher.start()
        for number in range(KILLS):
            time.sleep(rng.uniform(*UP_SECONDS))
            hub.process.kill()
            hub.start()
            shown.show(f"{number + 1} of {KILLS}")
        time.sleep(UP_SECONDS[0])
        stop.set()
        for publisher in publishers:
            publisher.join(60)
            assert not publisher.is_alive(), f"{publisher.name} hangs"
            if publisher.error:
                raise publisher.error

        acknowledged = [identity for one in publishers for identity in one.acknowledged]
        found = [event["id"] for event in hub.client().read_all(TOPIC)]
        told = complaints(acknowledged, found)
        assert not told, "\n  ".join(["the topic is broken:", *told])
        hub.process.stop()
        given_up = sum(one.given_up for one in publishers)
        assert acknowledged, "nothing was published"
        return f"{len(acknowledged)} acknowledged, {given_up} without answer, {KILLS} kills"
