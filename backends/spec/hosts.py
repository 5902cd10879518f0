"""Groups of hosts as named in a plan file, under `hosts`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.backends.hosts.ssh import PATIENCE, SLOTS, SSH, SSHHost, SSHHosts


class HostPart(BaseModel):
    """A host."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        description="Name in events and session ids: 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'."
    )
    slots: int = Field(default=SLOTS, ge=1, le=1000, description="Number of attempts at once on the host.")
    address: str | None = Field(
        default=None, min_length=1, description="Destination for ssh, such as user@10.0.0.3. Default: the name."
    )
    plait: str = Field(
        default="plait",
        min_length=1,
        description="The command there: a name on the PATH of a login that is not interactive, or a path.",
    )

    def host(self) -> SSHHost:
        """Return the host."""
        return SSHHost(self.name, self.slots, self.address, self.plait)


class SSHHostsPart(BaseModel):
    """Hosts reached with OpenSSH, each by a command such as `ssh m3 plait host`."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["ssh"] = Field(description="The way to the hosts.")
    hosts: list[str | HostPart] = Field(min_length=1, description="The hosts: names, or mappings with a name.")
    ssh: list[str] | None = Field(
        default=None,
        min_length=1,
        description=f"Command that reaches a host, such as [ssh, -F, config]. Default: {' '.join(SSH)}.",
    )
    patience: float = Field(
        default=PATIENCE,
        ge=0,
        allow_inf_nan=False,
        description="Seconds for which the attempts of a host that does not answer are waited for.",
    )

    @model_validator(mode="after")
    def _can_be_made(self) -> SSHHostsPart:
        self.make()
        return self

    def make(self) -> SSHHosts:
        """Return the hosts. Raises ValueError for invalid values."""
        hosts = [one if isinstance(one, str) else one.host() for one in self.hosts]
        return SSHHosts(hosts, ssh=SSH if self.ssh is None else self.ssh, patience=self.patience)
