"""What the runner asks of a backend: open a conversation, send a prompt, get a reply.

Everything here is a plain frozen value or a protocol; nothing imports an SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from plait.backends.values import value

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"
"""JSON that plait gives back."""
JsonInput: TypeAlias = "Mapping[str, JsonInput] | Sequence[JsonInput] | str | int | float | bool | None"
"""JSON that plait is given. A `dict[str, str]` or a `list[str]` is one too; no type checker lets it be a JsonValue.
A schema is a `Mapping[str, object]` instead: that is what mypy makes of one that stands in a constant.
"""
Role = Literal["system", "user", "assistant"]


@value
class Usage:
    """What a turn cost, and which model answered. Tokens are the backend's own count; `cost_usd` and `model` are None
    where the backend does not say. `model` is the name that the server or the agent itself gives, printable; in a sum
    it is that of the last one.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    model: str | None = None

    def __add__(self, other: Usage) -> Usage:
        costs = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            sum(costs) if costs else None,
            other.model or self.model,
        )


NO_USAGE = Usage()


@value
class Message:
    """One message of a conversation. `usage` is set on assistant messages where the backend reports it."""

    role: Role
    content: str
    usage: Usage = NO_USAGE


@value
class Question:
    """What a person, or whoever stands in for one, is asked. `text` says it; the answer has to fit `schema`, a JSON
    Schema, and is any text where there is none. When `deadline` seconds have passed without an answer, `default` is
    taken, or, if that is None, the task fails; without a deadline the question waits for ever.
    """

    text: str
    schema: Mapping[str, object] | None = None
    default: JsonValue = None
    deadline: float | None = None


@value
class Reply:
    """A whole answer to one prompt.

    `text` is what the model said; `data` is the parsed value when a schema was asked for, or when a function returned
    something other than text. `messages` lists every message of this turn in order, the prompt included; empty means
    just the prompt and `text`. `usage` covers the whole turn. `session_id` is the conversation's id, if it has one.

    `question` says that the conversation cannot go on before somebody has answered it: the task waits, and its next
    turn says the answer (`Opening.answer`). `tasks` are to be added to the run, each in the shape of a plan file's.
    """

    text: str
    data: JsonValue = None
    session_id: str | None = None
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()
    question: Question | None = None
    tasks: tuple[Mapping[str, JsonInput], ...] = ()

    def turn(self, prompt: str) -> tuple[Message, ...]:
        """Every message of the turn that answered `prompt`."""
        return self.messages or (Message("user", prompt), Message("assistant", self.text, self.usage))


@value
class Output:
    """Something seen while a turn goes on: a piece of the answer's text, a tool that an agent uses, what it waits for
    (such as a rate limit), or a notice about what the backend does. `usage` is what the turn has cost so far, where it
    says so.
    """

    kind: Literal["text", "tool", "waiting", "notice"]
    text: str
    usage: Usage = NO_USAGE


def _ignore_output(_output: Output) -> None:
    return None


def _ignore_session(_session_id: str) -> None:
    return None


@value
class Answer:
    """What a question was answered with: text, or the value that its schema asked for."""

    value: JsonValue


@value
class Files:
    """Folders that outlive this process, readable by this user alone. `turn` is this attempt's own, and made by the
    backend that uses it; `sessions` is shared by all turns of all runs of the store.
    """

    turn: Path
    sessions: Path


@value
class Opening:
    """Everything a backend may need to open a conversation.

    `session_id` names the conversation: with `resume` it exists already and is to be continued, otherwise it is new and
    was chosen by `Backend.new_session_id` (None where the backend makes its own). `history` holds the earlier messages,
    oldest first, for backends that keep none themselves. `idempotency_key` is stable over all attempts of a task.
    `on_output` and `on_session` are plain calls that never block and never raise. `on_session` says that the backend
    has the session by now, with the prompt of this turn in it: if the turn is cut after that, it is taken up by
    opening the session with `resume` and saying that there was an interruption. Who keeps nothing never calls it.
    `answer` is there when the turn says the answer to the question that the conversation's last reply ended with; the
    prompt is then that answer as text. `goes_on` marks a turn that takes up one which was cut: the prompt is then a
    word about that.

    `forks` is the session of another task whose conversation this new one begins with, and which has to stay as it is;
    `history` holds the same. With `resume` it is a session of its own already, and `forks` says nothing any more.
    `files` are there where the store keeps files, for an `OutlivingBackend`. `adopts` marks a turn that a process began
    which has died since, and that `OutlivingBackend.left` found alive or ended: its answer is waited for and returned,
    and nothing is sent. If it ends without one, that is `crashed`. In `timeout` seconds the turn is cancelled, None for
    never: a backend that ends it itself just before can say what it cost, and that it goes on.
    """

    session_id: str | None = None
    resume: bool = False
    history: tuple[Message, ...] = ()
    output_schema: Mapping[str, object] | None = None
    idempotency_key: str = ""
    metadata: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    answer: Answer | None = None
    goes_on: bool = False
    forks: str | None = None
    files: Files | None = None
    adopts: bool = False
    on_output: Callable[[Output], None] = _ignore_output
    on_session: Callable[[str], None] = _ignore_session
    timeout: float | None = None


class Conversation(Protocol):
    """An open conversation. One turn at a time."""

    @property
    def session_id(self) -> str | None:
        """The conversation's id as far as it is known."""
        ...

    async def send(self, prompt: str) -> Reply:
        """Say `prompt` and return the whole answer.

        Raises BackendError, and nothing else, when there is no whole answer: a cut stream or a missing finish reason
        is an error, never a short answer. Cancellation ends the turn at once, frees what it held at the server, and
        leaves the conversation unusable.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """Something that holds conversations. One object serves many conversations at the same time."""

    def new_session_id(self) -> str | None:
        """An id for a new conversation, stored before the first call; None if the backend makes its own
        (it then reports it through `Opening.on_session`) or has no sessions. Cheap, no I/O.
        """
        ...

    def open(self, opening: Opening) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation. Leaving the context frees everything that it held, also when cancelled.

        Entering raises BackendUnavailable when an extra, a key or a file is missing here, BackendError for the rest.
        """
        ...


@value
class LeftTurn:
    """What is left of a turn whose runner died. "alive": it still works; "ended": its whole outcome is in its files;
    "dead": it was cut. `session_id` is the session that is known to hold its prompt, as far as its files say; `goes_on`
    as it was in its Opening; `about` names it in a few words, such as "claude, pid 4711".
    """

    state: Literal["alive", "ended", "dead"]
    session_id: str | None = None
    goes_on: bool = False
    about: str = ""


@runtime_checkable
class OutlivingBackend(Backend, Protocol):
    """A backend whose turns may outlive the process that began them, where the Opening has `files`."""

    def left(self, files: Files) -> LeftTurn | None:
        """What is left of the turn in `files.turn`; None where none ever began. Files and the table of processes are
        looked at, nothing is changed. Never raises.
        """
        ...


@runtime_checkable
class ForkingBackend(Backend, Protocol):
    """A backend that keeps the history of its sessions and heeds `Opening.forks`. For others, a task that continues
    another one goes on in that one's session, unless several tasks do.
    """

    @property
    def can_fork(self) -> bool:
        """Whether it does."""
        ...
