"""Start the training scripts in processes of their own, and look at how they end."""

import contextlib
import json
import os
import subprocess
import sys

import psutil

from tests.support.workers import free_port


def torchrun(words, ranks=2, restarts=0, script="train.py", **variables):
    """Start `script words` on so many ranks of this machine; returns the process of torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "localhost:0", "--max_restarts", str(restarts), script, *words,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def bare_ranks(words_of_rank, started=2):
    """Start ranks of two without a launcher that would end the others when one fails; returns their processes."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *words_of_rank(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(started)
    ]  # fmt: skip


def finish(process, timeout=200):
    """Exit status and output; the program must end by itself."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def summary(tmp_path, run_num):
    return json.loads((tmp_path / "logs/quick" / run_num / "summary.json").read_text())


def rank_pids(process):
    """Process ids of the ranks that torchrun started: its children that train."""
    pids = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if {"train.py", "train_mp.py", "train_shard.py"} & set(child.cmdline()):
                pids.append(child.pid)
    return pids
