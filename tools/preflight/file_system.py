"""Checks of files and clocks: the log folder, the data, and what the nodes share."""

import os
import shutil
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tools.preflight.rendezvous import CheckResult, Rendezvous
from utils.files import whole_file
from utils.rank_failure import wait_until

LEAST_FREE_GB = 10  # sample data and the checkpoints of two runs
READ_BYTES, CHUNK = 256 << 20, 8 << 20
CLOCK_SECONDS = 2
DATA_FILES = "*.h5", "*.nc", "*.zarr/fields/**/[0-9]*"  # years, and the chunks of years


def log_folder(options: Namespace, _ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that this rank can write, sync and rename files in the log folder."""
    folder, advice = Path(options.expdir), "another folder: --expdir, or LOG_DIR for sites/launch.sh"
    mark = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        for text in ("old", "new"):  # the second file replaces the first
            with whole_file(mark) as part, part.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        renamed = mark.read_text() == "new"
        mark.unlink()
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        yield CheckResult("FAIL", "log folder", f"{folder}: {error.strerror or error}", advice)
        return
    if not renamed:
        yield CheckResult("FAIL", "log folder", f"{folder}: a renamed file has its old content", advice)
    message = f"{folder}: written, synced, renamed; {free:.0f} GB free"
    yield CheckResult("ok" if free > LEAST_FREE_GB else "warn", "log folder", message, f"make room, or {advice}")


def shared_folder(options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that the other ranks soon see a file of rank 0: all of them write a checkpoint into one folder."""
    if ranks.size == 1:
        return
    folder, mark = Path(options.expdir), Path(options.expdir) / f".preflight-{uuid.uuid4().hex}"
    if ranks.rank == 0:
        mark.touch()
    name, began = ranks.exchange("shared folder: written", mark.name)[0], time.monotonic()

    def seen() -> bool:
        with suppress(OSError):
            return folder / name in folder.iterdir()  # listing the folder asks the server
        return False

    found = wait_until(seen, min(10, ranks.patience / 2))
    answers = ranks.exchange("shared folder: seen", time.monotonic() - began if found else None)
    mark.unlink(missing_ok=True)
    blind = [rank for rank, answer in enumerate(answers) if answer is None]
    if blind:
        message = f"a file of rank 0 is not seen by {ranks.names(blind)}"
    else:
        message = f"a file of rank 0 is seen after {max(answers):.1f} s"
    advice = "a folder that all nodes share: --expdir, or LOG_DIR"
    yield CheckResult("FAIL" if blind else "ok", "shared folder", f"{options.expdir}: {message}", advice)


def data_folder(options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that there are files to train with, and measure how fast all ranks together read them."""
    folder, speed = Path(options.train_data_path or "data"), None
    files = sorted(path for pattern in DATA_FILES for path in folder.rglob(pattern) if path.is_file())
    if files:
        try:
            speed = _read_speed(files[ranks.rank % len(files)])
            rights = "" if os.access(folder, os.W_OK) else "; may not be written, and need not"
            yield CheckResult("ok", "data folder", f"{folder}: {len(files)} data files{rights}")
        except OSError as error:
            yield CheckResult("FAIL", "data folder", f"{error}", "read access to the files of the data set")
    else:
        message = f"{folder}: {'no .h5 file in it' if folder.is_dir() else 'not there'}"
        if options.train_data_path:
            advice = "docs/data.md says how to fill it; --train_data_path names another"
        else:
            advice = "make demo makes sample data; --train_data_path names your own"
        yield CheckResult("FAIL" if options.train_data_path else "warn", "data folder", message, advice)
    speeds = [answer for answer in ranks.exchange("data: read", speed) if answer]
    if speeds:
        message = f"{sum(speeds):.2f} GB/s by {len(speeds)} rank(s) at once, the slowest {min(speeds):.2f}"
        yield CheckResult("ok", "data reading", message, values={"gb_per_s": speeds})


def _read_speed(path: Path) -> float:
    """GB/s for the first part of a file. The system is asked to drop its cached copy first."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, count = time.perf_counter(), 0
        while count < READ_BYTES and (chunk := file.read(CHUNK)):
            count += len(chunk)
    return count / 1e9 / (time.perf_counter() - began)


def clocks(_options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """How far the clocks of the ranks are apart; the dates of files and log lines depend on them."""
    if ranks.size == 1:
        return
    ranks.exchange("clocks: ready", True)
    times = ranks.exchange("clocks", time.time())
    apart = max(times) - min(times)
    message, level = f"at most {apart:.2f} s apart", "ok"
    if apart > CLOCK_SECONDS:
        message, level = f"{message}; {ranks.names([times.index(max(times))])} ahead", "warn"
    yield CheckResult(level, "clocks", message, "time synchronisation (NTP) of the nodes")


CHECKS = (log_folder, data_folder, shared_folder, clocks)
