"""What a comparison of layouts looks at: a rank's part of each tensor by stage and name, and hooks that record it."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.shard.core.operands import sum_partial
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, local
from training.step.speed_options import blocks_of
from training.step.step import TrainingStep
from utils.device import device_module
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


def of_parameter(step: TrainingStep, name: str, value: Tensor) -> Part:
    """The part of a parameter or its gradient."""
    return part_of_rank(value, step.parallel.split.specs.get(name))


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
        for name, module in self.seen_modules():
            self.hooks.append(module.register_forward_pre_hook(partial(self._keep_input, name)))
            self.hooks.append(module.register_forward_hook(partial(self._keep_output, name)))
        for part in self.outermost:
            self.hooks.append(part.register_forward_hook(self._leave))

        for name, parameter in self.model.named_parameters():
            # fully_shard gathers without hooks.
            is_seen = parameter.requires_grad and not isinstance(parameter, DTensor)
            if is_seen:
                self.hooks.append(parameter.register_hook(partial(self._keep_unreduced, name)))

    def seen_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules whose calls hooks can see, with their names: not those inside of compiled blocks."""
        modules = list(self.model.named_modules())
        if not self.step.config.enable_jit:
            return modules
        inside = set[nn.Module]()
        for block in blocks_of(self.model, "enable_jit"):
            inside.update(block.modules())
            inside.remove(block)
        return [(name, module) for name, module in modules if module not in inside]

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

        A module may be called twice, and is called in each step of a forecast.
        """
        config = self.step.config
        micro_batches = config.gradient_accumulation
        passes = micro_batches * config.forecast_steps(0, 1)
        joined: list[tuple[int, Key, Part]] = []
        for (stage, name), parts in self.calls.items():
            # The last calls are those of the micro-batches: a pipeline has tried its stages out before.
            parts = parts[-passes * len(parts) * len(self.outermost) // self.rounds :]
            times = len(parts) // micro_batches  # calls of the module for a micro-batch
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
