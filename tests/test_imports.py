"""Imports of a program that starts, and output that is not ours."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.marks import slow_but
from tests.support.programs import launch_variables
from tests.support.workers import free_port
from utils.yaml_files import ROOT

PROGRAMS = ("train", "train_mp", "train_shard", "forecast", "plan", "benchmark")
STATE = """
def state():
    import gc, signal, sys, threading
    import torch
    patched = {"vmap": torch._functorch.vmap._add_batch_dim, "trace": torch.jit.trace, "tensor": torch.tensor}
    return {
        "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": (str(sys.excepthook), str(threading.excepthook)),
        "threads": threading.active_count(),
        "functions of torch": {name: (function.__module__, str(function)) for name, function in patched.items()},
    }
"""


def output_of(program, *words, **variables):
    """Run a new Python: (exit status, standard output, standard error)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONWARNINGS", "SLURM_GPUS_ON_NODE")}
    done = subprocess.run(
        [sys.executable, *program, *words], cwd=ROOT, env=environment | variables, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", slow_but(["train"], PROGRAMS, "every program", nightly=True))
def test_an_import_leaves_the_process_as_it_was(name):
    """Only a ShardTensor replaces functions of torch; rungs 1 to 3 and the other programs make none."""
    program = f"{STATE}\nimport json\nbefore = state()\nimport {name}\nprint(json.dumps([before, state()]))"
    status, output, errors = output_of(["-c", program])
    assert (status, errors) == (0, "")
    before, after = json.loads(output)
    if name not in ("train", "train_mp"):
        before.pop("functions of torch"), after.pop("functions of torch")
    assert after == before


def test_help_imports_nothing_that_only_a_run_needs():
    program = (
        "import sys, train\ntry:\n    train.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('h5py', 'matplotlib', 'tensorboard', 'torch._dynamo', 'scipy') if m in sys.modules])"
    )
    status, output, errors = output_of(["-c", program])
    assert (status, output.splitlines()[-1], errors) == (0, "[]", "")


@pytest.mark.slow("programs of one process; two ranks say what one does")
def test_programs_print_no_line_of_a_library(tiny_options):
    """No deprecation, no leak: with the torch of this machine, whichever it is."""
    words = tiny_options(num_iters=2, warmup=0)
    assert output_of(["train.py"], *words)[::2] == (0, "")
    status, _, told = output_of(["plan.py"], "--config=quick", "--gpus=2", "--top=1")
    own, *others = told.splitlines()
    assert (status, others) == (0, []) and own.startswith("tracing layout 1 of 1 ")


@pytest.mark.slow("what two ranks print")
def test_ranks_print_no_line_of_a_library(tiny_options):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", *tiny_options(num_iters=2, warmup=0, data_parallel="fsdp")], cwd=ROOT,
            env=os.environ | launch_variables(rank, 2, port), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert [(rank.communicate(timeout=200)[1], rank.returncode) for rank in ranks] == [("", 0), ("", 0)]
