"""Attempts: the session, the prompt, the call of the backend, and the reports during the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.lowlevel

from plait import events
from plait.backends.backend_protocol import (
    Abilities,
    Allowance,
    Attachment,
    ConversationRequest,
    DetachedBackend,
    DetachedTurn,
    Files,
    Output,
    PlacedBackend,
    Placement,
    Reply,
)
from plait.backends.prices import billing_of
from plait.clock_and_ids import parse_time, traceparent
from plait.dialogue import Answer, Message
from plait.errors import BackendError, ErrorKind, PromptError, StoreError
from plait.json_form import JsonInput, to_json
from plait.runner.domain.continuation import EVIDENCE, NO_HISTORY, Continuation, History
from plait.runner.engine.answer_check import VERDICT, AnswerCheck, Settle
from plait.runner.engine.backend_call import CallOutcome, call_backend, classified, kept_usage
from plait.runner.engine.call_costs import ATTACHMENT_TOKENS, tokens_in
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.row_reader import answers_of_rows
from plait.runner.engine.work_folders import WorkFolders
from plait.runner.state.attempt_files import attempt_files, end_attempt, files_root, make_room, run_folder
from plait.runner.state.stored_conversations import load_history
from plait.runner.state.task_files import (
    conversation_of,
    files_of,
    read_contents,
    sends_files,
    with_paths,
    with_texts,
)
from plait.safe_text import clean_text
from plait.statuses import TASK_DONE
from plait.task import TEXT, ModelOptions, Task
from plait.usage import NO_USAGE, Usage

_START_NOT_STORED = (
    "the store does not answer, so this at_most_once task was not started: after a crash "
    "no record would show the start; resume with --retry-failed when the store answers again"
)


_NO_VALUES: Mapping[str, JsonInput] = {}
_NO_FILES: tuple[Sequence[tuple[str, str]], tuple[Attachment, ...]] = (), ()


def _nothing() -> None:
    return None


STORE_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between two looks whether a store that is away has the start of a task marked at_most_once, and between two
readings of a conversation. After the last, the attempt fails.
"""
_ATTACH_SECONDS = 1.0
"""Least time for an adopted attempt, in seconds, even after the timeout: enough to attach to the attempt and end the
attempt.
"""
_OF_AN_ANSWER = frozenset({"text", "tool"})
"""The kinds of an Output that show that the model answers."""
INTERRUPTED = (
    "You were interrupted while you worked on the request above: the program that asked you ended before your answer "
    "was written down. Look at what you have done already, do what is missing, and give your whole answer again."
)
"""The message that resumes an interrupted conversation. The conversation holds the prompt already."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt of a task, recorded as running."""

    position: int
    """The position of the task in the DAG."""
    task: Task
    number: int
    """The number of the attempt, from 1."""
    session_id: str | None
    """The id of the session, if known."""
    backend: str
    """The backend that the attempt calls: the task's own, or a spare."""
    continuation: Continuation | None = None
    """The conversation of an earlier attempt to continue, if any."""
    confirmed: bool = False
    """See SessionOpened."""
    resume: bool = False
    """See ConversationRequest."""
    fork_of: str | None = None
    """`fork_of` of the ConversationRequest."""
    prompt: str = ""
    """The prompt of the task, or the message sent instead."""
    has_begun: bool = False
    """True once the backend was called and, on another host, the attempt may have begun there."""
    over: bool = False
    """True once the call has ended."""
    accepted: Callable[[], object] = _nothing
    """Is called when the backend has accepted the call: a response, or a part of an answer, is there."""
    exhausted: bool = False
    """True if the backend's last response reported that nothing is left of a limit."""
    place: str | None = None
    """The host of the attempt, once that host may begin; None for an attempt in this process."""
    adopted: DetachedTurn | None = None
    """The attempt's turn as an earlier process left it behind, if one began the attempt: "alive", or "ended" with an
    answer still to be read.
    """

    @property
    def resumes_interrupted(self) -> bool:
        """True if the attempt resumes an interrupted turn."""
        return self.continuation is not None and self.continuation.interrupted

    def messages(self, reply: Reply) -> tuple[Message, ...]:
        """Return the messages of the turn that `reply` ended, behind those of refused answers."""
        return (*(() if self.continuation is None else self.continuation.refused), *self.turn(reply))

    def turn(self, reply: Reply) -> tuple[Message, ...]:
        """Return the messages of the turn that `reply` ended."""
        if self.resumes_interrupted:
            return (Message("user", self.prompt), *reply.turn(INTERRUPTED))
        return reply.turn(self.prompt)


def options_for(task: Task, own: object, spare: object) -> ModelOptions:
    """Return the settings of the task for a call of the `spare` of its `own` backend: the model that the task names
    counts if both are of the same kind and provider.
    """
    is_same = type(own) is type(spare) and billing_of(own).provider == billing_of(spare).provider
    return task.options if is_same or task.options.model is None else replace(task.options, model=None)


SlotForJudge: TypeAlias = Callable[[Attempt, str, Usage], Awaitable[Settle | None]]


class AttemptRunner:
    """Prepares and runs the attempts of one run. `folders` are those in which its programs write, None without such
    programs; `slot_for_judge` waits for a slot of the judge's backend: see `AnswerCheck.run`.
    """

    def __init__(self, run: LiveRun, folders: WorkFolders | None, slot_for_judge: SlotForJudge) -> None:
        self._run = run
        self._run_id = run.run_id
        self._state = run.state
        self._stamp = run.stamp
        self._clock = run.options.clock
        self._backends = run.options.backends
        self._task_backends = run.task_backends
        self._spares = run.options.spares
        self._costs = run.call_costs
        # Computed once: isinstance with a protocol costs more than the rest of an attempt's start.
        self._abilities = {name: Abilities.of(backend) for name, backend in self._backends.items()}
        self._outlive = {name: isinstance(backend, DetachedBackend) for name, backend in self._backends.items()}
        self._take_places = {name for name, abilities in self._abilities.items() if "cwd" in abilities.adjustable}
        self._placed = {name for name, backend in self._backends.items() if isinstance(backend, PlacedBackend)}
        self._folders = folders
        self._slot_for_judge = slot_for_judge
        self._files_root = files_root(run.options.store)
        """The folder for files of attempts; None if the store keeps no files."""
        root = self._files_root
        self._has_earlier_files = root is not None and run_folder(root, run.run_id).exists()

    def begin(self, position: int) -> Attempt:
        """Return the pending task's next attempt, which is to be recorded as running."""
        task = self._state.dag.tasks[position]
        number, name = self._state.attempts[position] + 1, self._task_backends[position]
        if self._spares:
            name = self._run.backend_of(position)
            if (moves := self._begin_elsewhere(position, name)) is not None:
                return moves
        if (continuation := self._state.continuations.get(position)) is not None:
            session_id, confirmed = continuation.session_id, continuation.interrupted
            return Attempt(position, task, number, session_id, name, continuation, confirmed=confirmed, resume=True)
        before = self._state.continued_session(task)
        if before is not None and not self._forks(task):
            return Attempt(position, task, number, before, name, resume=True)
        return Attempt(position, task, number, self._new_session_id(name), name, fork_of=before)

    def _begin_elsewhere(self, position: int, name: str) -> Attempt | None:
        """Return the next attempt of a task whose conversation so far was with another backend than `name`, which is
        sent the conversation as stored; None for a task without such a conversation.
        """
        task, own, moved = self._state.dag.tasks[position], self._task_backends[position], self._state.moved
        if position in self._state.continuations and moved.get(position, own) != name:
            self._state.move_continuation(position)
        continuation = self._state.continuations.get(position)
        if continuation is None:
            before = None if task.continues is None else self._state.dag.position(task.continues)
            if before is None or moved.get(before, own) == name:
                return None
        elif continuation.session_id is not None:
            return None
        number = self._state.attempts[position] + 1
        return Attempt(position, task, number, self._new_session_id(name), name, continuation)

    def adopt(self, position: int, adopted: DetachedTurn) -> Attempt:
        """Return the attempt that an earlier process began, reconstructed as far as possible."""
        record = self._state.records[position]
        task, number = self._state.dag.tasks[position], self._state.attempts[position]
        continuation = self._state.continuations.get(position)
        self._state.adopt(position)
        before = None if continuation is not None else self._state.continued_session(task)
        session_id = record.session_id
        # If the earlier session was lost, the attempt may have continued in a session of its own.
        same = before is not None and (before == session_id or not self._forks(task))
        resume, forks = continuation is not None or same, None if same else before
        return Attempt(
            position,
            task,
            number=number,
            session_id=session_id,
            backend=self._state.moved.get(position) or self._task_backends[position],
            continuation=continuation,
            confirmed=record.session_confirmed,
            resume=resume,
            fork_of=forks,
            has_begun=True,
            place=adopted.place,
            adopted=adopted,
        )

    def _forks(self, task: Task) -> bool:
        """Return whether the task forks the continued conversation and so leaves the original unchanged: if the backend
        can fork, or if several tasks continue the same conversation and would disturb each other.
        """
        assert task.continues is not None
        before = self._state.dag.position(task.continues)
        name = self._state.moved.get(before) or self._task_backends[before]
        return self._state.times_continued(before) > 1 or self._abilities[name].can_fork

    def size(self, position: int) -> int:
        """Return the length in characters of the next prompt of the task, with the conversation as far as in memory."""
        try:
            return sum(map(len, self._texts(position)))
        except PromptError:  # reported by the attempt
            return 0

    def _texts(self, position: int) -> list[str]:
        """Return the next prompt of the task and the conversation, as far as in memory. Raises PromptError."""
        task, continuation = self._state.dag.tasks[position], self._state.continuations.get(position)
        messages = () if continuation is None else (*continuation.messages, *continuation.refused)
        history = None if task.continues is None else self._state.history(task)
        messages += () if history is None else history.messages
        return [self._state.texts(task).prompt(), *(message.content for message in messages)]

    def worst_case(self, position: int, name: str | None = None) -> float | None:
        """Return the most that the next attempt of the task costs, in US dollars, on the backend `name` if given:
        infinite if that cannot be stated, None for a task that costs nothing.
        """
        costs, task = self._costs, self._state.dag.tasks[position]
        name = name or self._run.backend_of(position)
        judge = None if task.check is None or task.check.judge is None else task.check.backend or name
        if costs.is_free(name) and (judge is None or costs.is_free(judge)):
            return None
        sent = self._most_sent(position, task)
        most = costs.most(name, self._options(position, name).model, sent, task.output_schema)
        continuation = self._state.continuations.get(position)
        answer = None if continuation is None or continuation.answer is None else continuation.answer.value
        if most is not None and isinstance(answer, int | float):  # perhaps a higher limit for the turn of an agent
            most = max(most, float(answer))
        judged: float | None = 0.0
        if judge is not None and task.check is not None and task.check.judge is not None:
            # The judge may be shown all that the task was, and the answer.
            read = sent + costs.answer_tokens(name) + tokens_in(task.check.judge)
            judged = costs.most(judge, None, read, VERDICT)
        return inf if most is None or judged is None else most + judged

    def _most_sent(self, position: int, task: Task) -> int:
        """Return the most tokens of the prompt and the conversation of the task's next attempt."""
        texts, continuation = [task.system or ""], self._state.continuations.get(position)
        with suppress(PromptError):  # the attempt fails before its call
            texts += self._texts(position)
        if continuation is not None:
            texts += [continuation.correction or "", "" if continuation.answer is None else continuation.answer.text]
        tokens = tokens_in(*texts)
        for file in (file for each in conversation_of(task, self._state.dag) for file in files_of(each)):
            if (path := Path(file.path)).exists():
                size = path.stat().st_size
                tokens += size if file.media_type == TEXT else max(size, ATTACHMENT_TOKENS)
        if task.continues is not None and self._state.history(task) is None:
            usage = self._state.results[self._state.dag.position(task.continues)].usage
            tokens += usage.input_tokens + usage.output_tokens
        return tokens

    def call(self, attempt: Attempt) -> Awaitable[CallOutcome]:
        """Render the prompt and call the backend. Errors become part of the outcome; cancellation is re-raised."""
        return self._call(attempt) if attempt.adopted is None else self._call_adopted(attempt)

    async def _call_adopted(self, attempt: Attempt) -> CallOutcome:
        outcome = await self._call(attempt)
        if (files := self._files(attempt)) is not None:
            await end_attempt(files.turn)  # the backend may never have attached to the attempt
        return outcome

    async def _call(self, attempt: Attempt) -> CallOutcome:
        check = None
        try:
            request = await self._prepare(attempt)
            if attempt.task.check is not None:
                files, place, adopts = self._files(attempt), request.workspace, attempt.adopted is not None
                check = await AnswerCheck.begin(self._run, attempt.task, attempt.backend, files, place, adopts=adopts)
        except Exception as error:
            return CallOutcome(error=classified(error))
        answers = self._state.answers_for(attempt.position) if attempt.position in self._state.answers else ()
        attempt.has_begun = request.placement is None or attempt.place is not None
        message = INTERRUPTED if attempt.resumes_interrupted else attempt.prompt
        outcome = await call_backend(self._backends[attempt.backend], request, message, answers, self._run.cancellation)
        failure = outcome.error
        if failure is not None and failure.usage is NO_USAGE and not failure.continues_session:
            failure.usage = self._state.spent(attempt.position)  # a continued session counts the tokens again
        if outcome.usage is not NO_USAGE:
            outcome = await self._costs.priced(outcome, attempt.backend, self._model(attempt))
        reply = outcome.reply
        if check is not None and reply is not None and reply.question is None:
            outcome = await self._checked(attempt, check, request, message, outcome, reply)
        attempt.over = True
        if reply is not None and reply.session_id is not None:
            self._session(attempt, reply.session_id, last=True)
        return outcome

    async def _prepare(self, attempt: Attempt) -> ConversationRequest:
        """Render the prompt, read the files and the conversation to continue, and make room for the attempt's files.
        Raises PlaitError and OSError.
        """
        task = attempt.task
        if task.at_most_once and attempt.adopted is None:
            await self._require_stored()
        texts, attachments = _NO_FILES
        if (task.files or task.continues is not None) and sends_files(task, self._state.dag):
            texts, attachments = await read_contents(task, self._state.dag)
        attempt.prompt = clean_text(self._prompt(attempt, texts))
        history = NO_HISTORY if task.continues is None else await self._history(task, task.continues)
        request = self._request(attempt, history, attachments)
        if self._has_earlier_files and attempt.adopted is None and (files := self._files(attempt)) is not None:
            await make_room(files.turn)
        return request

    async def _checked(
        self,
        attempt: Attempt,
        check: AnswerCheck,
        request: ConversationRequest,
        message: str,
        outcome: CallOutcome,
        reply: Reply,
    ) -> CallOutcome:
        """Return `outcome`, whose `reply` answered `message`, with the evidence of the check; or its failure."""
        slot = partial(self._slot_for_judge, attempt)
        checked, evidence, mistake = await check.run(request, reply, self._costs.priced, slot)
        data_json = outcome.data_json if checked.data is reply.data else to_json(checked.data)
        # The turn costs what the answer did, the attempt what the judge did as well.
        checked = replace(checked, messages=(*reply.turn(message), *evidence))
        if mistake is None:
            return replace(outcome, reply=checked, data_json=data_json)
        mistake.usage, mistake.messages = checked.usage, attempt.turn(checked)
        return CallOutcome(error=mistake)

    async def _require_stored(self) -> None:
        """Wait for a store that is away, which then has all changes, as long as STORE_WAITS_S says. Raises BackendError
        if it stays away.
        """
        waits = iter(STORE_WAITS_S)
        while self._run.sink.away:
            if (wait := next(waits, None)) is None:
                raise BackendError(ErrorKind.TRANSIENT, _START_NOT_STORED)
            await self._clock.sleep(wait)

    def _options(self, position: int, name: str) -> ModelOptions:
        """Return the settings of the task for a call of the backend `name`: its own, or a spare."""
        task, own = self._state.dag.tasks[position], self._task_backends[position]
        return task.options if name == own else options_for(task, self._backends[own], self._backends[name])

    def _model(self, attempt: Attempt) -> str | None:
        is_own = attempt.backend == self._task_backends[attempt.position]
        return attempt.task.model if is_own else self._options(attempt.position, attempt.backend).model

    def _time_left(self, attempt: Attempt) -> float | None:
        """Return the seconds until the attempt times out; None without a timeout."""
        limit = attempt.task.timeout
        if limit is None or attempt.adopted is None:
            return limit
        return max(limit - self.earlier_duration(attempt), _ATTACH_SECONDS)

    def earlier_duration(self, attempt: Attempt) -> float:
        """Return the seconds since another process started the adopted attempt; 0 if it has already ended (the end time
        is unknown).
        """
        since = self._state.records[attempt.position].started_at
        if since is None or attempt.adopted is None or attempt.adopted.state == "ended":
            return 0.0
        return max(0.0, self._clock.wall() - parse_time(since))

    def _prompt(self, attempt: Attempt, texts: Sequence[tuple[str, str]]) -> str:
        if (continuation := attempt.continuation) is not None and continuation.answer is not None:
            return continuation.answer.text
        if continuation is not None and continuation.correction is not None:
            return continuation.correction
        prompt = self._state.texts(attempt.task).prompt()
        if not attempt.task.files:
            return prompt
        files = files_of(attempt.task)
        if self._abilities[attempt.backend].takes_files == "paths":
            return with_paths(prompt, files)
        return with_texts(prompt, texts)

    async def _history(self, task: Task, continues: str) -> History:
        """Return the conversation that the task continues, read back from the store if not in memory."""
        if not self._state.is_completed(continues):
            return NO_HISTORY
        history = self._state.history(task)
        if history is None:
            history = await self._recall(continues)
            self._state.keep_conversation(self._state.dag.position(continues), history)
        return history

    async def _recall(self, task_id: str) -> History:
        """Read the conversation of a completed task back from the store. While the store does not answer, wait, and try
        again for the time of STORE_WAITS_S. Raises BackendError of kind transient afterwards, or PlaitError if a
        message is damaged.
        """
        store = self._run.options.store
        if store is None:
            return NO_HISTORY
        waits = iter(STORE_WAITS_S)
        while True:
            try:
                history = await load_history(store, self._run_id, self._state, task_id)
            except (StoreError, BackendError) as error:
                wait = next(waits, None)
                self._run.program_log.warning(
                    "conversation_not_read", task=task_id, error=str(error), next_try_in_s=wait
                )
                if wait is None:
                    problem = f"the conversation of task {task_id!r} cannot be read: {error}"
                    raise BackendError(ErrorKind.TRANSIENT, problem) from error
            else:
                return replace(history, session_id=self._state.results[self._state.dag.position(task_id)].session_id)
            await self._clock.sleep(wait)

    def _request(self, attempt: Attempt, history: History, attachments: tuple[Attachment, ...]) -> ConversationRequest:
        continuation, answer = attempt.continuation, None
        messages = () if history is NO_HISTORY else history.messages  # the property builds a new tuple at each call
        if continuation is not None:
            messages += (*continuation.messages, *continuation.refused)
            if continuation.answer is not None and not continuation.interrupted:
                answer = Answer(continuation.answer.value)
        task = attempt.task
        name = attempt.backend
        files = self._files(attempt) if self._outlive[name] else None
        placement = self._placement(attempt) if name in self._placed else None
        return ConversationRequest(
            session_id=attempt.session_id,
            resume=attempt.resume,
            history=tuple(one for one in messages if not one.content.startswith(EVIDENCE)) if messages else (),
            output_schema=task.output_schema,
            idempotency_key=f"{self._run_id}:{task.id}",
            metadata=task.metadata,
            answer=answer,
            resumes_interrupted=attempt.resumes_interrupted,
            fork_of=attempt.fork_of,
            files=files,
            attaches=attempt.adopted is not None,
            on_output=partial(self.report, attempt),
            on_session=partial(self._session, attempt),
            timeout=self._time_left(attempt),
            continued_later=self._state.times_continued(attempt.position) > 0,
            on_allowance=partial(self._allowance, attempt),
            traceparent=None
            if files is None and placement is None
            else traceparent(self._run_id, task.id, attempt.number),
            options=self._options(attempt.position, name) if self._spares else task.options,
            placement=placement,
            workspace=self._state.texts(task).workspace() if name in self._take_places else None,
            keeps=() if self._folders is None else self._folders.descriptors(attempt.position),
            values=self._values(attempt.position, task) if task.arguments else _NO_VALUES,
            attachments=attachments if self._abilities[name].takes_files == "contents" else (),
        )

    def _values(self, position: int, task: Task) -> Mapping[str, JsonInput]:
        values, file = self._state.texts(task).argument_values(), self._state.dag.rows_file
        if file is None or position >= file.first:
            return values
        return {**values, **answers_of_rows(self._run, file, task)}

    def _placement(self, attempt: Attempt) -> Placement:
        """Return the placement of the attempt on another host."""
        on_place, turn_folder = partial(self._place, attempt), partial(self._turn_folder, attempt)
        run_id, task_id, place = self._run_id, attempt.task.id, attempt.place
        return Placement(
            run_id,
            task_id,
            attempt=attempt.number,
            on_place=on_place,
            on_go=_nothing,
            turn_folder=turn_folder,
            place=place,
            shared=attempt.task.shared,
        )

    async def _place(self, attempt: Attempt, place: str) -> None:
        """Store the host of the attempt. Raises BackendError if a task marked at_most_once cannot be stored now."""
        if attempt.over:  # lost a race; the cancellation arrives here
            await anyio.lowlevel.checkpoint()
        interrupted = attempt.resumes_interrupted
        placed = events.TaskPlaced(self._stamp(), attempt.task.id, attempt.number, place, interrupted)
        await self._run.sink.submit([placed]).wait()
        if attempt.task.at_most_once:
            await self._require_stored()
        attempt.place, attempt.has_begun = place, True  # only now: the host may begin once this method returns
        await anyio.lowlevel.checkpoint()  # an owner that was fenced off is cancelled here

    def _turn_folder(self, attempt: Attempt) -> Path | None:
        files = self._files(attempt)
        return None if files is None else files.turn

    def _files(self, attempt: Attempt) -> Files | None:
        root = self._files_root
        return None if root is None else attempt_files(root, self._run_id, attempt.task.id, attempt.number)

    def _new_session_id(self, name: str) -> str | None:
        try:
            session_id = self._backends[name].new_session_id()
        except Exception as error:
            self._run.program_log.warning("no_session_id", backend=name, error=type(error).__name__)
            return None
        return clean_text(session_id) if isinstance(session_id, str) else None

    def report(self, attempt: Attempt, output: Output) -> None:
        """Tell an output of the attempt to the readers of the run's events."""
        if attempt.over:
            return
        if output.kind == "node":
            node = clean_text(str(output.text))
            self._run.sink.submit([events.NodeStarted(self._stamp(), attempt.task.id, attempt.number, node)])
        else:
            if output.kind in _OF_AN_ANSWER and output.text:
                attempt.accepted()
            usage = output.usage
            if usage is not NO_USAGE:
                usage = self._costs.price(kept_usage(usage), attempt.backend, self._model(attempt))
                self._state.spend(attempt.position, usage)
            if not self._run.feed.has_readers:  # an output is not stored
                return
            event = events.TaskOutput(
                self._stamp(), attempt.task.id, attempt.number, output.kind, str(output.text), usage
            )
            self._run.feed.publish(event)

    def _allowance(self, attempt: Attempt, allowance: Allowance) -> None:
        self._run.scheduler.lower(attempt.position, allowance)
        if allowance.accepted:
            attempt.accepted()
        attempt.exhausted = not allowance.accepted and 0 in (allowance.requests_left, allowance.tokens_left)

    def _session(self, attempt: Attempt, session_id: str, *, last: bool = False) -> None:
        """Record a new, changed or confirmed session id. A call after the end of the attempt, or with an id that is
        not a text, changes nothing. `last` marks the id in the reply, for which confirming a known id is unnecessary.
        """
        new_id = clean_text(session_id) if isinstance(session_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if new_id is None or (attempt.over and not last) or self._state.statuses[attempt.position] in TASK_DONE:
            return
        if new_id == attempt.session_id and (attempt.confirmed or last):
            return
        attempt.session_id, attempt.confirmed = new_id, True
        self._run.sink.submit([events.SessionOpened(self._stamp(), attempt.task.id, attempt.number, new_id)])
