"""Memory of a rank in one training step, in bytes of distinct storages."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from tools.instruments.counting import Watch
from tools.instruments.phases import around
from tools.instruments.tracker import Tracker, plain_tensors
from training.speed_options import EXPENSIVE
from training.step import TrainingStep


def memory_of_a_step(step: TrainingStep, x: Tensor, y: Tensor, tracker: Tracker | None = None) -> dict[str, int]:
    """Run step(0, x, y), an optimizer step of a TrainingStep that has made one before; returns {what: bytes}.

    parameters: between forward and backward pass, whole ones that lie beside a rank's part included.
    parameters at most: in the forward pass, while the unit that computes is gathered. The buffer that receives the
    result of a running collective is not seen. Not of a pipeline.
    gradients: before the update. optimizer: its state. activations: what the backward pass needs of the forward pass,
    the input included, on whatever device; of a pipeline the most after the forward pass of a micro-batch.
    tracker: is told of these tensors, and that gathered parameters are buffers.
    """
    label = (tracker or Tracker()).label
    model, stages = step.parallel.model, step.parallel.pipeline.stages if step.parallel.pipeline else []
    own = [p for group in step.optimizer.param_groups for p in group["params"]]
    held: Counter[str] = Counter()
    saved = SavedTensors(model, lambda tensor: label("activations", [tensor]))
    staged: list[nn.Module] = [stage.submod for stage in stages]

    def note(name: str, size: int) -> None:
        held[name] = max(held[name], size)

    def after_forward() -> None:
        note("parameters", nbytes([*own, *model.parameters()]))
        note("activations", saved.nbytes())

    def before_update() -> None:
        gradients = [p.grad for p in own if p.grad is not None]
        label("gradients", gradients)
        note("gradients", nbytes(gradients))

    def gathered(unit: nn.Module, *_: Any) -> None:
        label("buffers", unit.parameters())
        if not stages:
            note("parameters at most", nbytes([*own, *model.parameters()]))

    def first(function: Callable[[], None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function()
        return method(*args, **kwargs)

    def chunk(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        after_forward()
        return output

    with ExitStack() as stack:
        for unit in dict.fromkeys(unit for module in staged or [model] for unit in module.modules()):
            if isinstance(unit, FSDPModule):  # first in line, so before the unit is resharded
                stack.callback(unit.register_forward_hook(gathered, prepend=True).remove)
        for stage in stages:
            stack.enter_context(around(stage, "forward_one_chunk", chunk))
        if not stages:
            stack.enter_context(around(step.scaler, "scale", partial(first, after_forward)))
        stack.enter_context(around(step.scaler, "step", partial(first, before_update)))
        stack.enter_context(warnings.catch_warnings())  # torch says that selective checkpointing passes the hooks by
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor))
        stack.enter_context(saved)
        step(0, x, y)
    if not stages:
        held["parameters at most"] = max(held["parameters"], held["parameters at most"])
    held["optimizer"] = nbytes(optimizer_states(step.optimizer))
    return dict(held)


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimizer keeps on this rank."""
    optimizer = getattr(optimizer, "optim", optimizer)  # inside a ZeroRedundancyOptimizer
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under some tensors, of the local part where one is sharded."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """{identity: bytes} of the distinct storages under some tensors."""
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in plain_tensors(tensors))}


class SavedTensors(Watch):
    """Context: notes the tensors that a forward pass keeps for the backward pass, except for parameters.

    Autograd saves some of them (`note` is its hook), and selective activation checkpointing keeps others by itself.
    listener: called with each of them.
    """

    def __init__(self, module: nn.Module, listener: Callable[[Tensor], None]):
        super().__init__()
        self.module, self.listener = module, listener
        self.sizes: dict[StorageWeakRef, int] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """Remember the storage of a tensor that is kept; returns the tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in _storages(self.module.parameters()):
            self.sizes[StorageWeakRef(storage)] = storage.nbytes()
            self.listener(tensor)
        return tensor

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note the result of an operation that selective activation checkpointing does not repeat."""
        if func in EXPENSIVE and torch.is_grad_enabled():  # which it is not in the backward pass
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor)

    def nbytes(self) -> int:
        """Bytes of the noted storages that still exist."""
        return sum(size for storage, size in self.sizes.items() if not storage.expired())
