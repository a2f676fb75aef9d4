"""Child processes: started with a log each, watched, and stopped by pid whatever happens."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .report import Skip

STOP_PATIENCE = 15.0
"""Seconds that a process gets to drain after SIGTERM before it is killed and called a failure."""

LOG_TAIL = 30
"""Lines of a process's log that are shown when it fails."""


class Process:
    """A program that can be started again and again under one name and one log."""

    def __init__(self, name, command, log, env=None):
        self.name = name
        self.command = [str(part) for part in command]
        self.log = Path(log)
        # The caller's own settings of a hub must not reach this one; the suites' variables may.
        keep = ("CARRICK_BIN", "CARRICK_TEST_POSTGRES")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("CARRICK_") or name in keep
        }
        self.env = {**inherited, **(env or {})}
        self.child = None

    def start(self):
        """Starts it; it must not be running."""
        assert not self.running(), f"{self.name} runs already"
        with open(self.log, "ab") as log:
            log.write(f"--- {' '.join(self.command)}\n".encode())
            log.flush()
            self.child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )
        return self

    def running(self):
        """Whether it runs."""
        return self.child is not None and self.child.poll() is None

    def check(self):
        """Fails if it ended by itself."""
        if self.child is not None and self.child.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.child.returncode}\n{self.tail()}")

    def kill(self):
        """Ends it at this instruction: SIGKILL. It must have been running until now."""
        self.check()
        self.child.kill()
        self.child.wait()
        self.child = None

    def signal(self, number):
        """Sends a signal, for example SIGSTOP."""
        self.child.send_signal(number)

    def stop(self):
        """Asks it to end, and fails if it does not do so cleanly in time."""
        if self.child is None:
            return
        self.check()
        self.child.terminate()
        self.wait(STOP_PATIENCE)

    def wait(self, seconds):
        """Waits for its end, which must be a success."""
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            self.child = None
            raise AssertionError(
                f"{self.name} did not end in {seconds:.0f} s\n{self.tail()}"
            ) from None
        self.child = None
        if code != 0:
            raise AssertionError(f"{self.name} ended with {code}\n{self.tail()}")

    def tail(self):
        """The end of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(f"    {self.name}| {line[:300]}" for line in lines[-LOG_TAIL:])


class Scene:
    """A temporary folder and the processes of one check; leaving it ends them, by pid."""

    def __init__(self, name):
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"carrick-{name}-"))
        self.processes = []
        self.closers = []

    def process(self, name, command, env=None):
        """Declares a process; it is not started yet."""
        process = Process(name, command, self.folder / f"{name}.log", env)
        self.processes.append(process)
        return process

    def on_close(self, close):
        """Runs `close` after the processes have ended."""
        self.closers.append(close)

    def check(self):
        """Fails if a started process ended by itself."""
        for process in self.processes:
            process.check()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._end_all()
        for close in reversed(self.closers):
            try:
                close()
            except Exception as problem:  # the check's own verdict is worth more
                print(f"  {self.name}: clean-up failed: {problem}", file=sys.stderr)
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, Skip):
            for process in self.processes:
                print(process.tail(), file=sys.stderr)
            print(f"  files are kept in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end_all(self):
        for process in self.processes:
            if process.running():
                process.signal(signal.SIGCONT)
                process.child.kill()
                process.child.wait()


def end_on_signals():
    """Turns SIGTERM and SIGINT into an orderly end, in which scenes stop their processes."""

    def leave(number, _frame):
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        print("interrupted; stopping what was started", file=sys.stderr)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def free_port():
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sleep_until(moment):
    """Sleeps until a monotonic moment."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
