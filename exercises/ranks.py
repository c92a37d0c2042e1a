"""The ranks of a check: processes on this machine, connected by gloo, that are ended where they fail or wait.

A rank loads the learner's file and runs `on_rank(exercise, rank, size, draw)` of the check (exercises/checks/). It ends
with nothing to say, or with one line: what is wrong, where the learner's code failed, or where it waits.
"""

import datetime
import importlib
import importlib.util
import linecache
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterable
from pathlib import Path

from tools.instruments.ranks import Pool, Process, RankError, RanksFailed

PATIENCE_SECONDS = 6  # for a check, which needs a second at most
START_SECONDS = 120  # for all ranks to start, on a busy machine
# Linux: ranks are copies of one process that has imported torch; elsewhere each one imports it.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def preload(names: Iterable[str]) -> None:
    """The checks that will run, to be imported once for all ranks."""
    multiprocessing.get_context(METHOD).set_forkserver_preload([f"exercises.checks.{name}" for name in names])


def run_ranks(name: str, file: Path, size: int, seed: int, patience: float) -> list[str]:
    """Run the check `name` of a file on `size` ranks: the lines that they have to say, none if all is right."""
    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, Pool(multiprocessing.get_context(METHOD)) as pool:
        try:
            args = name, str(file), size, seed, f"{folder}/store", patience
            pool.call(size, _check, *args, timeout=START_SECONDS + patience)
        except RanksFailed as failed:
            for rank, error in failed.failures.items():
                # Ranks that say the same are named together.
                text = re.sub(r"^rank \d+( of \d+)? ", "it ", str(error))
                said.setdefault(text, []).append(str(rank))
    if size == 1:
        return list(said)
    lines = []
    for text, ranks in said.items():
        who = "every rank" if len(ranks) == size else f"rank {' and '.join(ranks)}"
        lines.append(f"{who}: {text}")
    return lines


def _check(process: Process, name: str, file: str, size: int, seed: int, store: str, patience: float) -> None:
    import torch
    import torch.distributed as dist

    from exercises.checks.common import Draw, Wrong

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    check = importlib.import_module(f"exercises.checks.{name}")
    rank = process.number
    if size > 1:
        long = datetime.timedelta(seconds=START_SECONDS + patience)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=long)
    learner = threading.current_thread().ident
    watch = threading.Timer(patience, _give_up, (process, learner, file, patience))
    watch.daemon = True
    watch.start()
    try:
        check.on_rank(_load(file), rank, size, Draw(seed))
    except Wrong as wrong:
        raise RankError(str(wrong)) from None
    except BaseException as error:
        raise RankError(_in_one_line(error, file)) from None
    finally:
        watch.cancel()


def _load(file):
    spec = importlib.util.spec_from_file_location(f"exercise_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None  # of a file of Python there is one
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_one_line(error, file):
    """Describe an error by its line in the learner's file, not by its place deep in a library."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1]
    of_learner = [frame for frame in frames if frame.filename == file]
    message = str(error).strip() or "no message"
    text = f"{type(error).__name__}: {message.splitlines()[0]}"
    lacks_a_name = isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType)
    if lacks_a_name and error.obj.__file__ == file:
        return f"the file has no `{error.name}`, which the check calls: was it removed or renamed?"
    if not of_learner:
        return f"the check cannot go on with what it got: {text} ({innermost.name})"
    place = of_learner[-1]
    if isinstance(error, NotImplementedError) and innermost is place:
        return f"`{place.name}` is not filled in yet (line {place.lineno})"
    return f"line {place.lineno}, in {place.name}: {text}\n      {place.line}"


def _give_up(process, learner, file, patience):
    """Say where the learner's thread waits; the parent ends this rank then."""
    frame = sys._current_frames().get(learner)
    place = None
    # From the innermost call outward, to the first line of the learner's own.
    while frame and not place:
        if frame.f_code.co_filename == file:
            source = linecache.getline(file, frame.f_lineno).strip()
            place = f"line {frame.f_lineno}, in {frame.f_code.co_name}:\n      {source}"
        frame = frame.f_back
    place = place or "the check: for a rank that has not come so far, or for a collective that not all ranks call"
    process.answer(RankError(f"still waiting after {patience:g} s in {place}"))
