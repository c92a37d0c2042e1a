"""Signals: Ctrl-C while a program imports its modules, which takes seconds, and what asks a run to stop."""

import os
import signal
import threading
from types import FrameType
from typing import Any

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


# SIGINT is Ctrl-C, SIGQUIT is Ctrl-\. SIGHUP says that the terminal is gone, by a lost ssh. Schedulers use the rest.
STOP_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in ("TERM", "USR1", "USR2", "INT", "QUIT", "HUP"))


class StopRequest:
    """Within `with request:`, a stop signal only sets `request.made`; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.made = False
        self.handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self.handlers_before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.made = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
