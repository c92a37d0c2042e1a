"""Parts of a report, one after another: each within its time, and none leaves a process behind."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import STOPPED_STATUS, first_line

MARK = "GPU_REPORT_PART"  # in the environment of every process of a part
KILL_SECONDS = 10  # for killed processes to be gone: one that waits in a driver may never be
POLL_SECONDS = 0.1
TELLING = re.compile(r"(?i)(?<!ChildFailed)Error: |^FAIL ")  # lines that say why; the last word of torchrun does not


class Failure(Exception):
    """A part did not do what it should; the message says what."""


@dataclass(frozen=True)
class Part:
    """A program for this Python, as words, and the seconds that it may take.

    stop_at: what it says when it is to be stopped; then it is started again. figures: reads {name: value} from what it
    has left, and raises where that is wrong. lacks: what is not on this machine, so that the part is skipped.
    """

    name: str
    seconds: float
    words: Sequence[str]
    stop_at: str = ""
    figures: Callable[[], dict[str, Any]] = dict
    lacks: str = ""


def run_parts(parts: Sequence[Part], folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """Run parts in their order, and yield for each its part, status, seconds, why and figures, as JSON has them.

    status: passed, failed, out of time, skipped, or not run, where all seconds were over. Output goes to PART.log.
    """
    end = time.monotonic() + seconds
    for part in parts:
        began, status, why, figures = time.monotonic(), "passed", "", {}
        try:
            if part.lacks:
                status, why = "skipped", part.lacks
            elif began > end:
                status, why = "not run", f"the {seconds:g} s of all parts are over"
            else:
                log, limit = folder / f"{part.name}.log", min(began + part.seconds, end)
                if part.stop_at:
                    run(part.words, log, limit, STOPPED_STATUS, part.stop_at)
                run(part.words, log, limit)
                figures = part.figures()
        except TimeoutError:
            status, why = "out of time", f"not done after {time.monotonic() - began:.0f} s"
        except Exception as error:  # whatever it is, the other parts follow
            status, why = "failed", f"{type(error).__name__}: {first_line(error)}"
        took = round(time.monotonic() - began, 1)
        yield {"part": part.name, "status": status, "seconds": took, "why": why, "figures": figures}


def run(words: Sequence[str], log: Path, end: float, status: int = 0, stop_at: str = "") -> None:
    """Run a program, and end whatever it leaves. Raises Failure, or TimeoutError at the time `end`.

    status: its exit status if all is well. stop_at: what it says when it is to be stopped.
    """
    mark, start, process = str(uuid.uuid4()), log.stat().st_size if log.exists() else 0, None

    def said() -> str:
        return log.read_bytes()[start:].decode(errors="replace").strip()

    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            if stop_at and stop_at in said():
                process.terminate()
                stop_at = ""
            time.sleep(POLL_SECONDS)
    finally:
        end_processes(mark)  # one that a signal met in Popen is not in `process`
        if process:
            process.wait()
    if process.returncode != status:
        lines = said().splitlines() or ["no output"]
        telling = [line for line in lines if TELLING.search(line)] or lines
        raise Failure(f"exit status {process.returncode}, not {status}: {telling[-1].strip()}")


def end_processes(mark: str) -> None:
    """Kill all processes with this mark in their environment, whoever is their parent by now (on Linux)."""
    given_up, found = time.monotonic() + KILL_SECONDS, True
    while found and time.monotonic() < given_up:
        found = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    found = True
        time.sleep(POLL_SECONDS * found)
