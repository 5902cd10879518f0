"""The files whose functions, commands and permissions a worker takes, though the database alone names them.

Whoever may write to the database chooses the path. A worker therefore uses a file in a folder that was named to it, or
a file that nobody but its own user and root may change: neither the file nor any folder on the way to it. A folder with
the sticky bit, such as /tmp, is safe for what the two own in it, because others can neither replace nor rename that.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path


def why_untrusted(path: Path, folders: Collection[Path]) -> str | None:
    """Return why a worker does not trust the file or folder at the absolute `path`, which has no links in it; None if
    it does. `folders` were named to the worker, and have no links in them either.
    """
    if any(path.is_relative_to(folder) for folder in folders):
        return None
    for part in (path, *path.parents):
        try:
            found = part.stat()
        except FileNotFoundError:  # reported when the file is read
            continue
        except OSError as error:
            return f"{part} cannot be examined ({error.strerror})"
        if found.st_uid not in {0, os.geteuid()}:
            return f"{part} belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_IWOTH and not _keeps_others_out(found):
            return f"every user may write to {part}"
        if found.st_mode & stat.S_IWGRP and not (_keeps_others_out(found) or _is_of_one_user(found)):
            return f"the group {_group(found.st_gid)} may write to {part}"
    return None


def _keeps_others_out(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)


def _is_of_one_user(found: os.stat_result) -> bool:
    """Return whether the group is the owner's own: many systems give each user one, and let it write by default."""
    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
