"""A process that has torch and our modules imported, and forks programs: each starts in milliseconds.

tests/support/programs.py starts it, with a socket as its standard input. A request is a Program's words, environment
and folder, with three files: its output, its errors, and the socket that gets its process id and its exit status.
"""

import atexit
import contextlib
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path

from tests.support.forked import PRELOAD


def serve(connection):
    """Fork a program for each request. Returns in the programs alone, with the words of each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        request, files, _, _ = socket.recv_fds(connection, 2**20, 3)
        if not request:
            os._exit(0)  # the tests are over
        if not os.fork():
            connection.close()
            return keep(*files, **pickle.loads(request))
        for file in files:
            os.close(file)


def keep(output, errors, report, words, environment, folder):
    """Fork the program, tell its process id and, at its end, its exit status. Returns in the program alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program:
        os.setsid()
        os.write(report, f"{program}\n".encode())
        for file in (output, errors):
            os.close(file)
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.setsid()  # a process group of its own
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # nohup, or a shell's `&`, may have set them aside for the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for file in (output, errors, report):
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return words


def run(words):
    """What python does with these words: `-m MODULE ...` or `SCRIPT ...`. Returns the exit status."""
    sys.orig_argv = [sys.executable, *words]
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
    for name in PRELOAD:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread would be missing in the programs"
    importlib.import_module("tests.support.warm")
    leave(run(serve(socket.socket(fileno=os.dup(0)))))
