"""`plait serve` or `plait ui` for the pages that show it: started once a page, on any port, and left when all pages are
done.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from plait.runner.cli.command_options import DEFAULT_PORT

_SERVE = "plait serve --backends backends.yaml"


@dataclass
class PageServers:
    """The ports of the servers under way, by the folder that they were started in."""

    ports: dict[Path, str] = field(default_factory=dict[Path, str])
    leaving: ExitStack = field(default_factory=ExitStack)

    def addressed(self, line: str, folder: Path, environment: Mapping[str, str]) -> str:
        """`line` with the port that its server really has; empty where it is the line that starts the server."""
        starts = line.startswith(("plait serve", "plait ui"))
        if not starts and str(DEFAULT_PORT) not in line:
            return line
        if folder not in self.ports:
            self.ports[folder] = self._start(line if starts else _SERVE, folder, environment)
        return "" if starts else line.replace(str(DEFAULT_PORT), self.ports[folder])

    def _start(self, line: str, folder: Path, environment: Mapping[str, str]) -> str:
        # In what is HOME there. A reader takes longer from one line to the next than a run takes to come to a question.
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nmax-time = 30\nretry = 5\nretry-all-errors\n")
        process = self.leaving.enter_context(
            subprocess.Popen(
                [*shlex.split(line), "--port", "0", "--json"],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        self.leaving.callback(process.terminate)
        assert process.stdout is not None
        return str(urlsplit(json.loads(process.stdout.readline())["url"]).port)
