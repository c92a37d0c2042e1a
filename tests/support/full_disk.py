"""A disk that fills while files are made; tests/faults.py mounts real ones."""

import errno
import os


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
