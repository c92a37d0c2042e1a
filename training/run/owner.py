"""The owner of a run folder: one run at a time trains in it.

`owner.json` names the owner's job, host and process, and counts its heartbeats, or says that it has ended. It needs no
lock of the file system. A run that finds it takes the folder over where the owner has ended or its process is gone,
where it is the same job that has come back after a requeue, or where the heartbeat has stopped; and is refused
otherwise. A job that asks for a folder of its own (`--run_num auto`) finds it again by this file after a requeue.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from utils.errors import FAILED_STATUS, UsageError
from utils.rank_failure import exit_at_once

FILE = "owner.json"
BEAT_SECONDS = 5.0
DEAD_SECONDS = 30.0  # without a beat
ENDED = f"{'ended':>12}"  # in place of the beats, and as long


class Owner(BaseModel):
    """A process that owns a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str
    space: str  # in which the number of the process counts: containers have their own; '' where Linux does not tell
    process: int
    started: str  # the time, in the kernel's ticks: numbers are used again
    job: str  # of Slurm or torchrun, '' for none
    restarts: tuple[int, int]  # of the job, by Slurm and by torchrun

    def __str__(self):
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


def this_process() -> Owner:
    """This process as an owner."""
    env = os.environ
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if elastic == "none":  # torchrun's own default, the same for all runs; its process starts the ranks again
        elastic = f"of torchrun {os.getppid()} ({_start_of(os.getppid())})"
    # Two starts of one job are the same run.
    job = env.get("SLURM_JOB_ID") or elastic
    counts = [env.get(f"{launcher}_RESTART_COUNT", "") for launcher in ("SLURM", "TORCHELASTIC")]
    slurm, torchrun = [int(count) if count.isdecimal() else 0 for count in counts]
    # A number of a process means something on its machine and in its container alone.
    number = os.getpid()
    space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = boot + str(Path("/proc/self/ns/pid").readlink())
    return Owner(
        host=socket.gethostname(),
        space=space,
        process=number,
        started=_start_of(number),
        job=job,
        restarts=(slurm, torchrun),
    )


class RunOwner:
    """Makes this process the owner of a folder. Raises UsageError, naming the other, where another run owns it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / FILE
        self.me = this_process()
        self.beats = 0
        # Of several that try at once one makes the file.
        while not self._claim():
            text = self._read()
            if text is None:
                continue  # gone in between
            other = owner_of(text)
            if other != self.me and ENDED not in text and self._alive(other, text):
                raise UsageError(
                    f"{folder} is in use: {other or 'another run'} trains in it; wait for its end, or choose another "
                    "--run_num (auto: the next free number)"
                )
            self._remove(text)
        # A thread writes into the file while this run lives: other machines see it beat.
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="owner of the run folder")
        self.thread.start()

    def release(self) -> None:
        """Give the folder back."""
        self.leaving.set()
        self.thread.join()
        with contextlib.suppress(OSError):
            # The file may belong to another run by now.
            if owner_of(self._read() or "") == self.me:
                self._write(ENDED)

    def _content(self, beats):
        return json.dumps({"owner": self.me.model_dump(), "beats": beats}) + "\n"

    def _write(self, beats):
        with open(self.path, "r+") as file:
            file.write(self._content(beats))

    def _claim(self):
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with open(descriptor, "w") as file:
            file.write(self._content(f"{0:012d}"))
        return True

    def _read(self):
        """The text of the file, None where there is none. Opened anew each time: network file systems look again."""
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def _alive(self, other, text):
        if other is not None:
            if other.job and other.job == self.me.job and other.restarts < self.me.restarts:
                return False
            is_beside_us = (other.host, other.space) == (self.me.host, self.me.space)
            if self.me.space and is_beside_us:
                return _start_of(other.process) == other.started
        deadline = time.monotonic() + DEAD_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 5)
            if self._read() != text:
                return True
        return False

    def _remove(self, expected: str) -> None:
        """Remove the file of this text. Of several that try one does; what was claimed since is put back."""
        aside = self.path.with_name(f".{FILE}.{self.me.host}.{self.me.process}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_text(errors="replace") == expected:
            aside.unlink()
        else:
            aside.rename(self.path)

    def _beat(self):
        while not self.leaving.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk, or a server that is late: the next beat may do
                self.beats += 1
                other = owner_of(self._read() or "")
                if other not in (self.me, None):
                    print(f"error: {self.folder} has been taken over by {other}", file=sys.stderr, flush=True)
                    exit_at_once(FAILED_STATUS)
                if not self._claim():  # else somebody had tidied up
                    self._write(f"{self.beats:012d}")


def owner_of(text: str) -> Owner | None:
    """The Owner that the text of an owner's file names, None for any other text."""
    try:
        return Owner.model_validate(json.loads(text)["owner"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _start_of(process):
    """When a process started, in the kernel's ticks; '' for one that is gone, or a zombie, and where /proc is not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # The name of the program, in brackets, may hold spaces: the fields are counted from behind it.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
