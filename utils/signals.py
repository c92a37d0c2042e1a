"""Signals that ask a run to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED_STATUS = 130  # Ctrl-C, twice in training: nothing was saved on the way out


# SIGINT is Ctrl-C, SIGQUIT is Ctrl-\. SIGHUP says that the terminal is gone, by a lost ssh. Schedulers use the rest.
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
)


class StopRequest:
    """Within `with request:`, a stop signal only sets `request.made`; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.made = False
        self.handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # What is ignored stays so: nohup ignores SIGHUP.
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers_before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.made = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Block the stop signals: processes started inside never receive them, this one receives them afterwards.

    A scheduler signals every process of a job. The trainer finishes its step and saves, and for that it still needs
    the processes that read its data and compile its model.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
