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
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

PATIENCE_SECONDS = 6  # for a check, which needs a second at most
START_SECONDS = 120  # for all ranks to start, on a busy machine
OTHERS_SECONDS = 1  # for the other ranks to say something too, once one has failed
# Linux: ranks are copies of one process that has imported torch; elsewhere each one imports it.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def preload(names: Iterable[str]) -> None:
    """The checks that will run, to be imported once for all ranks."""
    multiprocessing.get_context(METHOD).set_forkserver_preload([f"exercises.checks.{name}" for name in names])


def run_ranks(name: str, file: Path, size: int, seed: int, patience: float) -> list[str]:
    """Run the check `name` of a file on `size` ranks: the lines that they have to say, none if all is right."""
    context, processes, pipes = multiprocessing.get_context(METHOD), [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                args = theirs, name, str(file), rank, size, seed, f"{folder}/store", patience
                process = context.Process(target=_rank, args=args, daemon=True)  # type: ignore[attr-defined]
                process.start()
                processes.append(process)
                theirs.close()
                pipes.append(ours)
            return _lines(pipes, patience)
        finally:
            for process in processes:
                process.kill()  # they may wait for one another
            for process in processes:
                process.join()


def _lines(pipes, patience):
    answers, deadline = {}, time.monotonic() + START_SECONDS + patience
    while len(answers) < len(pipes):
        ready = wait([p for r, p in enumerate(pipes) if r not in answers], max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipe.recv()
            except (EOFError, ConnectionError):
                answers[rank] = "its process has ended"
            if answers[rank]:
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
    if len(answers) < len(pipes) and not any(answers.values()):
        answers |= {rank: "no answer" for rank in range(len(pipes)) if rank not in answers}
    said = {}
    for rank in sorted(answers):
        if answers[rank]:
            said.setdefault(answers[rank], []).append(str(rank))
    if len(pipes) == 1:
        return list(said)
    return [
        f"{'every rank' if len(r) == len(pipes) else 'rank ' + ' and '.join(r)}: {text}" for text, r in said.items()
    ]


def _rank(pipe, name, file, rank, size, seed, store, patience):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well
    import torch
    import torch.distributed as dist

    from exercises.checks.common import Draw, Wrong

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    check = importlib.import_module(f"exercises.checks.{name}")
    if size > 1:
        long = datetime.timedelta(seconds=START_SECONDS + patience)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=long)
    learner = threading.current_thread().ident
    watch = threading.Timer(patience, _give_up, (pipe, learner, file, patience))
    watch.daemon = True
    watch.start()
    line = None
    try:
        check.on_rank(_load(file), rank, size, Draw(seed))
    except Wrong as wrong:
        line = str(wrong)
    except BaseException as error:
        line = _in_one_line(error, file)
    watch.cancel()
    with suppress(OSError, EOFError):
        pipe.send(line)
        pipe.recv()  # until the parent ends this process: the others must not lose their connection
    os._exit(0)


def _load(file):
    spec = importlib.util.spec_from_file_location(f"exercise_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_one_line(error, file):
    """Describe an error by its line in the learner's file, not by its place deep in a library."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if isinstance(error, NotImplementedError) and frames[-1] in own:
        return f"`{own[-1].name}` is not filled in yet (line {own[-1].lineno})"
    text = (str(error).strip() or "no message").splitlines()[0]
    if not own:
        return f"the check cannot go on with what it got: {type(error).__name__}: {text} ({frames[-1].name})"
    return f"line {own[-1].lineno}, in {own[-1].name}: {type(error).__name__}: {text}\n      {own[-1].line}"


def _give_up(pipe, learner, file, patience):
    """Say where the learner's thread waits, and end this rank."""
    frame, place = sys._current_frames().get(learner), None
    while frame and not place:
        if frame.f_code.co_filename == file:
            source = linecache.getline(file, frame.f_lineno).strip()
            place = f"line {frame.f_lineno}, in {frame.f_code.co_name}:\n      {source}"
        frame = frame.f_back
    place = place or "the check: for a rank that has not come so far, or for a collective that not all ranks call"
    with suppress(OSError):
        pipe.send(f"still waiting after {patience:g} s in {place}")
    time.sleep(2 * OTHERS_SECONDS)
    os._exit(0)
