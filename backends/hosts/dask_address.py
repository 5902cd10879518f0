"""The terms of a Dask cluster: addresses that may be used without TLS, the name of a host, and its slots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
_ROUNDING = 1e-9
"""Part of an attempt by which a division may be too low, as 0.3 / 0.1 is."""


def check_address(address: str) -> None:
    """Raise ValueError if `address` is no address of a scheduler, or needs TLS."""
    parts = urlsplit(address)
    if parts.scheme not in {"tcp", "tls"} or not parts.hostname or parts.port is None or parts.path:
        raise ValueError(
            f"the address of a Dask scheduler is tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine, not "
            f"{address!r}"
        )
    if is_open(address):
        raise ValueError(
            f"{address} has neither encryption nor authentication: whoever reaches a Dask scheduler executes code on "
            "every worker; use tls://, or a tunnel to tcp://127.0.0.1"
        )


def is_open(address: str) -> bool:
    """Return whether others than this machine reach the address without TLS."""
    parts = urlsplit(address)
    return parts.scheme == "tcp" and not _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(address: str, name: object) -> str:
    """Return the name of the host with a worker: the name given to the worker, else the IP address of the machine.

    A character that session ids and names of folders cannot have is replaced by a dash.
    """
    given = str(name)
    return _FOREIGN.sub("-", urlsplit(address).hostname or "" if given == address else given)


def slots_of(resources: Mapping[str, float]) -> int:
    """Return the number of attempts that a host with `resources` offers at most, for attempts of one each."""
    return max(1, min(1000, int(max(resources.values(), default=1))))


def slots_for(resources: Mapping[str, float], needs: Iterable[Mapping[str, float]]) -> int:
    """Return the number of attempts for which a host has the `resources`. Attempts of several `needs` are counted as if
    each kind had the host for itself: some may have to wait for room, and no room stays unused.
    """
    return sum(int(min(resources.get(name, 0) / need for name, need in one.items()) + _ROUNDING) for one in needs)
