"""Runs a command in a network of its own that has only 127.0.0.1: `python -m tests.real_agents.alone COMMAND ...`.

So nothing that an agent does reaches another machine, whatever its switches say. As root, or where the kernel lets
users make namespaces; elsewhere it says so in one line and runs the command as it is.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def leave_the_network() -> None:
    """Gives this process, and all that it starts from now on, a network of their own. OSError where that cannot be."""
    user, group = os.getuid(), os.getgid()
    _unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET)
    if user != 0:
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as mapping:  # noqa: PTH123 - the kernel wants one plain write
                mapping.write(line)
    _raise_loopback()


def is_alone() -> bool:
    """Whether there is no way out of here."""
    return [name for _, name in socket.if_nameindex() if name != "lo"] == []


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def main(command: list[str]) -> None:
    try:
        leave_the_network()
    except (OSError, AttributeError) as error:
        print(f"no network of its own can be made here ({error}): the agents run with this machine's", file=sys.stderr)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
