"""Groups of hosts as named in a plan file, under `hosts`, and the backends of a plan on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from plait.backends.backend_protocol import Backend
from plait.backends.hosts.dask_hosts import DaskHosts, check_address
from plait.backends.hosts.host_backend import PATIENCE, HostBackend
from plait.backends.hosts.ssh_hosts import SLOTS, SSH, SSHHost, SSHHosts
from plait.backends.specs.backend_specs import AnySpec, BackendSpec, build, make_unchecked
from plait.errors import BackendUnavailable
from plait.json_form import JsonValue
from plait.safe_text import one_line


class HostPart(BaseModel):
    """A host."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name in events and session ids: 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'."""
    slots: int = Field(default=SLOTS, ge=1, le=1000)
    """Number of attempts at once on the host."""
    address: str | None = Field(default=None, min_length=1)
    """Destination for ssh, such as user@10.0.0.3. Default: the name."""
    plait: str = Field(default="plait", min_length=1)
    """The command there: a name on the PATH of a login that is not interactive, or a path."""


class SSHHostsPart(BaseModel):
    """Hosts reached with OpenSSH, each by a command such as `ssh m3 plait host`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: Literal["ssh"]
    """The way to the hosts."""
    hosts: list[str | HostPart] = Field(min_length=1)
    """The hosts: names, or mappings with a name."""
    ssh: list[str] | None = Field(
        default=None,
        min_length=1,
        description=f"Command that reaches a host, such as [ssh, -F, config]. Default: {' '.join(SSH)}.",
    )
    patience: float = Field(default=PATIENCE, ge=0, allow_inf_nan=False)
    """Seconds for which the attempts of a host that does not answer are waited for."""

    @model_validator(mode="after")
    def _can_be_made(self) -> SSHHostsPart:
        self.make()
        return self

    @property
    def names(self) -> Sequence[str]:
        """The names of the hosts."""
        return self.make().names

    @property
    def slots(self) -> int:
        """The sum of the slots of all hosts."""
        return self.make().slots

    def make(self) -> SSHHosts:
        """Return the hosts. Raises ValueError for invalid values."""
        hosts = [one if isinstance(one, str) else SSHHost(**one.model_dump()) for one in self.hosts]
        return SSHHosts(hosts, ssh=SSH if self.ssh is None else self.ssh, patience=self.patience)


class DaskHostsPart(BaseModel):
    """The workers of a Dask cluster, such as `dask worker tls://sched:8786 --name m1 --resources agents=4`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: Literal["dask"]
    """The way to the hosts."""
    address: str
    """Address of the scheduler: tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine."""
    patience: float = Field(default=PATIENCE, ge=0, allow_inf_nan=False)
    """Seconds for which the attempts of a worker that has gone are waited for."""

    @model_validator(mode="after")
    def _is_safe(self) -> DaskHostsPart:
        check_address(self.address)
        return self

    @property
    def names(self) -> Sequence[str]:
        """The address, which belongs to one group of hosts."""
        return [self.address]

    @property
    def slots(self) -> None:
        """None: only the scheduler has the workers, which may come and go."""
        return None

    def make(self) -> DaskHosts:
        """Return the hosts. Raises BackendUnavailable without the package distributed."""
        return DaskHosts(self.address, patience=self.patience)


HostsPart: TypeAlias = Annotated[SSHHostsPart | DaskHostsPart, Field(discriminator="kind")]
"""A group of hosts in a plan file."""

# The description of a plan's backend, from which a host makes the backend: see also `hosts/host_backend.py`.

_SPEC: TypeAdapter[BackendSpec] = TypeAdapter(BackendSpec)


def spec_description(spec: AnySpec, folder: Path) -> dict[str, JsonValue]:
    """Return the description of the backend `spec` of a plan in `folder`."""
    return {"spec": spec.model_dump(mode="json", exclude_none=True, exclude={"on", "needs"}), "folder": str(folder)}


def placed(spec: AnySpec, folder: Path, hosts: SSHHosts | DaskHosts) -> HostBackend:
    """Return the backend `spec` of a plan in `folder` with its attempts on `hosts`. Starts nothing.

    Raises ValueError if the hosts have no resources, and the backend needs some.
    """
    made = make_unchecked(spec, folder=folder)
    return HostBackend(spec_description(spec, folder), hosts, made, hosts.checked(spec.needs))


def build_spec(described: Mapping[str, JsonValue]) -> Backend:
    """Return the backend of a description with a spec. Raises BackendUnavailable if this host cannot make it."""
    try:
        return build(_SPEC.validate_python(described["spec"]), folder=Path(str(described["folder"])))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(f"this host cannot make the backend: {one_line(str(error))}") from error
