"""Starts the JavaScript half (`js/sdk.mjs`), after installing its one package."""

import shutil
import subprocess
from pathlib import Path

from system.report import Skip

TOPIC = "sdk.javascript"
FOLDER = Path(__file__).parent / "js"


def check(hub, foreign_topic):
    """Runs the SDK program against the hub; it also reads another SDK's topic."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Skip("node and npm are not installed")
    lock = (FOLDER / "package-lock.json").read_bytes()
    stamp = FOLDER / "node_modules" / ".carrick-installed"
    if not stamp.exists() or stamp.read_bytes() != lock:
        command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
        if subprocess.run(command, cwd=FOLDER, timeout=300).returncode != 0:
            raise Skip("npm could not install the cloudevents package")
        stamp.write_bytes(lock)
    command = ["node", FOLDER / "sdk.mjs", hub.url, foreign_topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(f"sdk.mjs ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()
