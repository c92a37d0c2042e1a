"""Record what a rank computes in some training steps: outputs of modules, losses, gradients, weights, buffers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.shard.operands import reduced
from distributed.shard.spec import Spec
from distributed.shard.tensor import ShardTensor, local
from distributed.ties import keep_ties
from tools.layout_check.saving import state_of, why_not_saved
from training.assembly import build_step
from training.model import build_model
from training.step import TrainingStep
from utils import comm
from utils.device import library
from utils.sample_order import own_positions
from utils.schema import Config

STEPS = 3
BATCH, INITIAL, FORWARD, LOSS, GRADIENT = "batch", "initial weights", "forward pass", "loss", "gradient"
CLIPPED, BUFFERS, EVALUATION = "clipped gradient", "buffers", "evaluation"
UPDATES = tuple(f"weights after step {i + 1}" for i in range(STEPS))
# Consulted for the cause of a difference, see causes.py, and not compared as stages of their own.
UNREDUCED, INPUT = "gradient before its reduction", "input of a module"
RELOADED, MOMENTS = "weights and buffers read back", "moments read back"
# In their order.
STAGES = (BATCH, INITIAL, FORWARD, LOSS, GRADIENT, CLIPPED, *UPDATES, BUFFERS, EVALUATION, RELOADED, MOMENTS)
Key = tuple[str, str]  # (stage, name)


@dataclass
class Part:
    """A rank's part of a tensor. spec: how the domain ranks split it, None where they do not."""

    value: Tensor
    spec: Spec | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of what the domain ranks have together."""
        return self.spec.shape if self.spec else self.value.shape


def part_of_rank(value: Tensor, spec: Spec | None = None) -> Part:
    """A detached copy of a tensor of any kind; what fully_shard has cut is whole again.

    spec: of a plain tensor.
    """
    if isinstance(value, ShardTensor):
        split = reduced(value)
        value, spec = local(split), split.spec
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return Part(whole.detach().clone(), spec)


Record = dict[Key, Part]  # in the order in which they are computed


class Training(NamedTuple):
    """What was recorded of a training.

    kinds: {module: its class}. drawing: the modules that draw random numbers. unsaved: why its state cannot be saved
    and read back, "" where it can.
    """

    found: Record
    kinds: dict[str, str]
    drawing: set[str]
    unsaved: str


def record(config: Config, device: torch.device, read_data: bool = False, folder: Path | None = None) -> Training:
    """Train for STEPS steps and evaluate once; save the state into a folder, the same on all ranks, and read it back.

    read_data: on batches of the config's data, as its loader reads them, in place of random ones. folder: None: the
    state is not saved.
    """
    step, found, drawing = build_wide_step(config, device), Record(), set[str]()
    model = step.parallel.model
    step.optimizer.register_step_pre_hook(lambda *_: drop_rounding(model))
    batches = read_batches(step) if read_data else random_batches(step)
    for i, (x, y) in enumerate(batches):
        if i > 0:
            step(i, x, y)
        else:
            found |= {(BATCH, "input"): Part(x), (BATCH, "target"): Part(y)} | weights(step, INITIAL)
            with recorded(step, found, drawing):
                loss = step(i, x, y).loss.clone()
            found[LOSS, "of step 1"] = Part(comm.all_reduce(loss) / comm.world_size())
        found |= weights(step, UPDATES[i])
    found |= {(BUFFERS, name): part_of_rank(buffer) for name, buffer in model.named_buffers()}
    step.parallel.share_buffers()  # as before a validation, or a checkpoint
    model.eval()
    with torch.no_grad():
        output = step.parallel.predict(x[:, : config.model_in_channels], config.n_out_channels)
    found[EVALUATION, "output"] = part_of_rank(output)
    unsaved = ""
    if folder:
        fresh = build_wide_step(config, device)  # as a resumed run begins
        unsaved = why_not_saved(step, fresh, folder)
        if not unsaved:
            found |= state(fresh)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return Training(found, kinds, drawing, unsaved)


def build_wide_step(config: Config, device: torch.device) -> TrainingStep:
    """The training step of a config, with a model that has no narrower numbers than the default dtype."""

    def build_wide(config: Config, *place: Any) -> nn.Module:
        model = build_model(config, *place)
        with keep_ties(model):
            return model._apply(widened)

    # The look at a model builds one of its own.
    with patch("training.assembly.build_model", build_wide), patch("training.model.build_model", build_wide):
        return build_step(config, device)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the default dtype, or its complex one; as it is where it is wider already, or has no such numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.get_default_dtype()))


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
            gradients.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    own = max((grad.abs().max().item() for grad in gradients if grad.numel()), default=0.0)
    largest = max(comm.gather(own))
    for grad in gradients:
        sizes = grad.abs()
        grad.masked_fill_(sizes <= rounding_of(sizes.dtype) * largest, 0)


def state(step: TrainingStep) -> Record:
    """Weights, buffers and moments, as a checkpoint has them."""
    tensors, specs, found = state_of(step), step.parallel.split.specs, Record()
    for name, value in tensors["model"].items():
        found[RELOADED, name] = part_of_rank(value, specs.get(name))
    for name, moments in tensors["optimizer"].items():
        for moment, value in moments.items():
            if moment == "exp_avg_sq":  # as large as a gradient, so that all moments have one scale
                value = value.sqrt()
            spec = specs.get(name) if value.dim() else None
            found[MOMENTS, f"{moment} of {name}"] = part_of_rank(value, spec)
    return found


def random_batches(step: TrainingStep) -> Iterable[tuple[Tensor, ...]]:
    """This rank's part of random batches, (input, target) of each step."""
    random = torch.Generator().manual_seed(step.config.seed)
    for _ in range(STEPS):
        yield tuple(own_part(whole, step) for whole in step.task.random_batch(random))


def read_batches(step: TrainingStep) -> Iterable[tuple[Tensor, ...]]:
    """Batches of this rank's loader, (input, target) of each step, in the default dtype."""
    loader, valid_loader = step.task.build_loaders(step.device)
    valid_loader.close()
    for batch in loader.train(step.config.seed, 0, STEPS):  # which uses its memory again
        dtypes = (torch.get_default_dtype() if part.is_floating_point() else part.dtype for part in batch)
        yield tuple(part.to(dtype, copy=True) for part, dtype in zip(batch, dtypes, strict=True))
    loader.close()


def own_part(whole: Tensor, step: TrainingStep) -> Tensor:
    """This rank's part of a global batch, (B, ...): its samples, and its part of images."""
    window = step.task.own_window()
    micro_batches = step.config.gradient_accumulation
    whole = whole[own_positions(len(whole), comm.get_rank("dp"), comm.get_size("dp"), micro_batches)]
    image = whole.dim() == 2 + len(window)
    return (whole[(slice(None), slice(None), *window)] if image else whole).to(step.device).clone()


def of_parameter(step: TrainingStep, name: str, value: Tensor) -> Part:
    """The part of a parameter or its gradient."""
    return part_of_rank(value, step.parallel.split.specs.get(name))


def weights(step: TrainingStep, stage: str) -> Record:
    """All parameters."""
    return {(stage, name): of_parameter(step, name, p) for name, p in step.parallel.model.named_parameters()}


@contextmanager
def recorded(step: TrainingStep, found: Record, drawing: set[str]) -> Iterator[None]:
    """Inside, a step puts outputs of modules and gradients into a Record, and names of modules into `drawing`.

    These are modules in whose forward function the device's random state has changed.
    """
    model, update, inside = step.parallel.model, step.update, False
    rounds = 0  # forward passes of stages, or of a model without any
    calls = defaultdict[Key, list[tuple[int, Part]]](list)  # tensors of a module, each with its place in the order

    random_state = (library(step.device, "get_rng_state") or torch).get_rng_state
    state = random_state()

    def goes(inward, *_):
        nonlocal inside, rounds
        inside = inward
        rounds += inward and torch.is_grad_enabled()

    def keep(key, tensor):
        """Keep a tensor of a forward pass; what is computed again in the backward pass is not kept."""
        if inside and torch.is_grad_enabled() and isinstance(tensor, Tensor):
            place = sum(map(len, calls.values()))
            calls[key].append((place, part_of_rank(tensor)))

    def input_of(name, module, inputs):
        keep((INPUT, name), inputs[0] if inputs else None)

    def outputs(name, module, inputs, output):
        nonlocal state
        before, state = state, random_state()
        if not torch.equal(before, state):
            drawing.add(name)
        keep((FORWARD, name), output)

    def unreduced(name, gradient):
        part, before = of_parameter(step, name, gradient), found.get((UNREDUCED, name))
        if before:
            part.value += before.value
        found[UNREDUCED, name] = part

    def gradients(stage):
        """In the order in which the backward pass computes them."""
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None:
                found[stage, name] = of_parameter(step, name, parameter.grad)

    def recorded_update(log_norm):
        gradients(GRADIENT)
        return update(log_norm)

    hooks = [step.optimizer.register_step_pre_hook(lambda *_: gradients(CLIPPED))]
    outermost: list[nn.Module] = [*step.parallel.split.stages] or [model]
    hooks += [part.register_forward_pre_hook(partial(goes, True)) for part in outermost]
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(input_of, name)))
        hooks.append(module.register_forward_hook(partial(outputs, name)))
    hooks += [part.register_forward_hook(partial(goes, False)) for part in outermost]
    for name, parameter in model.named_parameters():
        is_seen = parameter.requires_grad and not isinstance(parameter, DTensor)  # fully_shard gathers without hooks
        if is_seen:
            hooks.append(parameter.register_hook(partial(unreduced, name)))
    with patch.object(step, "update", recorded_update):
        yield
    for hook in hooks:
        hook.remove()
    # The tensors of all micro-batches as one; a module may be called twice.
    micro_batches, joined = step.config.gradient_accumulation, []
    for (stage, name), parts in calls.items():
        # The last calls are those of the micro-batches: a pipeline has tried its stages out before.
        parts = parts[-micro_batches * len(parts) * len(outermost) // rounds :]
        times = len(parts) // micro_batches
        for i in range(times):
            (place, first), values = parts[i], [part.value for _, part in parts[i::times]]
            spec = first.spec
            if spec and micro_batches > 1:
                spec = spec.resized({0: spec.shape[0] * micro_batches})
            call = f"{name} ({i + 1})" if i else name
            joined.append((place, (stage, call), Part(torch.cat(values), spec)))
    for _, key, part in sorted(joined, key=lambda tensor: tensor[0]):  # as the first micro-batch computed them
        found[key] = part
