"""When one rank fails, every rank ends, says why, and leaves a record of its last collectives.

A rank that fails writes its error into the store through which the ranks connect; a thread of every other rank looks
there, so that a rank that waits in a collective, or for the others to come, ends too. Who wrote the first error prints
it; the others end in silence, unless they have something else to say.

torch's flight recorder notes every collective of NCCL and gloo in memory, TORCH_FR_BUFFER_SIZE of them (2000). Sends
and receives are left out: of gloo's it knows nothing. A rank that ends because something went wrong writes its
collectives into the run's folder, and `python -m tools.hang FOLDER` compares the files of all ranks.
"""

import contextlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from utils.errors import (
    FAILED_STATUS,
    ConnectionLostError,
    NonFiniteLossError,
    UsageError,
    leave_for_torchrun,
    one_line,
    print_error,
    status_of,
)
from utils.files import whole_file
from utils.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed import Store

# Keys of the store: the error, the number of ranks that know it, whether all shall end now, the number that are ending.
FIRST_FAILURE = "first_failure"
KNOWN = "known"
END = "end"
LEFT = "left"
LOST = "the loss of rank 0"
POLL_SECONDS = 0.5
SHORT_POLL_SECONDS = 0.05
RANK_0_SECONDS = 3  # by which rank 0 may be later than another one: it speaks for all where they have the same error
FAREWELL_SECONDS = 10  # at most, for ranks that are slow to notice
FILE_NAME = "collectives-rank{}.json"
LAST = 200  # collectives of a file
PLACES = 3  # lines of code
LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_folder: Path | None = None
_writing = threading.Lock()
_newest: object = None  # call in the record that this rank has written


class FailureListener:
    """Watches for the failure of other ranks. store: a connection of its own: the process group's may be waiting."""

    def __init__(self, store: "Store", rank: int, world_size: int):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.leaving = threading.Event()
        self.ending = threading.Lock()  # of this process: whoever takes it speaks for the rank, and ends it
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; Python must not exit while it uses the store."""
        self.leaving.set()
        self.thread.join(timeout)

    def end_this_rank(self, error: BaseException) -> NoReturn:
        """Say why, to people and to the other ranks, and end without waiting for their collectives."""
        status = status_of(error)
        expected = isinstance(error, UsageError | ConnectionLostError | NonFiniteLossError | KeyboardInterrupt)
        # The words of an error that is expected say it all; of any other the kind matters too.
        text = one_line(str(error) if expected else f"{type(error).__name__}: {error}")
        # Every message names the rank that it comes from.
        message = f"rank {self.rank}: {text}"
        self.ending.acquire()
        _ignore_stop_signals()
        if not expected:
            write_record(message)
        try:
            if self.rank > 0:
                wait_until(lambda: self.store.check([FIRST_FAILURE]), RANK_0_SECONDS)
            # The first error in the store is the one that counts.
            first = self.store.compare_set(FIRST_FAILURE, "", f"{status} {message}").decode()
        except RuntimeError:  # the store lives in rank 0, which is gone
            first = f"{status} {LOST}"
        # This rank was the first, so it speaks for all.
        if first == f"{status} {message}":
            print_error(message)
            if not expected:
                traceback.print_exc()
            self._wait_for_others()
            exit_at_once(status)
        self._end_because_of(first, text if expected else "")

    def _end_because_of(self, first: str, own_error: str = "") -> NoReturn:
        """End this rank after another. own: an error that this rank expected."""
        # The text in the store begins with the exit status.
        status, message = first.split(" ", 1)
        if int(status) == FAILED_STATUS:
            write_record(f"because of {message}")
        if own_error and message.partition(": ")[2] != own_error:
            print_error(f"rank {self.rank}: {own_error}")
        elif message == LOST:
            why = "torchrun has been killed" if agent_has_store() else f"of {message}"
            print_error(f"rank {self.rank} ends because {why}")
        else:
            leave_for_torchrun(message)
        self._wait_for_others()
        exit_at_once(int(status))

    def _wait_for_others(self) -> None:
        """Wait until all ranks know the error, so that they end together: torchrun kills those that are later."""
        with contextlib.suppress(RuntimeError):
            # Each rank counts itself, and rank 0 says when all know.
            self.store.add(KNOWN, 1)
            if self.rank > 0:
                wait_until(lambda: self.store.check([END]), FAREWELL_SECONDS)
                self.store.add(LEFT, 1)
                return
            wait_until(lambda: self.store.add(KNOWN, 0) >= self.world_size, FAREWELL_SECONDS)
            self.store.set(END, "")
            # It may live in this rank: torch prints a stack of C++ on ranks that look once more when it is gone.
            if not agent_has_store():
                wait_until(lambda: self.store.add(LEFT, 0) == self.world_size - 1, FAREWELL_SECONDS)

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: the collectives will notice
            while not self.leaving.wait(POLL_SECONDS):
                if self.store.check([FIRST_FAILURE]):
                    first = self.store.get(FIRST_FAILURE).decode()
                    if not first.split(" ", 1)[1].startswith(f"rank {self.rank}:"):
                        time.sleep(2 * POLL_SECONDS)  # an error of its own comes first
                        self.ending.acquire()
                        self._end_because_of(first)
                    return


def _ignore_stop_signals() -> None:
    """What ends is not stopped once more: torchrun stops every rank as soon as the first has ended."""
    if threading.current_thread() is threading.main_thread():  # signals interrupt no other
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not within this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(SHORT_POLL_SECONDS)
    return True


def agent_has_store() -> bool:
    """Tell whether the ranks connect through a store of torchrun's agent; otherwise rank 0 has it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def end_with_launcher(rank: int) -> None:
    """End this process when torchrun, which started it, is gone; whoever starts the run again finds no old ranks."""
    # A process whose parent is gone gets another parent.
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        print(f"error: rank {rank} ends because torchrun has been killed", file=sys.stderr, flush=True)
        exit_at_once(FAILED_STATUS)

    threading.Thread(target=watch, daemon=True, name="end with torchrun").start()


def exit_at_once(status: int) -> NoReturn:
    """End this process without waiting for other ranks, which may be waiting for this one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or full
            stream.flush()
    os._exit(status)


def record_in(folder: Path | None) -> None:
    """Name the folder for the records of this process; without one nothing is written."""
    global _folder
    _folder = folder


def write_record(reason: str) -> None:
    """Write what this rank has called so far, and where it is. reason: why it ends, '' if it does not.

    Any thread may call it, whatever the others wait for. A record of the same calls stays as it is; where the file
    cannot be written, this says so and goes on.
    """
    from torch import distributed as dist

    global _newest
    if _folder is None or not dist.is_initialized():
        return
    rank = dist.get_rank()
    try:
        from torch.distributed.distributed_c10d import _world

        with _writing:
            # A group of one rank communicates nothing.
            groups = {}  # those of several ranks
            for group in _world.pg_map:
                ranks = list(_world.pg_group_ranks[group])
                if len(ranks) > 1:
                    groups[_world.pg_names[group]] = [group.group_desc, ranks]
            record: dict[str, Any] = {
                "rank": rank,
                "world_size": dist.get_world_size(),
                "start": " ".join(os.environ.get(name, "") for name in LAUNCH),  # files of an earlier start stay
                "reason": reason,
                "at": _own_code(threading.main_thread().ident or 0),
                "groups": groups,
                "calls": _calls()[-LAST:],
            }
            # A call that has finished meanwhile is still the same call.
            newest = record["calls"] and record["calls"][-1] | {"done": None}
            if newest != _newest:  # else the rank has only lost the others since it wrote
                _newest = newest
                with whole_file(_folder / FILE_NAME.format(rank)) as partial:
                    partial.write_text(json.dumps(record))
    except Exception as error:  # whatever it is: this is called where a run must end
        print(f"warning: rank {rank}: its last collectives could not be written: {error}", file=sys.stderr, flush=True)


def recorded_collectives() -> list[dict[str, Any]]:
    """{group, number, operation} of the collectives that torch still knows of, in the order of their calls."""
    from torch import distributed as dist

    calls = _calls() if dist.is_initialized() else []
    recorded = []
    for call in calls:
        recorded.append({"group": call["group"], "number": call["number"], "operation": call["operation"]})
    return recorded


def _calls() -> list[dict[str, Any]]:
    """Collectives of gloo and NCCL, in the order in which this rank called them."""
    import torch._C._distributed_c10d as c10d

    entries = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's in a build that has it
        if hasattr(c10d, dump):
            entries += json.loads(getattr(c10d, dump)()).get("entries", [])
    # The newest torch keeps one list for both, and each call returns it.
    # Calls are known by group, number and time.
    once = {}
    for entry in entries:
        if not entry["is_p2p"]:
            group = entry["process_group"][0]
            once[group, entry["collective_seq_id"], entry["time_created_ns"]] = entry
    calls = []
    for entry in sorted(once.values(), key=lambda entry: entry["time_created_ns"]):
        tensors = []
        for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False):
            tensors.append(f"{dtype}{tuple(size)}")
        calls.append(
            {
                "group": entry["process_group"][0],
                "number": entry["collective_seq_id"],
                "operation": entry["profiling_name"].partition(":")[2],
                "tensors": tensors,
                "done": entry["retired"] or entry["state"] == "completed",
            }
        )
    return calls


def _own_code(thread: int) -> list[str]:
    """Lines in which a thread is, innermost first, outside Python's and other libraries: "path:line function"."""
    places: list[str] = []
    for frame, line in traceback.walk_stack(sys._current_frames()[thread]):
        # Places in libraries say nothing of what this program did.
        code = frame.f_code
        is_in_library = code.co_filename.startswith((*LIBRARIES, "<"))
        if is_in_library:
            continue
        places.append(f"{os.path.relpath(code.co_filename)}:{line} {code.co_name}")
        if len(places) == PLACES:
            break
    return places
