"""What makes the same model faster or smaller on one device, applied from outside. Names and weights stay the same."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from utils import comm
from utils.errors import UsageError


def apply_compute_options(config, device, model):
    """TF32, memory format, activation checkpointing and compilation, as the config says.

    Raises UsageError for an option that this device does not have.
    """
    if config.enable_cuda_graphs and device.type != "cuda":
        raise UsageError(f"--enable_cuda_graphs needs a GPU with CUDA or ROCm; this run is on {device}")
    if config.enable_cuda_graphs and comm.world_size() > 1:
        raise UsageError(
            f"--enable_cuda_graphs captures the step of one device; this run has {comm.world_size()} ranks"
        )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.enable_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.enable_tf32
    if config.enable_channels_last:
        model.to(memory_format=torch.channels_last)  # the convolution of the patch embedding
    if config.activation_checkpointing == "full":
        checkpoint_activations(model.blocks)
    if config.enable_jit:
        model.compile(fullgraph=True)  # one graph: a graph break is an error


def checkpoint_activations(blocks):
    """Keep only the input of each block for the backward pass, which computes the block a second time.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
