"""The description of a backend of Python, as JSON, from which a host makes the backend.

`specs/host_specs.py` has those of plan files.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from operator import attrgetter
from pathlib import PurePath
from typing import Any, cast

from plait.backends.backend_protocol import Backend
from plait.backends.function_backend import FunctionBackend, as_backend
from plait.errors import BackendUnavailable
from plait.json_form import JsonValue
from plait.safe_text import one_line


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
    kind = type(backend).__name__
    raise ValueError(
        f"{kind} cannot be described to a host; put a function that returns the backend into a module that the hosts "
        'have, and name the function: hosts.placed("module:function")'
    )


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
            kind = type(backend).__name__
            raise ValueError(
                f"{one.name} of {kind} is no JSON, so no host can make the backend; put a function that returns the "
                'backend into a module that the hosts have, and name the function: hosts.placed("module:function")'
            ) from None
    return options
