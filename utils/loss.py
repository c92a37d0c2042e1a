"""Training loss."""

import torch


def relative_l2_loss(prediction, target):
    """Mean over the batch of ||prediction - target|| / ||target||, norms over every other axis.

    prediction, target: (B, ...). Returns a scalar, in float32 also where the inputs are half precision. The loss of
    neural operators and of FourCastNet (Li et al. 2021, arXiv:2010.08895; Pathak et al. 2022, arXiv:2202.11214).
    """
    return relative_l2(prediction, target).mean()


def relative_l2(prediction, target):
    """As relative_l2_loss, one value a sample: (B,)."""
    prediction, target = prediction.float().flatten(1), target.float().flatten(1)
    return torch.linalg.vector_norm(prediction - target, dim=1) / torch.linalg.vector_norm(target, dim=1)
