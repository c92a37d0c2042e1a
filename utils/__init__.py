"""What everything else stands on: processes, mesh layout, launch, device, settings, errors, data loaders."""

import gc
import sys
from pathlib import Path

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on

PROGRAMS = ("train.py", "train_mp.py", "train_shard.py", "forecast.py", "plan.py", "benchmark.py")
_program = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
if _program.name in PROGRAMS and _program.parent == Path(__file__).resolve().parents[1]:
    gc.disable()  # imports make objects that stay, and hardly any garbage; run_main enables it again
