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

from distributed.shard.operands import sum_partial
from distributed.shard.spec import Spec
from distributed.shard.tensor import ShardTensor, local
from tools.layout_check.saving import state_of, why_not_saved
from tools.layout_check.wide import WideCasts, build_wide_step
from training.ensemble import repeat_members, training_noise
from training.step import TrainingStep
from utils import comm
from utils.device import device_module
from utils.sample_order import own_positions
from utils.schema import Config
from utils.torch_private import is_batched

STEPS = 3

# Stages of a training.
BATCH = "batch"
INITIAL = "initial weights"
FORWARD = "forward pass"
LOSS = "loss"
GRADIENT = "gradient"
CLIPPED = "clipped gradient"
BUFFERS = "buffers"
EVALUATION = "evaluation"
UPDATES = tuple(f"weights after step {i + 1}" for i in range(STEPS))
# Consulted for the cause of a difference, see causes.py, and not compared as stages of their own.
UNREDUCED = "gradient before its reduction"
INPUT = "input of a module"
# Of the state that was saved.
RELOADED = "weights and buffers read back"
MOMENTS = "moments read back"
# In their order.
STAGES = (
    BATCH,
    INITIAL,
    FORWARD,
    LOSS,
    GRADIENT,
    CLIPPED,
    *UPDATES,
    BUFFERS,
    EVALUATION,
    RELOADED,
    MOMENTS,
)

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
        split = sum_partial(value)
        value, spec = local(split), split.spec
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return Part(value.detach().clone(), spec)


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
    with WideCasts():
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

    # Evaluate.
    step.parallel.share_buffers()  # as before a validation, or a checkpoint
    model.eval()
    with torch.no_grad():
        images = x[:, : config.model_in_channels]  # without forcings, (B, C, h, w)
        output = step.parallel.predict(*members_of(step, images))
    found[EVALUATION, "output"] = part_of_rank(output)

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
    tensors = state_of(step)
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


def random_batches(step: TrainingStep) -> Iterable[tuple[Tensor, ...]]:
    """This rank's part of random batches, (input, target) of each step."""
    random = torch.Generator().manual_seed(step.config.seed)
    for _ in range(STEPS):
        yield tuple(own_part(whole, step) for whole in step.task.random_batch(random))


def read_batches(step: TrainingStep) -> Iterable[tuple[Tensor, ...]]:
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


def own_part(whole: Tensor, step: TrainingStep) -> Tensor:
    """This rank's part of a global batch, (B, ...): its samples, and its part of images."""
    window = step.task.own_window()
    micro_batches = step.config.gradient_accumulation
    own = own_positions(len(whole), comm.get_rank("dp"), comm.get_size("dp"), micro_batches)
    part = whole[own]
    is_image = part.dim() == 2 + len(window)  # (B, C, h, w), not a label of each sample
    if is_image:
        part = part[(slice(None), slice(None), *window)]
    return part.to(step.device).clone()


def of_parameter(step: TrainingStep, name: str, value: Tensor) -> Part:
    """The part of a parameter or its gradient."""
    return part_of_rank(value, step.parallel.split.specs.get(name))


def members_of(step: TrainingStep, images: Tensor) -> tuple[Any, ...]:
    """What `predict` takes for one step from images: of an ensemble this rank's members, with noise of their own."""
    config = step.config
    if config.ensemble_size == 1:
        return images, config.n_out_channels
    noise = training_noise(config, 0, 1, images)  # (B, m, 1, K)
    return repeat_members(images, noise.shape[1]), config.n_out_channels, noise.flatten(0, 2)


def weights(step: TrainingStep, stage: str) -> Record:
    """All parameters."""
    parameters = step.parallel.model.named_parameters()
    return {(stage, name): of_parameter(step, name, parameter) for name, parameter in parameters}


@contextmanager
def recorded(step: TrainingStep, found: Record, drawing: set[str]) -> Iterator[None]:
    """Inside, a step puts outputs of modules and gradients into a Record, and names of modules into `drawing`.

    These are modules in whose forward function the device's random state has changed.
    """
    recorder = Recorder(step, found, drawing)
    recorder.add_hooks()
    update = step.update

    # The update clips gradients, so they are kept before it begins.
    def recorded_update(log_norm):
        recorder.keep_gradients(GRADIENT)
        return update(log_norm)

    with patch.object(step, "update", recorded_update):
        yield
    recorder.remove_hooks()
    recorder.join_micro_batches()


class Recorder:
    """Hooks that record one step of a training, see `recorded`.

    calls: {key: tensors of a module, each with its place in the order of all}. rounds: forward passes of stages, or of
    a model without any. is_inside: whether a forward pass is under way.
    """

    def __init__(self, step: TrainingStep, found: Record, drawing: set[str]):
        self.step = step
        self.model = step.parallel.model
        self.found = found
        self.drawing = drawing
        self.calls = defaultdict[Key, list[tuple[int, Part]]](list)
        self.hooks: list[Any] = []
        self.rounds = 0
        self.is_inside = False
        # A pipeline calls its stages one by one, never the model as a whole.
        self.outermost: list[nn.Module] = [*step.parallel.split.stages] or [self.model]
        # The device draws from a random state of its own, a CPU from torch's.
        self.random_state = (device_module(step.device, "get_rng_state") or torch).get_rng_state
        self.last_state = self.random_state()

    # Hooks.

    def add_hooks(self) -> None:
        """Register all hooks. Those of a forward pass as a whole come first before it and last after it."""
        keep_clipped = partial(self._before_update, CLIPPED)
        self.hooks.append(self.step.optimizer.register_step_pre_hook(keep_clipped))

        for part in self.outermost:
            self.hooks.append(part.register_forward_pre_hook(self._enter))
        for name, module in self.model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(partial(self._keep_input, name)))
            self.hooks.append(module.register_forward_hook(partial(self._keep_output, name)))
        for part in self.outermost:
            self.hooks.append(part.register_forward_hook(self._leave))

        for name, parameter in self.model.named_parameters():
            # fully_shard gathers without hooks.
            is_seen = parameter.requires_grad and not isinstance(parameter, DTensor)
            if is_seen:
                self.hooks.append(parameter.register_hook(partial(self._keep_unreduced, name)))

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for hook in self.hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        self.is_inside = True
        self.rounds += torch.is_grad_enabled()

    def _leave(self, *_: Any) -> None:
        self.is_inside = False

    def _keep_input(
        self,
        name: str,
        module: nn.Module,
        inputs: tuple[Any, ...],
    ) -> None:
        first = inputs[0] if inputs else None
        self._keep((INPUT, name), first)

    def _keep_output(
        self,
        name: str,
        module: nn.Module,
        inputs: tuple[Any, ...],
        output: Any,
    ) -> None:
        # Whoever has drawn random numbers has moved the state.
        before = self.last_state
        self.last_state = self.random_state()
        if not torch.equal(before, self.last_state):
            self.drawing.add(name)
        self._keep((FORWARD, name), output)

    def _keep(self, key: Key, tensor: Any) -> None:
        """Keep a tensor of a forward pass; what is computed again in the backward pass is not kept."""
        is_kept = self.is_inside and torch.is_grad_enabled() and isinstance(tensor, Tensor)
        # Inside of torch.vmap a module sees one of many tensors, which has no memory of its own.
        if is_kept and not is_batched(tensor):
            # The number of tensors kept so far gives the order of execution.
            place = sum(map(len, self.calls.values()))
            self.calls[key].append((place, part_of_rank(tensor)))

    def _keep_unreduced(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to those of earlier micro-batches, before ranks reduce it."""
        part = of_parameter(self.step, name, gradient)
        before = self.found.get((UNREDUCED, name))
        if before:
            part.value += before.value
        self.found[UNREDUCED, name] = part

    def _before_update(self, stage: str, *_: Any) -> None:
        self.keep_gradients(stage)

    def keep_gradients(self, stage: str) -> None:
        """Keep all gradients, in the order in which the backward pass computes them."""
        for name, parameter in reversed(list(self.model.named_parameters())):
            if parameter.grad is not None:
                self.found[stage, name] = of_parameter(self.step, name, parameter.grad)

    # After the step.

    def join_micro_batches(self) -> None:
        """Put the tensors of all micro-batches into the record as one, as the first micro-batch computed them.

        A module may be called twice.
        """
        micro_batches = self.step.config.gradient_accumulation
        joined: list[tuple[int, Key, Part]] = []
        for (stage, name), parts in self.calls.items():
            # The last calls are those of the micro-batches: a pipeline has tried its stages out before.
            parts = parts[-micro_batches * len(parts) * len(self.outermost) // self.rounds :]
            times = len(parts) // micro_batches  # calls of the module in a forward pass
            for i in range(times):
                place, first = parts[i]
                values = [part.value for _, part in parts[i::times]]  # of the i-th call in each micro-batch
                spec = first.spec
                if spec and micro_batches > 1:
                    samples = spec.shape[0] * micro_batches
                    spec = spec.resized({0: samples})
                call = f"{name} ({i + 1})" if i else name
                whole = Part(torch.cat(values), spec)
                joined.append((place, (stage, call), whole))
        for _, key, part in sorted(joined, key=lambda tensor: tensor[0]):
            self.found[key] = part
