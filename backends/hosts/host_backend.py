"""`HostBackend`: a backend with its attempts on other hosts, each placed before the attempt may begin.

    ask -> slot -> the host is stored -> go -> session, output -> reply

Session ids are `ID@HOST`, so a task that continues a conversation goes to the host that has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version

import anyio

from plait.backends.agents.agent_transcript import PlacedOutput
from plait.backends.ask import QuestionAsked, given_answers
from plait.backends.backend_protocol import (
    AdjustableBackend,
    Allowance,
    Conversation,
    ConversationRequest,
    ForkingBackend,
    Hosts,
    OptionalPromptBackend,
    Output,
    Placement,
    Reply,
    ReusableBackend,
    RunOnHosts,
)
from plait.backends.function_backend import as_backend
from plait.backends.hosts.described_backend import describe
from plait.backends.hosts.host_connection import AttemptChannel
from plait.backends.hosts.host_frames import Frame, read_error, read_reply, request_json
from plait.backends.hosts.host_probe import ReachableHost
from plait.backends.hosts.host_session import HeldSlot, HostSession
from plait.backends.prices import UNBILLED, BilledBackend, Billing
from plait.backends.turn_cancellation import when_cancelled
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, from_json, value

_OF_HOST = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.AUTH})
"""The kinds of errors whose remedy is on the host: a program, a module or a key is missing there."""


@value
class BackendTraits:
    """The properties of a backend that a runner needs, although the hosts make the backend."""

    can_fork: bool = False
    """Whether the backend can fork a conversation."""
    adjustable: Collection[str] = ()
    """The settings that a task may have."""
    needs_prompt: bool = True
    """Whether a task needs a prompt."""
    answer_key: JsonValue = None
    """The backend's answer key; None if its answers are never taken over."""
    billing: Billing = UNBILLED
    """The facts that decide the price of the backend's calls."""

    @classmethod
    def of(cls, backend: object) -> BackendTraits:
        """Return the properties of `backend`: a backend, a function, or a text that only the hosts can read."""
        made = None if isinstance(backend, str) else as_backend(backend)
        return cls(
            isinstance(made, ForkingBackend) and made.can_fork,
            made.adjustable if isinstance(made, AdjustableBackend) else (),
            made.needs_prompt if isinstance(made, OptionalPromptBackend) else True,
            made.answer_key() if isinstance(made, ReusableBackend) else None,
            made.billing if isinstance(made, BilledBackend) else UNBILLED,
        )


class HostBackend:
    """A backend on the hosts `hosts`, which build the backend themselves from `described`.

    `needs` are the resources that an attempt takes. The environment, the keys and the programs are those of each host.
    """

    def __init__(
        self,
        described: Mapping[str, JsonValue],
        hosts: HostGroup,
        traits: BackendTraits,
        needs: Mapping[str, float] | None = None,
    ) -> None:
        self._described = described
        self._hosts = hosts
        self._needs = needs or {}
        self._traits = traits
        self.can_fork = traits.can_fork
        self.adjustable = traits.adjustable
        self.needs_prompt = traits.needs_prompt
        self.billing = traits.billing

    @property
    def hosts(self) -> Hosts:
        """The hosts."""
        return self._hosts

    def new_session_id(self) -> str | None:
        """Return None: the host is not chosen yet."""
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. The first prompt chooses the host."""
        placement = request.placement
        session = None if placement is None else self._hosts.session(placement.run_id)
        if session is not None and placement is not None:
            yield HostConversation(self._described, session, request, placement, self._needs)
            return
        raise BackendError(ErrorKind.UNEXPECTED, "the hosts are not connected; a bug of plait")


class ReusableHostBackend(HostBackend):
    """A `HostBackend` whose answers a later run may take over, wherever either run has its attempts."""

    def answer_key(self) -> JsonValue:
        """Return the answer key of the backend. The hosts do not count."""
        return self._traits.answer_key


def host_backend(
    described: Mapping[str, JsonValue],
    hosts: HostGroup,
    traits: BackendTraits,
    needs: Mapping[str, float] | None = None,
) -> HostBackend:
    """Return the backend on its hosts."""
    made = HostBackend if traits.answer_key is None else ReusableHostBackend
    return made(described, hosts, traits, needs)


PATIENCE = 120.0
"""Seconds for which the attempts of a host that is away are waited for, unless told otherwise."""


class HostGroup(ABC):
    """A group of hosts. Raises ValueError if `patience` is no number of seconds."""

    def __init__(self, patience: float) -> None:
        if not 0 <= patience < float("inf"):
            raise ValueError(f"patience must be 0 seconds or more, not {patience}")
        self._patience = patience
        self._sessions: dict[str, HostSession] = {}

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
        return self.place(describe(backend), BackendTraits.of(backend), needs)

    @abstractmethod
    def place(
        self, described: Mapping[str, JsonValue], traits: BackendTraits, needs: Mapping[str, float] | None
    ) -> HostBackend:
        """Return the backend `described` with its attempts on these hosts. Raises ValueError for wrong `needs`."""

    @abstractmethod
    def reachable(
        self, needs: Collection[Mapping[str, float] | None] = ()
    ) -> AbstractAsyncContextManager[Sequence[ReachableHost]]:
        """Return the hosts, to run commands of plait there within the context, with slots for attempts of the kinds
        `needs`. Raises HostUnreachable if there is no way to any.
        """

    def session(self, run_id: str) -> HostSession | None:
        """Return the session of a connected run; None without one."""
        return self._sessions.get(run_id)

    @asynccontextmanager
    async def connected(self, run: RunOnHosts) -> AsyncGenerator[HostSession]:
        """Connect the hosts for the attempts of `run`; leaving disconnects them. Attempts not ended go on there."""
        session = self._sessions[run.run_id] = self._new_session(run)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run)
                try:
                    yield session
                finally:
                    session.close()
        finally:
            del self._sessions[run.run_id]

    @abstractmethod
    def _new_session(self, run: RunOnHosts) -> HostSession:
        """Return the session of a run, not connected yet."""


def hello_frame(run: RunOnHosts, host: str, slots: int, kept: Collection[str]) -> Frame:
    """Return the first frame to `host`. The host ends the attempts of the run that are not in `kept`."""
    return {
        "op": "hello",
        "version": version("plait"),
        "key": run.key,
        "host": host,
        "epoch": run.epoch,
        "slots": slots,
        "keep": sorted(kept),
    }


class HostConversation:
    """A conversation on one of the hosts."""

    def __init__(
        self,
        described: Mapping[str, JsonValue],
        session: HostSession,
        request: ConversationRequest,
        placement: Placement,
        needs: Mapping[str, float],
    ) -> None:
        self._described = described
        self._needs = needs
        self._session = session
        self._request = request
        self._placement = placement
        self.session_id = request.session_id
        self._shown = PlacedOutput(placement.turn_folder)

    async def send(self, prompt: str) -> Reply:
        """Place the attempt on a host, and return the answer. Raises as `Conversation.send`."""
        name = f"{self._placement.task_id}/{self._placement.attempt}"
        slot = await self._place(name)
        try:
            return await self._run(slot, prompt)
        except anyio.get_cancelled_exc_class():
            if not await slot.end():
                state = "does not answer" if slot.connection.is_connected else "is away"
                notice = f"{slot.connection.name} {state}, so the attempt is not ended yet"
                self._request.on_output(Output("notice", notice))
            raise
        finally:
            slot.release()

    async def _place(self, name: str) -> HeldSlot:
        placement, request = self._placement, self._request
        attempt = AttemptChannel(name, self._report, self._needs)
        if request.attaches and placement.place is not None:
            return self._session.follow(attempt, placement.place)
        host = _host_of(request.session_id if request.resume else request.fork_of)
        slot = await self._session.place(attempt, host, request.on_output)
        self._host = slot.connection.name
        try:
            slot.connection.kept.add(name)  # from here on the host may be stored
            await placement.on_place(slot.connection.name)
        except BaseException:
            slot.connection.send({"op": "cancel", "attempt": name})
            slot.release()
            raise
        return slot

    async def _run(self, slot: HeldSlot, prompt: str) -> Reply:
        follows = self._request.attaches
        self._host = slot.connection.name
        with when_cancelled(self._session.wind_down):
            while True:
                if not await self._session.wait_until_back(slot.connection, slot.attempt, self._request.on_output):
                    raise self._session.away_error(slot.connection)
                slot.attempt.clear()
                self._go(slot, prompt, follows=follows)
                frame = await slot.attempt.next()
                if frame["op"] != "lost":
                    return self._outcome(frame)
                follows = True

    def _go(self, slot: HeldSlot, prompt: str, *, follows: bool) -> None:
        request = request_json(self._request)
        request |= {name: _without_host(request[name]) for name in ("session_id", "fork_of") if name in request}
        if follows:
            request["attaches"] = True
        frame: Frame = {
            "op": "go",
            "attempt": slot.attempt.name,
            "backend": self._described,
            "request": request,
            "prompt": prompt,
            "answers": given_answers(),
        }
        self._shown.restart()
        slot.connection.send(frame)
        self._placement.on_go()

    def _outcome(self, frame: Frame) -> Reply:
        try:
            match frame["op"]:
                case "reply":
                    reply = read_reply(frame["reply"])
                case "asked":
                    raise QuestionAsked(Question(**frame["question"]))
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
        if reply.session_id is None:
            return reply
        self.session_id = self._with_host(reply.session_id)
        return replace(reply, session_id=self.session_id)

    def _report(self, frame: Frame) -> None:
        try:
            match frame["op"]:
                case "session":
                    self.session_id = self._with_host(frame["session_id"])
                    self._request.on_session(self.session_id)
                case "output":
                    output = from_json(Output, frame["output"])
                    self._shown.write(output)
                    self._request.on_output(output)
                case _:
                    if self._request.on_allowance is not None:
                        self._request.on_allowance(Allowance(**frame["limits"]))
        except (KeyError, TypeError, ValueError):
            pass  # a report that cannot be read is worth less than the attempt

    def _with_host(self, session_id: str) -> str:
        return f"{session_id}@{self._host}"


def _host_of(session_id: str | None) -> str | None:
    """Return the host of a session; None without a session, and for one from before the backend was placed."""
    _, at, host = (session_id or "").rpartition("@")
    return host if at else None


def _without_host(session_id: str) -> str:
    return session_id.rpartition("@")[0] or session_id
