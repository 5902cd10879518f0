"""Find the coding agents on this machine: path, version, and login.

Agents are started only to print their version. The login is detected from outside: no secret is read.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio

from plait.backends.agents.agent_catalog import AGENTS, CatalogEntry, Login
from plait.backends.process.child_process import Launch, child_environment, running
from plait.errors import BackendError, BackendUnavailable
from plait.json_form import value

_VERSION = re.compile(r"(?<![\w.])\d+\.\d+\.\d+[\w.+-]*")


@value
class Installed:
    """The state of an agent on this machine."""

    agent: CatalogEntry
    path: str | None = None
    """Path of the command; None if not installed."""
    version: str | None = None
    """Version printed by the command; None if unknown."""
    is_logged_in: bool | None = None
    """Whether the agent is logged in; None if unknown."""
    by: str = ""
    """Evidence of the login: a file, or the name of an environment variable."""

    @property
    def is_tested(self) -> bool:
        """Whether plait was tested with this version."""
        return self.version in self.agent.tested

    @property
    def is_newer(self) -> bool:
        """Whether the version is later than all versions tested with plait."""
        return self.version is not None and _numbers(self.version) > _numbers(self.agent.tested[-1])


async def look_for_agents(patience: float = 15.0) -> tuple[Installed, ...]:
    """Return the state of every agent in the catalogue, in catalogue order.

    The agents are started in parallel to print their version, and ended after `patience` seconds.
    """
    found: dict[str, Installed] = {}

    async def look(agent: CatalogEntry) -> None:
        path = shutil.which(agent.program)
        if path is None:
            found[agent.name] = Installed(agent)
            return
        is_logged_in, by = logged_in(agent.login, os.environ)
        found[agent.name] = Installed(agent, path, await _version(agent, path, patience), is_logged_in, by)

    async with anyio.create_task_group() as group:
        for agent in AGENTS:
            group.start_soon(look, agent)
    return tuple(found[agent.name] for agent in AGENTS)


def logged_in(login: Login, environment: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether the agent is logged in, None if unknown, and the evidence."""
    for name in login.keys:
        if environment.get(name):
            return True, name
    variable, usual = login.folder
    folder = Path(environment.get(variable) or usual).expanduser()
    for file in login.files:
        try:
            if (folder / file).stat().st_size:
                return True, str(folder / file)
        except OSError:
            continue
    elsewhere = next((name for name in login.elsewhere if environment.get(name)), "")
    return (None, elsewhere) if elsewhere or login.may_be_elsewhere else (False, "")


async def _version(agent: CatalogEntry, path: str, patience: float) -> str | None:
    with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        quiet = {**child_environment(), **agent.quiet, "TMPDIR": name}
        start = Launch((path, "--version"), quiet, folder, b"")
        try:
            async with running(start, folder / "child") as child:
                await child.follow(lambda _: False, idle=patience, until=anyio.current_time() + patience)
        except (BackendError, BackendUnavailable):
            return None
        said = _VERSION.search(child.tail("stdout")) if child.status == 0 else None
    return said[0] if said else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
