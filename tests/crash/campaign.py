"""One campaign: a shop under load whose processes are killed, and paused, at random moments.

Killed are the producer, both relays, both consumers and the hub, by SIGKILL, each as often as the
others. A killed process stays away for a moment and is started again, so several can be away at
once. Paused beyond their lease are relays and consumers: a process that wakes up believing in a
lease that it lost is worse than a dead one.
"""

import heapq
import random
import signal
import sqlite3
import time
from dataclasses import dataclass, field

from system import database
from system.processes import Scene, sleep_until
from system.report import progress
from system.shop import Shop

ORDERS = 100
RATE = 2000
"""Events a second that the producer aims at: enough that every process is busy when it dies."""

LEASE = "2s"
"""Of deliveries and of the relay's buckets: what a dead process held is free again that soon."""

PAUSE_SECONDS = 3.0
"""Longer than the lease."""

PAUSES = 4
BETWEEN_SECONDS = (0.15, 0.9)
"""From one kill to the next."""

AWAY_SECONDS = (0.0, 0.8)
"""From a kill to the restart of the same process."""

PATIENCE = 60.0
"""Seconds to finish after the last kill; a few leases would do."""


@dataclass(order=True)
class Deed:
    """Something to do at a moment."""

    at: float
    what: str = field(compare=False)
    process: object = field(compare=False, default=None)


class Campaign:
    """The plan of kills, and its execution."""

    def __init__(self, shop, producer, relays, consumers, rng, kills):
        self.rng, self.kills, self.shop = rng, kills, shop
        self.everyone = [shop.hub.process, producer, *relays, *consumers]
        self.pausable = [*relays, *consumers]
        self.deck = []
        self.deeds = []
        self.killed = {process.name: 0 for process in self.everyone}
        self.away, self.paused = set(), set()

    def run(self):
        """Carries the plan out; returns once everything runs again."""
        moment = time.monotonic() + 1.0
        for number in range(self.kills):
            moment += self.rng.uniform(*BETWEEN_SECONDS)
            heapq.heappush(self.deeds, Deed(moment, "kill"))
            if (number + 1) % (self.kills // (PAUSES + 1) + 1) == 0:
                heapq.heappush(self.deeds, Deed(moment + 0.05, "pause"))
        with progress("kills") as shown:
            while self.deeds:
                deed = heapq.heappop(self.deeds)
                sleep_until(deed.at)
                self.check_standing()
                getattr(self, deed.what)(deed)
                shown.show(f"{sum(self.killed.values())} of {self.kills}")
        self.shop.hub.wait_ready()

    def check_standing(self):
        """Nobody may end by itself, whatever happens to the others."""
        for process in self.everyone:
            if process not in self.away:
                process.check()

    def kill(self, deed):
        """Kills the next of the deck that can be killed; its restart is a deed of its own."""
        while True:
            if not self.deck:
                self.deck = self.rng.sample(self.everyone, len(self.everyone))
            process = self.deck.pop()
            if process not in self.away and process not in self.paused:
                break
        process.kill()
        self.killed[process.name] += 1
        self.away.add(process)
        back = time.monotonic() + self.rng.uniform(*AWAY_SECONDS)
        heapq.heappush(self.deeds, Deed(back, "restart", process))

    def restart(self, deed):
        """Starts a killed process again."""
        deed.process.start()
        self.away.remove(deed.process)

    def pause(self, deed):
        """Stops a process from running for longer than its leases hold."""
        candidates = [p for p in self.pausable if p not in self.away and p not in self.paused]
        if not candidates:
            return
        process = self.rng.choice(candidates)
        process.signal(signal.SIGSTOP)
        self.paused.add(process)
        heapq.heappush(self.deeds, Deed(time.monotonic() + PAUSE_SECONDS, "wake", process))

    def wake(self, deed):
        """Lets a paused process go on."""
        deed.process.signal(signal.SIGCONT)
        self.paused.remove(deed.process)


def check(kind, hub_kind, seed, kills):
    """Runs one campaign and holds ledger and log against the orders."""
    with Scene(f"crash-{kind}-{hub_kind}") as scene:
        store = database.create(hub_kind, scene, "hub")
        shop = Shop(
            scene, kind, ORDERS, hub_store=store, lease=LEASE, relay_options=relay_options()
        )
        shop.hub.start()
        late = ("--late", 5) if kind == "postgres" else ()
        producer = shop.producer("producer", "--rate", RATE, "--seed", seed, *late)
        relays = [shop.relay("relay-1"), shop.relay("relay-2")]
        consumers = [shop.consumer("consumer-1"), shop.consumer("consumer-2")]
        for process in (producer, *relays, *consumers):
            process.start()

        plan = Campaign(shop, producer, relays, consumers, random.Random(seed), kills)
        plan.run()
        shop.stop_file.touch()
        producer.wait(PATIENCE)
        started = time.monotonic()
        wanted = shop.settle(PATIENCE)
        settled = time.monotonic() - started
        for process in (*relays, *consumers):
            process.stop()
        shop.verify()
        shop.hub.process.stop()
        check_files(scene)
        deaths = ", ".join(f"{name} {count}" for name, count in plan.killed.items())
        return (
            f"{wanted} events; killed: {deaths}; {shop.redelivered()} redeliveries recognised;"
            f" settled in {settled:.1f} s"
        )


def relay_options():
    """Short bucket leases, so that a dead relay is replaced within the campaign."""
    return ("--lease", LEASE)


def check_files(scene):
    """SQLite must find its files whole."""
    for path in scene.folder.glob("*.db"):
        db = sqlite3.connect(path)
        verdict = db.execute("PRAGMA integrity_check").fetchall()
        db.close()
        assert verdict == [("ok",)], f"{path.name}: {verdict[:3]}"
