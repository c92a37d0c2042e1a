"""HDF5 files, opened without locks: parallel file systems (Lustre, NFS) may have none, and answer with an error.

Readers need none, since a file has its name only when it is whole; and a file that is written has a name of its own.
"""

from pathlib import Path

import h5py


def open_hdf5(path: Path | str, mode: str = "r") -> h5py.File:
    """Open a file of HDF5, or make one (mode "w"). Raises OSError."""
    return h5py.File(path, mode, locking=False)
