"""A disk that fills while files are made, pretended, and one that is real."""

import errno
import os
import shlex
import subprocess
import sys


def fill_disk(monkeypatch, files):
    """From now on only so many files of HDF5 still find their space on the disk."""
    reserve = os.posix_fallocate
    left = [2 * files]  # each reserves twice: before HDF5 empties it, and after

    def reserve_what_is_left(descriptor, offset, size):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_what_is_left)


def can_mount():
    """Tell whether this user may mount a file system that it alone sees."""
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


def run_on_small_disk(words, folder, size):
    """Run a program with a file system of `size` (such as 100k) at `folder`; returns what subprocess.run does."""
    program = shlex.join(map(str, [sys.executable, *words]))
    mounted = f"mount -t tmpfs -o size={size} tmpfs {folder} && exec {program}"
    return subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True, text=True)
