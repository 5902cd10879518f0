"""Stand-ins with a script: a backend that holds conversations, a clock that does not wait, delays that are short."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.lowlevel

from plait.backends.backend_protocol import ConversationRequest, Output, Reply
from plait.clock_and_ids import Clock
from plait.errors import BackendError
from plait.runner.engine.inbox import LOOK_EVERY_S
from plait.usage import Usage

Answer = Callable[[str, ConversationRequest], "str | Reply | Exception"]


def echo(prompt: str, _opening: ConversationRequest) -> str:
    return f"re: {prompt}"


class Talker:
    """A backend with sessions and replayed history. `answer` decides; every opening and prompt is kept."""

    def __init__(self, answer: Answer = echo, *, own_ids: bool = False) -> None:
        self.answer = answer
        self.own_ids = own_ids
        self.made = 0
        self.requests: list[ConversationRequest] = []
        self.prompts: list[str] = []
        self.closed = 0

    def new_session_id(self) -> str | None:
        if self.own_ids:
            return None
        self.made += 1
        return f"session-{self.made}"

    def open(self, request: ConversationRequest) -> _Talk:
        self.requests.append(request)
        return _Talk(self, request)

    async def before_send(self) -> None:
        """Called once a prompt has arrived."""
        await anyio.lowlevel.checkpoint()


class _Talk:
    def __init__(self, backend: Talker, request: ConversationRequest) -> None:
        self._backend = backend
        self._opening = request
        self.session_id = request.session_id

    async def __aenter__(self) -> _Talk:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.closed += 1

    async def send(self, prompt: str) -> Reply:
        self._backend.prompts.append(prompt)
        await self._backend.before_send()
        if self._backend.own_ids and self.session_id is None:
            self._backend.made += 1
            self.session_id = f"own-{self._backend.made}"
            self._opening.on_session(self.session_id)
        answer = self._backend.answer(prompt, self._opening)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Reply):
            return answer
        self._opening.on_output(Output("text", answer))
        return Reply(answer, session_id=self.session_id, usage=Usage(len(prompt), len(answer), 0.5))


class Calls:
    """A function as a backend: answers from a table, an exception by raising it, else with the prompt in brackets.
    `made` are the prompts.
    """

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.made: list[str] = []

    async def __call__(self, prompt: str) -> object:
        self.made.append(prompt)
        answer = self.answers.get(prompt, f"<{prompt}>")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take(self) -> list[str]:
        """Return the prompts since the last time, sorted."""
        made, self.made = sorted(self.made), []
        return made


class QuickClock(Clock):
    """A clock whose sleeps pass at once, adding to the time instead; `slept` lists them."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.slept: list[float] = []

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        # Renewing the lease and looking into the inbox: never, in a test of moments. Others may sleep a second, too.
        if seconds == 10.0 or seconds is LOOK_EVERY_S:
            await anyio.sleep_forever()
        if seconds < 0:
            raise ValueError(f"sleeps for {seconds} seconds")  # as the real one does
        self.slept.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()


def failing(kind_error: BackendError, times: int, then: Answer = echo) -> Answer:
    """An answer that fails `times` times for each prompt."""
    left: dict[str, int] = {}

    def answer(prompt: str, request: ConversationRequest) -> str | Reply | Exception:
        left[prompt] = left.get(prompt, times) - 1
        return kind_error if left[prompt] >= 0 else then(prompt, request)

    return answer


class ShortDelays(random.Random):
    """A runner's `rng` with which a task that was cut by a death waits two milliseconds, and not up to two seconds."""

    def random(self) -> float:
        return 0.001
