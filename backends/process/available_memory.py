"""Measure the free memory of this machine, or of the control groups around this process.

psutil reports the machine alone, so the limits of control groups are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that new programs can use without pushing other programs out of memory.

    The result is the kernel's estimate, or the rest in the control groups of this process if the rest is less. Return
    None if the system reports neither.
    """
    limits = [*_of_groups(proc / "self" / "cgroup", cgroups)]
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        limits.append(psutil.virtual_memory().available)
    return max(min(limits), 0) if limits else None


def _of_groups(listed: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            yield from _up_from(cgroups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _up_from(cgroups / "memory", path, names)


def _up_from(top: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the rest in the group and in each group around it; a container sees its own group as the top."""
    limit, used, reclaimable = names
    group = top / path.strip("/")
    for one in (group, *group.parents):
        if one.is_relative_to(top):
            with suppress(OSError, ValueError):
                # The kernel reclaims unused pages of files first. "max" is not a number: no limit.
                yield int((one / limit).read_text()) - int((one / used).read_text()) + _stat(one, reclaimable)


def _stat(group: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
