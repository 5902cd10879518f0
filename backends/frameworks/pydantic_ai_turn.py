"""A conversation with an agent of pydantic-ai: one run of the agent for each prompt, on the history so far.

The history is written to the session's file before each request to the model and before each call of tools. An attempt
that resumes an interrupted turn sends no prompt: a history that ends in a request is sent, and a history that ends in
calls of tools lets the agent call the tools.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import CancelScope, current_time
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import ConversationRequest, Output, Reply
from plait.backends.frameworks.pydantic_ai_failures import failure_of, safe_line
from plait.backends.frameworks.pydantic_ai_session import History, Sessions
from plait.backends.frameworks.pydantic_ai_values import (
    check_whole,
    clean_parts,
    from_stored,
    reported,
    settings_for,
    spent,
    stated,
)
from plait.backends.output_schema import Mismatch, Schema, invalid_output, repair_prompt
from plait.backends.threads import check_answer, read_answer
from plait.backends.turn_cancellation import cancel_requested
from plait.backends.whole_answer import whole_answer
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage

_GOES_ON = frozenset({ErrorKind.TRANSIENT, ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED, ErrorKind.TIMEOUT,
                      ErrorKind.UNEXPECTED})  # fmt: skip
"""Kinds of errors after which the next attempt goes on from the last finished step. After others it starts over."""
_EARLY = 0.5
"""Seconds (at most a tenth of the timeout) by which a turn ends before the task's timeout, so that its usage is
recorded, and the next attempt goes on from its last finished step.
"""
_LOST = "the history of session {} is not on this machine any more"
_CANCELLED = "the agent stopped between two steps: the run is being cancelled"


class AgentConversation:
    """A conversation with `agent`, which also gets `toolsets`. Without `sessions`, the history is the request's.

    A turn that still goes on at `ends`, a time of anyio's clock, fails with kind `timeout`.
    """

    def __init__(
        self,
        agent: Any,
        toolsets: Sequence[Any],
        deps: Any,
        request: ConversationRequest,
        sessions: Sessions | None,
        ends: float,
    ) -> None:
        self._agent = agent
        self._toolsets = toolsets
        self._deps = deps
        self._request = request
        self._sessions = sessions
        self._ends = ends
        self._history: History | None = None
        """The history so far; None before the first turn."""
        self._noted: Sequence[ModelMessage] = ()
        """The messages before the current step, as written last."""
        self._thoughts: list[str] = []
        """The thoughts in the texts of this turn."""
        self._is_reported = False
        """Whether `on_session` was called in this turn."""

    @property
    def session_id(self) -> str | None:
        return self._request.session_id

    async def send(self, prompt: str) -> Reply:
        schema = None if self._request.output_schema is None else Schema(self._request.output_schema)
        asked: str | None = clean_text(prompt)
        if self._history is None:
            self._history = await self._recalled()
            if self._request.resumes_interrupted and self._history.messages and self._sessions is not None:
                asked = None
        if asked is not None:
            self._history = _begun_after(self._history.finished)
        self._is_reported = False
        self._thoughts.clear()
        try:
            with CancelScope(deadline=self._ends):
                reply = await self._turn(asked, schema)
                if not self._thoughts:
                    return reply
                said = Message("assistant", reply.text, reply.usage, "\n\n".join(self._thoughts))
                return replace(reply, messages=(Message("user", clean_text(prompt)), said))
            raise BackendError(ErrorKind.TIMEOUT, f"no answer within the task's timeout of {self._request.timeout:g} s")
        except Exception as error:
            failure = await self._failed(failure_of(error))
            if failure.messages:  # the text that came, after the prompt that it answers
                failure.messages = (Message("user", clean_text(prompt)), *failure.messages)
            raise failure from error

    async def _recalled(self) -> History:
        """Return the history to go on from. Raises BackendError (session_lost) if the history is gone."""
        request, kept = self._request, None
        source = request.session_id if request.resume else request.fork_of
        if source is not None and self._sessions is not None:
            kept = await run_sync(self._sessions.load, source)
            if kept is None and (request.resumes_interrupted or not request.history):
                raise BackendError(ErrorKind.SESSION_LOST, _LOST.format(source))
        if kept is not None:
            return kept if request.resumes_interrupted else _begun_after(kept.finished)
        return _begun_after(from_stored(request.history))

    async def _turn(self, prompt: str | None, schema: Schema | None) -> Reply:
        history = self._known()
        answer = history.answer if prompt is None else None
        if answer is None:
            answer = await self._answered(prompt, schema)
        history = self._known()
        usage = spent(history.messages[history.counted :])
        self._history = replace(history, answer=answer)
        with CancelScope(shield=True):  # an answer that came in time is no timeout
            await self._save()
        return Reply(*answer, self.session_id, usage)

    async def _answered(self, prompt: str | None, schema: Schema | None) -> tuple[str, JsonValue]:
        output = await self._run(prompt, schema)
        if schema is None:
            text, data = stated(output)
            return whole_answer(text, (), needs_text=data is None).content, data
        try:
            return await _checked(output, schema)
        except Mismatch as mismatch:
            problem = repair_prompt(mismatch, schema)
        self._request.on_output(Output("notice", "the answer does not fit its schema; asking once more"))
        try:
            return await _checked(await self._run(problem, schema), schema)
        except Mismatch as mismatch:
            raise invalid_output(mismatch) from None

    async def _run(self, prompt: str | None, schema: Schema | None) -> Any:
        """Run the agent once, and return the output."""
        history = self._known()
        options = self._options(schema)
        if prompt is not None and "output_type" not in options and schema is not None and self._is_textual:
            prompt = f"{prompt}\n\n{_in_words(schema)}"
        async with self._agent.iter(prompt, message_history=list(history.messages) or None, **options) as run:
            async for node in run:
                if hasattr(node, "request"):
                    await self._note([*run.all_messages(), node.request])
                elif hasattr(node, "model_response"):
                    if thoughts := clean_parts(node.model_response):
                        self._thoughts.append(thoughts)
                    self._remember(run.all_messages())
                    check_whole(node.model_response)
                    await self._note(run.all_messages())
                else:
                    continue
                if cancel_requested():
                    raise BackendError(ErrorKind.UNEXPECTED, _CANCELLED)
                try:
                    await self._step(node, run.ctx)
                finally:
                    self._remember(run.all_messages())
            output = run.result.output
            self._remember(run.result.all_messages())
            return output

    async def _step(self, node: Any, context: Any) -> None:
        """Send the request, or call the tools, of a node of the run."""
        async with node.stream(context) as events:
            async for event in events:
                if (output := reported(event)) is not None:
                    self._request.on_output(output)

    def _options(self, schema: Schema | None) -> dict[str, Any]:
        options: dict[str, Any] = {"deps": self._deps, "toolsets": self._toolsets}
        if settings := settings_for(self._agent.model):
            options["model_settings"] = settings
        if schema is not None and self._is_textual and (output_type := _output_type(schema)) is not None:
            options["output_type"] = output_type
        return options

    @property
    def _is_textual(self) -> bool:
        return self._agent.output_type is str

    def _known(self) -> History:
        assert self._history is not None
        return self._history

    def _remember(self, messages: Sequence[ModelMessage]) -> None:
        self._history = replace(self._known(), messages=list(messages))

    async def _note(self, messages: Sequence[ModelMessage]) -> None:
        """Write the history before the next step, and report the session."""
        self._remember(messages)
        self._noted = messages
        if await self._save() and not self._is_reported and self.session_id is not None:
            self._is_reported = True
            self._request.on_session(self.session_id)

    async def _save(self) -> bool:
        """Write the history to the session's file, if there are files. Return whether it is written."""
        if self._sessions is None or self.session_id is None:
            return False
        try:
            await run_sync(self._sessions.save, self.session_id, self._known())
        except (OSError, ValueError) as error:
            # The paid answer counts for more than a copy of the history.
            text = f"the history cannot be written; the stored text is used instead: {safe_line(str(error), 200)}"
            self._request.on_output(Output("notice", text))
            return False
        return True

    async def _failed(self, failure: BackendError) -> BackendError:
        """Complete the error of the turn with its usage, and with whether the next attempt goes on from here."""
        if self._history is None:
            return failure
        history = self._known()
        failure.usage = spent(history.messages[history.counted :])
        if self._is_reported and failure.kind in _GOES_ON:
            # What the failed step left, such as half an answer, is no place to go on from.
            self._history = replace(history, messages=self._noted, counted=len(self._noted))
            with CancelScope(shield=True):
                failure.continues_session = await self._save()
        return failure


def end_of_turn(request: ConversationRequest) -> float:
    """Return the time of anyio's clock at which a turn of `request`, opened now, has to end."""
    limit = request.timeout
    return math.inf if limit is None else current_time() + limit - min(_EARLY, limit / 10)


def _begun_after(finished: Sequence[ModelMessage]) -> History:
    """Return a history with an empty turn at its end."""
    return History(finished, len(finished), len(finished))


async def _checked(output: Any, schema: Schema) -> tuple[str, JsonValue]:
    """Return the text and the data of `output`. Raises Mismatch if the output does not fit."""
    text, data = stated(output)
    return text, await (read_answer(schema, text) if isinstance(output, str) else check_answer(schema, data))


def _output_type(schema: Schema) -> Any:
    """Return pydantic-ai's output type for a schema; None if the library takes no such schema."""
    from pydantic_ai import StructuredDict  # noqa: PLC0415
    from pydantic_ai.exceptions import UserError  # noqa: PLC0415

    try:
        return StructuredDict(json.loads(schema.text))
    except UserError:  # not an object, or a schema that refers to itself
        return None


def _in_words(schema: Schema) -> str:
    return f"Answer with nothing but JSON that fits this JSON Schema: {schema.text}"
