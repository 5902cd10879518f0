"""What requests over HTTP hold, and what answers hold beside the views. Published in /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from plait.json_form import JsonValue
from plait.runner.client.answer_task import How
from plait.runner.client.create_run import MOST_KEY_CHARACTERS
from plait.runner.views.view_models import QuestionView, RunView
from plait.statuses import RunStatus

MOST_SEQ = 2**53


MOST_LEVELS = 500
"""Depth of nesting that every supported version of Python can read and write."""


def _json(value: JsonValue) -> JsonValue:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for one in level for inner in _within(one)]
    if level:
        raise ValueError(f"is nested deeper than {MOST_LEVELS} levels")
    json.dumps(value, allow_nan=False)
    return value


def _within(value: JsonValue) -> Iterable[JsonValue]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


Json: TypeAlias = Annotated[Any, AfterValidator(_json)]
"""Any JSON value. Python's reader would accept NaN as well."""


class _Received(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Sent(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class NewRun(_Received):
    """A run to create and start."""

    plan: dict[str, Any]
    """A plan as in a plan file, without `backends`, `concurrency` and inputs that are files."""
    inputs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of the plan's inputs, in place of the defaults."""
    key: Annotated[str, Field(min_length=1, max_length=MOST_KEY_CHARACTERS)] | None = None
    """Key of the request: the same request with the same key creates no second run."""


class ResumeBody(_Received):
    """How a run continues."""

    answers: dict[str, Json] = Field(default_factory=dict[str, Any])
    """Answers to questions of waiting tasks, by task id."""
    retry_failed: StrictBool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class AnswerBody(_Received):
    """The answer to the question of a task."""

    value: Json
    """A value that fits the schema of the question: text if the schema is null, any value if the schema is empty."""
    attempt: Annotated[int, Field(ge=1, le=MOST_SEQ)] | None = None
    """The attempt that asked (`attempts` of the task). Without it, the answer is for the present question."""


class SettleBody(_Received):
    """The decision of a person about a task that waits: see `plait answer`."""

    how: How
    """`done` completes the task with `text` as its result, `again` runs the task again, `fail` fails it for the reason
    `text`. `again` is for a task marked at_most_once that was interrupted.
    """
    text: str = ""


class ContinueBody(_Received):
    """One more message in the conversation of a task."""

    message: Annotated[str, Field(min_length=1, pattern=r"\S")]
    """The message, which is not blank."""


class SignInBody(_Received):
    """The sign-in of a browser."""

    code: str
    """The code in the address that the command opened."""


class LiveQuery(_Received):
    """The view of a run."""

    task: str | None = None
    """The task to send in full."""


class RowsQuery(_Received):
    """The results to write to a file."""

    format: Literal["csv", "jsonl"] = "csv"
    group: str | None = None
    """The task whose parts are written; without it all tasks."""


class PreviewQuery(_Received):
    """The resume to preview."""

    retry_failed: bool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class ListQuery(_Received):
    """Which runs to list."""

    limit: int = Field(default=50, ge=1, le=1000)
    """Number of runs at most."""
    offset: int = Field(default=0, ge=0, le=10_000)
    """Number of newer runs to leave out."""
    status: list[RunStatus] = Field(default_factory=list[RunStatus])
    """Only runs in one of these statuses; may be given more than once."""
    name: str | None = None
    """Only runs with exactly this name."""
    search: str = ""
    """Only runs with this text in their id or name, in any case."""


class EventsQuery(_Received):
    """Which events to stream."""

    after: int = Field(default=0, ge=0, le=MOST_SEQ)
    """Stream only events with a higher number."""
    text: bool = False
    """Also stream the texts of answers while they are written, of attempts that execute on this server."""


class RunStatusBody(_Sent):
    """A run and its status."""

    run_id: str
    status: RunStatus


class AnswerResult(RunStatusBody):
    """A run after an answer."""

    taken: bool
    """True if the task has the answer; false if the answer is stored for the process that runs the run."""


class QuestionList(_Sent):
    """The tasks of all runs that wait for a person, those of the newest run first."""

    questions: list[QuestionView]


class RunList(_Sent):
    """Runs, newest first."""

    runs: list[RunView]


class ErrorFacts(_Sent):
    kind: str
    """One word for programs, such as run_not_found."""
    message: str
    """The cause and the remedy, for people."""


class ErrorBody(_Sent):
    """The shape of every error."""

    error: ErrorFacts
