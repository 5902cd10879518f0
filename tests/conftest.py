"""What all tests share: an environment without keys, and a store."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import inspect
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from plait.persistence import SQLiteStore, Store
from tests.support.agents.homes import Home, make_home
from tests.support.processes.room import Kin, kin

# A developer's own keys, servers and proxies must not reach a test, nor a test them.
PRIVATE = ("OPENAI_", "ANTHROPIC_", "PLAIT_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30
LIMIT_S = 240.0
HANG_S = 400.0
"""After so long in one test a whole worker ends with a traceback, and does not run its other tests."""
LONG = tuple(
    str(Path(__file__).parent / name)
    for name in (
        "backends/hosts/",
        "docs/",
        "faults/",
        "runner/engine/test_row_reader",
        "runner/recovery/",
        "runner/serving/",
    )
)

# How long examples take says nothing on a machine with other work. They are the same each time, so that no change is
# refused for what another one did; `pytest --hypothesis-profile=search` looks for others, and for twice as many.
hypothesis.settings.register_profile("search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile(
    "plait", hypothesis.settings.get_profile("search"), derandomize=True, max_examples=50
)
hypothesis.settings.load_profile("plait")


def has_room_in_memory() -> bool:
    """Whether files can lie in memory, programs too: a container may give it 64 MB, and let nothing there be run."""
    if not MEMORY.is_dir():
        return False
    there = os.statvfs(MEMORY)
    return there.f_bavail * there.f_frsize > ENOUGH and not there.f_flag & os.ST_NOEXEC


# Most of what a store on a disk costs a test is waiting for syncs, and no power loss is met here that is not simulated.
if "TMPDIR" not in os.environ and has_room_in_memory():
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# Told to write no bytecode, each of the hundreds of commands that the tests start would compile all of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A suite that a script started in the background ignores Ctrl-C, and so would every command that it sends one to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # and one under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a test of those that are asked for: each worker would import all of them."""
    if config.option.markexpr not in {"slow", "not slow"} or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if config.option.markexpr == "slow":
        return "mark.slow" not in text or None
    return re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE) is not None or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that mostly wait for other processes: at the end a long file would leave workers idle."""
    items.sort(key=lambda item: not str(item.path).startswith(LONG))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj)


def _limited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the test with an end to all its waits: a TimeoutError with the line that waits."""

    @functools.wraps(test)
    async def limited(*args: Any, **options: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(*args, **options)

    return limited


# Nothing of what makes up nine thousand tests goes before they have run: to look through it again at every collection
# of garbage took a fifth of the time in which pytest finds them, and a tenth of the time of most of them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    # A test makes little garbage, and libraries that it loads are looked through with it: at Python's own threshold of
    # 700 objects, one twentieth of the time of all tests.
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


_armed = -HANG_S
_stderr = 2


def pytest_configure() -> None:
    global _stderr  # noqa: PLW0603 - while a test runs, pytest has put another file in its place
    _stderr = os.dup(2)


def pytest_runtest_protocol() -> None:
    """Let a test that hangs be a failure with a traceback, not a CI run that times out. pytest's `faulthandler_timeout`
    starts and joins a thread for every test.
    """
    global _armed  # noqa: PLW0603 - one for the process, as the timer is
    if time.monotonic() > _armed + 20:
        _armed = time.monotonic()
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=_stderr)


def pytest_sessionfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="session")
def clean_environment() -> None:
    """Once for all tests: what a test sets of these, `monkeypatch` takes back."""
    for name in list(os.environ):
        if name.startswith(PRIVATE) or name.upper() in PROXIES:
            del os.environ[name]


@pytest.fixture
async def sqlite_store() -> AsyncGenerator[SQLiteStore]:
    with tempfile.TemporaryDirectory() as folder:
        async with SQLiteStore(Path(folder) / "plait.db") as store:
            yield store


@pytest.fixture
def store(sqlite_store: SQLiteStore) -> Store:
    """The store of the command. `MemoryStore` is the same on a database in memory."""
    return sqlite_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a database may be, with every character that a URI would take amiss; its folder does not exist yet."""
    return tmp_path / "a folder" / "runs #1 100% ?x=y.db"


@pytest.fixture(params=["sqlite", "none"])
def kept(request: pytest.FixtureRequest) -> Store | None:
    """A store, and no store at all."""
    return request.getfixturevalue("sqlite_store") if request.param == "sqlite" else None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Where fake agents live."""
    return make_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def holds() -> Iterator[Kin]:
    """What children hold as long as one of them is left."""
    with kin() as made:
        yield made
