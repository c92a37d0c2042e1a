"""A pipeline that a batch passes several times: the output of the last stage is the input of the first one again.

A forecast of k steps goes k times through the same blocks. Here each of these rounds has stages of its own, k times as
many as there are blocks to share, which hold the same modules: the last rank sends the state to the first one. What the
last rank needs of earlier rounds, it keeps: their states, for the loss and as what the next output is added to. The
gradient of a state then comes in two parts, from the ranks that have computed on with it and from the one that has kept
it; `_Kept` adds the second where the first arrives.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

Steps = Any  # what lies between two rounds, a Rollout of training/rollout.py


class Round(nn.Module):
    """A stage in one round. `batches` holds the inputs of all micro-batches, `part` is the number of the one under way.

    states: of earlier rounds, {(round, micro-batch): state}, shared by the rounds; on the last rank alone.
    """

    def __init__(self, stage: nn.Module, steps: Steps, number: int, rounds: int, first: bool, last: bool):
        super().__init__()
        self.stage, self.steps, self.number, self.rounds = stage, steps, number, rounds
        self.first, self.last = first, last
        self.states: dict[tuple[int, int], Tensor] = {}
        self.batches: Sequence[Tensor] = ()
        self.part = 0

    def forward(self, x: Tensor) -> Tensor:
        """x: of the stage before. The very last stage gives the states of all rounds, one after the other."""
        batch = self.batches[self.part]
        if self.first:
            if x.requires_grad:
                x = _Kept.apply(x, None)
            x = self.steps.inputs(x[:, : self.steps.n_in], batch, self.number)
        output = self.stage(x)
        if not self.last:
            return output
        earlier = [self.states[number, self.part] for number in range(self.number)]
        before = earlier[-1] if earlier else batch
        state = self.steps.next_state(before[:, : self.steps.n_in], output)
        if self.number == self.rounds - 1:
            return torch.cat([*earlier, state], 1)
        kept = state.detach().requires_grad_(state.requires_grad)
        self.states[self.number, self.part] = kept
        return _Kept.apply(state, kept)


class _Kept(torch.autograd.Function):
    """The same tensor; its gradient is contiguous, as sending needs it, and has that of `kept` added."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, kept: Tensor | None) -> Tensor:
        ctx.kept = kept
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.kept is not None and ctx.kept.grad is not None:
            grad = grad + ctx.kept.grad
        return grad.contiguous(), None


class RoundStage(PipelineStage):
    """A PipelineStage of a Round. wrapped: the stage, in DistributedDataParallel or fully_shard, which reduce once."""

    submod: Any  # a Round

    def __init__(self, module: Round, wrapped: nn.Module, *args: Any, **options: Any):
        super().__init__(module, *args, **options)
        self.wrapped = wrapped

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """The forward pass of one micro-batch, of this number."""
        self.submod.part = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """The backward pass of one micro-batch; the last one, in the first round, reduces gradients."""
        last, module = last_backward and self.submod.number == 0, self.submod
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(last)
        elif isinstance(self.wrapped, DistributedDataParallel):
            self.submod = self.wrapped  # which torch's method knows
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last)
        finally:
            self.submod = module


def stages_of_rounds(
    stages: Sequence[nn.Module], steps: Steps, rounds: int, rank: int, size: int, device: torch.device, group: Any
) -> list[RoundStage]:
    """The stages of this rank in every round, in order. stages: of one round, perhaps wrapped; size: ranks."""
    count, made = size * len(stages), []
    for number in range(rounds):
        for i, wrapped in enumerate(stages):
            index = rank + i * size
            plain = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
            module = Round(plain, steps, number, rounds, index == 0, index == count - 1)
            made.append(RoundStage(module, wrapped, number * count + index, rounds * count, device, group=group))
    for stage in made[1:]:
        stage.submod.states = made[0].submod.states
    return made
