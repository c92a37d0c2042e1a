"""Errors as one clear line: what was wrong, where, and what to do; and the exit statuses."""

import argparse
import difflib
import errno
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from utils.signals import INTERRUPTED_STATUS, STOPPED_STATUS, StopRequest, StopSignal

USAGE_STATUS = 2  # bad settings or bad input: nothing was started, nothing is lost
FAILED_STATUS = 1  # the run itself failed (the loss is no longer finite)

BROKEN_PIPE_STATUS = 141  # as a shell has it of a program that SIGPIPE ends

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
LAST_SECONDS = 5  # that a stopped program gives threads of libraries and readers, for which Python waits
NEAR = 0.75  # of difflib's similarity, from which on a name counts as misspelt


class UsageError(Exception):
    """Settings or input that cannot be used. The message is the one line shown to the user."""


class LayoutError(UsageError, ValueError):
    """A model or an image that cannot be split over the ranks as asked."""


class ConnectionLostError(Exception):
    """A store of data that is elsewhere no longer answers. Whoever repeats the command later may find it again."""


class NotEnoughRanksError(ConnectionLostError):
    """Too few ranks are there to go on. Whoever repeats the command later may find more."""


class StoppedError(Exception):
    """All ranks know that one was asked to stop, and leave together what can be made up later."""


class NonFiniteLossError(Exception):
    """The training loss became NaN or infinite."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raise it as a UsageError."""
        raise UsageError(f"{message} (see --help)")


def nearest(word: str, words: Iterable[str]) -> str:
    """The words ` (did you mean '...'?)` with the one of `words` that is most like `word`; "" where none is near."""
    known = [str(other) for other in words]
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=NEAR)
    return f" (did you mean '{near[0]}'?)" if near else ""


def int_in_range(least: int, most: int) -> Callable[[str], int]:
    """For the type of an option: a whole number within these bounds."""
    return _number(int, "whole number", least, most)


def float_in_range(least: float, most: float) -> Callable[[str], float]:
    """For the type of an option: a number within these bounds."""
    return _number(float, "number", least, most)


def _number(kind, name, least, most):
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a {name}") from None
        if not least <= value <= most:  # nor is NaN
            raise argparse.ArgumentTypeError(f"{text} is not within {least} to {most}")
        return value

    return parse


@contextmanager
def reported_as_usage_error(
    kind: type[Exception] | tuple[type[Exception], ...],
    where: str,
) -> Iterator[None]:
    """Turn an exception of `kind`, from a module that knows no settings, into a UsageError that begins with `where`."""
    try:
        yield
    except kind as error:
        raise UsageError(f"{where}: {first_line(error)}") from None


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a format, codec or file system raises into a UsageError. what: the file, and the place in it."""
    try:
        yield
    except (UsageError, ConnectionLostError):
        raise  # they name the place better
    except Exception as error:
        raise UsageError(f"{what} cannot be read: {first_line(error)}") from error


@contextmanager
def os_errors_as_usage_errors() -> Iterator[None]:
    """Turn what the system says of a file into a UsageError that names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        remedy = ": free some space, or write to another folder" if error.errno in FULL_DISK else ""
        raise UsageError(f"{error.filename}: {error.strerror or first_line(error)}{remedy}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the exception's name where it has none."""
    # The rest of a long message is a trace, or advice to programmers.
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def status_of(error: BaseException) -> int:
    """The exit status of a program that ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "status", INTERRUPTED_STATUS)
    if isinstance(error, UsageError):
        return USAGE_STATUS
    # Lost data and lost nodes come back, so the same command can go on later.
    return STOPPED_STATUS if isinstance(error, ConnectionLostError) else FAILED_STATUS


def one_line(text: str) -> str:
    """A message as a terminal may show it: control characters escaped."""
    shown = []
    for character in text:
        if character.isprintable():
            shown.append(character)
        else:
            shown.append(character.encode("unicode_escape").decode())
    return "".join(shown)


def print_error(message: str) -> None:
    """Print an error as one line, and leave it for torchrun."""
    print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    leave_for_torchrun(message)


def leave_for_torchrun(message: str) -> None:
    """Write why this rank ends to the file that torchrun, if it started the rank, reads for its own summary."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # This is the form in which torchrun reads it.
        answer = {"message": one_line(message), "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError), open(file, "w") as opened:
            json.dump({"message": answer}, opened)


def run_main(main: Callable[[], int | None], resumes: bool = False) -> NoReturn:
    """Call main() and exit with its status (None is 0); an error that is expected exits with status_of it.

    A process that dies of SIGBUS or SIGSEGV prints its stacks first. A stop signal ends main() with a line, where main
    does not look after signals itself. resumes: the same command then goes on with what is there already.
    """
    if sys.stderr is None:  # closed: what is said goes nowhere, and all else goes on
        sys.stderr = open(os.devnull, "w")
    # A crash in native code then shows where Python was.
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    request = StopRequest(raises=True, resumes=resumes, last_seconds=LAST_SECONDS)
    try:
        with request, os_errors_as_usage_errors():
            status = main()
    except (UsageError, ConnectionLostError, NonFiniteLossError) as error:
        print_error(str(error))
        status = status_of(error)
    except StopSignal as stop:
        request.told = True
        print_error(str(stop))
        status = status_of(stop)
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    except BrokenPipeError:  # whoever read the output has had enough, as `| head -1` has
        status = BROKEN_PIPE_STATUS
    try:
        # What is still in the buffer may meet a closed pipe.
        sys.stdout and sys.stdout.flush()
    except OSError:  # Python would try once more, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)
