"""Training loss."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import alike_on_ranks, as_group
from distributed.context_parallel import l2_norms
from distributed.shard_tensor import ShardTensor


def relative_l2_loss(prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean over the batch of ||prediction - target|| / ||target||, norms over every other axis.

    prediction, target: (B, ...), tensors or ShardTensors. Returns a scalar, in float32 also where the inputs are half
    precision. The loss of neural operators and of FourCastNet (Li et al. 2021, arXiv:2010.08895; Pathak et al. 2022,
    arXiv:2202.11214).
    image_group: process group whose ranks each hold a part of the images; norms are of whole images.
    """
    return relative_l2(prediction, target, image_group).mean()


def classification_loss(logits: Tensor, target: Tensor, image_group: dist.ProcessGroup | None = None) -> Tensor:
    """Cross-entropy: (B, classes), (B,) -> a scalar, in float32.

    image_group: process group whose ranks each hold a part of the images and all have these logits. The gradient is
    multiplied by their number, which the mean over the ranks takes out again, as in context_parallel.l2_norms.
    """
    return alike_on_ranks(F.cross_entropy(logits.float(), target), as_group(image_group))


def relative_l2(prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None = None) -> Tensor:
    """As relative_l2_loss, one value a sample: (B,)."""
    prediction, target = prediction.float(), target.float()
    if isinstance(prediction, ShardTensor):
        squares = torch.stack([x.square().flatten(1).sum(1) for x in (prediction - target, target)])
        error, size = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt().unbind()  # one all-reduce of (2, B)
        return error / size
    prediction, target = prediction.flatten(1), target.flatten(1)
    if image_group is not None and image_group.size() > 1:
        error, size = l2_norms(prediction - target, target, group=image_group)
        return error / size
    return torch.linalg.vector_norm(prediction - target, dim=1) / torch.linalg.vector_norm(target, dim=1)
