"""The tensors that a comparison of layouts looks at: a rank's part of each, by the stage of a training and a name."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.shard.operands import sum_partial
from distributed.shard.spec import Spec
from distributed.shard.tensor import ShardTensor, local
from training.step.step import TrainingStep

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
