"""What a backend is: open a conversation, send a prompt, return a reply; and the abilities that a backend may have."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, field, fields
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

from plait.dialogue import Answer, Message, Question
from plait.json_form import JsonInput, JsonValue, value
from plait.task import OWN_OPTIONS, ModelOptions, Workspace
from plait.usage import NO_USAGE, Usage


@value
class Reply:
    """The whole answer to one prompt."""

    text: str
    data: JsonValue = None
    """The parsed value, if a schema was requested or a function returned a value other than text. With a schema and no
    value here, plait reads the value from `text` and checks it.
    """
    session_id: str | None = None
    """Id of the conversation, if the backend has sessions."""
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()
    """Every message of the turn in order, including the prompt. Empty means the prompt and `text` only."""
    question: Question | None = None
    """The task waits for the answer to it, which its next turn carries (`ConversationRequest.answer`)."""
    tasks: tuple[Mapping[str, JsonInput], ...] = ()
    """Tasks to add to the run, each in the shape of a plan file's task."""

    def turn(self, prompt: str) -> tuple[Message, ...]:
        """Return every message of the turn that answered `prompt`."""
        return self.messages or (Message("user", prompt), Message("assistant", self.text, self.usage))


@value
class Output:
    """An event of a running turn."""

    kind: Literal["text", "tool", "waiting", "notice", "node"]
    """"text": a piece of the answer. "tool": a tool is used. "waiting": the cause of a delay, such as a rate limit.
    "notice": an action of the backend itself. "node": the node of a graph begins that `text` names.
    """
    text: str
    usage: Usage = NO_USAGE
    """Of the turn so far, if the backend reports it."""


@value
class Files:
    """Folders that outlive the process, readable by the current user only."""

    turn: Path
    """Folder of the attempt alone, made by the backend that uses the folder."""
    sessions: Path
    """Folder shared by all turns of all runs of the store."""


@value
class Allowance:
    """A server's own rate limits, as reported at the beginning of a response, and what it would accept now; None for
    unknown.
    """

    requests_per_minute: float | None = None
    requests_left: float | None = None
    tokens_per_minute: float | None = None
    tokens_left: float | None = None
    accepted: bool = True
    """Whether an answer follows; False for the response of an error."""


@value
class Attachment:
    """A file that a prompt comes with: an image or a PDF."""

    name: str
    """Without the folder."""
    media_type: str
    data: bytes = field(repr=False)

    @property
    def base64(self) -> str:
        """The contents in base64."""
        return b64encode(self.data).decode()


@value
class Placement:
    """The identity of an attempt that runs on another host, and the callbacks of a `PlacedBackend`."""

    run_id: str
    task_id: str
    attempt: int | str
    """The number of the attempt; a text for a person's message after the run."""
    on_place: Callable[[str], Awaitable[None]]
    """Called with the name of the host that has a slot. The host may begin once it returns: the name is stored, or the
    store is away.
    """
    on_go: Callable[[], None]
    """Called when the host may begin; the time limit counts from then. Never blocks or raises."""
    turn_folder: Callable[[], Path | None]
    """Makes and returns the folder of the attempt here; None if the store keeps no files."""
    place: str | None = None
    """With `ConversationRequest.attaches`, the host on which the attempt was placed."""
    shared: bool = False
    """Whether others may write in the folder of the program meanwhile."""


@value
class ConversationRequest:
    """Everything a backend may need to open a conversation."""

    _: KW_ONLY
    session_id: str | None = None
    """With `resume`, an existing session; otherwise the id of `Backend.new_session_id`, None if the backend makes its
    own ids.
    """
    resume: bool = False
    """Continue the session `session_id` instead of starting one."""
    history: tuple[Message, ...] = ()
    """Earlier messages, oldest first, for backends that keep no history."""
    output_schema: Mapping[str, object] | None = None
    """JSON Schema of the reply's `data`. None requests text."""
    idempotency_key: str = ""
    """Key of the task, the same in all attempts."""
    metadata: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    answer: Answer | None = None
    """Of the question that ended the conversation's last reply. If set, the prompt is the answer as text."""
    resumes_interrupted: bool = False
    """The turn continues an interrupted turn, and the prompt says only that it was interrupted."""
    fork_of: str | None = None
    """Session of another task to branch from, which stays unchanged; `history` holds the same messages. Ignored with
    `resume`: the branch then has a session of its own.
    """
    files: Files | None = None
    """Folders for a `DetachedBackend`. None if the store keeps no files."""
    attaches: bool = False
    """Adopt the turn of a dead process, which `DetachedBackend.inspect` reported as "alive" or "ended": wait for its
    answer, and send no prompt. A turn that ends without an answer is an error of kind `crashed`.
    """
    on_output: Callable[[Output], None] = lambda _output: None
    """Called with each output of the turn. Never blocks, never raises."""
    on_session: Callable[[str], None] = lambda _session_id: None
    """To be called once the backend's session holds the prompt of the turn: if the turn is then interrupted, the next
    attempt opens the session with `resumes_interrupted`. Never blocks, never raises.
    """
    timeout: float | None = None
    """Seconds until the turn is cancelled. A backend that ends it shortly before can report its usage."""
    continued_later: bool = False
    """Whether another task is known to continue the conversation, so that a server's cache is worth filling."""
    on_allowance: Callable[[Allowance], None] | None = None
    """Called at the beginning of each response. Never blocks, never raises. None if nobody needs it."""
    traceparent: str | None = None
    """The W3C trace context of the attempt, for a process that sends spans of its own."""
    options: ModelOptions = OWN_OPTIONS
    """Settings of the task, limited to those that are `adjustable` (`Abilities`)."""
    placement: Placement | None = None
    """For a `PlacedBackend` within a run."""
    workspace: Workspace | None = None
    """Where the program of the task works, for a backend whose `adjustable` settings have `cwd` and `env`; None for
    where the backend says.
    """
    keeps: Sequence[int] = ()
    """Descriptors that the program inherits: the locks on its folder."""
    values: Mapping[str, JsonInput] = field(default_factory=dict[str, "JsonInput"])
    """The values of `Task.arguments` by name, for a backend with `parameters`."""
    attachments: tuple[Attachment, ...] = ()
    """Images and PDFs of the prompt and of the earlier messages, for a backend that takes their contents."""


class Conversation(Protocol):
    """An open conversation. Runs one turn at a time."""

    @property
    def session_id(self) -> str | None:
        """Id of the conversation; None while unknown."""
        ...

    async def send(self, prompt: str) -> Reply:
        """Send `prompt` and return the whole answer.

        Raises BackendError, and nothing else, if no whole answer arrives. Cancellation ends the turn at once and frees
        the server's resources; the conversation is unusable afterwards.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A source of conversations. One object serves many conversations at the same time."""

    def new_session_id(self) -> str | None:
        """Return an id for a new conversation, stored before the first call; None if the backend has no sessions, or
        makes its own ids (`ConversationRequest.on_session`). Cheap, no I/O.
        """
        ...

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation. Leaving the context frees all its resources, also when cancelled.

        Entering raises BackendUnavailable if an extra, a key or a file is missing, and BackendError for any other
        failure.
        """
        ...


@value
class DetachedTurn:
    """The state of a turn whose runner died."""

    state: Literal["alive", "ended", "dead"]
    """"alive": the turn is running. "ended": its files hold the whole outcome. "dead": the turn was interrupted."""
    session_id: str | None = None
    """Session known from the turn's files to hold the prompt; None if no session is known."""
    resumes_interrupted: bool = False
    """`ConversationRequest.resumes_interrupted` of the turn."""
    about: str = ""
    """A short description, such as "claude, pid 4711"."""
    place: str | None = None
    """The host of a turn that was placed on another host, which has not been asked yet; None for a turn here."""


@runtime_checkable
class DetachedBackend(Backend, Protocol):
    """A backend whose turns may outlive the process that started them, provided that the request has `files`."""

    def inspect(self, files: Files) -> DetachedTurn | None:
        """Return the state of the turn in `files.turn`; None if no turn started. Changes nothing, never raises."""
        ...


@value
class Abilities:
    """What a backend can do besides holding conversations. A backend states each by an attribute of the same name; one
    that it lacks has the default.
    """

    adjustable: Collection[str] = ()
    """The settings that a task may have: names of fields of `ModelOptions`, `cwd` and `env` (`Workspace`), `shared`."""
    needs_prompt: bool = True
    """Whether a blank prompt is refused."""
    takes_files: Literal["contents", "paths"] | None = None
    """How a prompt comes with images and PDFs. "contents": `ConversationRequest.attachments` holds them. "paths": the
    prompt names the paths of all files, and the agent opens them. None: text files alone, as a part of the prompt.
    """
    can_fork: bool = False
    """Whether several tasks may continue a session (`ConversationRequest.fork_of`)."""
    parameters: Sequence[tuple[str, bool]] = ()
    """The parameters of a function by name, and whether each is required; those named like a task, an input or `item`
    receive its value (`ConversationRequest.values`).
    """
    allows: Sequence[Sequence[str]] | None = None
    """The first words of the commands (`Task.run`) that added and posted tasks may run; None if it runs no commands."""

    @classmethod
    def of(cls, backend: object) -> Abilities:
        """Return the abilities of `backend` now."""
        return cls(**{name: getattr(backend, name) for name in _ABILITIES if hasattr(backend, name)})


_ABILITIES = [ability.name for ability in fields(Abilities)]  # pyright: ignore[reportArgumentType]


def answer_key(backend: object) -> JsonValue:
    """Return what the method `answer_key` of the backend returns: the settings that determine an answer, such as the
    model, but no keys, time limits or concurrency. None if the backend has effects or no such method: its answers are
    never taken over by a later run (`run(like=...)`).
    """
    method = getattr(backend, "answer_key", None)
    return None if method is None else cast("JsonValue", method())


@value
class RunOnHosts:
    """A run whose attempts are placed on other hosts, and its owner's claim."""

    run_id: str
    key: str
    """Tells the run from every other run, also of another store. Part of the names of files on the hosts."""
    epoch: int
    """The number of the owner's claim. A host refuses the owner of an earlier claim."""
    adopted: Mapping[str, Sequence[str]] = field(default_factory=dict[str, "Sequence[str]"])
    """The attempts of a dead owner that go on, as `task/attempt`, by host. Hosts end all others of the run."""
    on_away: Callable[[str, float | None, str, tuple[str, ...]], None] = lambda _host, _since, _reason, _tasks: None
    """Called when attempts begin to wait for a host that is away, when others join, and when none waits any longer:
    with the host, the Unix time at which it was found to be away (None once no attempt waits), the reason (empty if the
    host is back), and the ids of the tasks that wait, in the order in which they began to wait.
    """


class HostConnections(Protocol):
    """The connections of a run to a group of hosts."""

    async def reached(self) -> Sequence[str]:
        """Wait until each host is connected, or one attempt to connect to it has failed, for no longer than an attempt
        has to end. Return the names of the hosts that are connected.
        """
        ...

    async def more_slots(self, known: int) -> int:
        """Wait until the hosts have more than `known` slots for attempts. Return the number: hosts that are away count,
        and hosts may join.
        """
        ...

    def remove_files(self) -> None:
        """Ask the connected hosts to remove the files of the run: no attempt of the run is under way, and no later
        owner adopts one.
        """
        ...


class Hosts(Protocol):
    """A group of hosts on which attempts are placed."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the hosts."""
        ...

    def placed(self, backend: object, needs: Mapping[str, float] | None = None) -> Backend:
        """Return `backend` with its attempts on these hosts, each of which takes the resources `needs`.

        Raises ValueError if the hosts could not make the backend, or have no resources.
        """
        ...

    def connected(self, run: RunOnHosts) -> AbstractAsyncContextManager[HostConnections]:
        """Connect the hosts for the attempts of `run`. Leaving the context disconnects the hosts; attempts that were
        not ended go on there.
        """
        ...


@runtime_checkable
class PlacedBackend(Backend, Protocol):
    """A backend whose attempts run on other hosts."""

    @property
    def hosts(self) -> Hosts:
        """The hosts, to be connected before a request with a `placement` is opened."""
        ...


class Placeable:
    """A backend whose attempts may run on other hosts."""

    __slots__ = ()

    def on(self, hosts: Hosts, needs: Mapping[str, float] | None = None) -> Backend:
        """Return this backend with its attempts on `hosts`. Paths, programs and keys are those of the hosts.

        `needs` are the resources of a Dask worker that an attempt takes, one of `agents` by default. Raises ValueError
        if a host could not make the backend, as with a function that no module has.
        """
        return hosts.placed(self, needs)
