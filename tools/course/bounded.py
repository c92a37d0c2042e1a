"""Run a command with bounded time and memory, and with as few rights as this system lets one give up.

    python -m tools.course.bounded SCRATCH SECONDS MEBIBYTES COMMAND...

SCRATCH is the one folder that it may write to. What could be taken away stands in SCRATCH/taken.json afterwards. Linux
alone has user namespaces (man 7 user_namespaces); elsewhere only the limits hold.
"""

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
from pathlib import Path

# Of linux/sched.h, linux/mount.h, linux/prctl.h and linux/if.h.
NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
NO_NEW_RIGHTS = 38
SET_FLAGS, IS_UP = 0x8914, 1
NOBODY = 65534
NETWORK = "the network"
WRITING = "writing outside of its folder"
ALL = (NETWORK, WRITING)  # what there is to take away


def limit(seconds: int, mebibytes: int) -> None:
    """Bound this process and what it starts: CPU time and address space of each process, and size of files."""
    size = mebibytes * 2**20
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: size,
        resource.RLIMIT_FSIZE: 64 * 2**20,
        resource.RLIMIT_CORE: 0,
    }
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))


def take_away(scratch: Path) -> list[str]:
    """Give up rights of this process for good; returns which of ALL."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    taken: list[str] = []
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS) != 0:
        return taken
    # In a namespace of its own this process is nobody, and loses its rights there with the next exec.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    start_loopback()
    taken.append(NETWORK)
    if has_only(libc, scratch):
        taken.append(WRITING)
    libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
    return taken


def start_loopback() -> None:
    """Start the loopback device of a new network, by which the ranks of a check talk."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", IS_UP)
        fcntl.ioctl(any_socket, SET_FLAGS, request)


def has_only(libc: ctypes.CDLL, scratch: Path) -> bool:
    """Make all that is mounted read-only, but for one folder; tells whether that was possible."""
    name = os.fsencode(scratch)
    is_private = libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None) == 0
    is_apart = is_private and libc.mount(name, name, None, BIND, None) == 0
    if not is_apart:
        return False
    # struct mount_attr of linux/mount.h: what to set, what to clear, propagation, a user namespace.
    closed = struct.pack("4Q", READ_ONLY, 0, 0, 0)
    opened = struct.pack("4Q", 0, READ_ONLY, 0, 0)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, closed, len(closed)) != 0:
        return False
    return libc.syscall(MOUNT_SETATTR, AT_FDCWD, name, 0, opened, len(opened)) == 0


def main() -> None:
    """Take away, and become the command."""
    folder, seconds, mebibytes, *command = sys.argv[1:]
    scratch = Path(folder)
    taken = take_away(scratch)
    (scratch / "taken.json").write_text(json.dumps(taken))
    limit(int(seconds), int(mebibytes))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
