"""Record what a rank computes in some training steps: outputs of modules, losses, gradients, weights, buffers."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tools.layout_check.record import (
    BATCH,
    BUFFERS,
    EVALUATION,
    INITIAL,
    LOSS,
    MOMENTS,
    RELOADED,
    STEPS,
    UPDATES,
    Part,
    Record,
    of_parameter,
    part_of_rank,
    recorded,
)
from tools.layout_check.saving import why_not_saved
from tools.layout_check.wide import build_wide_step, wide_casts
from training.checkpoints.state import collect_tensors
from training.forecasting.ensemble import repeat_members, training_noise
from training.step.step import TrainingStep
from utils import comm
from utils.schema import Config, count_forcings


class Training(NamedTuple):
    """What was recorded of a training.

    kinds: {module: its class}. drawing: the modules that draw random numbers. unsaved: why its state cannot be saved
    and read back, "" where it can.
    """

    found: Record
    kinds: dict[str, str]
    drawing: set[str]
    unsaved: str


def record(
    config: Config,
    device: torch.device,
    read_data: bool = False,
    folder: Path | None = None,
) -> Training:
    """Train for STEPS steps and evaluate once; save the state into a folder, the same on all ranks, and read it back.

    read_data: on batches of the config's data, as its loader reads them, in place of random ones. folder: None: the
    state is not saved.
    """
    with wide_casts():
        return _record(config, device, read_data, folder)


def _record(config, device, read_data, folder):
    step = build_wide_step(config, device)
    model = step.parallel.model
    found = Record()
    drawing = set[str]()
    # Hooks run in the order of their registration, so the recorder's clipped gradients are without rounding.
    step.optimizer.register_step_pre_hook(lambda *_: drop_rounding(model))
    batches = read_batches(step) if read_data else random_batches(step)
    for i, (x, y) in enumerate(batches):
        if i > 0:
            step(i, x, y)
        else:
            # The first step is looked into; of the others the weights are enough.
            found[BATCH, "input"] = Part(x)
            found[BATCH, "target"] = Part(y)
            found |= weights(step, INITIAL)
            with recorded(step, found, drawing):
                loss = step(i, x, y).loss.clone()
            # The loss of the whole batch is the mean over all ranks.
            mean = comm.all_reduce(loss) / comm.world_size()
            found[LOSS, "of step 1"] = Part(mean)
        found |= weights(step, UPDATES[i])
    for name, buffer in model.named_buffers():
        found[BUFFERS, name] = part_of_rank(buffer)

    found[EVALUATION, "output"] = part_of_rank(evaluate(step, x))

    # Save the state and read it back.
    unsaved = ""
    if folder:
        fresh = build_wide_step(config, device)  # as a resumed run begins
        unsaved = why_not_saved(step, fresh, folder)
        if not unsaved:
            found |= state(fresh)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return Training(found, kinds, drawing, unsaved)


def rounding_of(dtype: torch.dtype) -> float:
    """A number that counts as zero beside 1: far above rounding, far below what a mistake changes."""
    return torch.finfo(dtype).eps ** 0.75


@torch.no_grad()
def drop_rounding(model: nn.Module) -> None:
    """Set gradients to zero that are zero but for rounding, beside the model's largest.

    That of a bias in front of a BatchNorm is one. Adam divides a gradient by its size, so it would train on rounding,
    which no two layouts have in common.
    """
    gradients: list[Tensor] = []
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            part = grad.to_local() if isinstance(grad, DTensor) else grad
            gradients.append(part)
    sizes_here = [grad.abs().max().item() for grad in gradients if grad.numel()]
    # All ranks need one limit, so that they drop the same elements of a gradient; a rank may hold none.
    largest = max(comm.gather(max(sizes_here, default=0.0)))
    for grad in gradients:
        sizes = grad.abs()
        grad.masked_fill_(sizes <= rounding_of(sizes.dtype) * largest, 0)


def state(step: TrainingStep) -> Record:
    """Weights, buffers and moments, as a checkpoint has them."""
    tensors = collect_tensors(step)
    specs = step.parallel.split.specs
    found = Record()
    for name, value in tensors["model"].items():
        found[RELOADED, name] = part_of_rank(value, specs.get(name))
    for name, moments in tensors["optimizer"].items():
        for moment, value in moments.items():
            if moment == "exp_avg_sq":  # as large as a gradient, so that all moments have one scale
                value = value.sqrt()
            spec = specs.get(name) if value.dim() else None
            found[MOMENTS, f"{moment} of {name}"] = part_of_rank(value, spec)
    return found


def random_batches(step: TrainingStep, start: int = 0, stop: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of random batches, (input, target) of each step; they are the same in every layout."""
    config, task = step.config, step.task
    random = torch.Generator().manual_seed(config.seed)
    for i in range(stop):
        x, y = task.random_batch(random)
        # Batches of earlier steps are drawn too, so that a resumed run meets the ones that it would have met.
        if i < start:
            continue
        steps = [steps for first, steps in config.rollout_stages if first <= i][-1]
        if task.forecasts:  # a forecast of fewer steps has fewer targets, and fewer forcings
            fixed, timed = count_forcings(config.forcings)
            x = x[:, : config.state_channels + fixed + steps * timed]
            y = y[:, : steps * config.n_out_channels]
        yield task.own_part(x).to(step.device), task.own_part(y).to(step.device)


def read_batches(step: TrainingStep) -> Iterator[tuple[Tensor, ...]]:
    """Batches of this rank's loader, (input, target) of each step, in the default dtype."""
    loader, valid_loader = step.task.build_loaders(step.device)
    valid_loader.close()  # validation data are not compared
    for batch in loader.train(step.config.seed, 0, STEPS):
        copies = []
        for part in batch:
            dtype = torch.get_default_dtype() if part.is_floating_point() else part.dtype
            # A copy, since the loader uses its memory again.
            copies.append(part.to(dtype, copy=True))
        yield tuple(copies)
    loader.close()


@torch.no_grad()
def evaluate(step: TrainingStep, x: Tensor) -> Tensor:
    """The prediction of one step in evaluation, of an ensemble by this rank's members, with noise of their own.

    The weights are the averaged ones where there are any. x: a batch's inputs, with forcings of more steps.
    """
    config, parallel = step.config, step.parallel
    parallel.share_buffers()  # as before a validation, or a checkpoint
    parallel.model.eval()
    images = x[:, : config.model_in_channels]  # (B, C, h, w)
    noise: list[Tensor] = []
    if config.ensemble_size > 1:
        of_members = training_noise(config, 0, 1, images)  # (B, m, 1, K)
        images = repeat_members(images, of_members.shape[1])
        noise = [of_members.flatten(0, 2)]
    with step.autocast(), step.best_weights():
        return parallel.predict(images, config.n_out_channels, *noise)


def weights(step: TrainingStep, stage: str) -> Record:
    """All parameters."""
    parameters = step.parallel.model.named_parameters()
    return {(stage, name): of_parameter(step, name, parameter) for name, parameter in parameters}
