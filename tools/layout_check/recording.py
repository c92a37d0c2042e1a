"""Record what a rank computes in some training steps: outputs of modules, losses, gradients, weights, buffers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.shard.operands import reduced
from distributed.shard.spec import Spec
from distributed.shard.tensor import ShardTensor, local
from training.assembly import build_step
from training.step import TrainingStep
from utils import comm
from utils.schema import Config

STEPS = 3
BATCH, INITIAL, FORWARD, LOSS, GRADIENT = "batch", "initial weights", "forward pass", "loss", "gradient"
CLIPPED, BUFFERS, EVALUATION = "clipped gradient", "buffers", "evaluation"
UPDATES = tuple(f"weights after step {i + 1}" for i in range(STEPS))
UNREDUCED = "gradient before its reduction"  # compared with others of its kind alone, see causes.py
STAGES = (BATCH, INITIAL, FORWARD, LOSS, GRADIENT, CLIPPED, *UPDATES, BUFFERS, EVALUATION)  # in their order
Key = tuple[str, str]  # (stage, name)


@dataclass
class Part:
    """A rank's part of a tensor. None or False: nothing is split in this way.

    spec: how the domain ranks split it. dim: the dimension that tensor-parallel ranks split. samples: the first
    dimension holds samples, of which data-parallel ranks have equal parts.
    """

    value: Tensor
    spec: Spec | None = None
    dim: int | None = None
    samples: bool = False


Record = dict[Key, Part]  # in the order in which they are computed


def record(config: Config, device: torch.device) -> tuple[Record, dict[str, str]]:
    """Train for STEPS steps on random batches and evaluate once; (Record of this rank, {module: its class})."""
    step = build_step(config, device)
    recorder = Recorder(step)
    random = torch.Generator().manual_seed(config.seed)
    for i in range(STEPS):
        x, y = (own_part(whole, step) for whole in step.task.random_batch(random))
        if i == 0:
            recorder.record[BATCH, "input"] = Part(x.clone(), samples=True)
            recorder.record[BATCH, "target"] = Part(y.clone(), samples=True)
            recorder.add_weights(INITIAL)
        recorder.first = i == 0
        loss = comm.all_reduce(step(i, x, y).clone()) / comm.world_size()
        if i == 0:
            recorder.record[LOSS, "of step 1"] = Part(loss)
        recorder.add_weights(UPDATES[i])
    recorder.add_buffers()
    step.parallel.share_buffers()
    step.parallel.model.eval()
    with torch.no_grad():
        output = step.parallel.predict(x[:, : config.model_in_channels], config.n_out_channels)
    recorder.record[EVALUATION, "output"] = recorder.part(output, samples=True)
    return recorder.record, {name: type(module).__name__ for name, module in step.parallel.model.named_modules()}


def own_part(whole: Tensor, step: TrainingStep) -> Tensor:
    """This rank's part of a global batch, (B, ...): its samples, and its part of images."""
    window = step.task.own_window()
    whole = whole.chunk(comm.get_size("dp"))[comm.get_rank("dp")]
    image = whole.dim() == 2 + len(window)
    return (whole[(slice(None), slice(None), *window)] if image else whole).to(step.device).clone()


class Recorder:
    """Hooks on a training step that record its first step."""

    def __init__(self, step: TrainingStep):
        self.step, self.model, self.record = step, step.parallel.model, Record()
        self.first, self.inside = False, 0
        self.calls: dict[str, list[tuple[int, Part]]] = {}  # {module: [(how many outputs were kept before, it)]}
        self.kept = 0
        outermost: list[nn.Module] = [*step.parallel.split.stages] or [self.model]
        for part in outermost:
            part.register_forward_pre_hook(self._enter)
        for name, module in self.model.named_modules():
            module.register_forward_hook(partial(self._output, name))
        for part in outermost:
            part.register_forward_hook(self._leave)
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):  # fully_shard's gathers are not seen by hooks
                parameter.register_hook(partial(self._unreduced, name))
        update = step.update

        def recorded_update() -> Tensor | None:
            if self.first:
                self._outputs()
            self._gradients(GRADIENT)
            return update()

        step.update = recorded_update  # type: ignore[method-assign]
        step.optimizer.register_step_pre_hook(lambda *_: self._gradients(CLIPPED))

    def part(self, value: Any, samples: bool = False) -> Part:
        """A detached copy of a tensor of any kind, with its split."""
        if isinstance(value, ShardTensor):
            value = reduced(value)
            return Part(local(value).detach().clone(), value.spec, samples=samples)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return Part(whole.detach().clone(), samples=samples)

    def add_weights(self, stage: str) -> None:
        """Record all parameters."""
        for name, parameter in self.model.named_parameters():
            self.record[stage, name] = self._of_parameter(name, parameter)

    def add_buffers(self) -> None:
        """Record all buffers."""
        for name, buffer in self.model.named_buffers():
            self.record[BUFFERS, name] = self.part(buffer)

    def _of_parameter(self, name: str, value: Tensor) -> Part:
        """A parameter or its gradient: whole again where fully_shard has cut it, else as split says."""
        split, part = self.step.parallel.split, self.part(value)
        return Part(part.value, split.specs.get(name), split.dims.get(name))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.inside += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.inside -= 1

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the output of a module; what is computed again in the backward pass is not kept."""
        if self.first and self.inside and torch.is_grad_enabled() and isinstance(output, Tensor):
            self.calls.setdefault(name, []).append((self.kept, self.part(output, samples=True)))
            self.kept += 1

    def _outputs(self) -> None:
        """Record the outputs that were kept, those of all micro-batches as one; a module may be called twice."""
        micro_batches, outputs = self.step.config.gradient_accumulation, []
        for name, calls in self.calls.items():
            if self.step.parallel.pipeline:
                calls = calls[len(calls) // (micro_batches + 1) :]  # it has tried its stages out before
            times = len(calls) // micro_batches
            for i in range(times):
                numbers, parts = zip(*calls[i::times], strict=True)
                part = Part(torch.cat([p.value for p in parts]), parts[0].spec, samples=True)
                if part.spec and micro_batches > 1:
                    part.spec = part.spec.resized({0: part.spec.shape[0] * micro_batches})
                outputs.append((numbers[0], f"{name} ({i + 1})" if i else name, part))
        for _, name, part in sorted(outputs, key=lambda output: output[0]):  # in the order of the first micro-batch
            self.record[FORWARD, name] = part

    def _unreduced(self, name: str, gradient: Tensor) -> None:
        if self.first:
            part = self._of_parameter(name, gradient)
            before = self.record.get((UNREDUCED, name))
            if before:
                part.value += before.value
            self.record[UNREDUCED, name] = part

    def _gradients(self, stage: str) -> None:
        """Record the gradients, in the order in which the backward pass computes them."""
        for name, parameter in reversed(list(self.model.named_parameters())) if self.first else ():
            if parameter.grad is not None:
                self.record[stage, name] = self._of_parameter(name, parameter.grad)
