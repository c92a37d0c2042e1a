"""The mesh of a run's processes: in which groups they work together, and what they add up or gather.

Every process holds one device. Ranks form a mesh with named dimensions: dp data parallel (dp_replicate x dp_shard where
parameters are sharded inside smaller groups), ens ensemble parallel, cp context parallel, domain (domain_lat x
domain_lon) domain parallel, tp tensor parallel, pp pipeline parallel. In a single process the functions below work too,
and communicate nothing. How the processes meet and end is in utils/connection.py, how they come to one decision in
utils/agreement.py.
"""

import datetime
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.layout import Layout
from utils.torch_private import flattened, set_timeout

DOMAIN = {"domain_lat", "domain_lon"}
IMAGE = {"cp", *DOMAIN}
SAMPLE = {"ens", *IMAGE}
DP = {"dp_replicate", "dp_shard"}
# Dimensions that also work together as one.
COMBINED = {
    "dp": DP,
    "domain": DOMAIN,
    "image": IMAGE,  # ranks that share one image
    "sample": SAMPLE,  # ranks that share one sample: its members, and its images
    "grad_reduce": {*DP, *SAMPLE},  # ranks whose gradients are averaged
    "dp_ens": {*DP, "ens"},  # ranks that hold the same part of other images
    "dp_shard_sample": {"dp_shard", *SAMPLE},
    "tp_pp": {"tp", "pp"},
    "same_data": {"tp", "pp", "ens"},  # ranks that train on the same part of the same samples
}
# The combination that another one is where no rank shares the members of a sample.
WITHOUT_MEMBERS = {"sample": "image", "dp_ens": "dp", "same_data": "tp_pp"}
DATA_PARALLEL = ("dp", "dp_shard", "dp_ens", "grad_reduce", "dp_shard_sample")  # all ranks, until a mesh is built
T = TypeVar("T")

_patience = datetime.timedelta(seconds=600)  # of every group
# By name of a dimension, or of combined ones; "" is the whole mesh, "hsdp" that of _mesh_of_hsdp where it is needed.
_meshes: dict[str, DeviceMesh] = {}


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
        if name in WITHOUT_MEMBERS and dims["ens"] == 1:
            continue
        combined = tuple(dim for dim in dims if dim in parts)
        # Where at most one dimension has several ranks, its groups are those of the combination. Where none has, any
        # dimension will do that is the same on every rank.
        several = [dim for dim in combined if dims[dim] > 1] or [min(parts)]
        if len(several) == 1 and name != "dp_shard_sample":  # which hsdp asks for by this name
            _meshes[name] = mesh[several[0]]
        else:
            _meshes[name] = flattened(mesh[combined], name)
    if dims["ens"] == 1:
        for name, same in WITHOUT_MEMBERS.items():
            _meshes[name] = _meshes[same]
    # Only some orders of the dimensions need it.
    own = _mesh_of_hsdp(mesh)
    if own is not None:
        _meshes["hsdp"] = own
    groups = {mesh.get_group() for mesh in _meshes.values() if mesh.ndim == 1}
    for group in groups:
        set_group_timeout(group)


def forget_mesh() -> None:
    """Leave the meshes of this process; their groups end with the process group."""
    _meshes.clear()


def set_patience(seconds: float) -> None:
    """Let the ranks of every group that is made from now on wait so many seconds for one another."""
    global _patience
    _patience = datetime.timedelta(seconds=seconds)


def set_group_timeout(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group wait for one another as long as all others do; by itself a mesh does not."""
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
    return "dp_replicate", "dp_shard" if get_size("sample") == 1 else "dp_shard_sample"


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
    stream = stream * get_size("ens") + get_rank("ens")
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


def gather(own: T) -> list[T]:
    """Gather the value of every rank, on all ranks."""
    # In a single process this is the answer already.
    seen = [own] * world_size()
    if len(seen) > 1:
        dist.all_gather_object(seen, own)
    return seen


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
