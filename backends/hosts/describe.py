"""The description of a backend, as JSON, from which a host makes the backend: see `spec/described.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import PurePath
from typing import Any

from plait.backends.function import FunctionBackend
from plait.backends.protocol import JsonValue


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
