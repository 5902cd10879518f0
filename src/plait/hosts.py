"""Other machines that run tasks: reached by ssh, or workers of a Dask cluster."""

from __future__ import annotations

from plait.backends.hosts.dask_hosts import DaskHosts
from plait.backends.hosts.host_backend import SSHHost, SSHHosts

__all__ = [
    "DaskHosts",
    "SSHHost",
    "SSHHosts",
]
