"""20 000 events of 500 orders, from a Python program's own database to another one's ledger."""

import time

from system.processes import Scene
from system.shop import Shop

ORDERS = 500
VERSIONS = 40
PRODUCERS = {"sqlite": 1, "postgres": 2}
"""SQLite has one writer at a time: a second process would only wait for the first."""

LATE = {"sqlite": 0, "postgres": 20}
"""Orders whose transactions take their outbox number early and commit last."""

PATIENCE = 120.0
"""Seconds for the consumers to finish after the last commit; a run takes a small part of it."""


def check(kind, seed):
    """Runs the shop to its end and holds the ledger against the orders."""
    with Scene(f"shop-{kind}") as scene:
        shop = Shop(scene, kind, ORDERS)
        shop.hub.start()
        workers = [shop.relay("relay-1"), shop.relay("relay-2")]
        workers += [shop.consumer("consumer-1"), shop.consumer("consumer-2")]
        for worker in workers:
            worker.start()
        start = time.monotonic()
        count = PRODUCERS[kind]
        producers = [
            shop.producer(
                f"producer-{index}",
                *("--versions", VERSIONS, "--late", LATE[kind]),
                *("--index", index, "--processes", count, "--seed", seed + index),
            ).start()
            for index in range(count)
        ]
        for producer in producers:
            producer.wait(PATIENCE)
        wanted = shop.settle(PATIENCE)
        took = time.monotonic() - start
        assert wanted == ORDERS * VERSIONS, f"{wanted} versions were committed"
        # Everything must also end cleanly when asked to, before the verdict.
        for worker in workers:
            worker.stop()
        shop.verify()
        shop.hub.process.stop()
        return f"{wanted} events in {took:.1f} s, {shop.redelivered()} redelivered"
