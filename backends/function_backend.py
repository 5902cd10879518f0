"""Any Python function as a backend; how a plan names one: `file.py:name` or `package.module:name`; and a person, whom a
function of plait asks.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from copy import deepcopy
from functools import partial
from inspect import Parameter
from operator import attrgetter
from pathlib import Path
from traceback import StackSummary, TracebackException, walk_tb
from types import CodeType, ModuleType, TracebackType
from typing import Any, ClassVar, TypeAlias, cast

from plait.backends.backend_protocol import Backend, Conversation, ConversationRequest, Placeable, Reply
from plait.backends.error_kinds import passing_failure
from plait.backends.large_answers import in_thread, is_large, read_answer
from plait.backends.output_schema import Mismatch, Schema, invalid_output
from plait.backends.running_turn import ask
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonInput, JsonValue
from plait.safe_text import clean_text, one_line, parse_json, without_secrets

_NOT_THEIRS = (Path(__file__).parent, Path(inspect.__file__).parent)
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of code not written by users for a plan: `plait`, Python's own, and installed packages."""
_LONGEST_TRACEBACK = 16_000
"""Most characters of a stored traceback."""

Function: TypeAlias = Callable[..., Any]
"""`async def f(prompt: str)` or `def f(prompt: str)`, returning text or any JSON value except None."""


class FunctionBackend(Placeable):
    """A backend that answers each prompt by calling a function.

    Text becomes the reply's `text`, any other JSON value its `data`, as read back from JSON. With an output schema the
    value has to fit it, text being read as JSON first; there is no second try, and there are no sessions.

    Parameters that are named like a task, an input or `item` receive a copy of its value. The parameter `prompt`, else
    the first one if it receives no value, receives the prompt.

    Raises BackendError: `unexpected` if the function raises, or returns what JSON cannot hold. An exception that
    reports a limit, an overload or a failed connection, as those of the vendors' libraries do by their HTTP status, has
    the kind of that failure; a BackendError passes.

    A plain function runs in a thread, which cannot be stopped: after a cancellation or timeout it runs to its end, and
    the result is dropped. Prefer `async def`.
    """

    __slots__ = ("_call", "function", "parameters")
    needs_prompt: ClassVar[bool] = False
    """A task may call a function without a prompt: see `Abilities`."""

    def __init__(self, function: Function) -> None:
        if not callable(function):
            raise TypeError(f"FunctionBackend takes a function, not {type(function).__name__}")
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._call: Callable[..., Awaitable[Any]] = function if is_async else _threaded(function)
        self.function = function
        self.parameters = _parameters_of(function)

    def answer_key(self) -> JsonValue:
        """Return the function's module and name, and a digest of its own code, without what it calls or closes over."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        code = getattr(self.function, "__code__", None) or getattr(type(self.function).__call__, "__code__", None)
        digest = hashlib.sha256(repr(_code_parts(code)).encode()).hexdigest() if isinstance(code, CodeType) else ""
        return [getattr(self.function, "__module__", ""), name, digest]

    def new_session_id(self) -> str | None:
        """Return None: functions have no sessions."""
        return None

    def open(self, request: ConversationRequest) -> _FunctionConversation:
        """Open a conversation in which every turn is one call of the function."""
        call = self._call if not request.values else partial(self._call_with, request.values)
        return _FunctionConversation(call if self.parameters else self._call_without, request)

    def _call_with(self, values: Mapping[str, JsonInput], prompt: str) -> Awaitable[Any]:
        # Copies, so that a function that changes a value changes no stored result.
        arguments = {re.sub(r"\W", "_", name): deepcopy(value) for name, value in values.items()}
        first, *others = (name for name, _ in self.parameters)
        if first == "prompt" or not (first in arguments or "prompt" in others):
            return self._call(prompt, **arguments)
        return self._call(**arguments, **({"prompt": prompt} if "prompt" in others else {}))

    def _call_without(self, _prompt: str) -> Awaitable[Any]:
        return self._call()


def as_backend(value: object) -> Backend:
    """Return `value` if it is a backend, or wrap a function in a backend. Raises TypeError for any other value."""
    if isinstance(value, type):
        raise TypeError(f"{value.__name__} is a class; give an instance of it as the backend")
    if isinstance(value, Backend):
        return value
    if callable(value):
        return FunctionBackend(value)
    raise TypeError(
        f"a backend has `new_session_id` and `open`, or is a function that takes the prompt; {type(value).__name__} "
        "is neither"
    )


class _FunctionConversation:
    """Conversation and context manager in one object, because `asynccontextmanager` costs each task time."""

    __slots__ = ("_call", "_request")

    session_id: str | None = None

    def __init__(self, call: Callable[..., Awaitable[Any]], request: ConversationRequest) -> None:
        self._call = call
        self._request = request

    async def __aenter__(self) -> _FunctionConversation:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        return None

    async def send(self, prompt: str) -> Reply:
        try:
            value = await self._call(prompt)
        except BackendError:
            raise
        except Exception as exc:  # whatever the user's function raises
            raise error_of_code(exc) from exc
        if self._request.output_schema is not None:
            return await self._checked(value)
        if isinstance(value, str):
            return Reply(clean_text(str(value)))
        text, data = await _to_json(value)
        return Reply(text, data)

    async def _checked(self, value: Any) -> Reply:
        schema = Schema(self._request.output_schema or {})
        try:
            text = clean_text(str(value)) if isinstance(value, str) else (await _to_json(value))[0]
            return Reply(text, await read_answer(schema, text))
        except Mismatch as mismatch:
            raise invalid_output(mismatch) from None


def error_of_code(error: BaseException) -> BackendError:
    """Return the error of a turn that `error` of the user's code has ended, with the place in that code: `unexpected`,
    or the kind of the limit, the overload or the passing failure of a server that the code has met.
    """
    text = ": ".join(filter(None, (type(error).__name__, one_line(without_secrets(str(error))))))
    kind, wait = passing_failure(error, time.time()) or (ErrorKind.UNEXPECTED, None)
    return BackendError(kind, text + place_of(error), retry_after=wait, traceback=format_traceback(error))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of `error` from the first line of the user's code on, without secrets of the environment."""
    printed = TracebackException.from_exception(error, compact=True)
    frames = list(printed.stack)
    first = next((index for index, frame in enumerate(frames) if _is_users(Path(frame.filename))), 0)
    printed.stack = StackSummary.from_list(frames[first:])
    text = without_secrets(clean_text("".join(printed.format())))
    # The end says most: the innermost call and the error.
    return text if len(text) <= _LONGEST_TRACEBACK else f"...\n{text[-_LONGEST_TRACEBACK:]}"


def _is_users(file: Path) -> bool:
    """Return whether the code in `file` is neither of plait nor of Python nor of an installed package."""
    return _INSTALLED.isdisjoint(file.parts) and not any(file.is_relative_to(folder) for folder in _NOT_THEIRS)


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of `error`; empty if the traceback has none."""
    places = [
        (Path(frame.f_code.co_filename), line, frame.f_code.co_name) for frame, line in walk_tb(error.__traceback__)
    ]
    for file, line, name in reversed(places):
        if _is_users(file) and file.is_file():
            return f" (at {one_line(file.name, 80)}:{line} in {name})"
    return ""


async def _to_json(value: Any) -> tuple[str, JsonValue]:
    return await in_thread(_as_json, value) if is_large(value) else _as_json(value)


def _as_json(value: Any) -> tuple[str, JsonValue]:
    if value is None:
        raise BackendError(ErrorKind.UNEXPECTED, "the function returned None; return text or a JSON value")
    try:
        text = clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
        # Read the JSON back, so that dependents get the same value now and after a resume.
        return text, parse_json(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise BackendError(
            ErrorKind.UNEXPECTED,
            f"the function returned {type(value).__name__}, which JSON cannot hold: {one_line(str(exc), 120)}",
        ) from exc


def _threaded(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*prompt: str, **values: Any) -> Any:
        from anyio import CapacityLimiter  # noqa: PLC0415 - `async def` functions do without anyio
        from anyio.to_thread import run_sync  # noqa: PLC0415

        # The runner bounds the number of parallel calls; anyio's shared limit of 40 threads would be a second, hidden
        # bound.
        value = await run_sync(partial(function, *prompt, **values), abandon_on_cancel=True, limiter=CapacityLimiter(1))
        return await value if inspect.isawaitable(value) else value

    return call


def _parameters_of(function: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return the parameters, each with whether it is required, without those that only an unnamed value can reach. One
    named `prompt` stands for what cannot be known.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of some functions in C
        return (("prompt", True),)
    if parameters and parameters[0].kind in {Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL}:
        parameters[0] = Parameter("prompt", Parameter.POSITIONAL_OR_KEYWORD)
    named = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    return tuple((one.name, one.default is Parameter.empty) for one in parameters if one.kind in named)


def _code_parts(code: CodeType) -> list[object]:
    """Return what the code does, without the lines at which it stands in its file."""
    constants: list[object] = []
    for one in code.co_consts:
        if isinstance(one, CodeType):
            constants.append(_code_parts(one))
        else:  # the order of a set of texts differs from process to process
            is_set = isinstance(one, frozenset)
            constants.append(sorted(map(repr, cast("frozenset[object]", one))) if is_set else repr(one))
    return [code.co_code, constants, code.co_names]


def named_function(call: str, folder: Path) -> Any:
    """Return what `call` names: `file.py:name`, with the file in `folder`, or `package.module:name`. Raises
    BackendUnavailable with the reason if it cannot be loaded.
    """
    where, _, name = call.rpartition(":")
    try:
        module = _load_file(folder / where) if where.endswith(".py") else importlib.import_module(where)
    except BackendUnavailable:
        raise
    except Exception as exc:  # whatever the user's module raises while it is imported
        raise BackendUnavailable(f"cannot import {where}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise BackendUnavailable(f"{call}: {where} has no {name!r}") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    # One module per file, even for several functions, as with an import.
    name = f"plait_functions_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BackendUnavailable(f"there is no file {path}; write `call` relative to the plan file's folder")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importable_siblings(path.parent):
            spec.loader.exec_module(module)
    except Exception as exc:  # whatever the user's file raises while it is loaded
        del sys.modules[name]
        raise BackendUnavailable(f"cannot load {path}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    return module


# While a file named by `call` is loaded, its folder is the first entry of `sys.path`. Afterwards the entry and the
# modules of the folder are gone from `sys.path` and `sys.modules`: the next plan may have a module of the same name.

_lock = threading.RLock()
_loaded: dict[Path, dict[str, ModuleType]] = {}
"""The modules that files of a folder have imported from the folder, so that two files share one module."""


@contextmanager
def importable_siblings(folder: Path) -> Generator[None]:
    """Return a context in which the modules in `folder` can be imported. `folder` is absolute and resolved.

    Outside the context, the modules are only reachable through the names that the importing files bound. A module of
    the same name that was imported before from another place, Python's own modules excepted, is set aside meanwhile.
    """
    with _lock:
        aside = {name: sys.modules.pop(name) for name in _hidden_by(folder)}
        before = set(sys.modules)
        sys.modules.update(_loaded.get(folder, {}))
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            with suppress(ValueError):  # the loaded file may have removed the entry itself
                sys.path.remove(str(folder))
            imported = {
                name: sys.modules[name] for name in set(sys.modules) - before if _is_in(folder, sys.modules[name])
            }
            _loaded.setdefault(folder, {}).update(imported)
            for name in imported:
                del sys.modules[name]
            sys.modules.update(aside)


def _hidden_by(folder: Path) -> list[str]:
    """Return the names of the imported modules that a module of `folder` has to replace."""
    there = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    there -= sys.stdlib_module_names | {"plait"}
    return [name for name, one in sys.modules.items() if name.partition(".")[0] in there and not _is_in(folder, one)]


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Return whether the module lies in `folder`. Packages of an environment inside the folder are installed ones."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]  # a namespace has no file
    file = next((Path(place) for place in places if isinstance(place, str)), None)
    if file is None or module.__name__.partition("_")[0] == "plait" or not file.is_relative_to(folder):
        return False
    return _INSTALLED.isdisjoint(file.parts)


class PersonBackend:
    """A backend that asks a person, or a program answering in the person's place; see `ask`.

    The task waits for the answer (`waiting_input`). The answer is text, or a value that fits the task's
    `output_schema`. After `deadline` seconds without an answer, `default` is used; with a `default` of None the task
    fails. Without a deadline the question waits for ever. There are no sessions. A cancelled turn asks nothing.
    """

    def __init__(self, *, default: JsonInput = None, deadline: float | None = None) -> None:
        self.default = default
        self.deadline = deadline

    def answer_key(self) -> JsonValue:
        """Return the same key for every person: an answer is for the question, and the question is the prompt."""
        return "person"

    def new_session_id(self) -> str | None:
        """Return None: people have no sessions."""
        return None

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation in which every turn asks its prompt."""

        async def asked(prompt: str) -> JsonValue:
            if not prompt.strip():
                raise BackendError(ErrorKind.INVALID_REQUEST, "the prompt is empty: give the person a question")
            return await ask(prompt, schema=request.output_schema, default=self.default, deadline=self.deadline)

        return FunctionBackend(asked).open(request)
