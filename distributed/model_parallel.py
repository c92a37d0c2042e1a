"""Rung 3: one model over several ranks. Heads and hidden features (tp), tokens (cp) and blocks (pp) are split."""

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.context_parallel import context_parallel
from distributed.parallel_model import Split
from distributed.pipeline import split_into_stages
from distributed.tensor_parallel import tensor_parallel
from networks.vit import Transformer
from utils import comm

if TYPE_CHECKING:
    from utils.schema import Config


def split_model(model: Transformer, config: "Config") -> Split:
    """Split a ViT, in place, over the model-parallel ranks of the mesh. It may lie on the meta device.

    Raises ValueError where heads, hidden features, rows of patches or blocks cannot be split so.
    """
    split = Split()
    heads, cp, tp = config.num_heads, comm.get_size("cp"), comm.get_size("tp")
    if cp > 1:
        if config.cp_method == "all_to_all" and heads // tp % cp:
            raise ValueError(f"context parallel: all_to_all cannot split {heads // tp} heads over {cp} ranks")
        context_parallel(model, comm.get_group("cp"), config.cp_method)
    if tp > 1:
        if config.tp_backend == "dtensor":
            tensor_parallel_by_torch(model, comm.get_mesh("tp"))
        else:
            split.dims = tensor_parallel(model, comm.get_group("tp"), config.sequence_parallel)
    if comm.get_size("pp") > 1:
        split.stages = split_into_stages(model, comm.get_group("pp"), config.pp_schedule)
    return split


def tensor_parallel_by_torch(model: Transformer, mesh: DeviceMesh | None) -> None:
    """The same by PyTorch's own tensor parallelism, on DTensor: the library's route to the same numbers."""
    heads = model.blocks[0].attn.proj.in_features // model.blocks[0].attn.head_dim
    if heads % comm.get_size("tp"):
        raise ValueError(f"tensor parallel: {heads} heads cannot be split over {comm.get_size('tp')} ranks")
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attn.qkv": ColwiseParallel(),
                "attn.proj": RowwiseParallel(),
                "mlp.fc1": ColwiseParallel(),
                "mlp.fc2": RowwiseParallel(),
            },
        )
