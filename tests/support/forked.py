"""Processes that start in milliseconds: they are forked from one that has imported what they need."""

import multiprocessing
import sys
from pathlib import Path

SCRIPTS = ["train", "train_mp", "train_shard", "forecast", "plan", "benchmark"]  # with them comes nearly everything
PRELOAD = [*SCRIPTS, "tools.preflight.__main__", "torch.utils.tensorboard", "matplotlib.pyplot", "xarray"]
EXERCISES = [f"exercises.checks.{file.stem}" for file in Path("exercises/checks").glob("[0-9]*.py")]
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def instead_of_spawn(context):
    """multiprocessing.get_context as programs get it: what our benchmarks start by "spawn" comes from this context."""
    get_context = multiprocessing.get_context

    def forking(method=None):
        of_ours = sys._getframe(1).f_globals["__name__"].startswith("tools.")  # DALI's workers rely on spawn
        return context if method == "spawn" and of_ours else get_context(method)

    return forking


_context = multiprocessing.get_context(METHOD)


def context():
    """The multiprocessing context of processes that the tests start themselves."""
    return _context
