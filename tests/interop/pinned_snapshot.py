"""Does a snapshot that somebody holds open slow the relay down?

While a REPEATABLE READ transaction is open, Postgres may remove no row version that it could still
see: each published row leaves its old version behind, in the table and in the index that finds
unpublished rows. A relay whose poll reads through those gets slower with every event.
"""

import statistics
import time

from system import database
from system.processes import Scene
from system.report import progress, wait_until
from system.shop import SOURCE, TOPIC, TYPE, Shop

ROWS = 12_000
"""Rows of one round; large against a relay's batch, so that a round measures throughput."""

ROUNDS = 3
"""Rounds on each side; the medians are compared."""

MOST = 2.0
"""How much slower the pinned rounds may be."""

PATIENCE = 60.0

FILL = f"""
    INSERT INTO carrick_outbox (topic, key, type, source, data)
    SELECT '{TOPIC}', 'order-' || (n % 500), '{TYPE}', '{SOURCE}',
           ('{{"order":"order-' || (n % 500) || '","version":' || n || ',"amount":1}}')::json
    FROM generate_series(1, {ROWS}) AS n
"""


def round_seconds(shop, db):
    """Commits one round of rows; returns how long the relay took for them."""
    db.execute(FILL)
    start = time.monotonic()
    wait_until("a round is published", lambda: shop.unpublished() == 0, PATIENCE, 0.02)
    return time.monotonic() - start


def check():
    """Compares rounds without and with a pinned snapshot, one relay throughout."""
    with Scene("pinned") as scene, progress("rounds") as shown:
        shop = Shop(scene, "postgres", orders=0)
        shop.hub.start()
        relay = shop.relay("relay").start()
        db = database.connect(shop.app)
        round_seconds(shop, db)  # warms caches, plans and connections
        seconds = {"free": [], "pinned": []}
        holder = database.connect(shop.app)
        for side in ("free", "pinned"):
            if side == "pinned":
                holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                holder.execute("SELECT count(*) FROM carrick_outbox")
            for _ in range(ROUNDS):
                # What autovacuum would do in its own time; under a pin it can remove nothing.
                db.execute("VACUUM ANALYZE carrick_outbox")
                seconds[side].append(round_seconds(shop, db))
                shown.show(f"{side} {seconds[side][-1]:.2f} s")
        holder.execute("COMMIT")
        relay.stop()
        free, pinned = (statistics.median(seconds[side]) for side in ("free", "pinned"))
        said = f"{ROWS / free:.0f} events/s free, {ROWS / pinned:.0f} pinned"
        assert pinned <= MOST * free, f"{said}: more than {MOST} times slower; {seconds}"
        return said
