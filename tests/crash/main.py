"""Runs the checks of this folder, in order."""

import argparse
import os
import random
import sys

import campaign
import publishing
from system import history
from system.processes import end_on_signals
from system.report import Report

KILLS = 30
"""In each campaign; three campaigns and the kills during publishing make well over thirty."""


def main():
    """Reads the options, runs the checks, tells the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    seed = int(os.environ.get("CARRICK_CRASH_SEED") or random.randrange(2**32))
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--kills", type=int, default=KILLS, help="in each campaign")
    parser.add_argument("--self-test", action="store_true", help="only check the checker")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    end_on_signals()
    print(f"crash: seed {options.seed}, {options.kills} kills in each campaign")
    report = Report("crash", options.names)
    seed, kills = options.seed, options.kills
    report.check("the checker complains of spoilt histories", self_test, seed)
    if not options.self_test:
        report.check("publishing, hub on SQLite", publishing.check, "sqlite", seed)
        report.check("publishing, hub on Postgres", publishing.check, "postgres", seed)
        for shop, hub in (("sqlite", "sqlite"), ("postgres", "sqlite"), ("postgres", "postgres")):
            name = f"a shop on {shop}, hub on {hub}"
            report.check(name, campaign.check, shop, hub, seed, kills)
    return report.close()


def self_test(seed):
    """The checkers must be able to fail."""
    spoilt = history.self_test(seed) + publishing.self_test(seed)
    return f"{spoilt} spoilt histories"


if __name__ == "__main__":
    sys.exit(main())
