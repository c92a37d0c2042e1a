"""Programs under test: started as a user starts them, by a fork of a process that has torch imported.

    process = start(["train.py", "--config=quick"])         # like subprocess.Popen
    status, output, errors = run(["-m", "tools.checkpoint", "show", "nowhere"])
    (status, output), _ = run_ranks(["train.py", "--config=quick"], ranks=2)    # torchrun's variables, no torchrun

A program has its own process group, no input, and signals at their defaults. Where the launch itself is
tested, tests/support/launch.py starts a new python.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.workers import free_port

PATIENCE_SECONDS = 200
_started = []  # programs of the current test


class Program:
    """A running program; as far as tests need it, a subprocess.Popen."""

    def __init__(self, words, env=None, cwd=None, merged=False):
        self.words, self.returncode = list(map(str, words)), None
        self.output = tempfile.TemporaryFile()
        self.errors = self.output if merged else tempfile.TemporaryFile()
        self.report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"words": self.words, "environment": dict(env or os.environ), "folder": str(cwd or Path.cwd())}
        files = [self.output.fileno(), self.errors.fileno(), theirs.fileno()]
        socket.send_fds(_server(), [pickle.dumps(request)], files)
        theirs.close()
        self.pid = int(self.report.recv(100))
        _started.append(self)

    def poll(self):
        """Exit status, negative for a signal; None while the program runs."""
        return self._wait(0)

    def _wait(self, timeout):
        if self.returncode is None and select.select([self.report], [], [], timeout)[0]:
            self.returncode = int(self.report.recv(100))
            self.report.close()
        return self.returncode

    def wait(self, timeout=PATIENCE_SECONDS):
        """Exit status, once the program has ended by itself."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.words, timeout, self.said(), self.said(self.errors))
        return self.returncode

    def communicate(self, timeout=PATIENCE_SECONDS):
        """What it wrote to output and errors (None where they are merged), once it has ended."""
        self.wait(timeout)
        return self.said(), None if self.errors is self.output else self.said(self.errors)

    def said(self, file=None):
        """What it has written so far."""
        file = file or self.output
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@cache
def _server():
    """Our end of the socket to the fork server, which is started now and ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server"], stdin=theirs, stdout=subprocess.DEVNULL,
        start_new_session=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    theirs.close()
    return ours


def end_all():
    """Kill what is left of the programs started so far, and of what they have started in turn."""
    while _started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_started.pop().pid, signal.SIGKILL)


def start(words, env=None, cwd=None, merged=False):
    """Start a program. words: `SCRIPT ...` or `-m MODULE ...`; merged: its errors go where its output goes."""
    return Program(words, env, cwd, merged)


def run(words, env=None, cwd=None, timeout=PATIENCE_SECONDS):
    """Run a program to its end: subprocess.CompletedProcess with text."""
    program = start(words, env, cwd)
    return subprocess.CompletedProcess(program.words, program.wait(timeout), *program.communicate())


def start_ranks(words, ranks=2, started=None, **variables):
    """Start the ranks of a program, without a launcher that would end the others where one fails.

    words: of all ranks, or a function that gives the words of a rank. started: how many of them, all by default.
    """
    port = str(free_port())
    launch = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(
            words(rank) if callable(words) else words, merged=True,
            env=os.environ | {k: str(v) for k, v in (launch | {"RANK": rank, "LOCAL_RANK": rank} | variables).items()},
        )
        for rank in range(ranks if started is None else started)
    ]  # fmt: skip


def finish(process, timeout=PATIENCE_SECONDS):
    """Exit status and output; the program must end by itself."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def run_ranks(words, ranks=2, **variables):
    """Run all ranks of a program to their end: [(exit status, output), ...]."""
    return [finish(rank) for rank in start_ranks(words, ranks, **variables)]
