"""Runs the checks of this folder, in order."""

import argparse
import random
import sys

import first_five_minutes
import javascript
import late_commits
import pinned_snapshot
import sdk_python
import shop_run
from system import history
from system.hub import Hub
from system.processes import Scene, end_on_signals
from system.report import Report


def sdks(report):
    """Both SDKs against one hub, each reading what the other wrote."""
    if not report.wants("the CloudEvents SDKs"):
        return
    with Scene("sdk") as scene:
        hub = Hub(scene, f"sqlite://{scene.folder / 'hub.db'}").start()
        report.check("the CloudEvents SDKs: Python", sdk_python.check, hub)
        report.check("the CloudEvents SDKs: JavaScript", javascript.check, hub, sdk_python.TOPIC)
        report.check(
            "the CloudEvents SDKs: Python reads what JavaScript published",
            sdk_python.check_foreign,
            hub,
            javascript.TOPIC,
        )
        scene.check()


def main():
    """Reads the options, runs the checks, tells the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    end_on_signals()
    print(f"interop: seed {options.seed}")
    report = Report("interop", options.names)
    seed = options.seed
    report.check("the checker complains of spoilt histories", history_self_test, seed)
    report.check("the README's first five minutes, with curl", first_five_minutes.check)
    sdks(report)
    report.check("a shop on SQLite, two relays, two consumers", shop_run.check, "sqlite", seed)
    report.check("a shop on Postgres, two relays, two consumers", shop_run.check, "postgres", seed)
    report.check("early numbers that commit last are delivered", late_commits.check)
    report.check("a pinned snapshot does not slow the relay", pinned_snapshot.check)
    return report.close()


def history_self_test(seed):
    """The checker must be able to fail."""
    return f"{history.self_test(seed)} spoilt histories"


if __name__ == "__main__":
    sys.exit(main())
