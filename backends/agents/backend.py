"""`CliBackend`: what all coding agents have in common that are run as a command, one process a turn.

The agent keeps the history, in a session; we keep its id. A turn is a call of the command with the prompt on standard
input; its outcome is what the command's own last event says, never its exit status alone.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from uuid import uuid4

from plait.backends.agents.conversation import CliConversation
from plait.backends.agents.protocol import Call, Reader
from plait.backends.agents.session_files import holds
from plait.backends.agents.transcript import exchanges, reread
from plait.backends.errors import BackendUnavailable
from plait.backends.process.manifest import read_manifest
from plait.backends.process.watchdog import scratch
from plait.backends.protocol import Conversation, Files, LeftTurn, Opening


@dataclass(eq=False, kw_only=True)
class CliBackend(ABC):
    """Base of the backends that run an agent's command; each is its own `Program`.

    `command` is the executable, a name on PATH or a path. `cwd` is the folder that the agent works in, this process's
    own by default. `pass_env` names more variables of our environment that the agent may have; it gets what programs
    need to run, its own keys, and nothing else. A turn that takes longer than `turn_timeout` seconds, or prints nothing
    for `idle_timeout` seconds, is ended (`timeout`). Where the Opening has files, `on_runner_death` says what becomes
    of a turn when this process is killed: "adopt" lets it work on, and whoever resumes the run takes it over; "kill"
    ends it. `on_lost_session` says what becomes of a conversation whose session the agent does not know any more:
    "replay" tells a fresh session what was said, and the record says so; "fail" is an error (`session_lost`).

    Cancelling a turn ends the agent and everything that it started: SIGTERM, three seconds, SIGKILL.
    """

    command: str | None = None
    cwd: str | os.PathLike[str] | None = None
    pass_env: Sequence[str] = ()
    turn_timeout: float = 3600.0
    idle_timeout: float = 900.0
    on_runner_death: Literal["adopt", "kill"] = "adopt"
    on_lost_session: Literal["replay", "fail"] = "replay"

    kind: ClassVar[str]
    program: ClassVar[str]
    """The command's usual name."""
    install: ClassVar[str]
    """The command that installs it."""
    chooses_session: ClassVar[bool]
    can_fork: ClassVar[bool]

    def new_session_id(self) -> str | None:
        """A random UUID, where the agent takes an id of ours."""
        return str(uuid4()) if self.chooses_session else None

    def check(self) -> None:
        """BackendUnavailable when the command or the working folder is missing here. Starts nothing."""
        self.executable()
        if not self.folder.is_dir():
            raise BackendUnavailable(
                f"there is no folder {self.folder} for {self.kind} to work in; name another as cwd"
            )

    @asynccontextmanager
    async def open(self, opening: Opening) -> AsyncGenerator[Conversation]:
        """Open a conversation; the agent is started with its first turn. BackendUnavailable when it is missing here,
        unless the turn is adopted: that needs nothing but its files.
        """
        if not opening.adopts:
            self.check()
        if opening.files is not None:
            yield self.conversation(opening, opening.files)
            return
        with scratch() as folder:
            yield self.conversation(opening, Files(folder / "turn" / "1", folder / "sessions"))

    def conversation(self, opening: Opening, files: Files) -> CliConversation:
        """A conversation with its files there."""
        return CliConversation(self, opening, files)

    def left(self, files: Files) -> LeftTurn | None:
        """See `OutlivingBackend.left`."""
        calls = exchanges(files.turn)
        known = read_manifest(calls[-1]) if calls else None
        if known is None or known.note.get("kind") != self.kind:  # the task had another backend then
            return None
        reader = self.reader(Call(calls[-1]))
        reread(reader, calls[-1])
        about = f"{self.kind}, pid {known.pid}"
        goes_on = known.note.get("goes_on") == "yes"
        if reader.is_final:
            return LeftTurn("ended", reader.session_id, goes_on, about)
        # One that is to die with its runner does so any moment now, or is ended by who resumes.
        is_alive = known.is_alive and known.note.get("dies") != "yes"
        return LeftTurn("alive" if is_alive else "dead", self.session_of(calls[-1]), goes_on, about)

    def session_of(self, folder: Path) -> str | None:
        """The session that holds the prompt of the call with its files in `folder`, by what the agent has printed, or
        else by the session's own file.
        """
        reader, known = self.reader(Call(folder)), read_manifest(folder)
        reread(reader, folder)
        if reader.session_id is not None or reader.announced is None or known is None:
            return reader.session_id
        said = known.note.get("said", "")
        return reader.announced if any(holds(path, said) for path in self.session_files(reader.announced)) else None

    def session_files(self, session_id: str) -> Sequence[Path]:  # noqa: ARG002 - for those that keep readable ones
        """The files in which the agent may keep that session."""
        return ()

    @property
    def folder(self) -> Path:
        """The folder that the agent works in."""
        return Path(self.cwd).expanduser().absolute() if self.cwd is not None else Path.cwd()

    def executable(self) -> str:
        """The path of the command. BackendUnavailable when there is none."""
        name = self.called
        found = shutil.which(os.path.expanduser(name))  # noqa: PTH111 - a bare name has to stay one
        if found is None:
            raise BackendUnavailable(
                f"{self.kind} needs the command {name}: {self.install}; or name its path as command"
            )
        return str(Path(found).absolute())

    @property
    def called(self) -> str:
        """The command, as a name on PATH or a path."""
        return self.command or self.program

    @property
    def passes(self) -> Sequence[str]:
        """See `Program.passes`."""
        return ()

    def takes_schema(self, schema: Mapping[str, object]) -> bool:  # noqa: ARG002 - for those that take some
        """Whether the program itself can be asked for an answer that fits `schema`; else the prompt says it."""
        return False

    def says(self, call: Call, prompt: str) -> str:  # noqa: ARG002 - for those that are answered in another way
        """See `Program.says`."""
        return prompt

    @abstractmethod
    def arguments(self, call: Call) -> Sequence[str]:
        """See `Program.arguments`."""

    @abstractmethod
    def environment(self, call: Call) -> Mapping[str, str]:
        """See `Program.environment`."""

    @abstractmethod
    def reader(self, call: Call) -> Reader:
        """See `Program.reader`."""
