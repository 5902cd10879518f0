"""`Placeable`: the method that all backends with a description have (hosts/describe.py)."""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.backend_protocol import Backend, Hosts


class Placeable:
    """A backend whose attempts may run on other hosts."""

    __slots__ = ()

    def on(self, hosts: Hosts, needs: Mapping[str, float] | None = None) -> Backend:
        """Return this backend with its attempts on `hosts`. Paths, programs and keys are those of the hosts.

        `needs` are the resources of a Dask worker that an attempt takes, one of `agents` by default. Raises ValueError
        if a host could not make the backend, as with a function that no module has.
        """
        return hosts.placed(self, needs)
