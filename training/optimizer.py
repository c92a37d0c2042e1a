"""Optimizer and learning-rate schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distributed.data_parallel import build_zero1_optimizer
from utils import comm
from utils.schema import Config


def build_optimizer(config: Config, model: nn.Module, device: torch.device) -> Optimizer:
    """Adam or AdamW, as the config says. If fused, one kernel updates all parameters."""
    captured, peak = config.enable_cuda_graphs, peak_learning_rate(config)  # a CUDA graph reads the rate on the device
    lr = torch.tensor(peak, device=device) if captured else peak
    fused = config.enable_fused or None  # None: torch's own choice, one kernel for each operation (foreach)
    options = {"lr": lr, "betas": tuple(config.betas), "fused": fused, "capturable": captured}
    optimizer_class = getattr(torch.optim, config.optimizer)
    if config.data_parallel == "zero1" and comm.get_size("dp_image") > 1:
        return build_zero1_optimizer(optimizer_class, trained(model), **options)
    return optimizer_class(parameter_groups(model), **options)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """One group for each kind of parameter: fused kernels do not take DTensors and plain tensors together."""
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in trained(model):
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in kinds.values()]


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
