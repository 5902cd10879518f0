"""`CliBackend`: the common part of all coding agents run as a command, with one process per turn.

The agent keeps the history in a session; the runner stores the session's id. A turn is a call of the command with the
prompt on standard input. The outcome of the turn is given by the command's own last event, never by the exit status
alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal
from uuid import uuid4

from plait.backends.agents.agent_protocol import Call, Reader
from plait.backends.agents.agent_transcript import exchanges, reread
from plait.backends.agents.conversation import CliConversation
from plait.backends.agents.session_files import holds
from plait.backends.backend_protocol import Conversation, ConversationRequest, DetachedTurn, Files, Placeable
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import child_environment
from plait.backends.process.watchdog import scratch
from plait.errors import BackendUnavailable


@dataclass(eq=False, kw_only=True)
class CliBackend(Placeable, ABC):
    """Base class of the backends that run an agent's command; each backend is also the `Program` of its agent.

    Cancelling a turn ends the agent and all its child processes: SIGTERM, three seconds, SIGKILL. When the run is being
    cancelled, an agent with `ends_at_interrupt` receives SIGINT first, and has the grace time of the run to end.
    """

    command: str | None = None
    """Executable of the agent, a name on PATH or a path. None uses `program`."""
    cwd: str | os.PathLike[str] | None = None
    """Folder in which the agent works. None uses the current folder of this process."""
    pass_env: Sequence[str] = ()
    """Names of further environment variables for the agent. The agent otherwise gets only the variables that any
    program needs, and its own keys.
    """
    turn_timeout: float = 3600.0
    """Seconds after which a running turn is ended (`timeout`)."""
    idle_timeout: float = 900.0
    """Seconds without output after which a turn is ended (`timeout`)."""
    on_runner_death: Literal["adopt", "kill"] = "adopt"
    """Fate of a turn if this process is killed, provided that the request has files. "adopt": the agent works on, and
    the process that resumes the run adopts the turn. "kill": the agent is ended.
    """
    on_lost_session: Literal["replay", "fail"] = "replay"
    """Handling of a session that the agent no longer has. "replay": a fresh session receives the history as text, and
    the record says so. "fail": the turn fails (`session_lost`).
    """

    now: Callable[[], float] = time.time
    """Clock that returns the Unix time."""

    kind: ClassVar[str]
    """The backend's kind, as named in plans."""
    program: ClassVar[str]
    """Usual name of the command."""
    install: ClassVar[str]
    """Shell command to install the agent."""
    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "system"})
    """The settings that a task may have in place of the backend's: see `AdjustableBackend`."""
    takes_files: ClassVar[Literal["paths"]] = "paths"
    """The prompt names the paths of a task's files: see `FileBackend`."""
    chooses_session: ClassVar[bool]
    """Whether the agent accepts a session id chosen by the caller."""
    can_fork: ClassVar[bool]
    """Whether a session can be branched from another session."""
    ends_at_interrupt: ClassVar[bool] = False
    """Whether SIGINT makes the agent end its turn, with a session that holds everything up to there."""

    def branches_sessions(self) -> bool:
        """Return `can_fork`: whether a session can be branched from another session."""
        return self.can_fork

    def new_session_id(self) -> str | None:
        """Return a random UUID; None if the agent makes its own ids."""
        return str(uuid4()) if self.chooses_session else None

    def check(self) -> None:
        """Raise BackendUnavailable if the command or the working folder is missing. Starts nothing."""
        self.executable()
        if not self.folder.is_dir():
            raise BackendUnavailable(
                f"there is no folder {self.folder} for {self.kind} to work in; name another as cwd"
            )

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. The first turn starts the agent.

        Raises BackendUnavailable if the agent is missing, except for an adopted turn, which needs only its files.
        """
        if not request.attaches:
            self.check()
        own = {name: kept for name in self.adjustable if (kept := getattr(request.options, name)) is not None}
        program = replace(self, **own) if own else self
        if request.files is not None:
            yield program.conversation(request, request.files)
            return
        with scratch() as folder:
            yield program.conversation(request, Files(folder / "turn" / "1", folder / "sessions"))

    def conversation(self, request: ConversationRequest, files: Files) -> CliConversation:
        """Return a conversation that uses `files`."""
        return CliConversation(self, request, files)

    def inspect(self, files: Files) -> DetachedTurn | None:
        """Implement `DetachedBackend.inspect`."""
        calls = exchanges(files.turn)
        known = read_manifest(calls[-1]) if calls else None
        if known is None or known.note.get("kind") != self.kind:  # the task had another backend at the time
            return None
        reader = self.reader(Call(calls[-1]))
        reread(reader, calls[-1])
        about = f"{self.kind}, pid {known.pid}"
        goes_on = known.note.get("goes_on") == "yes"
        if reader.is_final:
            return DetachedTurn("ended", reader.session_id, goes_on, about)
        # A call guarded to die with its runner ends at any moment, or is ended by the process that resumes.
        is_alive = known.is_alive and known.note.get("guarded") != "yes"
        return DetachedTurn("alive" if is_alive else "dead", self.session_of(calls[-1]), goes_on, about)

    def session_of(self, folder: Path) -> str | None:
        """Return the session that holds the prompt of the call with its files in `folder`; None if no session is known.

        The evidence is the agent's output, or else the session's own file.
        """
        reader, known = self.reader(Call(folder)), read_manifest(folder)
        reread(reader, folder)
        if reader.session_id is not None or reader.announced is None or known is None:
            return reader.session_id
        said = known.note.get("input_digest", "")
        return reader.announced if any(holds(path, said) for path in self.session_files(reader.announced)) else None

    def session_files(self, session_id: str) -> Sequence[Path]:  # noqa: ARG002 - for agents with readable session files
        """Return the files in which the agent may keep the session. Empty by default."""
        return ()

    @property
    def folder(self) -> Path:
        """The folder in which the agent works. Raises BackendUnavailable if the folder would be the working directory
        of this process, or lie in it, and that directory has been removed.
        """
        try:
            return Path(self.cwd or ".").expanduser().absolute()
        except FileNotFoundError:
            raise BackendUnavailable(
                f"the working directory of this process has been removed; name another folder for {self.kind} as cwd"
            ) from None

    def executable(self) -> str:
        """Return the path of the command. Raises BackendUnavailable if not found."""
        name = self.called
        found = shutil.which(os.path.expanduser(name))  # noqa: PTH111 - a bare name has to stay bare
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
    def account(self) -> str:
        """The command and its environment, unreadable: agents with the same account share the limits of a login."""
        seen = [self.called, child_environment((*self.passes, *self.pass_env))]
        return f"{self.kind} {hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]}"

    @property
    def passes(self) -> Sequence[str]:
        """See `Program.passes`."""
        return ()

    def takes_schema(self, schema: Mapping[str, object]) -> bool:  # noqa: ARG002 - for agents that accept schemas
        """Return whether the program itself can enforce `schema`. If not, the prompt describes the schema."""
        return False

    def clock(self, call: Call) -> Callable[[], float]:
        """Return the clock for the output of the call: a time of day in a message counts from when it was written."""
        written_at = call.written_at
        return self.now if written_at is None else lambda: written_at

    def age(self, call: Call) -> float:
        """See `Program.age`."""
        return 0.0 if call.written_at is None else self.now() - call.written_at

    def input_text(self, call: Call, prompt: str) -> str:  # noqa: ARG002 - for agents with another way to answer
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
