"""`Task`: one task as written, stored and run, with its files, retries and limits: frozen values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, field, fields, replace
from enum import StrEnum
from functools import cache
from operator import attrgetter, is_
from pathlib import PurePath
from typing import Any, Literal, NoReturn, Protocol, Self, TypeAlias, cast

from plait.errors import DAGError, ErrorKind, Problem, nearest
from plait.json_form import JsonInput, JsonValue, to_json, value
from plait.statuses import TaskStatus


class FailureMode(StrEnum):
    """The effect of a task's failure on its dependents."""

    HARD = "hard"
    """Dependents stay blocked. The default."""
    SOFT = "soft"
    """Dependents run; the name of the failed task renders as an empty text. The run still counts as failed."""
    SKIP = "skip"
    """The task ends as *skipped*, as if completed with an empty result, and does not fail the run."""


Join: TypeAlias = Literal["all", "any", "done"]
"""When a task starts: after all of its dependencies, after the first that completes, or once all have ended somehow."""
Mode: TypeAlias = FailureMode | Literal["hard", "soft", "skip"]
"""Accepted spellings of a failure mode; stored as `FailureMode`."""
DEFAULT_RETRY_ON: frozenset[str] = frozenset(
    {"transient", "rate_limited", "overloaded", "timeout", "crashed", "invalid_output"}
)
"""Error kinds (`backends.ErrorKind` values) that may disappear with a second attempt. Other kinds fail the task at
once.
"""
NEVER_RETRIED: frozenset[str] = frozenset({"unavailable"})
"""Error kinds that persist until a person acts. Never retried, whatever the retry policy."""


@value
class Retry:
    """The retry policy for failed attempts.

    The wait before attempt n+1 is random, between 0 and min(`max_delay`, `base_delay` * 2**(n-1)) seconds (exponential
    backoff, full jitter). A wait that the server asks for is never shortened, and may last for weeks.

    A rate limit or an overload counts as no attempt, until a task has met 20 overloads, or 20 rate limits while other
    tasks completed. With `attempts` 1, either fails the task at once. A backend that is unavailable on this machine is
    never retried.

    Raises ValueError for unknown error kinds and invalid numbers.
    """

    attempts: int = 3
    """The maximum number of attempts, including the first."""
    base_delay: float = 1.0
    """The initial backoff limit, in seconds."""
    max_delay: float = 60.0
    """The maximum backoff, in seconds, unless the server asks for a longer wait."""
    on: Collection[str] = DEFAULT_RETRY_ON
    """The error kinds to retry: any collection of `ErrorKind` values, stored as a frozenset."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"retry attempts must be at least 1, not {self.attempts}; 1 means no retry")
        if not (self.base_delay >= 0 and self.max_delay >= 0):
            raise ValueError(f"retry delays must be at least 0 s, not {self.base_delay} and {self.max_delay}")
        if max(self.base_delay, self.max_delay) == float("inf"):
            raise ValueError("retry delays must be finite numbers of seconds")
        object.__setattr__(self, "on", _kinds(self.on))


def _kinds(words: Collection[str]) -> frozenset[str]:
    if isinstance(words, str):
        raise ValueError(f"retry on must be a collection of error kinds, not one text; write [{words!r}]")
    kind_names = [kind.value for kind in ErrorKind]
    kinds = tuple(words)
    for kind in kinds:
        if kind not in kind_names:
            raise ValueError(f"retry on: unknown error kind {kind!r}{nearest(str(kind), kind_names)}")
    return frozenset(ErrorKind(kind).value for kind in kinds)


DEFAULT_RETRY = Retry()


MAX_REPEAT = 100
"""The maximum number of samples of a task."""
COMMAND_BACKEND = "command"
"""The name of the backend of tasks that run a command and name no backend."""


Codes: TypeAlias = Sequence[int] | Literal["any"]
"""The exit codes with which a command completes its task."""
SUCCESS: Codes = (0,)


def command_text(words: Sequence[str], stdin: str, codes: Codes = SUCCESS) -> str:
    """Return the message that starts a command: its words as JSON in the first line, with the exit codes that complete
    the task if another code than 0 does, then its standard input.
    """
    first = list(words) if codes == SUCCESS else {"run": list(words), "codes": codes}
    return json.dumps(first, ensure_ascii=False) + (f"\n{stdin}" if stdin else "")


def read_command(message: str) -> tuple[list[str], str, Codes]:
    """Return the words, the standard input and the exit codes in a message by `command_text`. Raises ValueError for
    another message.
    """
    first, _, stdin = message.partition("\n")
    words, codes = json.loads(first), SUCCESS
    if isinstance(words, dict):
        words, codes = cast("dict[str, Any]", words).get("run"), cast("dict[str, Any]", words).get("codes", SUCCESS)
    if not isinstance(words, list) or not words:
        raise ValueError("the first line is no list of words")
    return list(map(str, cast("list[object]", words))), stdin, codes


def commands_of(part: object) -> dict[str, list[str]]:
    """Return the words of the command and of the check of a task as written in a plan file, whatever its shape, by
    their key: `run`, `check.run`; and those of the tasks of its loop, such as `loop.tasks[0].run`.
    """
    commands: dict[str, list[str]] = {}
    if isinstance(part, dict):
        task = cast("dict[str, object]", part)
        if isinstance(words := task.get("run"), list) and words:
            commands["run"] = list(map(str, cast("list[object]", words)))
        commands |= {f"check.{key}": words for key, words in commands_of(task.get("check")).items()}
        for where, inner in tasks_within(task):
            commands |= {f"{where}.{key}": words for key, words in commands_of(inner).items()}
    return commands


def tasks_within(part: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the tasks of the loop of a task as written, whatever its shape, each with its key: `loop.tasks[0]`."""
    loop = part.get("loop")
    tasks = cast("dict[str, object]", loop).get("tasks") if isinstance(loop, dict) else None
    for n, task in enumerate(cast("list[object]", tasks) if isinstance(tasks, list) else []):
        yield f"loop.tasks[{n}]", task


def is_allowed(run: Sequence[str], allows: Iterable[Sequence[str]]) -> bool:
    """Return whether a command begins with the words of one of those that are allowed."""
    return any(begin and tuple(run[: len(begin)]) == tuple(begin) for begin in allows)


def command_mismatch(backend: str, run: Sequence[str], *, is_command: bool) -> str | None:
    """Return the message about a command for a backend that runs none, or a prompt for one that only runs commands."""
    if bool(run) == is_command:
        return None
    if is_command:
        return f"backend {backend!r} runs commands alone; give the task one as `run`, or name another backend"
    return f"backend {backend!r} runs no commands; name one of kind command, or leave `backend` out"


def command_not_allowed(run: Sequence[str], backend: str | None) -> str:
    """Return the message about a command that an added or posted task may not run."""
    return (
        f"the command {' '.join(run)[:100]!r} is not allowed for tasks from outside of the plan file; the owner of the "
        f"backend {backend!r} can name the beginning of its words under `allows`"
    )


NO_PROMPT = "there is no prompt; write one, or name a function that needs none as the `backend`"
"""The message about a prompt that is missing or blank."""


def lacks_prompt(prompt: str | None, backend: str | None, files: Sequence[object] = ()) -> bool:
    """Return whether nothing would be asked: the prompt is blank, there are no files, and no `backend`, which may be a
    function, is named.
    """
    return backend is None and not files and (prompt is None or (isinstance(prompt, str) and not prompt.strip()))  # pyright: ignore[reportUnnecessaryIsInstance]


@value
class ModelOptions:
    """Settings of the model for a single task. None stands for the backend's own setting."""

    model: str | None = None
    """Name of the model."""
    system: str | None = None
    """System prompt, in place of the backend's own."""
    temperature: float | None = None
    """Sampling temperature, from 0."""

    def over(self, own: ModelOptions) -> ModelOptions:
        """Return these settings, completed by the backend's `own`."""
        if self is OWN_OPTIONS:
            return own
        return ModelOptions(
            own.model if self.model is None else self.model,
            own.system if self.system is None else self.system,
            own.temperature if self.temperature is None else self.temperature,
        )


MODEL_SETTINGS = tuple(one.name for one in fields(ModelOptions))
"""The names of the settings of the model that a task may have."""
OWN_OPTIONS = ModelOptions()
"""The options of a task that leaves all settings to its backend."""


SETTINGS = (*MODEL_SETTINGS, "cwd", "env", "shared")
"""The names of the settings of its backend that a task may have in place of the backend's own."""


def given_settings(task: object) -> list[str]:
    """Return the names of the settings that a task has, a `Task` or one as written in a plan file."""
    settings = ((name, getattr(task, name)) for name in SETTINGS)
    return [name for name, setting in settings if not (setting is None or setting is False or setting == {})]


@value
class Workspace:
    """Where the program of a task works, as rendered (`Task.cwd`, `Task.env`)."""

    cwd: str = "."
    """The folder as far as it is written out, relative to that of the backend."""
    below: str | None = None
    """The rest of the path, in which values stand: it stays below `cwd`. None without values."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further environment variables."""


MAX_FILE_BYTES = 20 * 2**20
"""The maximum size of a file of a task."""
MAX_FILES = 100
"""The maximum number of files of a task."""
_MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".pdf": "application/pdf",
}
TEXT = "text/plain"


@value
class TaskFile:
    """A file of a task, as it was when the run was made."""

    path: str
    """The absolute path."""
    sha256: str
    """The digest of the contents, in hexadecimal."""

    @property
    def name(self) -> str:
        """The name without the folder."""
        return PurePath(self.path).name

    @property
    def media_type(self) -> str:
        """The type of an image or a PDF, by the suffix; TEXT for all other files."""
        return media_type(self.path)


def media_type(path: str) -> str:
    """Return the type of the image or the PDF at `path`, by the suffix; TEXT for all other files."""
    return _MEDIA.get(PurePath(path).suffix.lower(), TEXT)


def takes_no_such_file(backend: str, name: str, kind: str) -> str:
    """Return the message about an image or a PDF for a `backend` that takes text alone."""
    return f"backend {backend!r} takes text files only, not {name} ({kind}); leave the file out"


@value
class Check:
    """What an answer has to pass before a task is done: all that is named here, in this order. Raises ValueError if
    nothing is, and for `tries` below 1.
    """

    run: Sequence[str] = ()
    """A command: the program and its arguments, as in `Task.run`, in the folder of the backend `command`. The answer is
    its standard input.
    """
    tries: int = 3
    """The number of answers that are checked, the first one included. After a failed check, the reason is the next
    message of the conversation; after the last, the task fails.
    """
    output_schema: Mapping[str, object] | None = None
    """A JSON Schema for the JSON in the answer, which then becomes the `data` of the result."""
    passes: str | None = None
    """A condition as in `Task.when`, in which `{{ answer }}` is the answer."""
    judge: str | None = None
    """A prompt with `{{ answer }}` for a model or a function that says `{"ok": ..., "reason": ...}`."""
    backend: str | None = None
    """The name of the judge's backend; None for that of the task."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", tuple(self.run))
        if not (self.run or self.output_schema or self.passes or self.judge):
            raise ValueError("a check has a command, an output_schema, a condition (passes) or a judge; name one")
        if self.tries < 1:
            raise ValueError(f"a check has at least 1 try, not {self.tries}")
        if self.backend is not None and not self.judge:
            raise ValueError("the backend of a check is that of its judge; add `judge`, or leave `backend` out")

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that the check needs beside that of the task."""
        return (*((COMMAND_BACKEND,) if self.run else ()), *((self.backend,) if self.backend else ()))


PREVIOUS = "previous"
"""The name of the results of the previous round, in the values (`with`) that a loop gives to its tasks."""


@value
class Call:
    """The tasks of a plan that a task stands for. They become tasks of the run once the task could start, and the task
    ends with the last of them: `report.draft` is the task `draft` of the plan that `report` calls.

    A loop adds them again, round by round, until a condition is true: `fix.1.test`, `fix.2.test`.
    """

    tasks: Sequence[Task]
    """The tasks of the plan. One with a `for_each` over an input becomes a task for each element."""
    values: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    """Values for the inputs of the plan, by name (`with`). Texts are templates, and a text that is one name, such as
    `{{ item }}`, is the value itself.
    """
    until: str | None = None
    """For a loop: the condition on the results of a round, as in `when`, with which the loop completes."""
    max: int = 1
    """The number of rounds after which the loop fails."""
    inputs: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    """The values of the inputs that are not among `values`."""
    returns: JsonInput = None
    """The result, as `returns` of a plan; None for the results of the tasks by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))

    @property
    def is_loop(self) -> bool:
        """Whether the tasks are added again and again, until a condition is true."""
        return self.until is not None

    @property
    def texts(self) -> tuple[str, ...]:
        """The templates of the values."""
        return tuple(_texts_in(self.values))

    @property
    def leaves(self) -> Iterator[Task]:
        """The tasks of the plan, with those of the plans that they call in place of the calling ones."""
        for task in self.tasks:
            yield from (task,) if task.call is None else task.call.leaves

    @property
    def backends(self) -> tuple[str | None, ...]:
        """The names of the backends of the tasks; None for the default backend of the run."""
        names: list[str | None] = []
        for task in self.leaves:
            if task.backend is not None or task.continues is None:
                names.append(task.backend)
            names += () if task.check is None else task.check.backends
            names += [task.vote.backend] if isinstance(task.vote, Best) and task.vote.backend else []
        return tuple(dict.fromkeys(names))


def _texts_in(value: JsonInput) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(inner)


@value
class Best:
    """A vote by a judge: it reads the answers of all samples, numbered, and names the best. Raises ValueError without a
    prompt.
    """

    prompt: str
    """What makes an answer good: a template as `Task.prompt`. The numbered answers are added behind it."""
    backend: str | None = None
    """The name of the judge's backend; None for that of the task."""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("the judge of a vote needs a prompt that says what makes an answer good")


class OutputModel(Protocol):
    """A pydantic model, `type[BaseModel]`: plait needs two of its methods."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the model."""
        ...

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Return the instance for a JSON value."""
        ...


@cache
def _schema_of(output: type[OutputModel]) -> Mapping[str, object]:
    """Return the schema, one object for all tasks with the model."""
    return output.model_json_schema()


class _Nothing(dict[str, Any]):
    """An empty mapping that stays empty, since the tasks of a run share it: each of their own would take 64 bytes."""

    def _refuse(self, *_args: Any, **_named: Any) -> NoReturn:
        raise TypeError("the fields of a task are not changed in place; make another with dataclasses.replace")

    __setitem__ = __ior__ = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]


_NOTHING = _Nothing()


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


@value
class Task:
    """A subtask: a prompt for a backend, run once all tasks in `depends_on` are done.

    Raises ValueError for a blank prompt without files and without a `backend`, which may be a function.
    """

    id: str
    """1 to 64 letters, digits, `.`, `_` or `-`, not starting with a dot."""
    prompt: str = ""
    """A template: `{{ other }}` is the result of the upstream task `other`. See docs/guides/plan-files.md."""
    depends_on: Sequence[str] = ()
    """The ids of the tasks to be done before: a list, or a single id."""
    backend: str | None = None
    """The name of a backend of the runner. None: the backend of the task in `continues`, or the default backend."""
    continues: str | None = None
    """The id of a task whose conversation to continue. Implies a dependency."""
    failure_mode: Mode = FailureMode.HARD
    """The effect of a failure on the dependents."""
    retry: Retry | int = DEFAULT_RETRY
    """The retry policy, or the number of retries: 3 allows four attempts."""
    timeout: float | None = None
    """The time limit of an attempt in seconds; None for no limit."""
    output_schema: Mapping[str, object] | None = None
    """A JSON Schema for the answer, such as the schema of a pydantic model. The result then has `data`."""
    weight: float = 1.0
    """The expected relative duration; long paths start first."""
    item: JsonInput = None
    """The value of `{{ item }}`. Filled by `for_each`."""
    aliases: Mapping[str, str | Sequence[str]] = field(default_factory=_nothing)
    """Further names in the prompt, each for the result of a task or for the list of several. Filled by `for_each`."""
    metadata: Mapping[str, JsonInput] = field(default_factory=_nothing)
    """JSON values for display. Only policies read the values, such as `role`."""
    at_most_once: bool = False
    """True for a task whose effects must not happen twice: it is never retried, and after a crash during its attempt a
    person decides (see `answer`).
    """
    for_each: str | None = None
    """The id of a task whose result is a list, or an object with exactly one list among its fields.

    Once that task is done, this task becomes a part for each element (`id.1`, `id.2`, ...), with the element as
    `{{ item }}`. Its own result is the list of the parts' results. Tasks with the same `for_each` that depend on each
    other are paired: `other.2` waits for `id.2`, and in its prompt `{{ id }}` is the result of `id.2`.
    """
    adds_tasks: bool = False
    """True if the answer, in the shape of a plan file's `tasks`, is to be added to the run."""
    model: str | None = None
    """The name of the model; None for the backend's own."""
    system: str | None = None
    """The system prompt, a text without templates, in place of the backend's own; None for the backend's own."""
    temperature: float | None = None
    """The sampling temperature, from 0; None for the backend's own."""
    files: Sequence[str | TaskFile] = ()
    """Paths of files that the prompt comes with: a list, or a single path. Text stands before the prompt, images and
    PDFs are sent as the API takes them, and agents get the paths. The contents are those at the start of the run.
    """
    cache: bool | float = False
    """True to take the answer of an earlier task with the same prompt, settings and conversation from any run of the
    store, without a call; a number is the maximum age of the answer in seconds. For backends with an `answer_key`.
    """
    when: str | None = None
    """A condition, such as `{{ review.ok }} == false`. If it is false once the dependencies are done, the task is
    skipped, and dependents continue as after an empty result. With `for_each`, the condition of each part counts.
    """
    run: Sequence[str] = ()
    """A command in place of a model: the program and its arguments, each word a template; the prompt is the standard
    input. Names stand behind `--`, or in an option such as `--file={{ path }}`. The result has `code`, `stdout`,
    `stderr`, and with an `output_schema` `data`, the JSON in `stdout`.
    """
    cwd: str | None = None
    """The folder in which the command or the agent works, relative to that of its backend: a template. What a name
    stands for stays below the folder that is written out before it. None: the folder of the task in `continues`, or
    of the backend.
    """
    env: Mapping[str, str] = field(default_factory=_nothing)
    """Further environment variables of the command or the agent, by name: templates. They are stored with the task."""
    shared: bool = False
    """True for a command or an agent that may work in a folder while another one writes there."""
    check: Check | None = None
    """What each answer has to pass before the task is completed."""
    join: Join = "all"
    """When the task starts. all: once all dependencies are done. any: once the first has completed; if none does, as
    with all. done: once all have ended, whatever happened, those that cannot start any more included. The prompt has
    an empty text for a result that is not there when the task starts.
    """
    race: bool = False
    """With `join` any: the first completed dependency cancels the others, and the tasks that only serve them."""
    codes: Codes = SUCCESS
    """The exit codes with which a command completes the task: numbers, or `any`."""
    call: Call | None = None
    """A plan in place of a prompt: its tasks become tasks of the run, and its `returns` is the result."""
    inputs: Mapping[str, JsonInput] = field(default_factory=_nothing)
    """Values for names in the prompt, in place of the inputs of the run. Filled by `call`."""
    repeat: int = 1
    """The number of samples: tasks `id.1`, `id.2`, ... with the same prompt. See `vote`."""
    vote: Literal["all", "majority", "best"] | Best | None = None
    """The answer of a task with `repeat`. all, the default: the list of the answers. majority: the answer that most
    samples gave; of several the first. `Best`: the one that a judge, the task `id.judge`, prefers. A stored task has
    `best` in place of a `Best`.
    """
    output: type[OutputModel] | None = None
    """A pydantic model for the answer, in place of an `output_schema`: the `value` of the result is then an instance.
    Known to this process only: the store holds the schema and the data.
    """
    max_cost: float | None = None
    """What the task may cost in all its attempts, in US dollars; None for no limit. A call that might cost more than
    what is left is not made: the task asks for a higher limit. With `for_each` or `repeat` it holds for each part.
    """
    arguments: Sequence[str] = ()
    """The names of tasks, inputs and the `item` whose values the function of the backend receives beside the prompt.
    Filled from the names of its parameters when a run is made.
    """

    def __post_init__(self) -> None:
        if self.run:
            object.__setattr__(self, "run", tuple(self.run))
            if self.backend is None:
                object.__setattr__(self, "backend", COMMAND_BACKEND)
        if self.codes != "any":
            object.__setattr__(self, "codes", tuple(self.codes))
        if self.call is not None and self.backend is None:  # it calls none itself, and its tasks need this one
            object.__setattr__(self, "backend", next(iter(self.call.backends), None))
        if self.call is None and lacks_prompt(self.prompt, self.backend, self.files):
            raise ValueError(f"task {self.id!r}: {NO_PROMPT}")
        # Convert a plain text such as "soft" to the enum.
        if type(self.failure_mode) is not FailureMode:
            object.__setattr__(self, "failure_mode", FailureMode(self.failure_mode))
        if self.output is not None:
            if self.output_schema not in (None, schema := _schema_of(self.output)):
                raise ValueError(f"task {self.id!r} has both output and output_schema; leave one of them out")
            object.__setattr__(self, "output_schema", schema)
        if self.arguments:
            object.__setattr__(self, "arguments", tuple(self.arguments))
        if isinstance(self.depends_on, str):
            object.__setattr__(self, "depends_on", (self.depends_on,))
        if isinstance(self.files, str):
            object.__setattr__(self, "files", (self.files,))
        if type(self.retry) is int and self.retry >= 0:  # the check of the DAG reports any other number
            object.__setattr__(self, "retry", Retry(attempts=self.retry + 1))

    @property
    def retry_policy(self) -> Retry:
        """The retry policy as a `Retry`. Raises TypeError for a value that the check of the DAG refuses."""
        if not isinstance(self.retry, Retry):
            raise TypeError(f"retry must be a Retry or a number of retries from 0 up, not {self.retry!r}")
        return self.retry

    @property
    def options(self) -> ModelOptions:
        """The settings of the model for this task."""
        if self.model is None and self.system is None and self.temperature is None:
            return OWN_OPTIONS
        return ModelOptions(self.model, self.system, self.temperature)

    @property
    def gathers(self) -> bool:
        """Whether the task calls no backend itself: it gathers the results of its parts, its plan or its samples."""
        return self.for_each is not None or self.call is not None or self.vote is not None

    @property
    def calls(self) -> bool:
        """Whether the task adds the tasks of a plan: not by way of parts that do."""
        return self.call is not None and self.for_each is None

    @property
    def texts(self) -> tuple[str, ...]:
        """The templates of the prompt, the command, the check, the folder and the values for a called plan."""
        check, call = () if self.check is None else self.check.run, () if self.call is None else self.call.texts
        folder = () if self.cwd is None else (self.cwd,)
        return (self.prompt, *self.run, *check, *call, *folder, *self.env.values())

    @property
    def upstream(self) -> tuple[str, ...]:
        """The ids of all tasks to be done before: `depends_on`, then `continues` and `for_each` if not already
        listed.
        """
        if self.continues is None and self.for_each is None:
            return tuple(self.depends_on)
        further = dict.fromkeys((self.continues, self.for_each))
        return (*self.depends_on, *(name for name in further if name is not None and name not in self.depends_on))


_OPTIONS = [one for one in fields(Task) if one.name not in {"id", "prompt", "depends_on", "backend", "output"}]
_DEFAULTS = tuple(one.default if one.default_factory is MISSING else one.default_factory() for one in _OPTIONS)
_options_of = attrgetter(*(one.name for one in _OPTIONS))
_shared_of = attrgetter(*(one.name for one in _OPTIONS if one.name not in {"item", "aliases"}))


def write_spec(task: Task) -> str:
    """Return the JSON in which a task is stored: its options that differ from the defaults. Most tasks of a large run
    share the empty spec.
    """
    options = _options_of(task)
    return "{}" if options == _DEFAULTS else to_json(_spec_of(task, options))


def write_specs(tasks: Iterable[Task], items: Mapping[int, str]) -> Iterator[str]:
    """Yield what `write_spec` returns for each task. The parts of a list share all but the item and the aliases, which
    is written once; `items` holds the JSON of the items by their `id`.
    """
    last: tuple[Any, ...] = ()
    before = after = ""
    for task in tasks:
        if (item := items.get(id(task.item))) is None:
            yield write_spec(task)
            continue
        shared = _shared_of(task)
        if not last or not all(map(is_, shared, last)):
            last, spec = shared, _spec_of(task, _options_of(task))
            spec.pop("aliases", None)
            named, place = [*spec.items()], [*spec].index("item")
            before = to_json(dict([*named[:place], ("item", 0)])).removesuffix("0}")
            after = to_json(dict([("item", 0), *named[place + 1 :]])).removeprefix('{"item":0')
        aliases = f',"aliases":{to_json(task.aliases)}' if task.aliases else ""
        yield f"{before}{item}{aliases}{after}"


def _spec_of(task: Task, options: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(_OPTIONS, options, _DEFAULTS, strict=True)
    spec: dict[str, Any] = {
        one.name: option for one, option, default in named if option is not default and option != default
    }
    if "failure_mode" in spec:
        spec["failure_mode"] = FailureMode(task.failure_mode).value
    if "retry" in spec:
        spec["retry"] = {**asdict(task.retry_policy), "on": sorted(task.retry_policy.on)}
    if "check" in spec and task.check is not None:
        spec["check"] = asdict(task.check)
    if "call" in spec and task.call is not None:
        tasks = [
            {"id": one.id, "prompt": one.prompt, "depends_on": one.depends_on, "backend": one.backend}
            | _spec_of(one, _options_of(one))
            for one in task.call.tasks
        ]
        spec["call"] = {one.name: getattr(task.call, one.name) for one in fields(Call)} | {"tasks": tasks}
    if isinstance(task.vote, Best):
        spec["vote"] = asdict(task.vote)
    if "files" in spec:
        spec["files"] = [[file.path, file.sha256] for file in task.files if isinstance(file, TaskFile)]
    return spec


def read_spec(spec: str) -> dict[str, Any]:
    """Return the options in `spec`, as arguments of `Task`. Raises ValueError, KeyError or TypeError if damaged."""
    if spec == "{}":
        return {}
    return _read_options(json.loads(spec))


def _read_options(options: dict[str, Any]) -> dict[str, Any]:
    if "retry" in options:
        options["retry"] = Retry(**options["retry"])
    if "check" in options:
        options["check"] = Check(**options["check"])
    if "call" in options:
        tasks = [
            Task(**_read_options({**one, "depends_on": tuple(one["depends_on"])})) for one in options["call"]["tasks"]
        ]
        call: dict[str, Any] = {**options["call"], "tasks": tasks}
        options["call"] = Call(**call)
    if isinstance(options.get("vote"), dict):
        options["vote"] = Best(**options["vote"])
    if "files" in options:
        options["files"] = tuple(TaskFile(path, digest) for path, digest in options["files"])
    return options


def with_prompt(task: Task, prompt: str) -> Task:
    """Return the task with another prompt. Raises DAGError if the task would lack one."""
    if lacks_prompt(prompt, task.backend, task.files):
        raise DAGError([Problem(NO_PROMPT, task.id, "prompt")])
    return replace(task, prompt=prompt)


def no_such_setting(backend: str, setting: str, settings: Collection[str]) -> str:
    """Return the message about a setting of a task that is not among the `settings` of its `backend`."""
    have = f"a task may set {', '.join(sorted(settings))} there" if settings else "a task cannot set anything there"
    return f"backend {backend!r} takes no {setting} from a task ({have}); leave {setting!r} out"


TASKS_SCHEMA: Mapping[str, JsonValue] = {
    "type": "object",
    "properties": {
        "tasks": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"},
                    "prompt": {"type": "string"},
                    "depends_on": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["id", "prompt"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["tasks"],
    "additionalProperties": False,
}
"""An `output_schema` for planners: an object whose `tasks` have an id, a prompt and dependencies. Without a field
`backend`, the new tasks run on the default backend; a planner that chooses backends needs a custom schema.
"""


def at_most_once_question(attempt: int) -> str:
    """Return the question for a person about an interrupted task marked `at_most_once`."""
    return (
        f"the process ended during attempt {attempt}, and the task is marked at_most_once: "
        f"did the attempt take effect? Answer --done TEXT, --again or --fail"
    )


def crash_question(deaths: int) -> str:
    """Return the question for a person about a task during which the process died `deaths` times."""
    return f"the process died {deaths} times during this task: run it once more? Answer --again or --fail REASON"


def failed_status(mode: Mode) -> TaskStatus:
    """Return the status of a failed task with the failure mode `mode`."""
    return TaskStatus.SKIPPED if mode is FailureMode.SKIP else TaskStatus.FAILED


def satisfies(task: Task, status: TaskStatus) -> bool:
    """Return whether a task with this status has ended so that dependents may run after it."""
    if status is TaskStatus.COMPLETED:
        return True
    if status is TaskStatus.FAILED:
        return task.failure_mode is not FailureMode.HARD
    return status is TaskStatus.SKIPPED


def may_start(join: Join, *, completed: int, unended: int, dead: int) -> bool | None:
    """Return whether a task may start, by the numbers of its dependencies: None for not yet, False for never.

    `dead` are those that failed hard, were cancelled, or can never start. The others that ended let dependents start.
    """
    if join == "any" and completed:
        return True
    if join == "all" and dead:
        return False
    return None if unended else join == "done" or not dead


MAX_TASKS = 10_000
"""Default limit on the tasks of a run."""


MAX_DEPTH = 10
"""Default limit on the depth of added tasks."""


@value
class GrowthLimits:
    """Limits on the growth of a run."""

    max_tasks: int = MAX_TASKS
    """The maximum number of tasks in all."""
    max_depth: int = MAX_DEPTH
    """The maximum number of levels at which tasks added by tasks may add tasks."""
    pilot: int | None = None
    """The number of elements, the first ones, to which every `for_each` of a pilot keeps; None for all elements."""

    def within(self, others: GrowthLimits | None) -> GrowthLimits:
        """Return the narrower limits of `self` and `others`."""
        if others is None:
            return self
        pilots = [pilot for pilot in (self.pilot, others.pilot) if pilot is not None]
        max_tasks, max_depth = min(self.max_tasks, others.max_tasks), min(self.max_depth, others.max_depth)
        return GrowthLimits(max_tasks, max_depth, min(pilots, default=None))
