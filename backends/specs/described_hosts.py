"""The description of a backend of a plan file, from which a host makes the backend: see also `hosts/describe.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from plait.backends.backend_protocol import Backend
from plait.backends.hosts.dask_hosts import DaskHosts
from plait.backends.hosts.host_backend import BackendTraits, HostBackend
from plait.backends.hosts.ssh_hosts import SSHHosts
from plait.backends.specs.build_backend import AnySpec, BackendSpec, build, make_unchecked
from plait.errors import BackendUnavailable
from plait.json_form import JsonValue
from plait.safe_text import one_line

_SPEC: TypeAdapter[BackendSpec] = TypeAdapter(BackendSpec)


def spec_description(spec: AnySpec, folder: Path) -> dict[str, JsonValue]:
    """Return the description of the backend `spec` of a plan in `folder`."""
    return {"spec": spec.model_dump(mode="json", exclude_none=True, exclude={"on", "needs"}), "folder": str(folder)}


def placed(spec: AnySpec, folder: Path, hosts: SSHHosts | DaskHosts) -> HostBackend:
    """Return the backend `spec` of a plan in `folder` with its attempts on `hosts`. Starts nothing.

    Raises ValueError if the hosts have no resources, and the backend needs some.
    """
    made = make_unchecked(spec, folder=folder)
    traits = BackendTraits() if made is None else BackendTraits.of(made)
    return hosts.place(spec_description(spec, folder), traits, spec.needs)


def build_spec(described: Mapping[str, JsonValue]) -> Backend:
    """Return the backend of a description with a spec. Raises BackendUnavailable if this host cannot make it."""
    try:
        return build(_SPEC.validate_python(described["spec"]), folder=Path(str(described["folder"])))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(f"this host cannot make the backend: {one_line(str(error))}") from error
