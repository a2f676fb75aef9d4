"""The order service: changes orders, each change with its outbox row in the same transaction.

Run as a process. It keeps no state: whatever instruction it is killed at, the orders table says
where to go on. Some transactions are rolled back on purpose; on Postgres some take their outbox
number early and commit last (`--late`).
"""

import argparse
import json
import random
import time
from pathlib import Path

from . import database
from .shop import SOURCE, TOPIC, TYPE, event_data, order_id

ROLLED_BACK = -1_000_000
"""Added to an amount whose transaction will be rolled back: it shows if it ever arrives."""

LATE_SPAN = (5, 40)
"""For how many other transactions a late one is held open."""


def change(db, key, versions, amount):
    """Changes one order and writes its event; returns false if it has all its versions.

    The update locks the order's row before the outbox row takes its number: writers of one key are
    serial, so the numbers of a key are in the order of its versions.
    """
    rows = db.execute(
        "UPDATE orders SET version = version + 1, total = total + ?"
        " WHERE id = ? AND (version < ? OR ? = 0) RETURNING version",
        (amount, key, versions, versions),
    )
    if not rows:
        return False
    [(version,)] = rows
    db.execute(
        "INSERT INTO carrick_outbox (topic, key, type, source, data, version)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (TOPIC, key, TYPE, SOURCE, event_data(key, version, amount), version),
    )
    return True


class RollBack(Exception):
    """Raised inside a transaction to undo it."""


class Producer:
    """One producing process."""

    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        self.db = database.connect(options.database)
        own_late = range(options.index, options.late * options.processes, options.processes)
        self.late = [order_id(n) for n in own_late]
        keys = {order_id(n) for n in range(options.orders)}
        # Another process's late keys are locked for long: waiting there would stall this one.
        shared = keys - {order_id(n) for n in range(options.late * options.processes)}
        self.keys = sorted(shared)
        self.late_db = database.connect(options.database) if self.late else None
        self.late_open, self.late_left = False, 0
        self.stats = {"transactions": 0, "rolled back": 0, "late": 0}

    def run(self):
        """Produces until every order has its versions, or the stop file appears."""
        pace = 1.0 / self.options.rate if self.options.rate else 0.0
        due = time.monotonic()
        while (self.keys or self.late) and not self.options.stop_file.exists():
            if self.keys:
                due += pace * self.one_transaction()
            self.step_late()
            left = due - time.monotonic()
            if left > 0:
                time.sleep(left)
        self.end_late()
        print(json.dumps(self.stats), flush=True)

    def one_transaction(self):
        """Changes a few orders at once; returns how many."""
        count = min(self.rng.randint(1, self.options.most), len(self.keys))
        # Sorted: two processes lock in one order, so neither waits for the other in a circle.
        picked = sorted(self.rng.sample(self.keys, count))
        roll_back = self.rng.random() < self.options.rollbacks
        finished = []
        try:
            with self.db.transaction():
                for key in picked:
                    amount = self.rng.randint(1, 999) + (ROLLED_BACK if roll_back else 0)
                    if not change(self.db, key, self.options.versions, amount):
                        finished.append(key)
                if roll_back:
                    raise RollBack
        except RollBack:
            self.stats["rolled back"] += 1
        else:
            self.stats["transactions"] += 1
        self.keys = [key for key in self.keys if key not in finished]
        return count

    def step_late(self):
        """Begins a late transaction, or holds the open one for one more step, or commits it."""
        if self.late_open:
            self.late_left -= 1
            if self.late_left <= 0 or not self.keys:
                self.end_late()
        elif self.late:
            key = self.rng.choice(self.late)
            self.late_db.execute("BEGIN")
            if change(self.late_db, key, self.options.versions, self.rng.randint(1, 999)):
                self.late_open, self.late_left = True, self.rng.randint(*LATE_SPAN)
            else:
                self.late_db.execute("ROLLBACK")
                self.late.remove(key)

    def end_late(self):
        """Commits the open late transaction, if there is one."""
        if self.late_open:
            self.late_db.execute("COMMIT")
            self.late_open = False
            self.stats["late"] += 1


def main():
    """Reads the options and produces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=0, help="of each order; 0: without end")
    parser.add_argument("--most", type=int, default=10, help="orders in one transaction")
    parser.add_argument("--rate", type=float, default=0.0, help="events a second; 0: no limit")
    parser.add_argument("--rollbacks", type=float, default=0.05, help="share of transactions")
    parser.add_argument("--late", type=int, default=0, help="orders with late commits (Postgres)")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    Producer(parser.parse_args()).run()


if __name__ == "__main__":
    main()
