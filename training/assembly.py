"""A model and its training step, assembled as the training scripts do, for programs that measure or use them."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from distributed.checks.usage import Usage
from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.model_parallel import ModelParallelOptions, split_model
from distributed.parallel_model import ParallelModel
from distributed.split import Split
from training.models.build import build_model, initial_weights
from training.models.info import inspect_model
from training.step.optimizer import build_optimizer
from training.step.speed_options import apply_speed_options
from training.step.step import TrainingStep
from training.tasks import Task, build_task
from utils import comm
from utils.schema import Config


def build_parallel(
    config: Config,
    device: torch.device,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    where: str = "",
    usage: Usage | None = None,
) -> ParallelModel:
    """The model of a config on the ranks of the mesh. weights: (name, full tensor); the initial ones unless given.

    Buffers that no checkpoint holds have their initial values in any case. where: how errors call the layout; the name
    of the config unless given. usage: of the model, where it is known already.
    """
    # The model has shapes and names, and no memory yet.
    model = build_model(config)
    split = split_as_configured(model, config, where)
    # Compilation and checkpointing wrap what each rank computes, so the split comes first.
    apply_speed_options(config, device, model)
    buffers = {name for name, _ in model.named_buffers()}
    unsaved = buffers - model.state_dict().keys()
    # Buffers that no checkpoint holds come from the initial weights.
    if weights is None:
        weights = initial_weights(config)
    elif unsaved:
        initial = initial_weights(config)
        unsaved_values = ((name, value) for name, value in initial if name in unsaved)
        weights = chain(weights, unsaved_values)
    usage = usage or inspect_model(config).usage
    return data_parallel(model, config.options(DataParallelOptions), device, weights, usage, split)


def split_as_configured(model: nn.Module, config: Config, where: str = "") -> Split:
    """Split a model, or its images, over the ranks of the mesh. Raises UsageError as split_model and split_images."""
    where = where or config.config
    if comm.get_size("domain") > 1:
        from distributed.domain_parallel import DomainOptions, split_images  # slow to import

        domain_options = replace(config.options(DomainOptions), config=where)
        return split_images(model, domain_options)
    options = replace(config.options(ModelParallelOptions), config=where)
    return split_model(model, options)


def build_step(config: Config, device: torch.device, where: str = "") -> TrainingStep:
    """The TrainingStep of this rank; the mesh is there. Raises UsageError, naming `where`, for a split that fails."""
    task = build_task(config)
    parallel = build_parallel(config, device, where=where, usage=task.usage)
    optimizer = build_optimizer(config, parallel, device)
    return TrainingStep(config, device, parallel, optimizer, task)


def random_batch(task: Task, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch of random numbers: inputs, and targets as the task has them."""
    x, y = task.random_batch(torch.Generator().manual_seed(task.config.seed))
    return task.own_part(x).to(device), task.own_part(y).to(device)
