"""How the processes of a run meet, and how they end: none is left behind that waits for another.

The ranks connect through a key-value store. A rank that fails tells the others why, and all end.
"""

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from utils import comm
from utils.device import backend_for, on_this_device, physical_name, select_device
from utils.errors import UsageError, first_line, os_errors_as_usage_errors, run_main
from utils.launch import Launch, name_gloo_interface, read_launch, warn_of_unused_tasks
from utils.rank_failure import FAREWELL_SECONDS, FailureListener, agent_has_store, end_with_launcher


class NotConnectedError(UsageError):
    """Ranks that did not connect in time."""


_listener: FailureListener | None = None


def connect(
    device_name: str = "auto",
    timeout: float = 600,
    cpu_offload: bool = False,
) -> torch.device:
    """Connect the processes of this run; returns this one's device.

    timeout: a rank waits so many seconds for another. The backend is that of utils.device.backend_for; with
    cpu_offload tensors in host memory are reduced too, by gloo beside it.
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
    # torchrun keeps its store when it restarts the ranks: what the dead ones wrote must not be read.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"start{start}", store)


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
    try:
        store.wait(["devices known"])
    except dist.DistStoreError:
        absent = [str(rank) for rank in range(ranks) if not store.check([f"rank {rank}"])]
        raise TimeoutError(f"rank {', '.join(absent)} did not come") from None
    shared = store.add("devices shared", 0)
    if shared:
        raise UsageError(
            f"{ranks} ranks have {ranks - shared} GPUs (by PCI address and UUID), and each needs one of its own: start "
            "fewer ranks, or give --device cpu"
        )


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


def run_ranks(main: Callable[[], int | None]) -> NoReturn:
    """run_main for a program of one or more processes: whatever happens to one rank, every rank ends.

    A rank that fails, before they are connected or after, tells the others why. The others notice, and all end.
    """

    def guarded():
        try:
            # A file that cannot be opened is bad input, not a fault of the program.
            with os_errors_as_usage_errors():
                status = main()
        except (Exception, KeyboardInterrupt) as error:
            _end_with_the_others(error)
            raise
        disconnect()
        return status

    run_main(guarded)


def _end_with_the_others(error: BaseException) -> None:
    """Tell the other ranks why this one fails, and end. Returns where there are none, or they cannot be told.

    A rank that fails before it is connected connects for this; where it cannot, a UsageError names the rank.
    """
    if _listener:
        _listener.end_this_rank(error)
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
