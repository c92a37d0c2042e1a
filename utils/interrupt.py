"""Ctrl-C while a program imports its modules, which takes seconds: it ends in silence, with the status of a shell."""

import os
import signal
import threading
from types import FrameType

INTERRUPTED_STATUS = 130  # Ctrl-C, twice in training: nothing was saved on the way out


def _interrupted(_number: int, frame: FrameType | None) -> None:
    """End the program here while it still imports, and once its main function is over; else raise KeyboardInterrupt.

    In between, imports would swallow the exception, or print it from where it cannot be caught.
    """
    called = None
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != ("__main__", "<module>"):
        frame, called = frame.f_back, frame
    if frame is None or (called is not None and "importlib" in called.f_code.co_filename):
        os._exit(INTERRUPTED_STATUS)
    raise KeyboardInterrupt


# Every package with programs imports this module before the slow ones.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _interrupted)
