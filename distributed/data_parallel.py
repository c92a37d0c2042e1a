"""Data parallel: every rank holds the whole model and its part of the batch; gradients are averaged."""

from torch.nn.parallel import DistributedDataParallel

from utils import comm


def data_parallel(model, device):
    """Wrap the model so that its backward pass averages gradients over all ranks (Li et al. 2020, arXiv:2006.15704).

    The weights of rank 0 are broadcast first. In a single process the model is returned as it is.
    """
    if comm.world_size() == 1:
        return model
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
