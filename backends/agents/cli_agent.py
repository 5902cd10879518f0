"""Coding agents run as a command, one process a turn: started here or adopted from a dead process, read to the end.

The agent keeps the history in a session, whose id the runner stores. The prompt goes to standard input. The command's
own last event says how the turn ended; the exit status alone never does.

A turn is one call, or two if the first answer does not fit the schema; each call has its own numbered folder below the
turn's folder. A process that adopts a turn repeats the same steps: calls already made are followed or read, the next
call is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

import anyio

from plait.backends.agents.agent_catalog import UNKNOWN, CatalogEntry, agent
from plait.backends.agents.agent_output import (
    AgentCall,
    ProcessEnd,
    Reader,
    SchemaRefused,
    TurnAnswer,
    UnreportedCall,
    classify,
    cut_before,
    exchanges,
    hide,
    mark_reported,
    noted_before,
    outputs_of,
    read_line,
    reread,
    safe_line,
)
from plait.backends.backend_protocol import (
    Conversation,
    ConversationRequest,
    DetachedTurn,
    Files,
    Output,
    Reply,
)
from plait.backends.json_fields import at, since, tables, text
from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Schema, fitting_answer, in_words
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import (
    Child,
    Launch,
    ProgramBackend,
    adopted,
    child_environment,
    own_variables,
    running,
)
from plait.backends.process.files_and_locks import is_locked, lock_file, private_folder, replace_file
from plait.backends.running_turn import cancel_requested, end_of_turn, when_cancelled
from plait.backends.whole_answer import whole_answer
from plait.dialogue import Message
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import as_json, from_json
from plait.safe_text import clean_text, one_line
from plait.task import MODEL_SETTINGS
from plait.usage import NO_USAGE, Usage

_PATIENCE = 30.0
"""Seconds to wait until another process releases a session."""
_MAX_PLAIN_LINES = 50
_ANSWERED = "answered"
"""Note of the question that a turn answers, and of the answer."""
LAST_WORD = 5.0
"""Seconds to wait for the agent to exit after its last event, because the agent may still be writing its session file.
"""


@dataclass(eq=False, kw_only=True)
class AgentBackend(ProgramBackend, ABC):
    """Base class of the backends that run an agent's command. A subclass says what its agent differs in.

    When the run is being cancelled, an agent with `ends_at_interrupt` receives SIGINT before the turn is cancelled, and
    has the grace time of the run to end.
    """

    command: str | None = None
    """Executable of the agent, a name on PATH or a path. None uses the agent's usual command."""
    model: str | None = None
    """The model's name, or its id as the session offers it (ACP); None for the agent's own choice."""
    turn_timeout: float = 3600.0
    """Seconds after which a running turn is ended (`timeout`)."""
    idle_timeout: float = 900.0
    """Seconds without output after which a turn is ended (`timeout`)."""
    on_lost_session: Literal["replay", "fail"] = "replay"
    """Handling of a session that the agent no longer has. "replay": a fresh session receives the history as text, and
    the record says so. "fail": the turn fails (`session_lost`).
    """

    now: Callable[[], float] = time.time
    """Clock that returns the Unix time."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "system", "cwd", "env", "shared"})
    """The settings that a task may have in place of the backend's: see `Abilities`."""
    takes_files: ClassVar[Literal["paths"]] = "paths"
    """The prompt names the paths of a task's files: see `Abilities`."""
    chooses_session: ClassVar[bool]
    """Whether the agent accepts a session id chosen by the caller."""
    can_fork: ClassVar[bool]
    """Whether a session can be branched from another session."""
    ends_at_interrupt: ClassVar[bool] = False
    """Whether SIGINT makes the agent end its turn, with a session that holds everything up to there."""

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
        names = [name for name in MODEL_SETTINGS if name in self.adjustable]
        options = {name: option for name in names if (option := getattr(request.options, name)) is not None}
        backend = replace(self, **options) if options else self
        backend = backend.working_in(request.workspace)
        if not request.attaches:
            backend.check()
        with self.files_of(request) as (files, guarded):
            yield backend.conversation(request, files, guarded=guarded)

    def conversation(self, request: ConversationRequest, files: Files, *, guarded: bool) -> AgentConversation:
        """Return a conversation that uses `files`. A `guarded` agent ends with this process."""
        return AgentConversation(self, request, files, guarded=guarded)

    def inspect(self, files: Files) -> DetachedTurn | None:
        """Implement `DetachedBackend.inspect`."""
        calls = exchanges(files.turn)
        manifest = read_manifest(calls[-1]) if calls else None
        if manifest is None or manifest.note.get("kind") != self.kind:  # the task had another backend at the time
            return None
        reader = reread(self.reader(AgentCall(calls[-1])), calls[-1])
        about = f"{self.kind}, pid {manifest.pid}"
        resumes_interrupted = manifest.note.get("goes_on") == "yes"
        if reader.is_final:
            return DetachedTurn("ended", reader.session_id, resumes_interrupted, about)
        state: Literal["alive", "dead"] = "alive" if manifest.outlives_starter else "dead"
        return DetachedTurn(state, self.session_of(calls[-1]), resumes_interrupted, about)

    def session_of(self, folder: Path) -> str | None:
        """Return the session that holds the prompt of the call with its files in `folder`; None if no session is known.

        The evidence is the agent's output, or else the session's own file.
        """
        reader, manifest = reread(self.reader(AgentCall(folder)), folder), read_manifest(folder)
        if reader.session_id is not None or reader.announced is None or manifest is None:
            return reader.session_id
        prompt, files = manifest.note.get("input_digest", ""), self.session_files(reader.announced)
        return reader.announced if any(holds(path, prompt) for path in files) else None

    def session_files(self, session_id: str) -> Sequence[Path]:  # noqa: ARG002 - for agents with readable session files
        """Return the files in which the agent may keep the session. Empty by default."""
        return ()

    def executable(self) -> str:
        """Return the path of the command. Raises BackendUnavailable if not found."""
        name = self.called
        path = shutil.which(os.path.expanduser(name))  # noqa: PTH111 - a bare name has to stay bare
        if path is None:
            raise BackendUnavailable(
                f"{self.kind} needs the command {name}: {self.entry.install}; or name its path as command"
            )
        return str(Path(path).absolute())

    @property
    def entry(self) -> CatalogEntry:
        """What the catalogue knows about the agent."""
        return agent(self.kind) or UNKNOWN

    @property
    def called(self) -> str:
        """The command, as a name on PATH or a path."""
        return self.command or self.entry.program

    @property
    def passes(self) -> Sequence[str]:
        """Names of the variables with keys and settings that are passed on to the agent."""
        return self.entry.passes

    def inherited(self) -> dict[str, str]:
        """Return the variables of this process that the agent has too."""
        return child_environment((*self.passes, *self.pass_env))

    @property
    def account(self) -> str:
        """The command and its environment, unreadable: agents with the same account share the limits of a login."""
        login = json.dumps([self.called, self.inherited()], sort_keys=True)
        return f"{self.kind} {hashlib.sha256(login.encode()).hexdigest()[:16]}"

    def takes_schema(self, schema: Mapping[str, object]) -> bool:  # noqa: ARG002 - for agents that accept schemas
        """Return whether the program itself can enforce `schema`. If not, the prompt describes the schema."""
        return False

    def clock(self, call: AgentCall) -> Callable[[], float]:
        """Return the clock for the output of the call: a time of day in a message counts from when it was written."""
        written_at = call.written_at
        return self.now if written_at is None else lambda: written_at

    def input_text(self, call: AgentCall, prompt: str) -> str:  # noqa: ARG002 - for agents with another way to answer
        """Return the text for standard input: the prompt, unless the agent receives an answer in another way."""
        return prompt

    def environment(self, call: AgentCall) -> Mapping[str, str]:  # noqa: ARG002 - for agents that need the call
        """Return the variables to set for the agent, in addition to those that it inherits."""
        return self.entry.sets

    @abstractmethod
    def arguments(self, call: AgentCall) -> Sequence[str]:
        """Return the command's arguments for a turn. May write files into `call.folder`, such as a schema."""

    @abstractmethod
    def reader(self, call: AgentCall) -> Reader:
        """Return a reader for the output of the call."""

    @classmethod
    def transcript_reader(cls, folder: Path) -> Reader:
        """Return a reader that shows the output of the call with its files in `folder` to a person."""
        return cls().reader(AgentCall(folder))


class AgentConversation:
    """A conversation with an agent, one process per turn. See `AgentBackend`."""

    def __init__(self, backend: AgentBackend, request: ConversationRequest, files: Files, *, guarded: bool) -> None:
        self._backend = backend
        self._guarded = guarded
        self._request = request
        self._files = files
        self._sessions = Sessions(files.sessions, backend.kind)
        self.session_id, self._question = unmarked(request.session_id)
        """`_question` is the id of the question that the turn answers; empty if the session id had none."""
        self._answer = None if request.answer is None else request.answer.value
        note = noted_before(request, files.turn, _ANSWERED)
        self._is_new = note is None
        """Whether the question is answered now, and not in the turn that this turn adopts or goes on with."""
        if isinstance(note, list) and len(note) == 2:
            self._question, self._answer = str(note[0]), note[1]
        self._exists = request.resume
        """Whether the session was made by an earlier turn or call."""
        self._noted: str | None = None
        """The session that the runner was told."""
        self._first_call_done = False
        self._calls = 0
        self._plain_lines = deque[str](maxlen=_MAX_PLAIN_LINES)
        """The last lines of the current call's output that are no events."""
        self._rewinds = request.resumes_interrupted
        self._ends = end_of_turn(request)
        schema = request.output_schema
        self._schema = None if schema is None else Schema(schema)
        self._enforced = schema if schema is not None and backend.takes_schema(schema) else None
        """The schema to be enforced by the program itself; None otherwise."""

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`."""
        turn: list[Message] = []
        if not prompt.strip():  # agents crash on an empty prompt, or send it to a model
            raise BackendError(
                ErrorKind.INVALID_REQUEST, f"the prompt is empty: say what {self._backend.kind} is to do"
            )
        try:
            answered = await self._first(turn, clean_text(prompt))
            data = None
            if self._schema is not None and answered.question is None:
                answered, data = await fitting_answer(
                    self._schema,
                    answered,
                    lambda schema, answered: read_answer(schema, answered.text, answered.data),
                    lambda repair: self._exchange(turn, repair, repair),
                    self._request.on_output,
                )
        except BackendError as error:
            error.usage += _cost(turn)
            error.messages = tuple(turn) if len(turn) > 1 else ()
            raise
        return Reply(answered.text, data, self.session_id, _cost(turn), tuple(turn), answered.question)

    async def _first(self, turn: list[Message], prompt: str) -> TurnAnswer:
        """Make the call that sends the prompt itself.

        If the session is lost, or in use by another process for too long, a fresh session receives the history as text.
        """
        sent = prompt
        if self._schema is not None and self._enforced is None:
            sent += f"\n\n{in_words(self._request.output_schema or {})}"
        try:
            if self._request.fork_of and not self._exists and not self._backend.can_fork:
                raise BackendError(ErrorKind.SESSION_LOST, f"{self._backend.kind} cannot fork a session")
            if self._request.history and not (self._exists or self._request.fork_of):  # of another backend's session
                return await self._exchange(turn, prompt, replayed(self._request.history, sent), _MOVED)
            return await self._exchange(turn, prompt, sent)
        except SchemaRefused as refused:
            self._request.on_output(
                Output("notice", f"the schema was rejected, so the prompt describes it: {refused.message}")
            )
            self._enforced = None
            turn.clear()
            return await self._first(turn, prompt)
        except BackendError as error:
            if error.kind is ErrorKind.SESSION_LOST and self._rewinds:
                # The turn was interrupted before its last messages reached the session's file. Continue from the
                # messages in the file.
                self._rewinds = False
                turn.clear()
                return await self._first(turn, prompt)
            lost = error.kind is ErrorKind.SESSION_LOST or isinstance(error, SessionInUse)
            begun = self._request.resumes_interrupted or self._first_call_done
            if not lost or begun or not self._request.history or self._backend.on_lost_session == "fail":
                raise
            what = error.holder if isinstance(error, SessionInUse) else error.message
        old = self.session_id if self._exists else self._request.fork_of
        turn.clear()
        if self._exists:
            self.session_id = self._backend.new_session_id()
        self._exists = False
        self._request = replace(self._request, fork_of=None, resume=False)
        note = f"session {old} could not be continued ({what}): a fresh session received the history as text"
        self._request.on_output(Output("notice", note))
        return await self._exchange(turn, prompt, replayed(self._request.history, sent), note)

    async def _exchange(self, turn: list[Message], prompt: str, sent: str, note: str | None = None) -> TurnAnswer:
        """Make one call: send `sent`, and record the message as `prompt`, followed by `note`."""
        turn.append(Message("user", prompt))
        if note is not None:
            turn.append(Message("system", note))
        self._calls += 1
        self._plain_lines.clear()
        call = self._call(self._files.turn / str(self._calls))
        reader = self._backend.reader(call)
        cut: list[UnreportedCall] = []
        if not self._first_call_done:
            cut = cut_before(self._files.turn, lambda folder: self._backend.reader(replace(call, folder=folder)))
        try:
            try:
                child = await self._let_work(call, reader, sent, cut)
            except BaseException:
                # The session, if any, from output written between the last read and the end of the agent.
                self._note_session(self._backend.session_of(call.folder))
                raise
            answered = reader.end(ProcessEnd(child.status, child.tail("stderr"), tuple(self._plain_lines)))
        except BackendError as error:
            used = reader.usage if error.usage == NO_USAGE else error.usage
            error.usage = self._unreported_cost(cut) + self._own(call.folder, self.session_id, used)
            error.continues_session = error.continues_session and reader.session_id is not None
            if error.retry_after is not None and call.written_at is not None:
                error.retry_after = max(0.0, error.retry_after - (self._backend.now() - call.written_at))
            if error.kind is ErrorKind.TIMEOUT and anyio.current_time() >= self._ends:
                error.message = f"no answer within the task's timeout of {self._request.timeout:g} s"
            if error.kind is ErrorKind.TIMEOUT and reader.session_id is None and self._plain_lines:
                # The agent waits, before its turn has begun, for a login perhaps that nobody will make.
                kind = classify("\n".join(self._plain_lines))
                error.kind = kind if kind is ErrorKind.AUTH else error.kind
                error.message += f"; the last line of its output: {safe_line(self._plain_lines[-1])}"
            if error.kind is ErrorKind.TRUNCATED and reader.last_text:
                turn.append(Message("assistant", clean_text(reader.last_text)))
            hide(error, self._backend.inherited())
            mark_reported(call.folder)
            raise
        usage = self._unreported_cost(cut)
        if answered.is_total:
            usage += self._total(call, answered.usage)
        else:
            usage += self._own(call.folder, self.session_id, answered.usage)
        try:
            message = whole_turn(reader, answered, usage)
        except BackendError as error:
            turn += [Message("assistant", message.content) for message in error.messages]
            mark_reported(call.folder)
            raise
        self._first_call_done, self._exists = True, True
        turn.append(message)
        return replace(answered, text=message.content)

    def _call(self, folder: Path) -> AgentCall:
        written_at = None
        manifest = read_manifest(folder) if self._request.attaches else None
        if manifest is not None and not manifest.is_alive:
            with suppress(OSError):
                written_at = (folder / "stdout").stat().st_mtime
        return AgentCall(
            folder,
            self.session_id,
            resume=self._exists,
            forks=None if self._exists else self._request.fork_of,
            output_schema=self._enforced,
            answer=None if self._first_call_done else self._request.answer,
            written_at=written_at,
        )

    async def _let_work(self, call: AgentCall, reader: Reader, sent: str, cut: list[UnreportedCall]) -> Child:
        """Return the child of the call, once the child has ended and `reader` has read all its output."""
        until = self._until()
        async with self._child(call, sent, cut) as child:
            with when_cancelled(child.interrupt) if self._backend.ends_at_interrupt else nullcontext():
                await self._follow(child, reader, until)
        return child

    async def _follow(self, child: Child, reader: Reader, until: float) -> None:
        """Read the output until the child has ended, or `LAST_WORD` seconds after the output is complete. A later line
        may begin a new part of the output, which is then complete no longer.
        """
        patience = anyio.CancelScope()

        def on_line(line: bytes) -> bool:
            was_final = reader.is_final
            self._on_line(reader, line)
            if reader.is_final != was_final:
                patience.deadline = anyio.current_time() + LAST_WORD if reader.is_final else inf
            return False

        try:
            with patience:
                await child.follow(on_line, idle=self._backend.idle_timeout, until=until)
        except BackendError:
            if not reader.is_final:
                raise

    def _until(self) -> float:
        return min(anyio.current_time() + self._backend.turn_timeout, self._ends)

    @asynccontextmanager
    async def _child(self, call: AgentCall, sent: str, cut: list[UnreportedCall]) -> AsyncGenerator[Child]:
        """Start the child of the call, or adopt it from the process that did; leaving ends the child."""
        async with AsyncExitStack() as stack:
            child = await stack.enter_async_context(adopted(call.folder)) if self._request.attaches else None
            if child is None:
                launch = await self._launch(call, sent, cut, stack)
                child = await stack.enter_async_context(running(launch, call.folder))
            yield child
        if child.skipped:
            self._request.on_output(Output("notice", f"output lines skipped as too long: {child.skipped}"))

    async def _launch(self, call: AgentCall, sent: str, cut: Sequence[UnreportedCall], stack: AsyncExitStack) -> Launch:
        """Return the command of a call, with its session locked until the end of `stack`."""
        backend, request, keeps = self._backend, self._request, [*self._request.keeps]
        if call.session_id is not None:
            lock = self._sessions.writing(
                call.session_id, _PATIENCE, lambda holder: request.on_output(Output("waiting", one_line(holder)))
            )
            keeps.append(await stack.enter_async_context(lock))
        if cancel_requested():
            message = f"the run is being cancelled, so {backend.kind} is not called"
            raise BackendError(ErrorKind.CRASHED, message)
        if self._rewinds:
            readers = [one.reader for one in cut if one.is_cut and one.reader.session_id == call.session_id]
            whole = [reader.last_whole for reader in readers if reader.last_whole]
            self._rewinds = bool(whole)
            call = replace(call, rewind_to=whole[0] if whole else None)
        private_folder(call.folder)
        text = backend.input_text(call, sent)
        # The agent's own spans join the trace of the run.
        trace = {} if request.traceparent is None else {"TRACEPARENT": request.traceparent}
        return Launch(
            self._words(call),
            {**backend.inherited(), **own_variables(request), **trace, **backend.environment(call)},
            backend.folder,
            text.encode(),
            keeps,
            {
                "kind": backend.kind,
                "goes_on": "yes" if request.resumes_interrupted else "no",
                "input_digest": digest(text),
                # For a process that adopts the turn.
                **({_ANSWERED: json.dumps([self._question, self._answer])} if self._question else {}),
            },
            guarded=self._guarded,
        )

    def _words(self, call: AgentCall) -> Sequence[str]:
        return (self._backend.executable(), *self._backend.arguments(call))

    def _on_line(self, reader: Reader, line: bytes) -> None:
        output_line = read_line(line)
        if output_line.words:
            self._plain_lines.append(output_line.words[:2000])
        for output in outputs_of(output_line, reader.read):
            self._request.on_output(output)
        self._note_session(reader.session_id)

    def _note_session(self, session_id: str | None) -> None:
        if session_id is not None and session_id != self._noted:
            self._noted = session_id
            self.session_id, self._exists = clean_text(session_id), True
            self._request.on_session(self.session_id)

    def _unreported_cost(self, cut: list[UnreportedCall]) -> Usage:
        read = ((one.folder, one.reader) for one in reversed(cut))
        cost = sum((self._own(folder, reader.session_id, reader.usage) for folder, reader in read), NO_USAGE)
        return replace(cost, model=None)  # an interrupted call does not determine the answering model

    def _own(self, folder: Path, session_id: str | None, usage: Usage) -> Usage:  # noqa: ARG002 - used by a subclass
        """Return the cost of the call with its files in `folder`, given the `usage` reported by the call itself."""
        return usage

    def _total(self, call: AgentCall, total: Usage) -> Usage:
        """Return the cost of the call, given the `total` cost of its session so far."""
        if self.session_id is None:
            return total
        before = self._sessions.spent(self.session_id) if call.resume else None
        if before is None and call.forks is not None:
            before = self._sessions.spent(call.forks)
        if before is None:
            before = _cost(self._request.history) if call.resume or call.forks else NO_USAGE
        before = first_before(call.folder, before)
        self._sessions.note_spent(self.session_id, total)
        return since(total, before)


def whole_turn(reader: Reader, answered: TurnAnswer, usage: Usage) -> Message:
    """Return the agent's message in a turn that has ended and used `usage`.

    Raises BackendError if the answer is not whole. The session, if it holds the turn, can be continued then.
    """
    try:
        return whole_answer(
            answered.text,
            answered.reasons,
            usage=usage,
            raise_limit="raise the limit in the agent's own settings",
            needs_text=answered.question is None and answered.data is None,
        )
    except BackendError as error:
        error.continues_session = reader.session_id is not None
        raise


_MOVED = "the conversation so far was in no session of this agent: a new session received it as text"


def _cost(messages: list[Message] | tuple[Message, ...]) -> Usage:
    return sum((message.usage for message in messages), NO_USAGE)


def replayed(history: Sequence[Message], prompt: str) -> str:
    """Return `prompt` preceded by the earlier messages."""
    conversation = "\n\n".join(
        f"<{message.role}>\n{message.content}\n</{message.role}>" for message in history if message.role != "system"
    )
    return (
        "You are continuing a conversation from another session. This is what was said in it, oldest first:\n\n"
        f"{conversation}\n\nWhat you did in it is done; look at the files if you need to know more. "
        f"The next message is:\n\n{prompt}"
    )


# Sessions of agents: the lock of the writer and the cost so far, kept beside the turns; does a session hold a prompt.
#
# Two processes in one session do harm: one agent silently drops a branch of the conversation, another never ends. The
# process that runs a turn therefore holds a lock on a file, and its child inherits the descriptor: the lock lasts while
# either process lives, even if the other was killed.

_LOOK = 0.2  # seconds between two tries for a lock


class SessionInUse(BackendError):  # noqa: N818
    """Another process is writing to the session."""

    def __init__(self, holder: str) -> None:
        super().__init__(ErrorKind.TRANSIENT, f"{holder}; wait until its turn is over, or end that process")
        self.holder = holder


class Sessions:
    """The sessions of one kind of agent. The files are in `folder`, created for the current user only."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    @asynccontextmanager
    async def writing(self, session_id: str, patience: float, on_wait: Callable[[str], None]) -> AsyncGenerator[int]:
        """Lock the session for writing, and yield the descriptor that the child has to inherit.

        If another process holds the lock, `on_wait` is called with a description of the holder. Raises SessionInUse
        after `patience` seconds, and BackendError (transient) if the file cannot be written, as on a full disk.
        """
        path, until = self._path(session_id, "lock"), anyio.current_time() + patience
        waits, descriptor = False, None
        try:
            try:
                private_folder(self._folder)
                while (descriptor := lock_file(path)) is None:
                    who = path.read_bytes()[:32].decode("ascii", "replace").strip()
                    holder = f"session {session_id} is in use" + (f" by process {who} or its agent" if who else "")
                    if anyio.current_time() >= until:
                        raise SessionInUse(holder)
                    if not waits:
                        on_wait(holder)
                        waits = True
                    await anyio.sleep(_LOOK)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except OSError as error:  # there may be room again at the next attempt
                message = f"the session cannot be locked, because {path} cannot be written: {error.strerror or error}"
                raise BackendError(ErrorKind.TRANSIENT, message) from error
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def spent(self, session_id: str) -> Usage | None:
        """Return the cost of the session so far, as counted by its program; None if unknown."""
        return _read_usage(self._path(session_id, "json"))

    def note_spent(self, session_id: str, total: Usage) -> None:
        """Record `total` as the cost of the session so far.

        Does not raise if the folder is not writable: only the next turn's usage is then wrong.
        """
        with suppress(OSError):
            private_folder(self._folder)
        _write_usage(self._path(session_id, "json"), total)

    def _path(self, session_id: str, what: str) -> Path:
        return self._folder / f"{self._kind}-{_file_name(session_id)}.{what}"


def _file_name(session_id: str) -> str:
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()[:32]


_OPEN = re.compile(r"(.*)\?(asks-[0-9a-f]{16}|spent-\d+\.\d+-of-\d+\.\d+)", re.DOTALL)


def marked(session_id: str, question: str) -> str:
    """Return the session id, extended by the id of an open question, so that the answer can be matched to it.

    The id is `asks-ACTION`, or `spent-DOLLARS-of-DOLLARS`.
    """
    return f"{session_id}?{question}"


def unmarked(session_id: str | None) -> tuple[str | None, str]:
    """Return the plain session id, and the id of the open question; empty without one."""
    match = _OPEN.fullmatch(session_id or "")
    return (match[1], match[2]) if match else (session_id, "")


_SESSION_FILE = re.compile(r"(?P<session>.+-(?P<name>[0-9a-f]{32}))\.(lock|json|[0-9]+\.new)")


def remove_sessions_except(session_ids: Iterable[str], folder: Path, idle: float) -> list[OSError]:
    """Remove from `folder` the data of all sessions except those of `session_ids`, and return the errors met.

    A session is kept while its lock is held, and until `idle` seconds after the last write.
    """
    names = {_file_name(unmarked(session_id)[0] or "") for session_id in session_ids}
    files: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        match = _SESSION_FILE.fullmatch(path.name)
        if match is not None and match["name"] not in names:
            files.setdefault(match["session"], []).append(path)
    failures: list[OSError] = []
    for session, paths in files.items():
        try:
            if time.time() - max(path.lstat().st_mtime for path in paths) > idle and not is_locked(
                folder / f"{session}.lock"
            ):
                for path in paths:
                    path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process removes the files
            continue
        except OSError as error:
            failures.append(error)
    return failures


def first_before(folder: Path, before: Usage) -> Usage:
    """Return the cost of the session before the call with its files in `folder`.

    The cost is `before`, unless a process that was killed before storing the outcome already counted the call: then the
    cost recorded at the first count is returned.
    """
    path = folder / "before.json"
    recorded = _read_usage(path)
    if recorded is None:
        _write_usage(path, before)
    return before if recorded is None else recorded


def _read_usage(path: Path) -> Usage | None:
    try:
        return from_json(Usage, json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _write_usage(path: Path, usage: Usage) -> None:
    with suppress(OSError):
        replace_file(path, json.dumps(as_json(usage)))


def digest(prompt: str) -> str:
    """Return the digest by which a prompt is recognised later."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def holds(path: Path, wanted: str) -> bool:
    """Return whether a user message in the file, one JSON object per line, has the digest `wanted`. Never raises."""
    try:
        with path.open("rb") as lines:
            return any(b'"user"' in line and wanted in map(digest, _user_texts(line)) for line in lines)
    except OSError:
        return False


def _user_texts(line: bytes) -> list[str]:
    """Return the user's texts in a line of a session file of Claude Code (`message`) or Codex (`payload`)."""
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return []
    message = at(entry, "message") or at(entry, "payload")
    if text(message, "role") != "user":
        return []
    return [text(message, "content"), *(text(block, "text") for block in tables(message, "content"))]
