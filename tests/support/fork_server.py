"""A process that has torch and our modules imported, and forks programs: each starts in milliseconds.

tests/support/programs.py starts it, with a socket that listens, and a pipe as its standard input: it ends with the
tests. Who connects sends a request of tests/support/forked_python.py and gets the program's process id, then its exit
status; meanwhile it may send numbers of signals. The program ends with the connection.
"""

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import site
import socket
import sys
import threading
from pathlib import Path

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import forked
from tools.instruments.ranks import share_gloo_device
from utils.signals import STOP_SIGNALS


def serve(listening):
    """Fork a program for each connection. Returns in the programs alone, with the words of each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        if sys.stdin in select.select([sys.stdin, listening], [], [])[0]:
            os._exit(0)  # the tests are over
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            return keep(connection)
        connection.close()


def keep(connection):
    """Fork the program and stay with it. Returns in the program alone, with its words."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(connection, 2**20, 2)
    words, environment, folder = json.loads(request)
    program = os.fork()
    if program:
        os.setsid()
        for file in files:
            os.close(file)
        stay_with(program, connection)
    os.setsid()  # a process group of its own
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nohup, a shell's `&` or perf may have set them aside for the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard, file in enumerate(files, 1):
        os.dup2(file, standard)
        os.close(file)
    connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)
    multiprocessing.get_context = forked.instead_of_spawn(multiprocessing.get_context("fork"))
    # A program that has planned was rank 0 for a while, and DTensor remembers its meshes: its ranks begin without them.
    os.register_at_fork(after_in_child=_clear_sharding_prop_cache)
    return words


def stay_with(program, connection):
    """Tell the program's process id and its exit status; signals that arrive meanwhile are for it."""
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(program).encode())
    ended = os.pidfd_open(program)
    while ended not in select.select([ended, connection], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            if number := connection.recv(100):
                os.kill(program, int(number))
            else:
                os.killpg(program, signal.SIGKILL)
                break
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(words):
    """Run these words as python does: `-m MODULE ...` or `SCRIPT ...`. Returns the exit status."""
    sys.orig_argv = [sys.executable, *words]
    if folders := os.environ.get("PYTHONPATH"):
        sys.path[1:1] = folders.split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], str(Path.cwd())
            for name in (words[1], f"{words[1]}.__main__"):
                if not hasattr(sys.modules.get(name), "__path__"):
                    sys.modules.pop(name, None)  # runpy would warn of a module that is imported and run
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def leave(status):
    """End as python does, but for its memory: to free what is shared with the server would copy it."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for name in forked.PRELOAD:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread would be missing in the programs"
    importlib.import_module("tests.support.warm")
    share_gloo_device()
    leave(run(serve(socket.socket(fileno=int(sys.argv[1])))))
