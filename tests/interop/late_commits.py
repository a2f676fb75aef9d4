"""Transactions whose outbox number is lower than that of others already published and read."""

from system import database
from system.processes import Scene
from system.report import wait_until
from system.shop import SOURCE, TOPIC, TYPE, Shop, event_data

INSERT = "INSERT INTO carrick_outbox (topic, key, type, source, data) VALUES (?, ?, ?, ?, ?)"
HELD_OPEN = 8
"""Transactions held open at once, opened one by one between the others' commits."""

BETWEEN = 200
"""Events that commit, and are published, while those are open."""

PATIENCE = 30.0


def insert(db, key, version):
    """Writes one outbox row in the open transaction, or in one of its own."""
    db.execute(INSERT, (TOPIC, key, TYPE, SOURCE, event_data(key, version, 1)))


def check():
    """Holds transactions open over many commits, then ends them in every order."""
    with Scene("late") as scene:
        shop = Shop(scene, "postgres", orders=0)
        shop.hub.start()
        relays = [shop.relay("relay-1").start(), shop.relay("relay-2").start()]
        prompt = database.connect(shop.app)
        held = []
        for number in range(HELD_OPEN):
            late = database.connect(shop.app)
            late.execute("BEGIN")
            insert(late, f"late-{number}", 1)
            held.append((f"late-{number}", late))
            for version in range(1, BETWEEN // HELD_OPEN + 1):
                insert(prompt, f"prompt-{number}", version)
        wait_until("prompt rows are published", lambda: shop.unpublished() == 0, PATIENCE)
        keys = [effect.key for effect in shop.logged()]
        assert len(keys) == BETWEEN, f"{len(keys)} events are in the log, not {BETWEEN}"
        assert not any(key.startswith("late-") for key in keys), "an open transaction was read"

        # Last opened, first committed; one is rolled back. The relays must find each of the rest,
        # though all their numbers lie far below what was published.
        _, undone = held.pop(HELD_OPEN // 2)
        undone.execute("ROLLBACK")
        for key, late in reversed(held):
            insert(late, key, 2)
            late.execute("COMMIT")
            wait_until(f"{key} is published", lambda: shop.unpublished() == 0, PATIENCE)
        late_keys = [
            (effect.key, effect.version)
            for effect in shop.logged()
            if effect.key.startswith("late-")
        ]
        expected = [(key, version) for key, _ in reversed(held) for version in (1, 2)]
        assert late_keys == expected, f"{late_keys} != {expected}"
        for relay in relays:
            relay.stop()
        return f"{len(held)} late transactions behind {BETWEEN} events"
