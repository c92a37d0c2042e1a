"""TensorBoard for one user of a shared machine: served on 127.0.0.1 only, at an address that cannot be guessed.

Everybody who is logged in on the same node can connect to 127.0.0.1, and TensorBoard asks for no password. Therefore
the address contains a random token, and every path without the token answers 404. The token never appears on a command
line, where `ps` would show it to others. TensorBoard's separate data server is disabled, because it would open a second
port without a token. TensorBoard runs in a process of its own, which ends with the process that started it.

This module needs only the standard library, so it works in any Jupyter kernel; TensorBoard itself may be in .venv.
"""

import getpass
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from urllib.parse import urlsplit

from utils.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent


def find_log_folder(folder: Path | str | None = None) -> Path:
    """The folder to show: the first given of `folder`, $LOGDIR, $LOG_DIR, $EXPDIR, or else logs or example_logs.

    Raises UsageError if it does not exist.
    """
    variables = ("LOGDIR", "LOG_DIR", "EXPDIR")  # LOG_DIR is that of the submit scripts
    named = [os.environ[name] for name in variables if os.environ.get(name)]
    # A fresh checkout has only the example logs.
    usual = Path("logs") if Path("logs").is_dir() else ROOT / "example_logs"
    given = [folder, *named, usual]
    first = next(path for path in given if path)
    path = Path(first).expanduser().resolve()
    if not path.is_dir():
        raise UsageError(f"{path}: no such log folder: LOGDIR of the notebook, or {', '.join(variables)} name it")
    return path


class PrivateTensorBoard:
    """A running TensorBoard on `folder`. It ends with `stop()`, with this object, or with this process.

    port: chosen by the system. path: /<token>/. url: its address on this machine.
    Raises UsageError if TensorBoard does not start.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.path = f"/{secrets.token_urlsafe()}/"
        process = subprocess.Popen(
            [_python_with_tensorboard(), "-m", "tools.tensorboard_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # interrupting a notebook cell must not end it
        )
        # It ends too when this object is collected, or when Python exits.
        self.stop = weakref.finalize(self, _end, process)
        # The token travels through the pipe, since everybody can see a command line.
        settings = {"logdir": str(self.folder), "path_prefix": self.path.rstrip("/")}
        print(json.dumps(settings), file=process.stdin, flush=True)
        answer = process.stdout.readline().strip()  # type: ignore[union-attr]  # stdout is a pipe
        # The answer is a port, or the line of an error.
        if not answer.isdigit():
            self.stop()
            raise UsageError(f"TensorBoard did not start: {answer or 'see the messages of the Jupyter server'}")
        self.port = int(answer)
        self.url = f"http://127.0.0.1:{self.port}{self.path}"

    def directions(self) -> str:
        """Instructions to open TensorBoard from this machine and from another one."""
        return (
            f"TensorBoard shows {self.folder}\n\n"
            f"On this machine, open\n    {self.url}\n"
            f"From another machine, first run there\n    {tunnel_command(self.port)}\n"
            "and leave it running; then open the same address in the browser there."
        )

    def proxy_path(self) -> str | None:
        """Path of TensorBoard below the address of the Jupyter server; None if that server is unknown."""
        base = jupyter_base_url()
        return base and f"{base.rstrip('/')}/proxy/{self.port}{self.path}"


def tunnel_command(port: int) -> str:
    """The ssh command that forwards `port` of this machine to the same port of the reader's machine."""
    user, host = getpass.getuser(), socket.getfqdn()
    # The full name may be that of the loopback address, which another machine cannot use.
    host = socket.gethostname() if host.startswith("localhost") else host
    login_node = os.environ.get("SLURM_SUBMIT_HOST", host)
    jump = "" if login_node.split(".")[0] == host.split(".")[0] else f"-J {user}@{login_node} "  # in a batch job
    return f"ssh -N -L {port}:127.0.0.1:{port} {jump}{user}@{host}"


def jupyter_has_proxy() -> bool:
    """Tell whether this kernel's environment has jupyter-server-proxy. The server's own environment is hidden."""
    return importlib.util.find_spec("jupyter_server_proxy") is not None


def jupyter_base_url() -> str | None:
    """Base URL of the Jupyter server that started this kernel, such as /user/ann/; None if it is unknown."""
    # JupyterHub says it in a variable; any other server keeps it in a record by its process number.
    if prefix := os.environ.get("JUPYTERHUB_SERVICE_PREFIX"):
        return prefix
    try:
        from jupyter_core.paths import jupyter_runtime_dir

        record = Path(jupyter_runtime_dir()) / f"jpserver-{os.environ['JPY_PARENT_PID']}.json"
        return json.loads(record.read_text())["base_url"]
    except (ImportError, KeyError, OSError, ValueError):
        return None


def _python_with_tensorboard() -> str:
    if importlib.util.find_spec("tensorboard"):
        return sys.executable
    python = ROOT / ".venv/bin/python"
    if python.exists():
        return str(python)
    raise UsageError(f"this kernel has no TensorBoard and there is no {python}: run `make setup` first")


def _end(process):
    """Close the standard input of the process, which makes it end; kill it if it does not."""
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _serve() -> None:
    """Run TensorBoard: read the settings from stdin, print the port or an error, and end when stdin closes."""
    settings = json.loads(sys.stdin.readline())
    try:
        from tensorboard import program

        board = program.TensorBoard()
        # Port 0 lets the system choose; load_fast would start the data server, with a port that needs no token.
        board.configure(host="127.0.0.1", port=0, load_fast="false", **settings)
        url = board.launch()
    except Exception as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)
        return
    print(urlsplit(url).port, flush=True)
    # The pipe closes when the parent stops this process, or is gone.
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
