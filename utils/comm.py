"""The processes of a run: how they connect, in which groups they work together, and how they end.

Every process holds one device. Ranks form a mesh with named dimensions: dp data parallel (dp_replicate x dp_shard where
parameters are sharded inside smaller groups), cp context parallel, domain (domain_lat x domain_lon) domain parallel,
tp tensor parallel, pp pipeline parallel. In a single process the functions below work too, and communicate nothing.

    python -m utils.comm --world_size 8 --tensor_parallel 4 --parallel_order tp-dp     shows the groups as a table
"""

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.device import backend_for, on_this_device, physical_name, select_device
from utils.errors import (
    ArgumentParser,
    ConnectionLostError,
    UsageError,
    first_line,
    int_in_range,
    os_errors_as_usage_errors,
    run_main,
)
from utils.launch import Launch, name_gloo_interface, read_launch, warn_of_unused_tasks
from utils.layout import ORDER, Layout, tile_counts
from utils.rank_failure import FAREWELL_SECONDS, FailureListener, agent_has_store, end_with_launcher
from utils.torch_private import flattened, set_timeout

RANKS = int_in_range(1, 2**16)
DOMAIN = {"domain_lat", "domain_lon"}
IMAGE = {"cp", *DOMAIN}
# Dimensions that also work together as one.
COMBINED = {
    "dp": {"dp_replicate", "dp_shard"},
    "domain": DOMAIN,
    "image": IMAGE,  # ranks that share one image
    "grad_reduce": {"dp_replicate", "dp_shard", *IMAGE},  # ranks whose gradients are averaged
    "dp_shard_image": {"dp_shard", *IMAGE},
    "tp_pp": {"tp", "pp"},
}
DATA_PARALLEL = ("dp", "dp_shard", "grad_reduce", "dp_shard_image")  # all ranks, until a mesh is built
T = TypeVar("T")


class NotConnectedError(UsageError):
    """Ranks that did not connect in time."""


_listener: FailureListener | None = None
_patience = datetime.timedelta(seconds=600)  # of every group
# By name of a dimension, or of combined ones; "" is the whole mesh, "hsdp" that of _mesh_of_hsdp where it is needed.
_meshes: dict[str, DeviceMesh] = {}


def init(
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
    global _listener, _patience
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
    _patience = datetime.timedelta(seconds=timeout)
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
            timeout=_patience,
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


def shutdown(timeout: float = 10) -> None:
    """Leave the process group. Never hangs: after `timeout` seconds the group is left to the end of the process."""
    if dist.is_initialized():
        if _listener:
            _listener.stop(timeout)
        _meshes.clear()
        # NCCL may wait for a peer that is gone, so the thread is not waited for.
        leaving = threading.Thread(target=on_this_device(dist.destroy_process_group), daemon=True)
        leaving.start()
        leaving.join(timeout)


def build_mesh(device: torch.device, layout: Layout) -> None:
    """Arrange all ranks as the Layout says, and make a process group for every dimension and combination."""
    _meshes.clear()
    if world_size() == 1:
        return
    # All ranks make the same groups in the same order.
    dims = layout.mesh_dims
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    _meshes[""] = mesh
    for name in dims:
        _meshes[name] = mesh[name]
    for name, parts in COMBINED.items():
        combined = tuple(dim for dim in dims if dim in parts)
        # Where at most one dimension has several ranks, its groups are those of the combination. Where none has, any
        # dimension will do that is the same on every rank.
        several = [dim for dim in combined if dims[dim] > 1] or [min(parts)]
        if len(several) == 1 and name != "dp_shard_image":  # which hsdp asks for by this name
            _meshes[name] = mesh[several[0]]
        else:
            _meshes[name] = flattened(mesh[combined], name)
    # Only some orders of the dimensions need it.
    own = _mesh_of_hsdp(mesh)
    if own is not None:
        _meshes["hsdp"] = own
    groups = {mesh.get_group() for mesh in _meshes.values() if mesh.ndim == 1}
    for group in groups:
        set_group_timeout(group)


def set_group_timeout(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group wait for one another as long as `init` was told; by itself a mesh does not."""
    if "fake" not in dist.get_backend(group):
        set_timeout(_patience, group)


def new_cpu_group() -> dist.ProcessGroup | None:
    """A process group of all ranks of its own, for tensors in host memory."""
    return dist.new_group(backend="gloo", timeout=_patience)


def swap_meshes(meshes: dict[str, DeviceMesh]) -> dict[str, DeviceMesh]:
    """Replace the meshes of this process by those of another layout; returns the previous ones."""
    before = dict(_meshes)
    _meshes.clear()
    _meshes.update(meshes)
    return before


def get_mesh(*names: str) -> DeviceMesh | None:
    """The mesh of one or more dimensions; None in a single process."""
    if not _meshes:
        return None
    if names == ("hsdp",) and "hsdp" not in _meshes:
        names = _hsdp_dims()
    return _meshes[names[0]] if len(names) == 1 else _meshes[""][names]


def _hsdp_dims() -> tuple[str, str]:
    """The dimensions of hsdp's mesh: groups that hold copies of sharded parameters, and the ranks of a group."""
    return "dp_replicate", "dp_shard" if get_size("image") == 1 else "dp_shard_image"


def _mesh_of_hsdp(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of hsdp where torch cannot cut it out of the whole one: its dimensions are in another order there."""
    outer, inner = _hsdp_dims()
    names = list(mesh.mesh_dim_names or ())
    outer_dim = names.index(outer)
    inner_names = COMBINED.get(inner, {inner})
    inner_dims = [dim for dim, name in enumerate(names) if name in inner_names]
    if outer_dim < min(inner_dims):
        return None
    others = [dim for dim in range(mesh.ndim) if dim != outer_dim and dim not in inner_dims]
    ranks = mesh.mesh.permute(*others, outer_dim, *inner_dims)
    ranks = ranks.reshape(-1, get_size(outer), get_size(inner))  # (meshes, groups, ranks of a group)
    (own,) = [table for table in ranks if rank() in table]
    groups = [_meshes[outer].get_group(), _meshes[inner].get_group()]
    return DeviceMesh.from_group(groups, mesh.device_type, own, mesh_dim_names=(outer, inner))


def get_group(name: str) -> dist.ProcessGroup | None:
    """The process group of this rank along a dimension; None in a single process."""
    return _meshes[name].get_group() if _meshes else None


def get_size(name: str) -> int:
    """Number of ranks along a dimension. Until a mesh is built, all ranks are data parallel."""
    if _meshes:
        return _meshes[name].size()
    return world_size() if name in DATA_PARALLEL else 1


def get_rank(name: str) -> int:
    """This rank's number along a dimension."""
    if _meshes:
        return _meshes[name].get_local_rank()
    return rank() if name in DATA_PARALLEL else 0


def dropout_stream(sequence_parallel: bool = False) -> int:
    """A number to seed dropout with: the same on ranks that hold the same activations, another on all others.

    Tensor-parallel ranks hold the same ones, except under sequence parallelism. The domain-parallel ranks of an image
    have one stream too: the rules of ShardTensor draw each rank's part from a stream of its own.
    """
    # The number of a rank among all, as if each dimension were a digit.
    stream = get_rank("dp")
    stream = stream * get_size("cp") + get_rank("cp")
    stream = stream * get_size("pp") + get_rank("pp")
    if sequence_parallel:
        stream = stream * get_size("tp") + get_rank("tp")
    return stream


def world_size() -> int:
    """Number of ranks; 1 in a single process."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank's number among all; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Tell whether this is rank 0, which writes logs, summaries and markers."""
    return rank() == 0


def on_main(function: Callable[[], T]) -> T:
    """Call function() on rank 0; every rank gets its result, or raises the exception that it raised."""
    if world_size() == 1:
        return function()
    # An exception travels to the other ranks like a result.
    outcome: list[Any] = [None, None]  # result, exception
    if is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather(own: T) -> list[T]:
    """Gather the value of every rank, on all ranks."""
    # In a single process this is the answer already.
    seen = [own] * world_size()
    if len(seen) > 1:
        dist.all_gather_object(seen, own)
    return seen


def raise_on_all_ranks(function: Callable[[], T]) -> T:
    """Call function() on every rank; where some raise a UsageError or ConnectionLostError, all raise the first one."""
    error_here: UsageError | ConnectionLostError | None = None
    try:
        result = function()
    except (UsageError, ConnectionLostError) as error:
        error_here = error
    for first in filter(None, gather(error_here)):
        raise first
    return result


def check_alike(own: dict[str, str]) -> None:
    """Raise UsageError, on every rank, where a rank sees something else than rank 0. own: {name: what is seen}."""
    seen = gather((socket.gethostname(), own))
    # Rank 0 is what the others are compared with.
    first_host, first = seen[0]
    for number, (host, other) in enumerate(seen):
        for name in sorted(first | other):
            there = other.get(name, "nothing")
            here = first.get(name, "nothing")
            if there != here:
                raise UsageError(f"{name}: rank {number} on {host} sees {there}, rank 0 on {first_host} {here}")


def timeout_seconds() -> float:
    """Seconds that a rank waits for another in a collective."""
    return _patience.total_seconds()


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all ranks, in place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def global_mean(values: Tensor) -> Tensor:
    """Mean over the first axis of all ranks' `values`, summed in float64: (n, ...) -> (...). n may differ by rank."""
    values = values.cpu() if values.device.type == "mps" else values
    # In float64 the mean hardly depends on how the values are shared out.
    sums = values.double().sum(0)
    # One all-reduce carries the sums and, behind them, the number of values.
    count = sums.new_tensor([len(values)])
    packed = all_reduce(torch.cat([sums.flatten(), count]))
    mean = packed[:-1] / packed[-1]
    return mean.view(sums.shape)


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
        shutdown()
        return status

    run_main(guarded)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for a layout that is impossible."""
    parser = ArgumentParser(description="Show the groups of a parallel layout.")
    parser.add_argument("--world_size", type=RANKS, required=True)
    for name in ("tensor", "context", "pipeline"):
        parser.add_argument(f"--{name}_parallel", type=RANKS, default=1)
    parser.add_argument("--domain_parallel", default="1", metavar="N|NxM", help="ranks along latitude x longitude")
    parser.add_argument("--dp_shard", type=RANKS, help="data-parallel ranks that share one copy of sharded parameters")
    parser.add_argument("--parallel_order", default=ORDER, help="default: %(default)s")
    parser.add_argument("--ranks_per_node", type=RANKS, default=4, help="default: %(default)s")
    o = parser.parse_args(argv)
    layout = Layout(
        o.world_size,
        o.tensor_parallel,
        o.context_parallel,
        o.pipeline_parallel,
        o.dp_shard,
        o.parallel_order,
        tile_counts(o.domain_parallel),
    )
    print(layout.table(o.ranks_per_node))


if __name__ == "__main__":
    run_main(main)
