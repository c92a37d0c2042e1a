"""In place of python: programs are forked by the server of tests/support/fork_server.py, without an import of torch.

    socket = ask(path, ["train.py", "--config=quick"], os.environ, ".", [1, 2])

As a program it is started by the file that tests/support/programs.py writes, and imports little.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

FORWARDED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


def ask(path, words, environment, folder, files):
    """Ask the server at a path for a program; returns the connection. files: descriptors of its output and errors."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [json.dumps([words, dict(environment), folder]).encode()], files)
    return connection


def main(python, path):
    """Run `SCRIPT ...` or `-m MODULE ...` by the server at a path; python itself runs everything else."""
    words = [word for number, word in enumerate(sys.argv) if number and (number > 1 or word != "-u")]
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        os.execv(python, [python, *sys.argv[1:]])
    connection = ask(path, words, os.environ, str(Path.cwd()), [1, 2])
    connection.recv(100)  # its process id
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(str(number).encode()))
    status = int(connection.recv(100))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
