"""The ledger service: leases events over HTTP and books each once, guarded by its inbox.

Run as a process. Everything that a lease call brought is booked in one transaction, and only then
acknowledged; killed between the two, the events come again, and the inbox knows them.
"""

import argparse
import random
import signal
import time

from . import database
from .hub import Client, Unavailable
from .shop import GROUP, TOPIC

MOST = 100
"""Deliveries in one lease call."""

RETRY_SECONDS = (0.05, 0.3)
"""Pause before the next call to a hub that did not answer; random, so that consumers spread."""


def book(db, event):
    """Books one event, unless the inbox has it; both in the caller's transaction."""
    fresh = db.changed(
        "INSERT INTO carrick_inbox (handler, source, id) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (GROUP, event["source"], event["id"]),
    )
    if fresh == 0:
        db.execute("INSERT INTO redelivered (event_id) VALUES (?)", (event["id"],))
        return
    data = event["data"]
    db.execute(
        "INSERT INTO ledger (order_id, version, amount, event_id) VALUES (?, ?, ?, ?)",
        (data["order"], data["version"], data["amount"], event["id"]),
    )


class Consumer:
    """One consuming process."""

    def __init__(self, options):
        self.hub = Client(options.hub)
        self.db = database.connect(options.database)
        self.lease = options.lease
        self.leaving = False
        signal.signal(signal.SIGTERM, self.leave)

    def leave(self, *_):
        """Ends after the present batch."""
        self.leaving = True

    def run(self):
        """Consumes until told to leave."""
        while not self.leaving:
            try:
                deliveries = self.hub.lease(TOPIC, GROUP, MOST, "1s", self.lease)
                if deliveries:
                    self.handle(deliveries)
            except Unavailable:
                time.sleep(random.uniform(*RETRY_SECONDS))

    def handle(self, deliveries):
        """Books a batch, then acknowledges it; gives it back if the database chose another."""
        leases = [delivery["lease"] for delivery in deliveries]
        try:
            with self.db.transaction():
                for delivery in deliveries:
                    book(self.db, delivery["event"])
        except database.Conflict:
            self.hub.nack(leases, reason="the database chose another transaction")
            return
        self.hub.ack(leases)


def main():
    """Reads the options and consumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--lease", default="30s")
    Consumer(parser.parse_args()).run()


if __name__ == "__main__":
    main()
