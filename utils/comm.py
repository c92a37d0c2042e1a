"""The processes of a run: who they are, how they connect, and how they end.

`init` understands plain python (one process), torchrun, and srun, with or without export_DDP_vars.sh. Every process
then holds one device. The functions below work in a single process too, where they do nothing.
"""

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.device import select_device
from utils.errors import FAILED_STATUS, USAGE_STATUS, NonFiniteLossError, UsageError, run_main

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FIRST_FAILURE = "first_failure"  # key of the store
FAREWELL_SECONDS = 2
_listener, _leaving = None, threading.Event()
_control = None  # a second connection to the store: the process group's own may be busy waiting


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    master_addr: str = ""
    master_port: int = 0


def read_launch(env=os.environ):
    """The Launch in the environment: of torchrun or export_DDP_vars.sh, else of srun, else a single process.

    Raises UsageError where variables are missing, are no numbers, or contradict each other.
    """
    tasks = _number(env, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in env else 1
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = [name for name in VARIABLES if name not in env]
        if missing:
            raise UsageError(
                f"{'RANK' if 'RANK' in env else 'WORLD_SIZE'} is set, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not: start with torchrun, srun or plain python, or unset it"
            )
        rank, local_rank, size, port = (_number(env, n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
        launch = Launch(rank, local_rank, size, _nodes(env, size), env["MASTER_ADDR"], port)
        by_srun = tasks > 1 and "TORCHELASTIC_RUN_ID" not in env
        if by_srun and (rank, size) != (_number(env, "SLURM_PROCID"), tasks):
            raise UsageError(
                f"RANK {rank} of {size} contradicts srun's task {env['SLURM_PROCID']} of {tasks}: source "
                "export_DDP_vars.sh inside each task, not in the batch script"
            )
    elif tasks > 1:
        launch = Launch(
            _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID"), tasks,
            _number(env, "SLURM_STEP_NUM_NODES"), env.get("MASTER_ADDR") or _slurm_master(env),
            _number(env, "MASTER_PORT") if "MASTER_PORT" in env else 12000 + _number(env, "SLURM_JOB_ID") % 20000,
        )  # fmt: skip
    else:
        return Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise UsageError(f"RANK {launch.rank} is not one of the {launch.world_size} ranks of WORLD_SIZE")
    return launch


def _nodes(env, size):
    if "LOCAL_WORLD_SIZE" in env:  # torchrun
        return -(-size // max(1, _number(env, "LOCAL_WORLD_SIZE")))
    return _number(env, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in env else 1


def _number(env, name):
    try:
        return int(env[name])
    except KeyError:
        raise UsageError(f"{name} is not set, although srun started several tasks") from None
    except ValueError:
        raise UsageError(f"{name}='{env[name]}' is not a whole number") from None


def _slurm_master(env):
    """The address of rank 0: the first node of the step, or the node of srun where that name does not resolve."""
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST", "")
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        first = listed.stdout.split()[0]
        socket.getaddrinfo(first, None)
        return first
    except (OSError, subprocess.CalledProcessError, IndexError):
        if "SLURM_LAUNCH_NODE_IPADDR" not in env:
            raise UsageError(f"no address for rank 0 of the nodes '{nodes}': set MASTER_ADDR") from None
        return env["SLURM_LAUNCH_NODE_IPADDR"]


def init(device_name="auto", timeout=600):
    """Connect the processes of this run; returns this one's device.

    timeout: seconds after which a rank that waits for another gives up. NCCL on CUDA devices, gloo elsewhere.
    Raises UsageError, before any connection, for variables that do not fit, and where the others do not come.
    """
    launch = read_launch()
    device = select_device(device_name, launch.local_rank if launch.world_size > 1 else 0)
    if launch.world_size == 1:
        return device
    os.environ.update(MASTER_ADDR=launch.master_addr, MASTER_PORT=str(launch.master_port))
    if launch.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
    cuda, patience = device.type == "cuda", datetime.timedelta(seconds=timeout)
    try:
        store, *_ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience))
        # torchrun keeps its store when it restarts the ranks: what the dead ones wrote must not be read.
        store = dist.PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=launch.rank, world_size=launch.world_size, timeout=patience,
            device_id=device if cuda else None,
        )  # fmt: skip
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise UsageError(
            f"rank {launch.rank} of {launch.world_size} could not connect within {timeout} s through "
            f"{launch.master_addr}:{launch.master_port}: {line}"
        ) from None
    global _control, _listener
    _control = store.clone()
    _listener = threading.Thread(target=_listen, daemon=True)
    _listener.start()
    return device


def shutdown(timeout=10):
    """Leave the process group. Never hangs: after `timeout` seconds the group is left to the end of the process."""
    if dist.is_initialized():
        _leaving.set()
        _listener.join(timeout)  # Python must not end while a thread is in the store
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(timeout)


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def is_main():
    """Whether this process speaks for all: writes logs, summaries, markers."""
    return rank() == 0


def on_main(function):
    """Call function() on rank 0; every rank gets its result, or raises the exception that it raised."""
    if world_size() == 1:
        return function()
    outcome = [None, None]
    if is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def agree(function):
    """Call function() on every rank; where some raise a UsageError, every rank raises the first of them."""
    if world_size() == 1:
        return function()
    result, error = None, None
    try:
        result = function()
    except UsageError as caught:
        error = caught
    errors = [None] * world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise error
    return result


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """Reduce `tensor` over all ranks, in place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op)
    return tensor


def global_mean(values):
    """Mean over the first axis of `values`, rows of all ranks counted, added up in float64: (n, ...) -> (...)."""
    values = values.cpu() if values.device.type == "mps" else values
    sums = values.double().sum(0)
    packed = all_reduce(torch.cat([sums.flatten(), sums.new_tensor([len(values)])]))
    return (packed[:-1] / packed[-1]).view(sums.shape)


def global_max(value, device):
    """The largest of all ranks' values."""
    return all_reduce(device_tensor([value], device), dist.ReduceOp.MAX).item()


def device_tensor(values, device):
    """A float64 tensor (float32 where the device has no such type) for a reduction."""
    return torch.tensor(values, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def run_ranks(main):
    """run_main for a program of one or more processes: whatever happens to one rank, every rank ends.

    A rank that fails tells the others why, and ends at once without waiting for them; those notice that it is gone and
    name its error.
    """

    def guarded():
        try:
            status = main()
        except (Exception, KeyboardInterrupt) as error:
            if world_size() > 1:
                _end_this_rank(error)
            raise
        shutdown()
        return status

    run_main(guarded)


def _end_this_rank(error):
    """Say why, to people and to the other ranks, and end without waiting for them."""
    status = USAGE_STATUS if isinstance(error, UsageError) else FAILED_STATUS
    expected = isinstance(error, UsageError | NonFiniteLossError | KeyboardInterrupt)
    message = f"rank {rank()}: {error if expected else f'{type(error).__name__}: {error}'}"
    try:
        first = _control.compare_set(FIRST_FAILURE, "", f"{status} {message}").decode()
    except RuntimeError:  # the store lives in rank 0, which is gone
        first = f"{status} the loss of rank 0"
    if first == f"{status} {message}":
        print(f"error: {message}", file=sys.stderr, flush=True)
        if not expected:
            traceback.print_exc()
        time.sleep(FAREWELL_SECONDS)  # the others listen; rank 0 also holds the store for them
        shutdown()
        exit_at_once(status)
    _end_because_of(first)


def _end_because_of(first):
    status, message = first.split(" ", 1)
    print(f"error: rank {rank()} ends because of {message}", file=sys.stderr, flush=True)
    exit_at_once(int(status))


def _listen():
    """In a thread of every rank: end it soon after another has failed, also while it waits in a collective."""
    with contextlib.suppress(RuntimeError):  # rank 0 is gone: the collectives will notice
        while not _leaving.wait(FAREWELL_SECONDS / 4):
            if _control.check([FIRST_FAILURE]):
                first = _control.get(FIRST_FAILURE).decode()
                if not first.split(" ", 1)[1].startswith(f"rank {rank()}:"):
                    time.sleep(FAREWELL_SECONDS / 2)  # an error of its own comes first
                    _end_because_of(first)
                return


def exit_at_once(status):
    """End this process without waiting for others: they may wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
