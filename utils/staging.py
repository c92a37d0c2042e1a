"""Copies of the data on the node's own disk, which hold only what the ranks of this node read.

They are plain year files, whatever was copied. As soon as all of these ranks have opened them, their names are removed:
the system frees the room when the last process ends, however it ends. A job makes its own, so no copy is ever trusted
that another job made, and what a killed one left in the middle of copying is removed by the next.
"""

import fcntl
import math
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from utils import comm
from utils.errors import STOPPED_STATUS, UsageError, reported_as_usage_error
from utils.signals import StopRequest
from weather.dataset import FieldDataset
from weather.hdf5_year import Hdf5Year

PREFIX = "staged-"
Copy = tuple[FieldDataset, int, Path]  # which of its files, and where the copy is


def stage(datasets: Sequence[FieldDataset], folder: Path, reads: bool) -> None:
    """Let these datasets, of the same window, read from copies in a folder of the node's disk; all ranks call it.

    reads: whether this rank reads. The ranks of a node share the copying. Raises UsageError, on all ranks, where the
    folder, its room or a copy will not do, and SystemExit(STOPPED_STATUS) where a signal asked one of them to stop; no
    file is left then.
    """
    host, shown = socket.gethostname(), reported_as_usage_error((OSError, RuntimeError), f"stage_to {folder}")
    seen = comm.gather((host, (datasets[0].rows, datasets[0].columns) if reads else None))
    mates = [rank for rank, (theirs, _) in enumerate(seen) if theirs == host]
    windows = [window for theirs, window in seen if theirs == host and window]
    years = [(data, n) for data in datasets for n in range(len(data.files)) if data.first_sample[n] < len(data)]
    around = [slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*windows, strict=True)]
    with StopRequest() as stop, ExitStack() as at_end:
        make = partial(_new_folder, folder, sum(4 * math.prod(_shape(*year, around)) for year in years), at_end)
        own = comm.gather(comm.agree(shown(make) if comm.rank() == mates[0] else Path))[mates[0]]
        copies = [(*year, own / f"{number}.h5") for number, year in enumerate(years if windows else ())]
        mine = copies[mates.index(comm.rank()) :: len(mates)]
        for turn in range(max(comm.gather(len(mine)))):  # the ranks meet after each year: none may wait too long
            copy: Callable[[], Any] = partial(_copy, *mine[turn], around, stop) if turn < len(mine) else Path
            comm.agree(shown(copy))
            if any(comm.gather(stop.made)):
                raise SystemExit(STOPPED_STATUS)
        comm.agree(shown(partial(_take_over, copies if reads else [])))
    for data in datasets if reads else ():
        both = zip((data.rows, data.columns), around, strict=True)
        data.rows, data.columns = (slice(part.start - whole.start, part.stop - whole.start) for part, whole in both)


def _shape(data: FieldDataset, number: int, window: Sequence[slice]) -> tuple[int, ...]:
    """Of a copy: (T, C, h, w)."""
    return data.files[number].shape[0], data.channels, *(part.stop - part.start for part in window)


def _new_folder(folder: Path, room: int, at_end: ExitStack) -> Path:
    """A folder in `folder` with so much room, locked while it is there; at_end removes it."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), ExitStack() as unlocked:  # of a running job, or another user's
            _lock(left, unlocked)
            shutil.rmtree(left)
    if room > (free := shutil.disk_usage(folder).free):
        raise UsageError(f"stage_to {folder}: {room / 1e9:.3f} GB are needed, and {free / 1e9:.3f} GB are free")
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    _lock(made, at_end)  # before it has a name that others look for
    own = made.rename(folder / f"{PREFIX}{made.name[1:]}")
    at_end.callback(shutil.rmtree, own, ignore_errors=True)
    return own


def _lock(folder: Path, held: ExitStack) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _copy(data: FieldDataset, number: int, path: Path, window: Sequence[slice], stop: StopRequest) -> None:
    """Copy the window of a year, and compare with what is then on disk; returns early at a stop signal."""
    source, sums, shape = data.files[number], [0, 0], _shape(data, number, window)
    frame: Any = np.empty((1, *shape[1:]), np.float32)
    with h5py.File(path, "w") as file:
        fields = file.create_dataset("fields", shape, "f4")
        if (times := source.arrays.get("time")) is not None:
            file["time"] = times[:]
            file["time"].attrs.update(dict(times.attrs))
        title = f"staging {source.path.name}"
        for n in tqdm(range(shape[0]), title, unit="frame", mininterval=10, disable=not comm.is_main()):
            source.read(n, frame, *window)
            sums[0] = zlib.crc32(frame, sums[0])
            fields.write_direct(frame, dest_sel=np.s_[n : n + 1])
            if stop.made:
                return
    with closing(Hdf5Year(path, source.path)) as copy:
        os.fsync(copy.descriptor)
        if hasattr(os, "posix_fadvise"):  # what is on disk counts, not what the system remembers
            os.posix_fadvise(copy.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for n in range(shape[0]):
            copy.read(n, frame, *map(slice, shape[2:]))
            sums[1] = zlib.crc32(frame, sums[1])
    if sums[0] != sums[1]:
        raise UsageError(f"{path}: differs from {source.path} when it is read again: a damaged disk?")


def _take_over(copies: Sequence[Copy]) -> None:
    """Let datasets read copies, which other processes can open by way of this one when the name is gone."""
    for data, number, path in copies:
        source = data.files[number]
        copy = data.files[number] = Hdf5Year(path, source.path)
        copy.location = Path(f"/proc/{os.getpid()}/fd/{copy.descriptor}")
        source.close()
