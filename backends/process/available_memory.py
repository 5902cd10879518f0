"""How much memory is free on this machine, or in the part of it that we may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that programs started now can have without others being pushed out: what the kernel thinks, or what the
    control groups leave that this process is in, if that is less. None where nobody tells (they are Linux's).
    """
    found = [*_of_machine(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", cgroups)]
    return max(min(found), 0) if found else None


def _of_machine(meminfo: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_groups(told: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = told.read_text().splitlines()
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
    """What the group and each one around it leaves; a container sees its own group as the top."""
    limit, used, reclaimable = names
    group = top / path.strip("/")
    for one in (group, *group.parents):
        if one.is_relative_to(top):
            with suppress(OSError, ValueError):
                # What files keep in memory and nobody uses is given away first. "max" is no number: no limit.
                yield int((one / limit).read_text()) - int((one / used).read_text()) + _stat(one, reclaimable)


def _stat(group: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
