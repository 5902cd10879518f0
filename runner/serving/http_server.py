"""The application behind its guard, and the server that runs it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import cast

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from plait.runner.serving.connections import ACCEPTED_AT_ONCE, QUEUED, Connections
from plait.runner.serving.http_errors import add_handlers
from plait.runner.serving.http_guard import MOST_HEAD_BYTES, Guard, WebPage
from plait.runner.serving.http_routes import Api, ServedRuns
from plait.runner.serving.page_files import POLICY, page_files, page_router
from plait.runner.serving.page_routes import PageApi
from plait.runner.serving.sign_in import SignIn

_LAST_ANSWERS_S = 2


def make_app(served: ServedRuns, sign_in: SignIn | None = None) -> FastAPI:
    """Return the application without its guard; with `sign_in`, the web page included."""
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
    api = Api(served)
    app.include_router(api.router())
    app.include_router(api.questions_router())
    if sign_in is not None:
        app.include_router(page_router())
        app.include_router(PageApi(served.runs, sign_in, served.stopping).router())
    return app


class ApiServer:
    """Serves runs on `listening`, a socket bound to `host`, to clients that send `token`; with `sign_in`, also the web
    page to browsers.
    """

    def __init__(
        self,
        served: ServedRuns,
        listening: socket.socket,
        token: str,
        sign_in: SignIn | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._served = served
        self._listening = listening
        port = listening.getsockname()[1]
        own = f"[{host}]" if ":" in host else host
        hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]", own))
        page = None if sign_in is None else WebPage(f"{own}:{port}", frozenset(page_files()), POLICY)
        self._connections = Connections()
        self._uvicorn = _Quiet(
            uvicorn.Config(
                Guard(make_app(served, sign_in), token, hosts, page),
                http=cast("type[asyncio.Protocol]", self._connections.make_protocol),  # uvicorn only calls it
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
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(self._connections.handle_loop_error)
        try:
            await self._uvicorn.serve([self._listening])
        finally:
            loop.set_exception_handler(handler)

    def stop(self) -> None:
        """Refuse new requests, end the event streams, finish requests in progress. Can be called at any time."""
        self._served.stopping.set()
        self._uvicorn.should_exit = True


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
