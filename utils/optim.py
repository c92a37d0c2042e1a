"""Optimizer and learning-rate schedule."""

import math

import torch


def build_optimizer(config, parameters):
    """Adam or AdamW as the config says; fused: one kernel updates all parameters."""
    optimizer = getattr(torch.optim, config.optimizer)
    return optimizer(parameters, lr=config.lr, betas=tuple(config.betas), fused=config.enable_fused)


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
        group["lr"] = value
