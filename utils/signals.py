"""Signals that ask a program to stop: it is interrupted where it is, or ends what it must not leave half done."""

import _thread
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED_STATUS = 130  # Ctrl-C, twice in training: nothing was saved on the way out
STOPPED_STATUS = 75  # stopped by a signal after saving: the same command continues (EX_TEMPFAIL of sysexits.h)

# SIGINT is Ctrl-C, SIGQUIT is Ctrl-\. SIGHUP says that the terminal is gone, by a lost ssh. Schedulers use the rest.
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
)


FORWARD_SECONDS = 0.2  # that a thread waits for a signal before it looks whether it is still needed
# Set once this process was asked to stop. Threads that wait for something from outside need not wait longer.
stop_asked = threading.Event()


class StopSignal(KeyboardInterrupt):
    """A stop signal, raised where the program was. status: of the program that ends with it."""

    def __init__(self, number: int, resumes: bool):
        # A shell has it so of a program that a signal ends.
        self.status = STOPPED_STATUS if resumes else 128 + number
        remedy = "; repeat the command to resume" if resumes else ""
        super().__init__(f"stopped by {signal.Signals(number).name}{remedy}")


class StopRequest:
    """Within `with request:`, a stop signal only sets `request.made`; a second Ctrl-C ends the process at once.

    raises: as long as this is true, it also raises StopSignal, after so many seconds; a request around this one, if
    there is any, raises it instead. resumes: see StopSignal. last_seconds: after which the process ends where it does
    not end by itself: a thread may be waiting for a file system. told: what ended it was said.
    """

    def __init__(
        self,
        raises: bool = False,
        seconds: float = 0,
        resumes: bool = True,
        last_seconds: float | None = None,
    ) -> None:
        self.made = False
        self.raises = raises
        self.seconds = seconds
        self.resumes = resumes
        self.last_seconds = last_seconds
        self.told = False
        self.is_own = False  # the next signal comes from here
        self.deadline = math.inf  # as time.monotonic() has it
        self.process = os.getpid()
        self.handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # What is ignored stays so: nohup ignores SIGHUP.
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers_before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)
        self.handlers_before = {}
        if kind is None:
            stop_asked.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A process that was forked from this one ends as any other does.
        if os.getpid() != self.process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.made and number == signal.SIGINT and not self.is_own:
            raise KeyboardInterrupt
        if not self.made:
            self.made = True
            stop_asked.set()
            self.deadline = time.monotonic() + self.seconds
            if self.raises and self.seconds > 0:
                self._repeat(number)
        # Schedulers repeat themselves too, and what ends must not be interrupted once more.
        if self.raises and time.monotonic() >= self.deadline:
            self.deadline = math.inf
            around: Any = self.handlers_before.get(signal.Signals(number))
            if isinstance(getattr(around, "__self__", None), StopRequest):
                around(number, frame)
            stop = StopSignal(number, self.resumes)
            if self.last_seconds is not None:
                self._end_late(stop, self.last_seconds)
            raise stop

    def _end_late(self, stop: StopSignal, seconds: float) -> None:
        def end() -> None:
            if not self.told:
                print(f"error: {stop}", file=sys.stderr, flush=True)
            os._exit(stop.status)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    def _repeat(self, number: int) -> None:
        """Send the signal once more at the deadline: Python runs handlers in the main thread alone."""

        def send() -> None:
            if self.raises and self.handlers_before:
                self.is_own = True
                os.kill(os.getpid(), number)

        timer = threading.Timer(self.seconds, send)
        timer.daemon = True
        timer.start()


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


@contextmanager
def stop_signals_heard_alone() -> Iterator[None]:
    """As stop_signals_held_back, but this process hears them at once: a compilation may take minutes."""
    with stop_signals_held_back():
        over = threading.Event()
        is_main = threading.current_thread() is threading.main_thread()
        # A signal that does nothing lets the main thread look up from whatever it waits for.
        before = signal.signal(signal.SIGURG, lambda *_: None) if is_main else None
        # Another thread may receive the signal, of which only this pipe tells.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if is_main else -1
        threading.Thread(target=_forward, args=[over, reader, writer], daemon=True).start()
        try:
            yield
        finally:
            if is_main:
                signal.set_wakeup_fd(pipe_before)
                signal.signal(signal.SIGURG, before)
            over.set()


def _forward(over: threading.Event, reader: int, writer: int) -> None:
    """In a thread in which the stop signals are blocked: call their handlers in the main thread, where they are too."""
    main = threading.main_thread().ident
    assert main is not None
    while not over.is_set():
        received = signal.sigtimedwait(STOP_SIGNALS, FORWARD_SECONDS)
        is_told = bool(select.select([reader], [], [], 0)[0])
        if is_told and set(os.read(reader, 100)) & set(STOP_SIGNALS) and not over.is_set():
            signal.pthread_kill(main, signal.SIGURG)
        if received is None:
            continue
        number = signal.Signals(received.si_signo)
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            os.kill(os.getpid(), number)
        else:
            _thread.interrupt_main(number)
            if not over.is_set():
                signal.pthread_kill(main, signal.SIGURG)
    os.close(reader)
    os.close(writer)
