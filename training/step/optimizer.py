"""Optimizer and learning-rate schedule."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distributed.parallel_model import ParallelModel
from distributed.zero1 import build_zero1_optimizer
from training.models.weight_roles import Role, weight_roles
from training.step.muon import MatrixPart, Muon
from training.step.whole_matrices import cuts_of
from utils import comm
from utils.choices import choose, load
from utils.schema import Config


def build_optimizer(config: Config, parallel: ParallelModel, device: torch.device) -> Optimizer:
    """The optimizer that the config names (utils/choices.py). If fused, one kernel updates all parameters."""
    kind = config.optimizer_kind
    captured = config.enable_cuda_graphs
    peak = peak_learning_rate(config)
    # A CUDA graph reads the rate on the device.
    lr = torch.tensor(peak, device=device) if captured else peak
    settings = {
        "betas": tuple(config.betas),
        "fused": config.enable_fused or None,  # None: torch's own choice, one kernel for each operation (foreach)
        "capturable": captured,
    }
    own_settings = {name: settings[name] for name in kind.takes}
    build: Callable[..., Optimizer] = partial(load(kind.build), **kind.arguments, **own_settings)
    # Names and shapes decide what decays, and what Muon trains.
    roles = weight_roles(parallel.model, parallel.split, config.muon_weights)
    groups = parameter_groups(config, roles)
    if kind.trains_matrices:
        build = muon_builder(config, parallel, roles, device, build)
    # ZeRO-1: every rank keeps the moments of its share of the parameters.
    if config.data_parallel == "zero1" and comm.get_size("grad_reduce") > 1:
        return build_zero1_optimizer(build, groups, lr=lr)
    return build(groups, lr=lr)


def muon_builder(
    config: Config,
    parallel: ParallelModel,
    roles: Iterable[Role],
    device: torch.device,
    build_adam: Callable[..., Optimizer],
) -> Callable[..., Optimizer]:
    """Muon, to be called with groups and lr. With mixed precision its products of matrices are in bfloat16."""
    # Muon must know of which whole matrix a parameter is a part.
    matrices = {}
    for role in roles:
        if role.is_hidden:
            cuts = cuts_of(role.parameter, parallel.split.dims.get(role.name))
            matrices[role.parameter] = MatrixPart(role.shape, cuts)
    dtype = None if config.amp_mode == "none" else torch.bfloat16
    return partial(
        Muon,
        matrices=matrices,
        momentum=config.muon_momentum,
        dtype=dtype,
        device=device,
        build_adam=build_adam,
    )


def parameter_groups(
    config: Config,
    roles: Iterable[Role],
) -> list[dict[str, Any]]:
    """One group for each kind of parameter: its weight decay, whether Muon trains it, and how its moments begin.

    Fused kernels do not take DTensors and plain tensors together.
    """
    optimizer = config.optimizer_kind
    kinds: dict[tuple[DeviceMesh | None, float, bool], list[nn.Parameter]] = {}
    for role in roles:
        decay = weight_decay(config, role)
        by_muon = optimizer.trains_matrices and role.is_hidden
        mesh = getattr(role.parameter, "device_mesh", None)
        kinds.setdefault((mesh, decay, by_muon), []).append(role.parameter)
    groups: list[dict[str, Any]] = []
    for (_, decay, by_muon), parameters in kinds.items():
        groups.append(
            {"params": parameters, "weight_decay": decay, "muon": by_muon, "initial": optimizer.initial},
        )
    return groups


def weight_decay(config: Config, role: Role) -> float:
    """The part of a weight, over the learning rate, that a step takes away.

    Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """
    if config.weight_decay is None:
        return config.optimizer_kind.decay
    decays = role.decays or config.weight_decay_all
    return config.weight_decay if decays else 0.0


def peak_learning_rate(config: Config) -> float:
    """config.lr, scaled from base_batch_size to global_batch_size.

    linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD; sqrt: Krizhevsky 2014 (arXiv:1404.5997), Malladi et al. 2022
    (arXiv:2205.10287) for Adam.
    """
    base = config.base_batch_size or config.global_batch_size
    ratio = config.global_batch_size / base
    factors = {"none": 1, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return config.lr * choose("lr_scaling", config.lr_scaling, factors)


def learning_rate(config: Config, iteration: int) -> float:
    """Learning rate of an iteration (from 0): linear warmup to the peak, then a cosine to zero or a constant.

    A function of the iteration alone, so that a resumed run needs no state for it. Cosine: Loshchilov and Hutter
    2017 (arXiv:1608.03983), without restarts.
    """
    peak = peak_learning_rate(config)
    warmup = min(config.warmup, config.num_iters // 2)
    # The rate rises in equal steps from peak / warmup.
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    progress = (iteration - warmup) / (config.num_iters - warmup)
    return peak * choose("lr_schedule", config.lr_schedule, SCHEDULES)(progress)


# Each a function of the part of the iterations after the warmup that is done: what is left of the peak.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
}


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every group; in place where it is a tensor, which a CUDA graph reads."""
    for group in optimizer.param_groups:
        # A CUDA graph reads the rate where it was captured.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
