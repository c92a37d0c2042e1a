"""Programs under test: started as a user starts them, by a fork of a process that has torch imported.

    process = start(["train.py", "--config=quick"])         # like subprocess.Popen
    status, output, errors = run(["-m", "tools.checkpoint", "show", "nowhere"])
    (status, output), _ = run_ranks(["train.py", "--config=quick"], ranks=2)    # torchrun's variables, no torchrun

A program has its own process group, no input, and signals at their defaults. Where the launch itself is
tested, tests/support/launch.py starts a new python.
"""

import atexit
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.forked_python import ask
from tests.support.temporary import make_folder
from tests.support.workers import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 200
_started = []  # programs of the current test


class Program:
    """A running program; as far as tests need it, a subprocess.Popen."""

    def __init__(self, words, env=None, cwd=None, merged=False):
        self.words, self.returncode = list(map(str, words)), None
        self.output = tempfile.TemporaryFile()
        self.errors = self.output if merged else tempfile.TemporaryFile()
        files = [self.output.fileno(), self.errors.fileno()]
        self.report = ask(_server(), self.words, env or os.environ, str(cwd or Path.cwd()), files)
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
        """Its output and errors (None where they are merged), once it has ended."""
        self.wait(timeout)
        return self.said(), None if self.errors is self.output else self.said(self.errors)

    def said(self, file=None):
        """Its output so far."""
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
    """Path of the fork server's socket; it is started now and ends with this process."""
    folder = make_folder("fork-")  # the length of a socket's path is limited
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # where no test has started it
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{folder}/server")
    listening.listen(64)
    number = listening.fileno()
    lifeline, _ = os.pipe()  # the other end stays open until this process ends
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", str(number)], stdin=lifeline,
        stdout=subprocess.DEVNULL, start_new_session=True, cwd=ROOT, pass_fds=[number],
    )  # fmt: skip
    return f"{folder}/server"


def write_python(folder):
    """Write `python` and `torchrun` into a folder: what they run is forked as well. Returns the path of `python`."""
    folder.mkdir(parents=True, exist_ok=True)
    python, torchrun = folder / "python", folder / "torchrun"
    python.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.forked_python import main\nmain({sys.executable!r}, {_server()!r})\n"
    )
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    for file in (python, torchrun):
        file.chmod(0o755)
    return str(python)


def use_forks(folder, monkeypatch):
    """Fork the processes that this test's programs start: by sys.executable, by torchrun, and from a folder."""
    python = write_python(folder)
    monkeypatch.setenv("PYTHON_EXEC", python)  # by which torchrun starts the ranks
    monkeypatch.setattr(sys, "executable", python)


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


def launch_variables(rank, size, port=1):
    """The variables that torchrun gives a rank on a machine of its own."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start_ranks(words, ranks=2, only=None, port=None, **variables):
    """Start the ranks of a program, without a launcher that would end the others where one fails.

    words: of all ranks, or a function that gives the words of a rank. only: the ranks that come, all by default.
    """
    port, given = port or free_port(), {name: str(value) for name, value in variables.items()}
    return [
        start(
            words(rank) if callable(words) else words,
            os.environ | launch_variables(rank, ranks, port) | given,
            merged=True,
        )
        for rank in only or range(ranks)
    ]


def finish(process, timeout=PATIENCE_SECONDS):
    """Exit status and output; the program must end by itself."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def run_ranks(words, ranks=2, **variables):
    """Run all ranks of a program to their end: [(exit status, output), ...]."""
    return [finish(rank) for rank in start_ranks(words, ranks, **variables)]
