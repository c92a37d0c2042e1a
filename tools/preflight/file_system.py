"""The part of tools.preflight that asks about files and clocks: folders, reading, what the nodes share."""

import os
import shutil
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from tools.preflight.check_results import Finding
from tools.preflight.rendezvous import RollCall

LEAST_FREE_GB = 10  # sample data, checkpoints of two runs
READ_BYTES, CHUNK = 256 << 20, 8 << 20
CLOCK_SECONDS = 2


def log_folder(options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """Whether this rank can write there, durably."""
    folder, advice = Path(options.expdir), "another folder: --expdir, or LOG_DIR for sites/launch.sh"
    mark = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for text in ("old", "new"):  # the second one takes the place of the first
            part = mark.with_suffix(".part")
            with part.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(mark)
        renamed = mark.read_text() == "new"
        mark.unlink()
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        yield Finding("FAIL", "log folder", f"{folder}: {error.strerror or error}", advice)
        return
    if not renamed:
        yield Finding("FAIL", "log folder", f"{folder}: a renamed file has its old content", advice)
    found = f"{folder}: written, synced, renamed; {free:.0f} GB free"
    yield Finding("ok" if free > LEAST_FREE_GB else "warn", "log folder", found, f"make room, or {advice}")


def shared_folder(options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """A file of rank 0 must be seen by the others soon: a checkpoint is written by all into one folder."""
    if ranks.size == 1:
        return
    mark, began = Path(options.expdir) / ".preflight-shared", time.monotonic()
    token = ranks.exchange("shared folder: begin", uuid.uuid4().hex)[0]
    try:
        if ranks.rank == 0:
            mark.write_text(token)
        ranks.exchange("shared folder: written", True)
        seen, began = False, time.monotonic()
        while not seen and time.monotonic() - began < min(10, ranks.patience / 2):
            seen = mark in mark.parent.iterdir() and mark.read_text() == token  # a listing asks the server
            time.sleep(0 if seen else 0.1)
    except OSError:
        seen = False
    seconds = time.monotonic() - began
    answers = ranks.exchange("shared folder: seen", seconds if seen else None)
    if ranks.rank == 0:
        mark.unlink(missing_ok=True)
    blind = [rank for rank, answer in enumerate(answers) if answer is None]
    if blind:
        found = f"{options.expdir}: a file of rank 0 is not seen by {ranks.names(blind)}"
        yield Finding("FAIL", "shared folder", found, "a folder that all nodes share: --expdir, or LOG_DIR")
    else:
        yield Finding("ok", "shared folder", f"{options.expdir}: a file of rank 0 is seen after {max(answers):.1f} s")


def data_folder(options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """Files to train with, and how fast they are read."""
    folder = Path(options.train_data_path or "data")
    files = sorted(folder.rglob("*.h5")) if folder.is_dir() else []
    if not files:
        found = f"{folder}: {'no .h5 file in it' if folder.is_dir() else 'not there'}"
        advice = "docs/data.md says how to fill it; --train_data_path names another" if options.train_data_path else (
            "make demo makes sample data; --train_data_path names your own"
        )  # fmt: skip
        yield Finding("FAIL" if options.train_data_path else "warn", "data folder", found, advice)
        answer = None
    else:
        try:
            answer = _read(files[ranks.rank % len(files)])
            rights = "" if os.access(folder, os.W_OK) else "; may not be written, and need not"
            yield Finding("ok", "data folder", f"{folder}: {len(files)} .h5 files{rights}")
        except OSError as error:
            answer = None
            yield Finding("FAIL", "data folder", f"{error}", "read access to the files of the data set")
    speeds = [a for a in ranks.exchange("data: read", answer) if a]
    if speeds:
        found = f"{sum(speeds):.2f} GB/s by {len(speeds)} rank(s) at once, the slowest {min(speeds):.2f}"
        yield Finding("ok", "data reading", found, values={"gb_per_s": speeds})


def _read(path: Path) -> float:
    """GB/s of the first part of a file, from the disk where the system lets go of its copy."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, count = time.perf_counter(), 0
        while count < READ_BYTES and (chunk := file.read(CHUNK)):
            count += len(chunk)
    return count / 1e9 / (time.perf_counter() - began)


def clocks(_options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """Clocks of the ranks at the same moment: dates of files and of logs are compared."""
    if ranks.size == 1:
        return
    ranks.exchange("clocks: ready", True)
    times = ranks.exchange("clocks", time.time())
    apart = max(times) - min(times)
    found = f"at most {apart:.2f} s apart"
    if apart > CLOCK_SECONDS:
        late = [rank for rank, t in enumerate(times) if t == max(times)]
        found += f"; {ranks.names(late)} ahead"
    yield Finding("warn" if apart > CLOCK_SECONDS else "ok", "clocks", found, "time synchronisation (NTP) of the nodes")


CHECKS = (log_folder, data_folder, shared_folder, clocks)
