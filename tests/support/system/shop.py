"""A shop in two services: one takes orders, the other keeps a ledger; Carrick joins them.

The order service changes orders in its own database and writes one outbox row for each change, in
the same transaction. The ledger service consumes those events over HTTP, and books each in one
transaction with its inbox row. Both are Python; neither has any of Carrick's code in it.
"""

import json
import sys
import time
from pathlib import Path

from . import database, history
from .hub import CARRICK, Hub
from .report import progress

TOPIC = "orders"
GROUP = "ledger"
SOURCE = "/shop"
TYPE = "order.changed.v1"

ORDERS = {
    "sqlite": "CREATE TABLE orders (id TEXT PRIMARY KEY, version INTEGER NOT NULL DEFAULT 0,"
    " total INTEGER NOT NULL DEFAULT 0);",
    "postgres": "CREATE TABLE orders (id text PRIMARY KEY, version int NOT NULL DEFAULT 0,"
    " total bigint NOT NULL DEFAULT 0);",
}

LEDGER = {
    "sqlite": """
        CREATE TABLE ledger (position INTEGER PRIMARY KEY AUTOINCREMENT, order_id TEXT NOT NULL,
            version INTEGER NOT NULL, amount INTEGER NOT NULL, event_id TEXT NOT NULL);
        CREATE TABLE redelivered (event_id TEXT NOT NULL);
    """,
    "postgres": """
        CREATE TABLE ledger (position bigserial PRIMARY KEY, order_id text NOT NULL,
            version int NOT NULL, amount bigint NOT NULL, event_id text NOT NULL);
        CREATE TABLE redelivered (event_id text NOT NULL);
    """,
}


def order_id(number):
    """The key of an order."""
    return f"order-{number:04}"


class Shop:
    """The databases and processes of one run, inside a scene."""

    def __init__(self, scene, kind, orders, hub_store=None, lease="30s", relay_options=()):
        self.scene, self.kind, self.orders, self.lease = scene, kind, orders, lease
        self.relay_options = list(relay_options)
        self.app = database.create(kind, scene, "shop")
        self.books = database.create(kind, scene, "ledger")
        store = hub_store or f"sqlite://{scene.folder / 'hub.db'}"
        self.hub = Hub(scene, store)
        self.stop_file = scene.folder / "stop-producing"
        self._prepare()

    def _prepare(self):
        for url, schema in ((self.app, ORDERS), (self.books, LEDGER)):
            migrate(self.scene, url)
            db = database.connect(url)
            db.script(schema[self.kind])
            if schema is ORDERS:
                with db.transaction():
                    for number in range(self.orders):
                        db.execute("INSERT INTO orders (id) VALUES (?)", (order_id(number),))
            db.close()

    def relay(self, name):
        """A `carrick relay` process that drains the shop's outbox into the hub."""
        command = [CARRICK, "relay", "--database", self.app, "--to", self.hub.url]
        return self.scene.process(name, command + self.relay_options)

    def producer(self, name, *options):
        """A process that changes orders."""
        command = [sys.executable, "-m", "system.producer", "--database", self.app]
        command += ["--orders", self.orders, "--stop-file", self.stop_file, *options]
        return self.scene.process(name, command)

    def consumer(self, name):
        """A process that books events in the ledger."""
        command = [sys.executable, "-m", "system.consumer", "--hub", self.hub.url]
        command += ["--database", self.books, "--lease", self.lease]
        return self.scene.process(name, command)

    def committed(self):
        """What the order service committed: key → `history.Order`."""
        db = database.connect(self.app)
        rows = db.execute("SELECT id, version, total FROM orders")
        db.close()
        return {key: history.Order(version, total) for key, version, total in rows}

    def booked(self):
        """What the ledger shows, in the order in which it was booked."""
        db = database.connect(self.books)
        rows = db.execute(
            "SELECT order_id, version, amount, event_id FROM ledger ORDER BY position"
        )
        db.close()
        return [history.Effect(*row) for row in rows]

    def logged(self):
        """What the hub's topic shows, in the order of its log."""
        client = self.hub.client()
        events = client.read_all(TOPIC)
        client.close()
        effects = []
        for event in events:
            data = event["data"]
            effects.append(
                history.Effect(data["order"], data["version"], data["amount"], event["id"])
            )
        return effects

    def unpublished(self):
        """How many outbox rows wait for a relay."""
        db = database.connect(self.app)
        [(count,)] = db.execute("SELECT count(*) FROM carrick_outbox WHERE published_at IS NULL")
        db.close()
        return count

    def redelivered(self):
        """How many deliveries the inbox recognised as repeats."""
        db = database.connect(self.books)
        [(count,)] = db.execute("SELECT count(*) FROM redelivered")
        db.close()
        return count

    def settle(self, seconds):
        """Waits until the ledger has as many entries as versions were committed.

        A missing entry ends the wait at its limit, and an extra one at once: what is wrong with
        them is then told by `verify`, not here.
        """
        wanted = sum(order.version for order in self.committed().values())
        books = database.connect(self.books)
        with progress("booked") as shown:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self.scene.check()
                [(have,)] = books.execute("SELECT count(*) FROM ledger")
                shown.show(f"{have} of {wanted}")
                if have >= wanted:
                    break
                time.sleep(0.1)
        books.close()
        return wanted

    def verify(self):
        """Holds ledger and log against the orders; raises with every complaint."""
        orders, booked = self.committed(), self.booked()
        complaints = [f"ledger: {told}" for told in history.check(orders, booked)]
        # The hub deduplicates within its window, and a run is shorter than that: the log itself
        # must have each event once, too.
        complaints += [f"log: {told}" for told in history.check(orders, self.logged())]
        rolled_back = [effect for effect in booked if effect.amount < 0]
        complaints += [f"rolled back, yet booked: {effect}" for effect in rolled_back[:5]]
        waiting = self.unpublished()
        if waiting:
            complaints.append(f"outbox: {waiting} rows were never marked as published")
        if complaints:
            raise AssertionError("\n  ".join(["the history is broken:", *complaints]))


def migrate(scene, url):
    """Creates Carrick's public tables in a database, as an operator would."""
    command = [CARRICK, "relay", "--database", url, "--migrate-only"]
    process = scene.process(f"migrate-{Path(url).name}", command)
    process.start()
    process.wait(60)


def event_data(order, version, amount):
    """The payload of an event, as the order service writes it."""
    return json.dumps({"order": order, "version": version, "amount": amount})
