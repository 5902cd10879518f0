"""For tests of plans and programs: a backend with the answers that the test gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ClassVar, Self

from plait.backends.backend_protocol import Backend, Conversation, ConversationRequest
from plait.backends.function_backend import FunctionBackend
from plait.errors import BackendError, ErrorKind, nearest
from plait.json_form import JsonInput, value
from plait.persistence.store_protocol import Store
from plait.runner.domain.dag import group_of
from plait.runner.state.stored_run import stored_run
from plait.task import SETTINGS, ModelOptions

__all__ = ["FakeBackend", "FakeCall"]


@value
class FakeCall:
    """A call of a FakeBackend."""

    task_id: str
    """The id of the task, of a part with its number."""
    prompt: str
    """The prompt as rendered."""
    options: ModelOptions
    """The `model`, `system` and `temperature` of the task."""
    values: Mapping[str, JsonInput]
    """The values that a function would receive."""


class FakeBackend(Backend):
    """Stands in for any backend except that of commands: answers without a model, and notes each call.

    `answers` are by the id of the task; the id of a `for_each` task stands for its parts. An answer is text, a JSON
    value, an exception to raise, or a function of the prompt that returns one of them. `rule` is such a function for
    all other tasks. A task without an answer fails as `invalid_request`. An answer that does not fit the task's
    `output_schema` fails as a model's would.
    """

    adjustable: ClassVar[tuple[str, ...]] = SETTINGS
    needs_prompt: ClassVar[bool] = False
    takes_files: ClassVar[str] = "contents"

    def __init__(self, answers: Mapping[str, Any] | None = None, *, rule: Callable[[str], Any] | None = None) -> None:
        self._answers = dict(answers or {})
        self._rule = rule
        self.calls: list[FakeCall] = []
        """The calls so far."""

    @classmethod
    async def of_run(cls, store: Store, run_id: str, *, rule: Callable[[str], Any] | None = None) -> Self:
        """Return a backend with the answers of the completed tasks of a stored run. Raises RunNotFound, StoreError."""
        run = await stored_run(store, run_id)
        done = [task for task in run.state.dag if run.state.is_completed(task.id)]
        results = {task.id: run.state.results[run.state.dag.position(task.id)] for task in done}
        return cls({task_id: result.value for task_id, result in results.items()}, rule=rule)

    def new_session_id(self) -> str | None:
        """Return None: a conversation is its history."""
        return None

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation of the task."""
        task_id = request.idempotency_key.partition(":")[2]

        async def answer(prompt: str) -> Any:
            self.calls.append(FakeCall(task_id, prompt, request.options, request.values))
            value = self._answer_of(task_id)
            value = value(prompt) if callable(value) else value
            value = await value if inspect.isawaitable(value) else value
            if isinstance(value, BaseException):
                raise value
            return value

        return FunctionBackend(answer).open(replace(request, values={}))

    def _answer_of(self, task_id: str) -> Any:
        for name in (task_id, group_of(task_id, "")):
            if name in self._answers:
                return self._answers[name]
        if self._rule is not None:
            return self._rule
        hint = nearest(task_id, self._answers) or f"; give FakeBackend({{{task_id!r}: ...}}), or a rule for all tasks"
        return BackendError(ErrorKind.INVALID_REQUEST, f"there is no answer for task {task_id!r}{hint}")
