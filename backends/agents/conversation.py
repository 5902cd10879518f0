"""Turns with an agent run as a command: started here, or adopted from a process that died, and read to the end.

A turn is one call, or two if the first answer does not fit the schema; each call has its own numbered folder below the
turn's folder. A process that adopts a turn repeats the same steps: calls already made are followed or read, the next
call is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import anyio

from plait.backends.agents.agent_errors import COMMON, SchemaRefused, classify, hide, safe_line
from plait.backends.agents.agent_protocol import Call, ProcessEnd, Program, Reader, TurnAnswer
from plait.backends.agents.agent_sessions import SessionInUse, Sessions, first_before, since
from plait.backends.agents.agent_transcript import UnreportedCall, cut_before, mark_reported, outputs_of
from plait.backends.agents.output_lines import read_line
from plait.backends.agents.session_files import digest
from plait.backends.backend_protocol import ConversationRequest, Files, Output, Reply
from plait.backends.output_schema import Mismatch, Schema, invalid_output, repair_prompt
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Child, Launch, adopted, child_environment, running
from plait.backends.process.private_files import private_folder
from plait.backends.threads import check_answer, read_answer
from plait.backends.turn_cancellation import cancel_requested, when_cancelled
from plait.backends.whole_answer import whole_answer
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line
from plait.usage import NO_USAGE, Usage

_PATIENCE = 30.0
"""Seconds to wait until another process releases a session."""
_EARLY = 0.5
"""Seconds (at most a tenth of the timeout) by which a turn ends before the task's timeout, so that its usage is
recorded.
"""
_MOST_PLAIN_LINES = 50
LAST_WORD = 5.0
"""Seconds to wait for the agent to exit after its last event, because the agent may still be writing its session file.
"""


class CliConversation:
    """A conversation with an agent, one process per turn. See `CliBackend`."""

    def __init__(self, program: Program, request: ConversationRequest, files: Files) -> None:
        self._program = program
        self._request = request
        self._files = files
        self._sessions = Sessions(files.sessions, program.kind)
        self._session_id = request.session_id
        self._exists = request.resume
        self._seen: str | None = None
        self._first_call_done = False
        self._calls = 0
        self._plain_lines = deque[str](maxlen=_MOST_PLAIN_LINES)
        """The last lines of the current call's output that are no events."""
        self._rewinds = request.resumes_interrupted
        limit = request.timeout
        self._ends = None if limit is None else anyio.current_time() + limit - min(_EARLY, limit / 10)
        schema = request.output_schema
        self._schema = None if schema is None else Schema(schema)
        self._asked = schema if schema is not None and program.takes_schema(schema) else None
        """The schema to be enforced by the program itself; None otherwise."""

    @property
    def session_id(self) -> str | None:
        """Id of the session; None while unknown."""
        return self._session_id

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`."""
        turn: list[Message] = []
        if not prompt.strip():  # agents crash on an empty prompt, or send it to a model
            raise BackendError(
                ErrorKind.INVALID_REQUEST, f"the prompt is empty: say what {self._program.kind} is to do"
            )
        try:
            answered = await self._first(turn, clean_text(prompt))
            data = None
            if self._schema is not None and answered.question is None:
                answered, data = await self._fitting(turn, answered, self._schema)
        except BackendError as error:
            error.usage += _cost(turn)
            error.messages = tuple(turn) if len(turn) > 1 else ()
            raise
        return Reply(answered.text, data, self._session_id, _cost(turn), tuple(turn), answered.question)

    async def _first(self, turn: list[Message], prompt: str) -> TurnAnswer:
        """Make the call that sends the prompt itself.

        If the session is lost, or in use by another process for too long, a fresh session receives the history as text.
        """
        sent = prompt
        if self._schema is not None and self._asked is None:
            sent += f"\n\nAnswer with nothing but JSON that fits this JSON Schema: {self._schema.text}"
        try:
            if self._request.fork_of and not self._exists and not self._program.branches_sessions():
                raise BackendError(ErrorKind.SESSION_LOST, f"{self._program.kind} cannot fork a session")
            return await self._exchange(turn, prompt, sent)
        except SchemaRefused as refused:
            self._request.on_output(
                Output("notice", f"the schema was rejected, so the prompt describes it: {refused.message}")
            )
            self._asked = None
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
            if not lost or begun or not self._request.history or self._program.on_lost_session == "fail":
                raise
            what = error.holder if isinstance(error, SessionInUse) else error.message
        old = self._session_id if self._exists else self._request.fork_of
        turn.clear()
        if self._exists:
            self._session_id = self._program.new_session_id()
        self._exists = False
        self._request = replace(self._request, fork_of=None, resume=False)
        note = f"session {old} could not be continued ({what}): a fresh session received the history as text"
        self._request.on_output(Output("notice", note))
        return await self._exchange(turn, prompt, replayed(self._request.history, sent), note)

    async def _fitting(self, turn: list[Message], answered: TurnAnswer, schema: Schema) -> tuple[TurnAnswer, JsonValue]:
        try:
            return answered, await _read(answered, schema)
        except Mismatch as mismatch:
            problem = mismatch
        self._request.on_output(Output("notice", "the answer does not fit its schema; asking once more"))
        prompt = repair_prompt(problem, schema)
        answered = await self._exchange(turn, prompt, prompt)
        try:
            return answered, await _read(answered, schema)
        except Mismatch as mismatch:
            raise invalid_output(mismatch) from None

    async def _exchange(self, turn: list[Message], prompt: str, sent: str, note: str | None = None) -> TurnAnswer:
        """Make one call: send `sent`, and record the message as `prompt`, followed by `note`."""
        turn.append(Message("user", prompt))
        if note is not None:
            turn.append(Message("system", note))
        self._calls += 1
        self._plain_lines.clear()
        call = self._call(self._files.turn / str(self._calls))
        reader = self._program.reader(call)
        cut = self._cut_before(call) if not self._first_call_done else []
        try:
            try:
                child = await self._let_work(call, reader, sent, cut)
            except BaseException:
                self._read_last_session(call)
                raise
            answered = reader.end(ProcessEnd(child.status, child.tail("stderr"), tuple(self._plain_lines)))
        except BackendError as error:
            used = reader.usage if error.usage == NO_USAGE else error.usage
            error.usage = self._unreported_cost(cut) + self._own(call.folder, self._session_id, used)
            error.continues_session = error.continues_session and reader.session_id is not None
            if error.retry_after is not None:
                error.retry_after = max(0.0, error.retry_after - self._program.age(call))
            if error.kind is ErrorKind.TIMEOUT and self._ends is not None and anyio.current_time() >= self._ends:
                error.message = f"no answer within the task's timeout of {self._request.timeout:g} s"
            if error.kind is ErrorKind.TIMEOUT and reader.session_id is None and self._plain_lines:
                # The agent waits, before its turn has begun, for a login perhaps that nobody will make.
                kind = classify("\n".join(self._plain_lines), COMMON)
                error.kind = kind if kind is ErrorKind.AUTH else error.kind
                error.message += f"; the last line of its output: {safe_line(self._plain_lines[-1])}"
            if error.kind is ErrorKind.TRUNCATED and reader.last_text:
                turn.append(Message("assistant", clean_text(reader.last_text)))
            hide(error, self._given())
            mark_reported(call.folder)
            raise
        usage = self._unreported_cost(cut)
        if answered.is_total:
            usage += self._total(call, answered.usage)
        else:
            usage += self._own(call.folder, self._session_id, answered.usage)
        try:
            message = whole_turn(reader, answered, usage)
        except BackendError as error:
            turn += [Message("assistant", said.content) for said in error.messages]
            mark_reported(call.folder)
            raise
        self._first_call_done, self._exists = True, True
        turn.append(message)
        return replace(answered, text=message.content)

    def _call(self, folder: Path) -> Call:
        request, asked = self._request, self._asked
        forks = None if self._exists else request.fork_of
        answer = None if self._first_call_done else request.answer
        return Call(
            folder,
            self._session_id,
            resume=self._exists,
            forks=forks,
            output_schema=asked,
            answer=answer,
            written_at=self._written_at(folder),
        )

    def _written_at(self, folder: Path) -> float | None:
        """Return when the agent that another process started wrote its last output; None if the agent is alive."""
        known = read_manifest(folder) if self._request.attaches else None
        if known is not None and not known.is_alive:
            with suppress(OSError):
                return (folder / "stdout").stat().st_mtime
        return None

    def _cut_before(self, call: Call) -> list[UnreportedCall]:
        return cut_before(self._files.turn, lambda folder: self._program.reader(replace(call, folder=folder)))

    async def _let_work(self, call: Call, reader: Reader, sent: str, cut: list[UnreportedCall]) -> Child:
        """Return the child of the call, once the child has ended and `reader` has read all its output."""
        until = self._until()
        async with AsyncExitStack() as held:
            child = await self._found(held, call) or await self._start(held, call, sent, cut)
            if self._program.ends_at_interrupt:
                held.enter_context(when_cancelled(child.interrupt))
            await self._follow(child, reader, until)
        self._note_skipped(child)
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
                await child.follow(on_line, idle=self._program.idle_timeout, until=until)
        except BackendError:
            if not reader.is_final:
                raise

    def _until(self) -> float:
        until = anyio.current_time() + self._program.turn_timeout
        return until if self._ends is None else min(until, self._ends)

    async def _found(self, held: AsyncExitStack, call: Call) -> Child | None:
        """Return the child of the call if another process started the child; None otherwise."""
        if self._request.attaches and read_manifest(call.folder) is not None:
            return await held.enter_async_context(adopted(call.folder))
        return None

    def _note_skipped(self, child: Child) -> None:
        if child.skipped:
            self._request.on_output(Output("notice", f"output lines skipped as too long: {child.skipped}"))

    async def _start(self, held: AsyncExitStack, call: Call, sent: str, cut: list[UnreportedCall]) -> Child:
        keeps: list[int] = []
        if call.session_id is not None:
            on_wait = partial(self._show, "waiting")
            keeps.append(await held.enter_async_context(self._sessions.writing(call.session_id, _PATIENCE, on_wait)))
        if cancel_requested():
            message = f"the run is being cancelled, so {self._program.kind} is not called"
            raise BackendError(ErrorKind.CRASHED, message)
        if self._rewinds:
            readers = [one.reader for one in cut if one.is_cut and one.reader.session_id == call.session_id]
            whole = [reader.last_whole for reader in readers if reader.last_whole]
            self._rewinds = bool(whole)
            call = replace(call, rewind_to=whole[0] if whole else None)
        private_folder(call.folder)
        program = self._program
        said = program.input_text(call, sent)
        guarded = self._request.files is None or program.on_runner_death == "kill"
        start = Launch(
            self._words(call),
            {**self._given(), **self._trace(), **program.environment(call)},
            program.folder,
            said.encode(),
            keeps,
            {
                "kind": program.kind,
                "goes_on": "yes" if self._request.resumes_interrupted else "no",
                "input_digest": digest(said),
                "guarded": "yes" if guarded else "no",
                **self._notes(),
            },
            guarded=guarded,
        )
        return await held.enter_async_context(running(start, call.folder))

    def _given(self) -> dict[str, str]:
        return child_environment((*self._program.passes, *self._program.pass_env))

    def _trace(self) -> Mapping[str, str]:
        """Return the variable by which the agent's own spans join the trace of the run."""
        parent = self._request.traceparent
        return {} if parent is None else {"TRACEPARENT": parent}

    def _words(self, call: Call) -> Sequence[str]:
        return (self._program.executable(), *self._program.arguments(call))

    def _notes(self) -> Mapping[str, str]:
        """Return the notes needed by a process that adopts the turn."""
        return {}

    def _on_line(self, reader: Reader, line: bytes) -> None:
        told = read_line(line)
        if told.words:
            self._plain_lines.append(told.words[:2000])
        for output in outputs_of(told, reader.read):
            self._request.on_output(output)
        self._note_session(reader.session_id)

    def _note_session(self, session_id: str | None) -> None:
        if session_id is not None and session_id != self._seen:
            self._seen = session_id
            self._session_id, self._exists = clean_text(session_id), True
            self._request.on_session(self._session_id)

    def _read_last_session(self, call: Call) -> None:
        """Record the session, if any, from output written between the last read and the end of the agent."""
        self._note_session(self._program.session_of(call.folder))

    def _show(self, kind: str, text: str) -> None:
        self._request.on_output(Output("waiting" if kind == "waiting" else "notice", one_line(text)))

    def _unreported_cost(self, cut: list[UnreportedCall]) -> Usage:
        read = ((one.folder, one.reader) for one in reversed(cut))
        cost = sum((self._own(folder, reader.session_id, reader.usage) for folder, reader in read), NO_USAGE)
        return replace(cost, model=None)  # an interrupted call does not determine the answering model

    def _own(self, folder: Path, session_id: str | None, usage: Usage) -> Usage:  # noqa: ARG002 - used by a subclass
        """Return the cost of the call with its files in `folder`, given the `usage` reported by the call itself."""
        return usage

    def _total(self, call: Call, total: Usage) -> Usage:
        """Return the cost of the call, given the `total` cost of its session so far."""
        if self._session_id is None:
            return total
        before = self._sessions.spent(self._session_id) if call.resume else None
        if before is None and call.forks is not None:
            before = self._sessions.spent(call.forks)
        if before is None:
            before = _cost(self._request.history) if call.resume or call.forks else NO_USAGE
        before = first_before(call.folder, before)
        self._sessions.note_spent(self._session_id, total)
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


async def _read(answered: TurnAnswer, schema: Schema) -> JsonValue:
    if answered.data is not None:
        return await check_answer(schema, answered.data)
    return await read_answer(schema, answered.text)


def _cost(messages: list[Message] | tuple[Message, ...]) -> Usage:
    return sum((message.usage for message in messages), NO_USAGE)


def replayed(history: Sequence[Message], prompt: str) -> str:
    """Return `prompt` preceded by the earlier messages."""
    said = "\n\n".join(
        f"<{message.role}>\n{message.content}\n</{message.role}>" for message in history if message.role != "system"
    )
    return (
        "You are going on with a conversation from another session. This is what was said in it, oldest first:\n\n"
        f"{said}\n\nWhat you did in it is done; look at the files if you need to know more. The next message is:\n\n"
        f"{prompt}"
    )
