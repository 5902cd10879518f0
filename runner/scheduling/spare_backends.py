"""Which backends take over from which (`or_else`) while a limit closes one. Pure.

`Scheduler` moves the tasks: to the first spare that no limit closes, and back with their next attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from plait.errors import nearest


def mistakes_of_spares(
    or_else: Mapping[str, Sequence[str]], backends: Collection[str]
) -> Iterator[tuple[str, int, str]]:
    """Yield each mistake in the spares of `backends`: the backend, the index of the spare, and what is wrong."""
    for name, spares in or_else.items():
        if name not in backends:
            yield name, 0, f"it is no backend of this runner{nearest(name, backends)}"
        for index, spare in enumerate(spares):
            if spare not in backends:
                yield name, index, f"unknown backend {spare!r}{nearest(spare, backends)}"
            elif spare == name:
                yield name, index, "a backend cannot take over from itself; leave it out"
            elif spare in spares[:index]:
                yield name, index, f"{spare!r} is named twice; leave it out"


def spares_of(or_else: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the spares of each backend that has some, each followed by its own, but none twice: two backends may be
    the spares of each other.
    """

    def walk(name: str, found: dict[str, None]) -> dict[str, None]:
        for spare in or_else.get(name, ()):
            if spare not in found:
                found[spare] = None
                walk(spare, found)
        return found

    return {name: tuple(one for one in walk(name, {}) if one != name) for name, spares in or_else.items() if spares}
