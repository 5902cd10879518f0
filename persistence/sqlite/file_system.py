"""The file system of a path on Linux, and its suitability for a store. Pure: the table of mounts is an argument."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "orangefs", "pvfs2", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs",
     "fuse.rclone", "fuse.gcsfuse", "fuse.davfs", "fuse.cifs", "fuse.juicefs", "fuse.goofys", "fuse.mountpoint-s3"}
)  # fmt: skip
# A folder of the host, shared by a hypervisor: no shared memory between host and guest.
_SHARED: Final = frozenset({"9p", "virtiofs", "vboxsf", "vmhgfs", "fuse.vmhgfs-fuse", "prl_fs", "drvfs"})
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class Locality(Enum):
    """The place where a file system keeps files. A store in WAL mode needs memory shared by all users of the file."""

    LOCAL = "local"
    NETWORK = "network"
    SHARED = "shared"
    IN_MEMORY = "in memory"
    UNKNOWN = "unknown"


def file_system_type(path: Path, mountinfo: str) -> str:
    """Return the type of the file system of `path`, or an empty text if unknown.

    `path` is absolute and without links; `mountinfo` is the text of /proc/self/mountinfo.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), columns[4])
        # A later line hides an earlier line with the same mount point.
        if len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), rest.split(" ")[0]
    return kind


def locality_of(kind: str) -> Locality:
    """Return the place where a file system of type `kind` keeps files."""
    for locality, kinds in ((Locality.NETWORK, _NETWORK), (Locality.SHARED, _SHARED), (Locality.IN_MEMORY, _IN_MEMORY)):
        if kind in kinds:
            return locality
    return Locality.UNKNOWN if not kind or kind.startswith("fuse") else Locality.LOCAL
