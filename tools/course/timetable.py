"""How long the commands of the timetable (docs/teaching.md) take on this machine."""

import re
import subprocess
import sys
import time
from pathlib import Path

from tools.commands import ROOT, started

PAGE = ROOT / "docs/teaching.md"
BEGINNINGS = ("python ", "torchrun ")  # of commands that need no cluster


def commands(page: Path = PAGE) -> list[str]:
    """The commands of the half day and the full day that run on one machine, each once, in order."""
    # Between these headings the page says what a class runs.
    text = page.read_text()
    course = text[text.index("## Half a day") : text.index("## Exercises and how they are checked")]
    found = re.findall(r"`([^`\n]+)`|^    (\S.*)$", course, re.M)
    listed = []
    for inline, block in found:
        command = (inline or block).partition("  #")[0].strip()
        is_whole = command.startswith(BEGINNINGS) and "..." not in command
        if is_whole and command not in listed:
            listed.append(command)
    return listed


def minutes_of(name: str, page: Path = PAGE) -> int:
    """Minutes of the block that teaches a page of docs/. Raises ValueError unless there is one such block."""
    found = re.findall(rf"^\| \d+:\d\d \| (\d+) \| \[[^\]]+\]\({re.escape(name)}\)", page.read_text(), re.M)
    # Two blocks of one page would be two answers.
    (minutes,) = found
    return int(minutes)


def seconds_of(command: str, limit: float) -> float | None:
    """Seconds that a command takes here; None if it fails or is not done after `limit`."""
    # The commands say `python`, which is that of this environment.
    environment_path = Path(sys.executable).parent
    began = time.monotonic()
    words = ["bash", "-c", f'PATH="{environment_path}:$PATH" {command}']
    with started(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - began if status == 0 else None
