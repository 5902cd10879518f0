"""The check of an answer (`Task.check`): what it has to pass before the task is done.

What was checked is the end of the messages of the turn, and is stored with the attempt: of a command its words, the
digests of the files that it names, before and after the turn, its exit code, and the end of its output; of the others
what they found. A failed check is the error of the attempt, and its text the next message of the conversation: see
`OutcomeHandler` and `continuation`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import anyio
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Backend, ConversationRequest, Files, PlacedBackend, Reply
from plait.backends.command_backend import CommandBackend
from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Mismatch, Schema
from plait.backends.process.child_process import ProgramBackend
from plait.backends.process.files_and_locks import private_file, private_folder
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind, PromptError
from plait.json_form import JsonValue, value
from plait.runner.domain.continuation import EVIDENCE, FAILED_CHECK
from plait.runner.engine.backend_call import CallOutcome, call_backend
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.retries import deserves_retry, retry_delay
from plait.runner.state.budget import may_have_cost
from plait.runner.state.run_state import MOST_THROTTLINGS, THROTTLING, RunState
from plait.safe_text import clean_text
from plait.task import COMMAND_BACKEND, Check, Task, Workspace, command_text
from plait.usage import NO_USAGE, Usage

_MOST_TOLD = 1_500
"""Characters of output in the next message of the conversation."""
_MOST_SHOWN = 4_000
"""Characters of output in the evidence."""
_BEFORE = "named-files.json"
"""File in the folder of an attempt: the digests before the turn, for the process that adopts the attempt."""
_NOT_JUDGED = "the run is being cancelled, so the answer is not judged"
VERDICT: Mapping[str, JsonValue] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["ok", "reason"],
    "additionalProperties": False,
}
"""The `output_schema` of a judge."""
Priced = Callable[[CallOutcome, str, "str | None"], Awaitable[CallOutcome]]
"""Adds the cost to the outcome of a call of a backend."""
Settle: TypeAlias = Callable[[Usage], None]
"""Settles the share of a rate limit with the usage of the call."""
Slot: TypeAlias = Callable[[str, Usage], Awaitable["Settle | None"]]
"""Gives the slot of the turn back, with the usage of the last call in it, and waits for one of the named backend.
Returns None if the run is being cancelled.
"""


class AnswerCheck:
    """The check of the answer of one attempt. `judge` is the name of the judge's backend."""

    def __init__(self, run: LiveRun, task: Task, check: Check, judge: str, command: CommandCheck | None) -> None:
        self._run = run
        self._task = task
        self._check = check
        self._judge = judge
        self._command = command

    @classmethod
    async def begin(
        cls, run: LiveRun, task: Task, name: str, files: Files | None, place: Workspace | None, *, adopts: bool
    ) -> AnswerCheck:
        """Return the check, before the turn begins. `name` is the backend of the task, `place` where the task works.
        Raises PromptError, and BackendError of kind unavailable without a backend for commands, or for the judge, on
        this machine.
        """
        assert task.check is not None
        own, judge, command = run.options.backends[name], task.check.backend or name, None
        if task.check.run:
            words = list(map(clean_text, run.state.texts(task).check_words()))
            backend = run.options.backends.get(COMMAND_BACKEND)
            if place is not None and isinstance(own, ProgramBackend):
                place = Workspace(str(own.working_in(place).folder), env=place.env)
            command = await CommandCheck.begin(backend, words, files, place, adopts=adopts)
        if task.check.judge is not None and isinstance(run.options.backends[judge], PlacedBackend):
            message = f"a judge runs on this machine, and the backend {judge!r} runs on hosts; name another one"
            raise BackendError(ErrorKind.UNAVAILABLE, message)
        return cls(run, task, task.check, judge, command)

    async def run(
        self, request: ConversationRequest, reply: Reply, priced: Priced, slot: Slot
    ) -> tuple[Reply, tuple[Message, ...], BackendError | None]:
        """Check the answer in `reply`. Return the reply with the data of the schema and the cost of the judge, the
        messages with the evidence, and the error if the check failed, or if it could not be made. `request` is that
        of the turn. The judge has a slot, and a share of the rate limits, of its own backend (`slot`).
        """
        evidence: tuple[Message, ...] = ()
        error: BackendError | None = None
        if self._check.output_schema is not None:
            try:
                reply = replace(
                    reply, data=await read_answer(Schema(self._check.output_schema), reply.text, reply.data)
                )
                evidence += (_evidence("output_schema", "fits"),)
            except Mismatch as mismatch:
                evidence += (_evidence("output_schema", str(mismatch)),)
                error = _failed("output_schema", f"the answer does not fit: {mismatch}")
        if error is None and (condition := self._check.passes) is not None:
            try:
                passes = self._run.state.texts(self._task).passes(_answer(reply))
                end = "is true" if passes else "is false"
            except PromptError as mistake:
                passes, end = False, f"cannot be evaluated: {mistake}"
            evidence += (_evidence(condition, end),)
            error = None if passes else _failed(condition, end)
        if error is None and self._command is not None:
            async with self._command.backend.check_slot():
                answer_evidence, error = await self._command.run(request, reply.text)
            evidence += answer_evidence
        if error is None and self._check.judge is not None:
            outcome = await self._ask_judge(request, reply, priced, slot)
            reply = replace(reply, usage=reply.usage + outcome.usage)
            error = outcome.error
            if error is None and outcome.reply is not None:
                data = outcome.reply.data
                verdict: Mapping[str, JsonValue] = data if isinstance(data, dict) else {}
                end, reason = ("passed" if verdict.get("ok") is True else "refused"), str(verdict.get("reason", ""))
                evidence += (_evidence(f"judge {self._judge}", end, reason),)
                error = None if end == "passed" else _failed(f"judge {self._judge}", end, reason)
        return reply, evidence, error

    @property
    def _is_limited(self) -> bool:
        """Whether a budget limits what the judge may cost."""
        budget, costs = self._run.budget, self._run.call_costs
        return budget is not None and budget.limits(self._task) and not costs.is_free(self._judge)

    async def _ask_judge(self, request: ConversationRequest, judged: Reply, priced: Priced, slot: Slot) -> CallOutcome:
        """Ask the judge, again after errors as the task's retry policy says: the answer itself is not to be paid twice.
        With a budget, in which one call is reserved for the judge, only after errors that cost nothing. Return the last
        outcome, with the usage of all.
        """
        options, retry = self._run.options, self._task.retry_policy
        backend, cancellation = options.backends[self._judge], self._run.cancellation
        try:
            prompt = clean_text(self._run.state.texts(self._task).judge_prompt(_answer(judged)))
        except PromptError as mistake:
            return CallOutcome(error=BackendError(ErrorKind.INVALID_REQUEST, f"the judge's prompt: {mistake}"))
        tries, failures, usage = 0, 0, NO_USAGE
        while True:
            if (settle := await slot(self._judge, judged.usage)) is None:
                return CallOutcome(error=BackendError(ErrorKind.CRASHED, _NOT_JUDGED, usage=usage))
            asking = ConversationRequest(
                session_id=backend.new_session_id(),
                output_schema=VERDICT,
                idempotency_key=f"{request.idempotency_key}:judge",
                timeout=request.timeout,
                traceparent=request.traceparent,
            )
            outcome = await priced(
                await call_backend(backend, asking, prompt, cancellation=cancellation), self._judge, None
            )
            settle(outcome.usage)
            if outcome.asked is not None or (outcome.reply is not None and outcome.reply.question is not None):
                outcome = CallOutcome(error=BackendError(ErrorKind.UNEXPECTED, "a judge cannot ask a person"))
            if (error := outcome.error) is None:
                assert outcome.reply is not None
                return replace(outcome, reply=replace(outcome.reply, usage=usage + outcome.reply.usage))
            usage, tries = usage + error.usage, tries + 1
            # Of a budget, one call of the judge is reserved.
            is_spent = self._is_limited and may_have_cost(error.usage, error.kind)
            if is_spent and error.usage.cost_usd is None:
                usage += Usage(cost_is_partial=True)
            failures += error.kind not in THROTTLING or tries > MOST_THROTTLINGS
            if is_spent or not deserves_retry(retry, failures, error):
                # The kind says that nothing is to be done anew by itself: the answer is there, but not judged.
                message = f"the judge {self._judge!r} gave no verdict ({error.kind.value}): {error.message}"
                return CallOutcome(error=BackendError(ErrorKind.UNEXPECTED, message, usage=usage))
            await options.clock.sleep(retry_delay(retry, tries, error.retry_after, options.rng))


@value
class PlayedCheck:
    """The command of a check, played again on a stored answer."""

    task_id: str
    command: str
    passes: bool
    end: str
    """How the command ended, such as `exit code 0`."""
    output: str
    """The end of its output."""


async def play_again(state: RunState, backend: CommandBackend) -> list[PlayedCheck]:
    """Play the commands that checked the completed tasks of a stored run again, on the stored answers, and return how
    they end now. Stores nothing. Raises PromptError.
    """
    tasks = [task for task in state.dag if task.check is not None and task.check.run and state.is_completed(task.id)]
    commands = {task.id: list(map(clean_text, state.texts(task).check_words())) for task in tasks}
    played: dict[str, PlayedCheck] = {}

    async def play(task: Task) -> None:
        words, result = commands[task.id], state.results[state.dag.position(task.id)]
        async with backend.check_slot():
            request = ConversationRequest(timeout=task.timeout)
            check = CommandCheck(backend, words, None, {}, state.texts(task).workspace())
            evidence, error = await check.run(request, result.text)
        head, _, output = evidence[0].content.partition("\n\n") if evidence else ("", "", "")
        end = head.split("\n")[1] if evidence else "" if error is None else error.message
        played[task.id] = PlayedCheck(task.id, shlex.join(words), error is None, end, output)

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(play, task)
    return [played[task.id] for task in tasks]


def _answer(reply: Reply) -> JsonValue:
    return reply.text if reply.data is None else reply.data


def _evidence(what: str, end: str, details: str = "") -> Message:
    return Message("system", f"{EVIDENCE}{what}\n{end}\n\n{details[-_MOST_SHOWN:]}".rstrip())


def _failed(what: str, end: str, details: str = "") -> BackendError:
    text = f"{FAILED_CHECK}: {what[:200]}: {end}\n{details[-_MOST_TOLD:]}".rstrip()
    return BackendError(ErrorKind.CHECK_FAILED, text)


@value
class CommandCheck:
    """The command that checks the answer of one attempt."""

    backend: CommandBackend
    words: Sequence[str]
    files: Files | None
    """The files of the attempt; None if the store keeps none."""
    before: Mapping[str, str]
    """The digests of the files that the command names, before the turn."""
    place: Workspace | None
    """Where the command works; None for where its backend does."""

    @classmethod
    async def begin(
        cls,
        backend: Backend | None,
        words: Sequence[str],
        files: Files | None,
        place: Workspace | None,
        *,
        adopts: bool,
    ) -> CommandCheck:
        """Return the check, before the turn begins. Raises BackendError of kind unavailable without a backend for
        commands on this machine.
        """
        if not isinstance(backend, CommandBackend):
            message = "a check needs the backend 'command', of kind command and without hosts; add it"
            raise BackendError(ErrorKind.UNAVAILABLE, message)
        before: Mapping[str, str] | None = None
        if files is not None and adopts:
            with suppress(OSError, ValueError):
                before = json.loads((files.turn / _BEFORE).read_bytes())
        if before is None:
            before = await run_sync(backend.working_in(place).digests, words)
            if files is not None:
                with suppress(OSError):
                    private_file(private_folder(files.turn) / _BEFORE, json.dumps(before))
        return cls(backend, words, files, before, place)

    async def run(self, request: ConversationRequest, answer: str) -> tuple[tuple[Message, ...], BackendError | None]:
        """Run the command on `answer`. Return the message with the evidence, and the error if the check failed; without
        a message, the error of a check that could not be run. `request` is that of the turn.
        """
        files = self._free_files()
        attaches = files is not None and self.backend.inspect(files) is not None
        check = ConversationRequest(
            files=files,
            attaches=attaches,
            on_output=request.on_output,
            timeout=request.timeout,
            traceparent=request.traceparent,
            workspace=self.place,
            keeps=request.keeps,
        )
        outcome = await call_backend(self.backend, check, command_text(self.words, answer))
        error = outcome.error
        if error is not None and error.kind not in {ErrorKind.COMMAND_FAILED, ErrorKind.TIMEOUT}:
            return (), error
        end = "exit code 0" if error is None else error.message.partition(": ")[0]
        output = _output_of(outcome)
        now = await run_sync(self.backend.working_in(self.place).digests, self.words)
        named, changed = "", list[str]()
        for name in sorted(self.before.keys() | now.keys()):
            was, digest = (digests.get(name, "missing") for digests in (self.before, now))
            named += f"\n{name} {digest}" + ("" if was == digest else f", changed in this turn: was {was}")
            changed += [] if was == digest else [name]
        words = json.dumps(list(self.words), ensure_ascii=False)
        evidence = (_evidence(words, end + named, output),)
        if error is None:
            return evidence, None
        if changed:
            end += f"; files that the check names were changed in this turn: {', '.join(changed)[:200]}"
        return evidence, _failed(shlex.join(self.words), end, output)

    def _free_files(self) -> Files | None:
        """Return the files of a command that goes on or has ended, or else of the next one: one that was killed with
        its runner is begun anew.
        """
        if self.files is None:
            return None
        number = 1
        while (files := Files(self.files.turn / f"check-{number}", self.files.sessions)).turn.exists():
            detached = self.backend.inspect(files)
            if detached is not None and detached.state != "dead":
                break
            number += 1
        return files


def _output_of(outcome: CallOutcome) -> str:
    """Return standard output and standard error of the command."""
    if outcome.error is not None:
        return outcome.error.messages[-1].content if outcome.error.messages else ""
    data = outcome.reply.data if outcome.reply is not None else None
    return f"{data['stdout']}{data['stderr']}" if isinstance(data, dict) else ""
