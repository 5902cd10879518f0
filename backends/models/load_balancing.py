"""Several servers with the same model, used as one backend: the least loaded server gets the next request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from plait.backends.backend_protocol import Conversation, ConversationRequest, Output
from plait.backends.models.http_client import NotConnected
from plait.backends.models.model_api import ModelBackend, RemoteBackend, ReplayConversation
from plait.backends.prices import Billing, billing_of
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue

FIRST_PAUSE_S = 1.0
"""Seconds for which a broken server gets no requests. Each further failure in a row, of a request sent after the last
pause, doubles the time.
"""
LAST_PAUSE_S = 60.0
"""The longest of these times, in seconds."""
KEPT_CONVERSATIONS = 10_000
"""Number of conversations, the last used, whose server is known."""
_REFUSED = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
"""The kinds of error with which a server refuses a request before it processes the request."""
_BROKEN = _REFUSED | {ErrorKind.TRANSIENT}


@dataclass(slots=True, eq=False)
class _Server:
    backend: RemoteBackend
    under_way: int = 0
    """Requests without an answer so far."""
    sent: int = 0
    """Requests sent so far."""
    failures: int = 0
    """Failures in a row, each of a request sent after the pause that followed the failure before."""
    paused_until: float = 0.0
    """Time on the clock until which the server gets no requests."""


@dataclass(eq=False)
class LoadBalancedBackend(ModelBackend):
    """Several servers with the same model, used as one backend.

    A request goes to the server with the fewest under way. A conversation stays at its last server, which may have its
    beginning in the cache, unless that one has more than twice the requests of the least loaded. A server that fails
    (`transient`, `overloaded`, `rate_limited`) gets none for a second, and up to a minute if it keeps failing. A
    request that was not processed (no connection, `overloaded`, `rate_limited`) goes to the next server at once; if all
    refuse, the error with the shortest wait ends the attempt. Every other failure ends it: the request may have been
    processed.

    Raises ValueError without servers.
    """

    servers: Sequence[RemoteBackend]
    """The servers, such as `OpenAIBackend("model", base_url="http://gpu1:8000/v1")`."""
    monotonic: Callable[[], float] = time.monotonic
    """The clock for the times of broken servers, in seconds."""
    adjustable: ClassVar[frozenset[str]] = RemoteBackend.adjustable
    takes_files: ClassVar[Literal["contents"]] = RemoteBackend.takes_files
    _states: list[_Server] = field(init=False, repr=False)
    _last_server: OrderedDict[str, _Server] = field(default_factory=OrderedDict[str, _Server], init=False, repr=False)
    """The last server of each conversation, by session id, the last used at the end."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("a LoadBalancedBackend needs a server")
        self._states = [_Server(backend) for backend in self.servers]

    def answer_key(self) -> JsonValue:
        """Return a digest of the settings that determine an answer, of each server."""
        return [server.answer_key() for server in self.servers]

    @property
    def account(self) -> str:
        """The servers and their keys, unreadable: backends with the same account share the rate limits."""
        return ", ".join(server.account for server in self.servers)

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of calls without a reported cost: those of the first server."""
        bounds = [server.max_tokens for server in self.servers]
        most = None if None in bounds else max(bound for bound in bounds if bound is not None)
        return replace(billing_of(self.servers[0]), max_output_tokens=most)

    def check(self) -> None:
        """Raise BackendUnavailable if a key is missing or a URL is invalid. Needs no network."""
        for server in self.servers:
            server.check()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation. Raises BackendUnavailable if a key is missing or a client cannot be made."""
        for server in self.servers:
            await server.connect()
        yield ReplayConversation(partial(self._ask, request), request)

    async def aclose(self) -> None:
        """Close the connections of this event loop. All conversations have to be closed before."""
        for server in self.servers:
            await server.aclose()

    async def _ask(self, request: ConversationRequest, messages: Sequence[Message]) -> Message:
        remaining = list(self._states)
        errors: list[BackendError] = []
        while remaining:
            server = self._choose(remaining, request)
            try:
                return await self._ask_server(server, request, messages)
            except BackendError as error:
                if not isinstance(error, NotConnected) and error.kind not in _REFUSED:
                    raise
                errors.append(error)
            remaining.remove(server)
            if remaining:
                request.on_output(Output("notice", f"{errors[-1].message}; asking another server"))
        # The shortest wait that a server asks for; missing connections last.
        raise min(errors, key=lambda error: (isinstance(error, NotConnected), error.retry_after or 0.0))

    async def _ask_server(self, server: _Server, request: ConversationRequest, messages: Sequence[Message]) -> Message:
        began = self.monotonic()
        server.under_way += 1
        server.sent += 1
        try:
            answer = await server.backend.ask(request, messages)
        except BackendError as error:
            if error.kind in _BROKEN:
                self._pause(server, began, error.retry_after)
            raise
        finally:
            server.under_way -= 1
        server.failures, server.paused_until = 0, 0.0
        if request.session_id is not None:
            self._last_server[request.session_id] = server
            self._last_server.move_to_end(request.session_id)
            if len(self._last_server) > KEPT_CONVERSATIONS:
                self._last_server.popitem(last=False)
        return answer

    def _choose(self, servers: Sequence[_Server], request: ConversationRequest) -> _Server:
        now = self.monotonic()
        ready = [server for server in servers if server.paused_until <= now]
        if not ready:
            return min(servers, key=lambda server: server.paused_until)
        least = min(ready, key=lambda server: (server.under_way, server.sent))
        # A forked conversation begins like the other one.
        last = self._last_server.get(request.session_id or "") or self._last_server.get(request.fork_of or "")
        return last if last in ready and last.under_way <= 2 * max(1, least.under_way) else least

    def _pause(self, server: _Server, began: float, retry_after: float | None) -> None:
        """Pause the server after the failure of a request sent at `began`. The failure of a request sent before the end
        of the last pause is ignored: all requests that one outage ends are one failure.
        """
        if began < server.paused_until:
            return
        pause = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(server.failures, 10))
        server.failures += 1
        server.paused_until = self.monotonic() + max(pause, min(retry_after or 0.0, LAST_PAUSE_S))
