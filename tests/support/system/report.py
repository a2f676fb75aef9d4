"""Runs named checks, one after the other, and tells at the end how many passed."""

import os
import sys
import time
import traceback
from contextlib import contextmanager


class Skip(Exception):
    """Raised by a check that cannot run here; its text is the reason."""


class Report:
    """Counts checks. `only` keeps those whose name contains one of the given texts."""

    def __init__(self, suite, only=()):
        self.suite = suite
        self.only = list(only)
        self.passed = self.failed = self.skipped = 0

    def wants(self, name):
        """Whether a check of this name was asked for."""
        return not self.only or any(text in name for text in self.only)

    def check(self, name, run, *args):
        """Runs one check; a failure is told and counted, and the next check still runs."""
        if not self.wants(name):
            return
        print(f"{self.suite}: {name} …", flush=True)
        start = time.monotonic()
        try:
            said = run(*args)
        except Skip as reason:
            self.skipped += 1
            print(f"SKIPPED {self.suite}: {name}: {reason}", flush=True)
        except Exception:
            self.failed += 1
            traceback.print_exc()
            print(f"FAILED {self.suite}: {name}", flush=True)
        else:
            self.passed += 1
            took = time.monotonic() - start
            print(
                f"ok {self.suite}: {name} ({took:.1f} s{'; ' + said if said else ''})", flush=True
            )

    def close(self):
        """Prints the closing line; returns the exit code."""
        if self.passed + self.failed + self.skipped == 0:
            print(f"{self.suite}: no check has a name with {' or '.join(self.only)}")
            self.failed += 1
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped", flush=True)
        return 1 if self.failed else 0


class Progress:
    """One line of progress: redrawn on a terminal, every few seconds elsewhere."""

    EVERY = 5.0

    def __init__(self, what):
        self.what = what
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.start = self.last = time.monotonic()

    def show(self, text):
        """Shows `text` as the present state."""
        now = time.monotonic()
        line = f"  {self.what}: {text} ({now - self.start:.0f} s)"
        if self.live:
            print(f"\r{line}\x1b[K", end="", flush=True)
        elif now - self.last >= self.EVERY:
            self.last = now
            print(line, flush=True)

    def end(self):
        """Clears the line."""
        if self.live:
            print("\r\x1b[K", end="", flush=True)


@contextmanager
def progress(what):
    """A `Progress` that clears its line, however the block ends."""
    shown = Progress(what)
    try:
        yield shown
    finally:
        shown.end()


def wait_until(what, done, seconds, look_every=0.1, meanwhile=None):
    """Waits until `done()` is true and returns its value; fails after `seconds`, saying `what`."""
    deadline = time.monotonic() + seconds
    while True:
        value = done()
        if value:
            return value
        if meanwhile:
            meanwhile()
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(look_every)
