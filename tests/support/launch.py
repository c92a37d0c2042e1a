"""Launches as users make them, where these are tested; tests/support/programs.py starts programs in milliseconds."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.programs import launch_variables
from utils import comm, connection
from utils.errors import run_main


def torchrun(words, ranks=2, restarts=0, script="train.py", **variables):
    """Start `script words` by torchrun on so many ranks of this machine; returns the process of torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "localhost:0", "--max_restarts", str(restarts), script, *words,
    ]  # fmt: skip
    return popen(command, os.environ | {"OMP_NUM_THREADS": "1"} | variables)


def popen(command, env=None):
    """Start a new process with a group of its own; its errors go where its output goes.

    Signals are at their defaults: a shell ignores SIGINT in what it starts in the background, the tests among it.
    """
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def without_make(*names):
    """The environment without what a make around the tests has set, and without variables of these names."""
    around = ("MAKE", "MFLAGS", *names)
    return {name: value for name, value in os.environ.items() if not name.startswith(around)}


def summary(tmp_path, run_num):
    return json.loads((tmp_path / "logs/quick" / run_num / "summary.json").read_text())


def losses(tmp_path, run_num):
    """The losses and scores with which a run has ended."""
    found = summary(tmp_path, run_num)
    return {"train_loss": found["train_loss"], "val_loss": found["val_loss"]} | found["rmse"]


def wait_for(path, text, process):
    """Return when a file holds a text, which the process writes."""
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, f"it has ended without {text!r} in {path}"
        time.sleep(0.02)


def wait_until(condition, seconds=60):
    """Return what a condition gives as soon as it gives something."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def alive(pid):
    """Tell whether a process runs, and is not merely waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def rank_pids(process):
    """Process ids of the ranks that torchrun started: its children that train."""
    pids = []
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if {"train.py", "train_mp.py", "train_shard.py"} & set(child.cmdline()):
                    pids.append(child.pid)
    return pids


def outcome(script, words):
    """Exit status of a script on this rank, which a launcher is pretended to have started, and what it says."""
    launcher = launch_variables(comm.rank(), comm.world_size())
    said, main = io.StringIO(), importlib.import_module(script).main
    with (
        unittest.mock.patch.dict(os.environ, launcher),
        unittest.mock.patch.object(connection, "connect", return_value=torch.device("cpu")),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as end,
    ):
        run_main(lambda: main(words))
    return end.value.code, said.getvalue()
