"""Pastes the README's first five minutes into a shell, and reads what it prints.

The commands are taken from the README itself, so that they cannot grow apart from it. Only the
hub's address, the path of the program and the standing `tail` are adapted.
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from system.hub import CARRICK, Hub
from system.processes import Scene
from system.report import Skip

README = Path(__file__).parents[2] / "README.md"
SECTION = "## The first five minutes"


def blocks():
    """The shell blocks of the section, in order."""
    text = README.read_text()
    section = text.split(SECTION, 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(found) >= 4, f"the README's section has {len(found)} shell blocks"
    return found


class Shell:
    """A bash that keeps its variables from one pasted block to the next."""

    def __init__(self, scene, hub):
        self.hub = hub
        self.folder = scene.folder
        self.state = scene.folder / "shell-state"
        self.state.write_text("")

    def adapt(self, block):
        """The block with this test's hub and program in place of the README's."""
        block = block.replace("http://127.0.0.1:7070", self.hub.url)
        block = block.replace("target/release/carrick", CARRICK)
        # `-s` leaves out curl's progress meter, which a terminal would show elsewhere.
        return re.sub(r"\bcurl (?!-s)", "curl -s ", block)

    def paste(self, block, seconds=30):
        """Runs a block; returns what it printed."""
        keep = f"declare -p lease carrick > {self.state} 2>/dev/null || true"
        script = f"set -eo pipefail\nsource {self.state}\n{self.adapt(block)}\n{keep}\n"
        env = {**os.environ, "CARRICK_URL": self.hub.url}
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=self.folder,
            env=env,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


def check():
    """Pastes block after block; each must print what the README says it does."""
    if shutil.which("curl") is None:
        raise Skip("curl is not installed")
    with Scene("readme") as scene:
        hub = Hub(scene, f"sqlite://{scene.folder / 'hub.db'}").start()
        shell = Shell(scene, hub)
        publish, read, consume, dead, follow = blocks()

        first = shell.paste(publish)
        assert " 201 " in first.splitlines()[0], first
        account = json.loads(first.split("\n\n", 1)[1])
        assert (account["accepted"], account["duplicates"]) == (1, 0), account
        again = json.loads(shell.paste(publish).split("\n\n", 1)[1])
        assert (again["accepted"], again["duplicates"]) == (0, 1), again

        answer = json.loads(shell.paste(read))
        assert [event["data"] for event in answer["events"]] == [{"total": 1299}], answer
        assert answer["position"], answer

        acked = json.loads(shell.paste(consume))
        assert len(acked["acked"]) == 1 and acked["stale"] == [], acked
        client = hub.client()
        assert client.lease("orders", "billing") == [], "what is acknowledged does not come back"

        shell.paste(dead)
        check_follow(shell, scene, hub, follow)
        scene.check()


def check_follow(shell, scene, hub, block):
    """`tail` shows what `publish` sends while it runs."""
    tail, publish = [line for line in block.splitlines() if line.strip()]
    tail = shell.adapt(tail).replace("$carrick", CARRICK)
    process = scene.process("tail", ["bash", "-c", f"exec {tail}"], {"CARRICK_URL": hub.url})
    process.start()
    # Nothing tells when it has begun to follow: publish until one of them shows.
    for _ in range(50):
        shell.paste(publish)
        time.sleep(0.2)
        process.check()
        if "order.paid.v1" in process.log.read_text():
            return
    raise AssertionError(f"tail showed nothing\n{process.tail()}")
