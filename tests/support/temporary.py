"""A temporary folder for all processes of a test session, in which nothing of ours may be left when they have ended."""

import os
import shutil
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path

NAME = "VIT_ERA5_TESTS"  # the variable that names the folder, for pytest's workers and for the programs under test
# What other programs leave: torchrun that is killed, the compiler's cache, multiprocessing, a browser, W&B when killed.
OF_OTHERS = (
    "torchelastic_*", "torchinductor_*", "pymp-*", "triton_*", "matplotlib-*", ".org.chromium.*", ".X*", "*wandb-*",
)  # fmt: skip
PATIENCE_SECONDS = 10.0  # for processes that are still ending
_made: list[str] = []  # by this process, for as long as the session lasts


def use_own_folder() -> bool:
    """Let this process and all that it starts use a temporary folder of their own; True in the process that made it."""
    if NAME in os.environ:
        return False
    # Pytest keeps the folders of the last sessions, where people look for them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="t-")  # the length of a socket's path is limited
    Path(folder).chmod(0o711)  # munge wants its folder to be reachable by others, and accounts of a class are others
    os.environ[NAME] = folder
    # After multiprocessing has removed its own folder in it, which has priority -100.
    Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # it is looked up anew
    return True


def left_behind() -> list[str]:
    """The names of what lies in the folder and is of ours, once the processes of the session have ended."""
    folder = Path(os.environ[NAME])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        known = {path for pattern in OF_OTHERS for path in folder.glob(pattern)}
        left = sorted(path.name for path in folder.iterdir() if path not in known)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def make_folder(prefix: str) -> str:
    """A folder that stays until the end of the session in this process."""
    folder = tempfile.mkdtemp(prefix=prefix)
    _made.append(folder)
    return folder


def remove_made() -> None:
    """Remove the folders that this process has made for the session."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)
