"""Optimizer and learning-rate schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distributed.data_parallel import build_zero1_optimizer
from distributed.parallel_model import ParallelModel
from training.weight_roles import Role, weight_roles
from utils import comm
from utils.schema import Config

DECAY_OF_ADAMW = 0.01  # torch's own

def build_optimizer(config: Config, parallel: ParallelModel, device: torch.device) -> Optimizer:
    """Adam or AdamW, as the config says. If fused, one kernel updates all parameters."""
    captured, peak = config.enable_cuda_graphs, peak_learning_rate(config)  # a CUDA graph reads the rate on the device
    lr = torch.tensor(peak, device=device) if captured else peak
    fused = config.enable_fused or None  # None: torch's own choice, one kernel for each operation (foreach)
    options = {"lr": lr, "betas": tuple(config.betas), "fused": fused, "capturable": captured}
    # With a decay Adam is AdamW: the decay is decoupled from the moments.
    name = "AdamW" if config.weight_decay else config.optimizer
    optimizer_class = getattr(torch.optim, name)
    groups = parameter_groups(config, parallel)
    if config.data_parallel == "zero1" and comm.get_size("dp_image") > 1:
        return build_zero1_optimizer(optimizer_class, groups, **options)
    return optimizer_class(groups, **options)


def parameter_groups(config: Config, parallel: ParallelModel) -> list[dict[str, Any]]:
    """One group for each kind of parameter, of those that are not frozen, each with its weight decay.

    Fused kernels do not take DTensors and plain tensors together.
    """
    kinds: dict[tuple[DeviceMesh | None, float], list[nn.Parameter]] = {}
    for role in weight_roles(parallel):
        decay = weight_decay(config, role)
        mesh = getattr(role.parameter, "device_mesh", None)
        kinds.setdefault((mesh, decay), []).append(role.parameter)
    return [{"params": parameters, "weight_decay": decay} for (_, decay), parameters in kinds.items()]


def weight_decay(config: Config, role: Role) -> float:
    """The part of a weight, over the learning rate, that a step takes away.

    Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """
    if config.weight_decay is None:
        return DECAY_OF_ADAMW if config.optimizer == "AdamW" else 0.0
    decays = role.decays or config.weight_decay_all
    return config.weight_decay if decays else 0.0


def peak_learning_rate(config: Config) -> float:
    """config.lr, scaled from base_batch_size to global_batch_size.

    linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD; sqrt: Krizhevsky 2014 (arXiv:1404.5997), Malladi et al. 2022
    (arXiv:2205.10287) for Adam.
    """
    ratio = config.global_batch_size / (config.base_batch_size or config.global_batch_size)
    return config.lr * {"none": 1, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def learning_rate(config: Config, iteration: int) -> float:
    """Learning rate of an iteration (from 0): linear warmup to the peak, then a cosine to zero or a constant.

    A function of the iteration alone, so that a resumed run needs no state for it. Cosine: Loshchilov and Hutter
    2017 (arXiv:1608.03983), without restarts.
    """
    peak, warmup = peak_learning_rate(config), min(config.warmup, config.num_iters // 2)
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    if config.lr_schedule == "constant":
        return peak
    progress = (iteration - warmup) / (config.num_iters - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every group; in place where it is a tensor, which a CUDA graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
