"""What the programs really printed (tests/fixtures/agent-clis), read by their Readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from plait.backends.agents.agent_output import AgentCall, ProcessEnd, Reader, TurnAnswer, outputs_of, read_line
from plait.backends.agents.cli_agent import whole_turn
from plait.backends.backend_protocol import Output
from plait.errors import BackendError

ROOT = Path(__file__).parent.parent.parent / "fixtures" / "agent-clis"
NOW = 1_795_000_000.0
MakeReader: TypeAlias = Callable[[AgentCall], Reader]


@dataclass
class Seen:
    """What a Reader made of a turn."""

    reader: Reader
    outputs: list[Output]
    answered: TurnAnswer | None = None
    error: BackendError | None = None

    @property
    def streamed(self) -> str:
        return "".join(output.text for output in self.outputs if output.kind == "text")

    @property
    def others(self) -> list[tuple[str, str]]:
        return [(output.kind, output.text) for output in self.outputs if output.kind != "text"]


def names(cli: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / cli).glob("*.json"))


def recorded(cli: str, name: str) -> dict[str, Any]:
    return json.loads((ROOT / cli / f"{name}.json").read_text(encoding="utf-8"))


def replay(make: MakeReader, cli: str, name: str) -> Seen:
    """The recorded turn, as it was: resumed or forked where its command line says so."""
    turn = recorded(cli, name)
    words = [word.removeprefix("--") for word in turn["argv"]]
    forks = "fork" in words or "fork-session" in words
    resumes = "resume" in words and not forks
    # Codex takes it last but for the prompt, the others right after the word.
    session = (words[-2] if cli == "codex" else words[words.index("resume") + 1]) if resumes else None
    call = AgentCall(folder=Path("/nowhere"), session_id=session, resume=resumes, forks="x" if forks else None)
    return read(make(call), turn["stdout"], ProcessEnd(turn["exit_code"], turn["stderr"]))


def read(reader: Reader, stdout: str, ending: ProcessEnd) -> Seen:
    seen = Seen(reader, [])
    lines = [read_line(line.encode()) for line in stdout.splitlines()]
    for line in lines:
        seen.outputs += outputs_of(line, reader.read)
    try:
        answered = reader.end(replace(ending, stdout=[line.words for line in lines if line.words]))
        whole_turn(reader, answered, answered.usage)
        seen.answered = answered
    except BackendError as error:
        seen.error = error
    return seen
