"""Commands: those that `pip install` makes, each the script of its name, and those that tools start."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the script that this process is called after, as python would."""
    # A command such as .venv/bin/train lies far from train.py, so that only its name counts.
    called = Path(sys.argv[0])
    script = ROOT / called.with_suffix(".py").name
    runpy.run_path(str(script), run_name="__main__")


@contextmanager
def started(words: Sequence[str], grace_seconds: float = 0, **options: Any) -> Iterator[subprocess.Popen]:
    """Start a command in a session of its own; leaving the context ends it and all that it has started.

    grace_seconds: for a command that still runs, between the request to end and the kill. options: of Popen.
    """
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(grace_seconds)
        # Others of its session may be left, also behind a command that has ended by itself.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
