"""A command in the place of ssh: `ssh.py FOLDER HOST COMMAND` runs COMMAND here, with the state of HOST in FOLDER/HOST.

While there is a file FOLDER/HOST.away, the host cannot be reached; with FOLDER/HOST.silent it never answers.
FOLDER/HOST.pids has the process of each connection.
With the variable HOST_MODULE the host has this module in the place of plait.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main(folder: Path, host: str, command: str) -> None:
    if (folder / f"{host}.away").exists():
        sys.exit(f"ssh: connect to host {host} port 22: No route to host")
    with (folder / f"{host}.pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if (folder / f"{host}.silent").exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / host), "PYTHONPATH": str(ROOT)}
    words = shlex.split(command)
    if "HOST_MODULE" in environment:
        words[:1] = [sys.executable, "-m", environment["HOST_MODULE"]]
    os.execvpe(words[0], words, environment)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
