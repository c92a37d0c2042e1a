"""What makes processes start in milliseconds: they are forked from one that has imported what they need."""

import multiprocessing
import sys
from pathlib import Path

SCRIPTS = ["train", "train_mp", "train_shard", "forecast", "plan", "benchmark"]  # with them comes nearly everything
PRELOAD = [*SCRIPTS, "tools.preflight.__main__", "torch.utils.tensorboard", "matplotlib.pyplot", "xarray"]
EXERCISES = [f"exercises.checks.{file.stem}" for file in Path("exercises/checks").glob("[0-9]*.py")]
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


_context = multiprocessing.get_context(METHOD)


def context():
    """The multiprocessing context of processes that the tests start themselves."""
    return _context
