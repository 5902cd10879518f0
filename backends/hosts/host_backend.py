"""`HostBackend`: a backend with its attempts on other hosts, each placed before the attempt may begin.

    ask -> slot -> the host is stored -> go -> session, output -> reply

Session ids are `ID@HOST`, so a task that continues a conversation goes to the host that has it.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import PurePath
from typing import Any, cast

import anyio

from plait.backends.agents.agent_output import place_output
from plait.backends.backend_protocol import (
    Abilities,
    Allowance,
    Backend,
    Conversation,
    ConversationRequest,
    Output,
    Placement,
    Reply,
    RunOnHosts,
    answer_key,
)
from plait.backends.function_backend import FunctionBackend, as_backend
from plait.backends.hosts.host_connection import (
    AttemptChannel,
    Channel,
    Frame,
    HostConnection,
    ReachableHost,
    open_process,
    read_error,
)
from plait.backends.hosts.host_session import HostSession
from plait.backends.prices import billing_of
from plait.backends.running_turn import TURN, QuestionAsked, when_cancelled
from plait.dialogue import Question
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, as_json, from_json, value
from plait.safe_text import one_line

_OF_THE_RUNNER = frozenset({"files", "on_output", "on_session", "on_allowance", "placement", "attachments", "keeps"})
"""The fields of a request that stay with the runner."""
_OF_HOST = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.AUTH})
"""The kinds of errors whose remedy is on the host: a program, a module or a key is missing there."""


class HostBackend:
    """A backend on the hosts `hosts`, which build the backend themselves from `described`.

    `made` is the backend as made here, for the properties that a runner needs; None if only the hosts can make it.
    `needs` are the resources that an attempt takes. The environment, the keys and the programs are those of each host.
    """

    def __init__(
        self,
        described: Mapping[str, JsonValue],
        hosts: HostGroup,
        made: Backend | None,
        needs: Mapping[str, float],
    ) -> None:
        self.described = described
        self.hosts = hosts
        self.needs = needs
        self._answer_key = answer_key(made)
        abilities = Abilities.of(made)
        self.can_fork = abilities.can_fork
        self.adjustable = abilities.adjustable
        self.needs_prompt = abilities.needs_prompt
        self.parameters = abilities.parameters
        self.allows = abilities.allows
        self.billing = billing_of(made)

    def answer_key(self) -> JsonValue:
        """Return the answer key of the backend. The hosts do not count."""
        return self._answer_key

    def new_session_id(self) -> str | None:
        """Return None: the host is not chosen yet."""
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. The first prompt chooses the host."""
        placement = request.placement
        session = None if placement is None else self.hosts.sessions.get(placement.run_id)
        if session is not None and placement is not None:
            yield HostConversation(self, session, request, placement)
            return
        raise BackendError(ErrorKind.UNEXPECTED, "the hosts are not connected; a bug of plait")


PATIENCE = 120.0
"""Seconds for which the attempts of a host that is away are waited for, unless told otherwise."""


class HostGroup(ABC):
    """A group of hosts. Raises ValueError if `patience` is no number of seconds."""

    def __init__(self, patience: float) -> None:
        if not 0 <= patience < float("inf"):
            raise ValueError(f"patience must be 0 seconds or more, not {patience}")
        self._patience = patience
        self.sessions: dict[str, HostSession] = {}
        """The sessions of the connected runs by the id of the run."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of the hosts."""

    def placed(self, backend: object, needs: Mapping[str, float] | None = None) -> HostBackend:
        """Return `backend` with its attempts on these hosts: a backend of plait, a function, or a text "module:name".

        A text names a function or a class that each host calls without arguments to get the backend. A host imports
        functions and classes by their modules, so the modules have to be installed there. Paths, keys and commands are
        those of the host. Raises ValueError if the hosts could not make the backend, and for wrong `needs`: hosts
        reached with ssh have slots and no needs; on workers of Dask an attempt takes one of `agents` by default.
        """
        described = describe(backend)
        made = None if isinstance(backend, str) else as_backend(backend)
        return HostBackend(described, self, made, self.checked(needs))

    @abstractmethod
    def checked(self, needs: Mapping[str, float] | None) -> Mapping[str, float]:
        """Return the resources of an attempt that is placed here. Raises ValueError for wrong `needs`."""

    @abstractmethod
    def reachable(
        self, needs: Collection[Mapping[str, float] | None] = ()
    ) -> AbstractAsyncContextManager[Sequence[ReachableHost]]:
        """Return the hosts, to run commands of plait there within the context, with slots for attempts of the kinds
        `needs`. Raises HostUnreachable if there is no way to any.
        """

    @asynccontextmanager
    async def connected(self, run: RunOnHosts) -> AsyncGenerator[HostSession]:
        """Connect the hosts for the attempts of `run`; leaving disconnects them. Attempts not ended go on there."""
        session = self.sessions[run.run_id] = self._new_session(run)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run)
                try:
                    yield session
                finally:
                    session.close()
        finally:
            del self.sessions[run.run_id]

    @abstractmethod
    def _new_session(self, run: RunOnHosts) -> HostSession:
        """Return the session of a run, not connected yet."""


class HostConversation:
    """A conversation on one of the hosts."""

    def __init__(
        self, backend: HostBackend, session: HostSession, request: ConversationRequest, placement: Placement
    ) -> None:
        self._backend = backend
        self._session = session
        self._request = request
        self._placement = placement
        place = None if request.workspace is None else as_json(request.workspace)
        self._writes = None if placement.shared else {"backend": backend.described, "workspace": place}
        name = f"{placement.task_id}/{placement.attempt}"
        self._attempt = AttemptChannel(name, self._report, backend.needs, self._writes)
        self._has_output = False
        """Whether the file of the output has been begun since the attempt was last let go."""
        self.session_id = request.session_id

    async def send(self, prompt: str) -> Reply:
        """Place the attempt on a host, and return the answer. Raises as `Conversation.send`."""
        await self._place()
        try:
            return await self._run(prompt)
        except anyio.get_cancelled_exc_class():
            if not await self._attempt.end():
                state = "does not answer" if self._attempt.connection.is_connected else "is away"
                notice = f"{self._host} {state}, so the attempt is not ended yet"
                self._request.on_output(Output("notice", notice))
            raise
        finally:
            self._attempt.release()

    @property
    def _host(self) -> str:
        return self._attempt.connection.name

    async def _place(self) -> None:
        attempt, placement, request = self._attempt, self._placement, self._request
        if request.attaches and placement.place is not None:
            self._session.follow(attempt, placement.place)
            return
        # A session from before the backend was placed has no host.
        _, at, host = ((request.session_id if request.resume else request.fork_of) or "").rpartition("@")
        await self._session.place(attempt, host if at else None, request.on_output)
        try:
            attempt.connection.keeps.add(attempt.name)  # from here on the host may be stored
            await placement.on_place(self._host)
        except BaseException:
            attempt.cancel()
            attempt.release()
            raise

    async def _run(self, prompt: str) -> Reply:
        attempt, follows = self._attempt, self._request.attaches
        with when_cancelled(self._session.wind_down):
            while True:
                if not await self._session.wait_until_back(attempt.connection, attempt, self._request.on_output):
                    raise self._session.away_error(attempt.connection)
                attempt.clear()
                self._go(prompt, follows=follows)
                frame = await attempt.next()
                if frame["op"] != "lost":
                    return self._outcome(frame)
                follows = True

    def _go(self, prompt: str, *, follows: bool) -> None:
        request = as_json(self._request, _OF_THE_RUNNER)
        for name in ("session_id", "fork_of"):
            if isinstance(own := request.get(name), str):
                request[name] = own.rpartition("@")[0] or own
        if follows:
            request["attaches"] = True
        self._has_output = False
        self._attempt.connection.send(
            {
                "op": "go",
                "attempt": self._attempt.name,
                "backend": self._backend.described,
                "request": request,
                "wants_allowance": self._request.on_allowance is not None,
                "prompt": prompt,
                "needs": self._attempt.needs,
                "writes": self._writes,
                "answers": [] if (turn := TURN.get()) is None else turn.answers,
            }
        )
        self._placement.on_go()

    def _outcome(self, frame: Frame) -> Reply:
        try:
            match frame["op"]:
                case "reply":
                    reply = from_json(Reply, frame["reply"])
                case "asked":
                    raise QuestionAsked(from_json(Question, frame["question"]))
                case "error":
                    error = read_error(frame["error"])
                    if error.kind in _OF_HOST:
                        error.message = f"{self._host}: {error.message}"
                    raise error
                case _:
                    raise BackendError(ErrorKind.CRASHED, f"{self._host} ended the attempt")
        except (KeyError, TypeError, ValueError) as error:
            message = f"{self._host} sent an answer that cannot be read: {error!r}"
            raise BackendError(ErrorKind.UNEXPECTED, message) from None
        if reply.session_id is not None:
            self.session_id = f"{reply.session_id}@{self._host}"
            reply = replace(reply, session_id=self.session_id)
        return reply

    def _report(self, frame: Frame) -> None:
        with suppress(KeyError, TypeError, ValueError):  # a report that cannot be read is worth less than the attempt
            match frame["op"]:
                case "session":
                    self.session_id = f"{frame['session_id']}@{self._host}"
                    self._request.on_session(self.session_id)
                case "output":
                    output = from_json(Output, frame["output"])
                    if output.kind != "node" and (turn := self._placement.turn_folder()) is not None:
                        with suppress(OSError):  # the attempt matters more than the file
                            place_output(turn, output, begins=not self._has_output)
                            self._has_output = True
                    self._request.on_output(output)
                case _:
                    if self._request.on_allowance is not None:
                        self._request.on_allowance(Allowance(**frame["limits"]))


# The description of a backend of Python, as JSON, from which a host makes the backend. `backend_specs.py` has
# those of plan files.


_IN_A_MODULE = (
    "put a function that returns the backend into a module that the hosts have, and name the function: "
    'hosts.placed("module:function")'
)


def describe(backend: object) -> dict[str, JsonValue]:
    """Return the description of `backend`: a backend of plait, a function, or a text `module:name`.

    A text names a function or a class that the hosts call without arguments to get the backend. Raises ValueError if
    the hosts could not make the backend.
    """
    if isinstance(backend, str):
        return {"make": backend, "options": {}}
    if isinstance(backend, FunctionBackend):
        return {"call": _name_of(backend.function)}
    if is_dataclass(backend) and not isinstance(backend, type):
        return {"make": _name_of(type(backend)), "options": _options(backend)}
    if callable(backend) and not isinstance(backend, type):
        return {"call": _name_of(backend)}
    raise ValueError(f"{type(backend).__name__} cannot be described to a host; {_IN_A_MODULE}")


def build_described(described: Mapping[str, JsonValue]) -> Backend:
    """Return the backend of a description by `describe`. Raises BackendUnavailable if this host cannot make it."""
    try:
        if "call" in described:
            return as_backend(_imported(str(described["call"])))
        options = cast("dict[str, Any]", described["options"])
        return as_backend(_imported(str(described["make"]))(**options))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(f"this host cannot make the backend: {one_line(str(error))}") from error


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        message = f"this host has no {name}: {one_line(str(error))}; install the module here, for the Python of plait"
        raise BackendUnavailable(message) from error


def _name_of(value: Callable[..., Any]) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if module == "__main__" or not module or not name or "<" in name:
        raise ValueError(
            f"{name or value!r} of {module or 'no module'} cannot be imported by a host; put it at the top level of a "
            "module that the hosts have"
        )
    return f"{module}:{name}"


def _options(backend: Any) -> dict[str, JsonValue]:
    """Return the constructor arguments that differ from the defaults."""
    options: dict[str, JsonValue] = {}
    for one in fields(backend):
        value = getattr(backend, one.name)
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if not one.init or value == default:
            continue
        value = str(value) if isinstance(value, PurePath) else value
        try:
            options[one.name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            what = f"{one.name} of {type(backend).__name__} is no JSON, so no host can make the backend"
            raise ValueError(f"{what}; {_IN_A_MODULE}") from None
    return options


# `SSHHosts`: hosts reached with OpenSSH, each by one command such as `ssh m3 plait host`.

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""The command that reaches a host: no password is asked for, and a silent connection ends after 30 seconds."""
SLOTS = 4
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@value
class SSHHost:
    """A host reached with OpenSSH."""

    name: str
    """The name in events and session ids: 1 to 64 letters, digits, `.`, `_` or `-`, not beginning with a dot."""
    slots: int = SLOTS
    """The number of attempts at once, of all runs of all users of this account on the host."""
    address: str | None = None
    """The destination for ssh, such as `user@10.0.0.3`. None uses `name`."""
    plait: str = "plait"
    """The command there, a name on the PATH of a login that is not interactive, or a path."""

    def check(self) -> None:
        """Raise ValueError for an invalid value."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"the host name {self.name!r} must have 1 to 64 letters, digits, '.', '_' or '-', and no dot first; "
                "put another destination for ssh into address"
            )
        if not 1 <= self.slots <= 1000:
            raise ValueError(f"the slots of host {self.name} must be from 1 to 1000, not {self.slots}")
        if (self.address or "").startswith("-"):
            raise ValueError(f"the address of host {self.name} must not begin with a dash: {self.address!r}")


class SSHHosts(HostGroup):
    """Hosts on which attempts run: `SSHHosts(["m1", SSHHost("m2", slots=8)])`. A text is the name of a host.

    - `ssh`: the command that reaches a host; the destination and `plait host` are added.
    - `patience`: the seconds for which the attempts of a host that does not answer are waited for. Then each attempt
      counts as crashed, and another follows on any host.

    Each host needs the same version of plait, and an ssh login without a password. Raises ValueError for invalid
    values.
    """

    def __init__(self, hosts: Sequence[str | SSHHost], *, ssh: Sequence[str] = SSH, patience: float = PATIENCE) -> None:
        super().__init__(patience)
        self.all = tuple(SSHHost(one) if isinstance(one, str) else one for one in hosts)
        """The hosts, in the order given."""
        self._ssh = tuple(ssh)
        for one in self.all:
            one.check()
        if not self.all or len(set(self.names)) < len(self.all):
            raise ValueError(f"hosts need at least one name, and each name once, not {self.names}")
        if not self._ssh:
            raise ValueError("ssh needs a command, such as ['ssh', '-F', 'config']")

    @property
    def names(self) -> Sequence[str]:
        """The names of the hosts."""
        return [one.name for one in self.all]

    @property
    def slots(self) -> int:
        """The sum of the slots of all hosts."""
        return sum(one.slots for one in self.all)

    def checked(self, needs: Mapping[str, float] | None) -> Mapping[str, float]:
        """Return one slot. Raises ValueError for `needs`."""
        if needs is not None:
            raise ValueError("needs are resources of Dask workers; hosts reached with ssh have slots: leave needs out")
        return _ONE

    def command(self, host: SSHHost, *words: str) -> tuple[str, ...]:
        """Return the command that runs `plait` with `words` on `host`."""
        return (*self._ssh, host.address or host.name, shlex.join((host.plait, *words)))

    @asynccontextmanager
    async def reachable(
        self,
        needs: Collection[Mapping[str, float] | None] = (),  # noqa: ARG002 - for hosts with resources
    ) -> AsyncGenerator[Sequence[ReachableHost]]:
        """Return the hosts, to run commands of plait there."""

        async def opened(host: SSHHost, words: Sequence[str]) -> Channel:
            return await open_process(self.command(host, *words))

        yield [ReachableHost(host.name, host.slots, partial(opened, host)) for host in self.all]

    def _new_session(self, run: RunOnHosts) -> HostSession:
        connections = (
            # The host itself gives its slots, which other runs share.
            HostConnection(host.name, run, {"slots": host.slots}, partial(open_process, self.command(host, "host")))
            for host in self.all
        )
        return HostSession(connections, self._patience, run, [_ONE])


_ONE: Mapping[str, float] = {"slots": 1}
