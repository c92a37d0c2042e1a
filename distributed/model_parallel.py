"""Rung 3: one model over several ranks. Heads and hidden features (tp), tokens (cp) and blocks (pp) are split."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distributed.checks.ties import tie_pieces, tied_names
from distributed.context_parallel import context_parallel
from distributed.pipeline import SCHEDULES, split_into_stages
from distributed.protocol import SplittableTransformer, check_transformer, points_kept_together
from distributed.split import Split, image_cuts
from distributed.tensor_parallel import tensor_parallel
from utils import comm
from utils.choices import check_known
from utils.errors import LayoutError, reported_as_usage_error


@dataclass(frozen=True)
class ModelParallelOptions:
    """How each dimension splits the model; the fields are keys of the config (utils/schema.py)."""

    img_size: Sequence[int]
    config: str = "model"  # how messages call it
    tp_backend: str = "native"
    sequence_parallel: bool = False
    cp_method: str = "gather"
    pp_schedule: str = "1f1b"


def split_model(model: nn.Module, options: ModelParallelOptions) -> Split:
    """Split a transformer, in place, over the model-parallel ranks of the mesh. It may lie on the meta device.

    Raises UsageError where heads, hidden features, rows of patches or blocks cannot be split, and for a model without
    what distributed/protocol.py lists.
    """
    with reported_as_usage_error(ValueError, options.config):
        cp = comm.get_size("cp")
        tp = comm.get_size("tp")
        pp = comm.get_size("pp")
        if max(cp, tp, pp) == 1:
            return Split()
        transformer = check_transformer(model, "tensor, context and pipeline parallelism")
        split = Split(schedule=options.pp_schedule)
        # Context parallelism comes first, since the others split its band; pipeline stages take the blocks as they are.
        if cp > 1:
            attention = transformer.blocks[0].attn
            heads = attention.proj.in_features // attention.head_dim // tp
            if options.cp_method == "all_to_all" and heads % cp:
                raise LayoutError(f"context parallel: all_to_all cannot split {heads} heads over {cp} ranks")
            split.cuts = image_cuts(options.img_size, points_kept_together(model))
            context_parallel(transformer, comm.get_group("cp"), options.cp_method)
        if tp > 1:
            check_known("tp_backend", options.tp_backend, ("native", "dtensor"))
            ties = tied_names(model)
            if options.tp_backend == "dtensor":
                tensor_parallel_by_torch(transformer, comm.get_mesh("tp"))
            else:
                split.dims = tensor_parallel(transformer, comm.get_group("tp"), options.sequence_parallel)
            tie_pieces(model, ties, "tensor parallel")
        if pp > 1:
            check_known("pp_schedule", options.pp_schedule, SCHEDULES)
            split.stages = split_into_stages(transformer, comm.get_group("pp"), options.pp_schedule)
        return split


def tensor_parallel_by_torch(model: SplittableTransformer, mesh: DeviceMesh | None) -> None:
    """The same by PyTorch's own tensor parallelism, on DTensor: the library's route to the same numbers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow to import

    attention = model.blocks[0].attn
    heads = attention.proj.in_features // attention.head_dim
    ranks = comm.get_size("tp")
    if heads % ranks:
        raise LayoutError(f"tensor parallel: {heads} heads cannot be split over {ranks} ranks")
    # As in our own: the first layer of each pair splits its outputs, the second one its inputs.
    for block in model.blocks:
        plan = {
            "attn.qkv": ColwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
