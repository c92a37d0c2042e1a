"""How long waiting threads of OpenMP spin, and what it costs alone and beside other work.

    python -m tests.waiting_threads

Milliseconds of this machine, so no test: utils/openmp.py takes its number from what this prints. Each turn is a process
that trains the quick config on random samples; all settings take turns in every round, and a ratio is taken within a
round.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import torch
from pandas import DataFrame

from tools.benchmarks.cases import in_turns
from tools.tables import format_table
from training.assembly import build_step
from training.tasks import build_task
from utils import comm
from utils.config import load_config
from utils.openmp import CHOICES

DEFAULT = "300000 spins, GNU's default"
SETTINGS = {
    DEFAULT: {"GOMP_SPINCOUNT": "300000"},
    "100000 spins": {"GOMP_SPINCOUNT": "100000"},
    "30000 spins": {"GOMP_SPINCOUNT": "30000"},
    "10000 spins": {"GOMP_SPINCOUNT": "10000"},
    "1000 spins": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEPS = {"alone": 20, "beside other work": 4}  # where threads wait for a core, a step takes seconds
ROUNDS = 3


def main():
    """Print the ratio of each setting's time to the default's, alone and beside a busy process on each core."""
    columns = {"setting": ""}
    rows = {name: [name] for name in SETTINGS}
    for place, steps in STEPS.items():
        turns = [{} for _ in range(ROUNDS)]
        with busy_cores(0 if place == "alone" else os.cpu_count()):
            for number, name, setting in in_turns(SETTINGS, ROUNDS):
                turns[number][name] = milliseconds(setting, steps)
        times = DataFrame(turns)
        medians = times.median()
        ratios = times.div(times[DEFAULT], axis=0).median()
        columns |= {f"{place}, ms": ".0f", f"{place}, x default": ".2f"}
        for name, row in rows.items():
            row += [medians[name], ratios[name]]
    print(format_table(columns, list(rows.values())))


@contextmanager
def busy_cores(number):
    """Other programs that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def milliseconds(setting, steps):
    """Of a training step, in a process with these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    words = [sys.executable, "-m", "tests.waiting_threads", str(steps)]
    done = subprocess.run(words, env=environment | setting, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def train(steps):
    """Print the milliseconds of a training step, on samples that are there already."""
    device = torch.device("cpu")
    config = load_config(["--config=quick", "--device=cpu"])
    comm.build_mesh(device, config.layout(comm.world_size()))
    step = build_step(config, device)
    batch = build_task(config).random_batch(torch.Generator().manual_seed(1))
    lead_in = 2
    for iteration in range(lead_in):
        step(iteration, *batch)
    start = time.perf_counter()
    for iteration in range(lead_in, lead_in + steps):
        step(iteration, *batch)
    print(1000 * (time.perf_counter() - start) / steps)


if __name__ == "__main__":
    train(int(sys.argv[1])) if len(sys.argv) > 1 else main()
