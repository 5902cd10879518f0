"""The application behind its guard, and the server that runs it, its connections bounded in number and in time.

Anybody on this machine can open connections, without the token. A connection is *waiting* until a request with the
token has come in, and again after the response. Waiting connections are few: one more than the bound closes the oldest.
A client that sends its request at once is served whatever the number of connections that others hold open, because
its request comes in long before that many further connections have. (uvicorn's `limit_concurrency` would refuse that
client instead.)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any, Final, cast

import h11
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.runner.serving.http_guard import ADMIT, MOST_HEAD_BYTES, Guard, SignIn
from plait.runner.serving.http_routes import PageApi, ServedRuns, add_handlers, files_router, page_files
from plait.runner.views.view_models import prepare_schemas

HEAD_SECONDS = 10.0
"""Seconds in which the head of a request has to come in, after the opening of the connection or its first byte."""
MOST_WAITING: Final = 128
"""Waiting connections. The descriptors of the process stay below the usual limits (256 on macOS, 1,024 on Linux)."""
ACCEPTED_AT_ONCE: Final = 32
"""Connections that the event loop accepts in one step. They take descriptors beyond MOST_WAITING."""
QUEUED: Final = 4096
"""Connections that the system keeps until they are accepted. Beyond, a client repeats its attempt a second later."""


class _Connection(H11Protocol):
    def __init__(self, server: ApiServer, **given: Any) -> None:
        super().__init__(**given)
        self._server = server
        self._head_timer: asyncio.TimerHandle | None = None
        admit: Callable[[], None] = self._admit
        self.app_state = {ADMIT: admit}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.count_waiting(self)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.discard(self)
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the head is complete, or no head at all
            self._cancel_timer()
        elif self._head_timer is None:
            self._limit_head()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._server.count_waiting(self)
        super().on_response_complete()

    def _admit(self) -> None:
        self._server.discard(self)

    def _limit_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


_LAST_ANSWERS_S = 2


def make_app(served: ServedRuns, sign_in: SignIn) -> FastAPI:
    """Return the application, the web page included, without its guard."""
    # The guard checks the token; this dependency publishes the scheme in /openapi.json.
    bearer = HTTPBearer(auto_error=False, description="The token in the file that `plait serve` names at its start.")
    app = FastAPI(
        title="plait",
        version=metadata.version("plait"),
        description="Runs of DAGs of LLM subtasks: made, followed, resumed and cancelled.",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        dependencies=[Depends(bearer)],
        redirect_slashes=False,
    )
    add_handlers(app)
    prepare_schemas()
    app.include_router(served.router())
    app.include_router(files_router())
    app.include_router(PageApi(served.runs, sign_in, served.stopping).router())
    return app


class ApiServer:
    """Serves runs on `listening`, a socket bound to `host`, to clients that send the token of `sign_in`, and the web
    page to browsers.
    """

    def __init__(self, served: ServedRuns, listening: socket.socket, sign_in: SignIn, host: str = "127.0.0.1") -> None:
        self._served = served
        self._listening = listening
        port = listening.getsockname()[1]
        own = f"[{host}]" if ":" in host else host
        hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]", own))
        self._waiting: dict[_Connection, None] = {}  # in the order of their coming
        self._uvicorn = _Quiet(
            uvicorn.Config(
                Guard(make_app(served, sign_in), sign_in.token, hosts, f"{own}:{port}", page_files()),
                http=cast("type[asyncio.Protocol]", partial(_Connection, self)),  # uvicorn only calls it
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # every warning is about a mistake of a client, token or not
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )

    async def serve(self) -> None:
        """Serve until `stop` is called."""
        await self._uvicorn.serve([self._listening])

    def stop(self) -> None:
        """Refuse new requests, end the event streams, finish requests in progress. Can be called at any time."""
        self._served.stopping.set()
        self._uvicorn.should_exit = True

    def count_waiting(self, connection: _Connection) -> None:
        """Count `connection` as waiting. Closes the oldest waiting connection if there are too many."""
        self._waiting[connection] = None
        if len(self._waiting) > MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()

    def discard(self, connection: _Connection) -> None:
        """Count `connection` no longer as waiting."""
        self._waiting.pop(connection, None)


class _Quiet(uvicorn.Server):
    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept few connections in each step of the event loop, with many in the queue of the system. asyncio has one
        number for both.
        """
        await super().startup(list(sockets or ()))
        for one in sockets or ():
            one.listen(QUEUED)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the command, which stops the runs as well."""
        yield
