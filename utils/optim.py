"""Optimizer and learning-rate schedule."""

import math

import torch


def build_optimizer(config, model, device):
    """Adam or AdamW as the config says; fused: one kernel updates all parameters.

    For CUDA graphs the optimizer keeps everything on the device, the learning rate too.
    """
    captured = config.enable_cuda_graphs
    lr = torch.tensor(config.lr, device=device) if captured else config.lr
    fused = config.enable_fused or None  # None: torch's own choice, one kernel for each operation (foreach)
    return getattr(torch.optim, config.optimizer)(
        model.parameters(), lr=lr, betas=tuple(config.betas), fused=fused, capturable=captured
    )


def learning_rate(config, iteration):
    """Learning rate of an iteration (from 0): linear warmup to config.lr, then a cosine to zero or a constant.

    A function of the iteration alone, so that a resumed run needs no state for it. Cosine: Loshchilov and Hutter
    2017 (arXiv:1608.03983), without restarts.
    """
    if iteration < config.warmup:
        return config.lr * (iteration + 1) / config.warmup
    if config.lr_schedule == "constant":
        return config.lr
    progress = (iteration - config.warmup) / max(1, config.num_iters - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer, value):
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
