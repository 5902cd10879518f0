"""Backends of a server by name, for plans that are posted to it."""

from __future__ import annotations

from plait.backends.backend_specs import BackendSpec, FunctionSpec
from plait.runner.client.run_backends import BackendSet


def specs_of(*names: str) -> dict[str, BackendSpec]:
    return {name: FunctionSpec(kind="function", call="os:getcwd") for name in names}


def set_of(*names: str) -> BackendSet:
    return BackendSet(specs_of(*names))
