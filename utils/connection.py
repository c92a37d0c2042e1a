"""How the processes of a run meet, and how they end: none is left behind that waits for another.

The ranks connect through a key-value store. A rank that fails tells the others why, and all end.
"""

import datetime
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist

from utils import comm
from utils.device import backend_for, on_this_device, physical_name, select_device
from utils.errors import FAILED_STATUS, UsageError, first_line, os_errors_as_usage_errors, run_main, status_of
from utils.launch import Launch, name_gloo_interface, read_launch, warn_of_unused_tasks
from utils.rank_failure import (
    FAREWELL_SECONDS,
    FIRST_FAILURE,
    SHORT_POLL_SECONDS,
    FailureListener,
    agent_has_store,
    end_with_launcher,
    exit_at_once,
    wait_until,
)
from utils.signals import StopRequest

# Keys of the store: the offer of rank 0; the status of a run that has ended, and how many waiting ranks have read it.
OFFER = "offer"
ENDED = "ended"
RELEASED = "released"


class NotConnectedError(UsageError):
    """Ranks that did not connect in time."""


_listener: FailureListener | None = None
_watched: tuple[dist.Store, int] | None = None  # where ranks that wait look for the end, and how many they are


def connect(
    device_name: str = "auto",
    timeout: float = 600,
    cpu_offload: bool = False,
    ranks: int | None = None,
) -> torch.device:
    """Connect the processes of this run; returns this one's device.

    timeout: a rank waits so many seconds for another. The backend is that of utils.device.backend_for; with
    cpu_offload tensors in host memory are reduced too, by gloo beside it. ranks: the first ones of the launch, which
    take part; all unless given. This does not come back on the others: they end when these do.
    Raises UsageError for launch variables that contradict each other, where other ranks do not arrive in time, where
    ranks on such devices cannot communicate, and where two ranks have the same GPU.
    """
    global _listener
    launch = read_launch()
    # Ranks of a node choose among its devices by their number; a process alone takes the first.
    local_rank = launch.local_rank if launch.world_size > 1 else 0
    device = select_device(device_name, local_rank)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher(launch.rank)
    if launch.world_size == 1:
        warn_of_unused_tasks()
        return device
    # Libraries beside torch look for these variables too.
    os.environ.update(MASTER_ADDR=launch.master_addr, MASTER_PORT=str(launch.master_port))
    name_gloo_interface(launch)
    backend = backend_for(device)
    comm.set_patience(timeout)
    try:
        store = open_store(launch, timeout)
        if ranks is not None and ranks < launch.world_size:
            _part_from_those_who_wait(store, launch, ranks)
            launch = replace(launch, world_size=ranks)
            if ranks == 1:
                return device
        # From here on a rank that fails can tell the others.
        _listener = FailureListener(store.clone(), launch.rank, launch.world_size)  # type: ignore[attr-defined]  # not in torch's stubs
        # Two ranks on one GPU would hang in their first collective.
        check_devices(store, launch, physical_name(device))
        # With offloading gloo reduces what lies in host memory, and no single device can be bound.
        offloaded = cpu_offload and backend != "gloo"
        backends = f"cpu:gloo,{device.type}:{backend}" if offloaded else backend
        is_bound = not offloaded and backend != "gloo"
        dist.init_process_group(
            backends,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=device if is_bound else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError, OSError, RuntimeError) as error:
        raise NotConnectedError(
            f"the {launch.world_size} ranks could not connect within {timeout} s through "
            f"{launch.master_addr}:{launch.master_port}: {first_line(error)}"
        ) from None
    return device


def open_store(launch: Launch, timeout: float) -> dist.Store:
    """The key-value store through which the ranks connect, of torchrun or else of rank 0, for which others wait.

    Where all ranks are on this machine it listens on its loopback alone: whoever reaches it may write.
    Raises OSError or RuntimeError where it cannot be opened, or not be reached within `timeout` seconds.
    """
    # torchrun's agent has a store already; otherwise rank 0 opens one.
    serves = launch.rank == 0 and not agent_has_store()
    listener = None
    if not serves:
        wait_for_rank_0(launch, timeout)
    elif launch.master_addr in ("localhost", "127.0.0.1"):
        listener = socket.create_server(("127.0.0.1", launch.master_port)).detach()
    store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        serves,
        datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    if not agent_has_store():
        return store
    return dist.PrefixStore(agree_on_start(store, launch, timeout), store)


def agree_on_start(store: dist.Store, launch: Launch, timeout: float) -> str:
    """A name for this start of the ranks, on which they agree through torchrun's store.

    torchrun keeps its store when it starts the ranks again, after a failure or because a node has come or gone: what
    the ranks of before wrote must not be read. Rank 0 offers a name, the others answer with one of their own, and it
    begins once it has heard of all. Raises TimeoutError with the ranks that do not come.
    """
    own_name = uuid.uuid4().hex
    if launch.rank == 0:
        store.set(OFFER, own_name)
    name = ""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        # An offer of before stands there until the new rank 0 has come.
        offered = store.get(OFFER).decode() if store.check([OFFER]) else ""
        if offered and offered != name:
            name = offered
            store.set(f"{name} {launch.rank}", own_name)
        answers = [f"{name} {rank}" for rank in range(launch.world_size)]
        if launch.rank == 0 and store.check(answers):
            heard = [store.get(answer).decode() for answer in answers]
            store.set(f"{name} begins", " ".join(heard))
        # Ranks of before have begun under their own names.
        if name and store.check([f"{name} begins"]) and own_name in store.get(f"{name} begins").decode():
            return name
        time.sleep(SHORT_POLL_SECONDS)
    absent = [str(rank) for rank in range(launch.world_size) if not store.check([f"{name} {rank}"])]
    raise TimeoutError(f"rank {', '.join(absent)} did not come")


def wait_for_rank_0(launch: Launch, timeout: float) -> None:
    """Return when rank 0's store can be reached; raises OSError after `timeout` seconds.

    torch's client waits too, and then prints stacks of C++ before its error.
    """
    # Rank 0 may start later than this rank.
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((launch.master_addr, launch.master_port), timeout).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def check_devices(store: dist.Store, launch: Launch, name: str) -> None:
    """Raise UsageError, on every rank, where two ranks have the same GPU: NCCL would hang.

    name: of this rank's device on its machine, '' for one that ranks may share. Waits for all ranks; raises
    TimeoutError with the ranks that do not come.
    """
    ranks = launch.world_size
    store.set(f"rank {launch.rank}", "")
    # The store counts for each device how many ranks have named it.
    if name and store.add(f"device {name}", 1) > 1:
        store.add("devices shared", 1)
    # Whoever comes last lets the others go on.
    if store.add("devices named", 1) == ranks:
        store.set("devices known", "")
    _wait_for(store, ["devices known"], ranks)
    shared = store.add("devices shared", 0)
    if shared:
        raise UsageError(
            f"{ranks} ranks have {ranks - shared} GPUs (by PCI address and UUID), and each needs one of its own: start "
            "fewer ranks, or give --device cpu"
        )


def _part_from_those_who_wait(store: dist.Store, launch: Launch, ranks: int) -> None:
    """Wait until every rank has come, and come back on the first `ranks` of them, which take part.

    A rank that comes when the others have ended would look for their store in vain.
    """
    global _watched
    store.set(f"rank {launch.rank}", "")
    _wait_for(store, [f"rank {rank}" for rank in range(launch.world_size)], launch.world_size)
    if launch.rank >= ranks:
        wait_for_the_end(store, launch, ranks)
    _watched = store.clone(), launch.world_size - ranks  # type: ignore[attr-defined]  # not in torch's stubs


def _wait_for(store: dist.Store, keys: list[str], ranks: int) -> None:
    """Wait for keys of the store; raises TimeoutError with those of `ranks` ranks that do not come."""
    try:
        store.wait(keys)
    except dist.DistStoreError:
        absent = [str(rank) for rank in range(ranks) if not store.check([f"rank {rank}"])]
        raise TimeoutError(f"rank {', '.join(absent)} did not come") from None


def disconnect(timeout: float = 10) -> None:
    """Leave the process group. Never hangs: after `timeout` seconds the group is left to the end of the process."""
    if dist.is_initialized():
        if _listener:
            _listener.stop(timeout)
        comm.forget_mesh()
        # NCCL may wait for a peer that is gone, so the thread is not waited for.
        leaving = threading.Thread(target=on_this_device(dist.destroy_process_group), daemon=True)
        leaving.start()
        leaving.join(timeout)


def wait_for_the_end(store: dist.Store, launch: Launch, ranks: int) -> NoReturn:
    """Wait, on a rank that takes no part, until the others end; end with their status."""
    if launch.rank == ranks:
        waiting = launch.world_size - ranks
        print(f"{ranks} of {launch.world_size} ranks share the batch, {waiting} wait", flush=True)
    status = FAILED_STATUS
    # A signal is for the others: they save, and this one ends with them.
    with StopRequest(), suppress(RuntimeError):  # the store is gone, and with it the others
        wait_until(lambda: store.check([ENDED]) or store.check([FIRST_FAILURE]), math.inf)
        has_ended = store.check([ENDED])
        ending = store.get(ENDED if has_ended else FIRST_FAILURE)
        status = int(ending.split()[0])
        store.add(RELEASED, 1)
    exit_at_once(status)


def release_those_who_wait(status: int | None) -> None:
    """Let ranks that take no part end with the status of this run."""
    if _watched is None or comm.rank() > 0:
        return
    store, waiting = _watched
    store.set(ENDED, str(status or 0))
    # The store may live in this process.
    wait_until(lambda: store.add(RELEASED, 0) == waiting, FAREWELL_SECONDS)


def run_ranks(main: Callable[[], int | None], resumes: bool = False) -> NoReturn:
    """run_main for a program of one or more processes: whatever happens to one rank, every rank ends.

    A rank that fails, before they are connected or after, tells the others why. The others notice, and all end.
    """

    def guarded():
        try:
            # A file that cannot be opened is bad input, not a fault of the program.
            with os_errors_as_usage_errors():
                status = main()
            release_those_who_wait(status)
        except (Exception, KeyboardInterrupt) as error:
            _end_with_the_others(error)
            raise
        disconnect()
        return status

    run_main(guarded, resumes)


def _end_with_the_others(error: BaseException) -> None:
    """Tell the other ranks why this one fails, and end. Returns where there are none, or they cannot be told.

    A rank that fails before it is connected connects for this; where it cannot, a UsageError names the rank.
    """
    if _listener:
        _listener.end_this_rank(error)
    release_those_who_wait(status_of(error))
    if isinstance(error, KeyboardInterrupt):
        return
    launch = read_launch()
    if launch.world_size == 1:
        return
    if not isinstance(error, NotConnectedError):
        with suppress(OSError, RuntimeError):
            store = open_store(launch, FAREWELL_SECONDS)
            FailureListener(store, launch.rank, launch.world_size).end_this_rank(error)
    if isinstance(error, UsageError):
        raise UsageError(f"rank {launch.rank}: {error}") from None
