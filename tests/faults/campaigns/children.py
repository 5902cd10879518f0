"""A command that is killed while its model server works: the server has to go with it, whatever the signal."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

from tests.faults.campaigns.report import Report, Scale
from tests.support.plans import engine

ROUNDS: dict[Scale, int] = {"quick": 1, "nightly": 20}
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_START, _GRACE = 60.0, 2.0  # seconds


def run(*, scale: Scale, seed: int = 0) -> Report:
    """As many rounds of each signal as `scale` says. Needs procfs and the extra `local`; without there are no cases."""
    began = time.monotonic()
    if engine.missing() is not None:
        return Report(method="children", unit="killed commands", cases=0)
    rounds = [by for by in SIGNALS for _ in range(ROUNDS[scale])]
    violations = [f"{by.name}: {wrong}" for by in rounds for wrong in _round(by)]
    return Report(
        method="children",
        unit="killed commands with a child",
        cases=len(rounds),
        violations=tuple(violations),
        planted={sabotage: is_caught(sabotage) for sabotage in get_args(engine.Sabotage)},
        seconds=time.monotonic() - began,
    )


def is_caught(sabotage: engine.Sabotage) -> bool:
    """Whether a round shows the planted bug."""
    return bool(_round(signal.SIGKILL, sabotage))


def _round(by: signal.Signals, sabotage: engine.Sabotage | None = None) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        engine.make(Path(name))
        return killed(Path(name), by, sabotage)


def killed(folder: Path, by: signal.Signals, sabotage: engine.Sabotage | None = None) -> list[str]:
    """Send `by` to the command while its server works: what is wrong with the server."""
    command = engine.start(folder, sabotage)
    try:
        if not engine.within(_START, lambda: engine.asked(folder)):
            return [f"the server was never asked (the command: {command.poll()})"]
        (server,) = engine.servers(folder)
        # What a terminal sends to the command's whole group, Ctrl-C for one, is for the command alone.
        wrong = [] if os.getsid(server) == server else ["the server is not in a session of its own"]
        command.send_signal(by)
        command.communicate(timeout=_START)
    finally:
        command.kill()
        command.wait()
    if engine.within(_START if sabotage is None else _GRACE, lambda: not engine.is_alive(server)):
        return wrong
    with suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    return [*wrong, "the server outlived the command"]
