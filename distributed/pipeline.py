"""Pipeline parallel: the blocks of the model are split into stages, and micro-batches flow through them.

Each rank holds one stage, or two with the interleaved schedule. It sends activations to the next stage and gradients
back to the previous one; torch.distributed.pipelining runs the schedule. With p stages and m micro-batches each rank is
idle for (p - 1) / (m + p - 1) of a step. This idle time is called the bubble. 1f1b has the same bubble as gpipe, but
keeps the activations of at most p micro-batches. Two interleaved stages per rank halve the bubble and double the number
of messages.

GPipe: Huang et al. 2019 (arXiv:1811.06965); 1F1B: Narayanan et al. 2019 (arXiv:1806.03377); interleaved: Narayanan et
al. 2021 (arXiv:2104.04473).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checks.ties import tied_names
from distributed.collectives import AnyGroup, as_group
from distributed.protocol import SplittableTransformer
from utils.errors import LayoutError

SCHEDULES = {  # by name, the class of torch.distributed.pipelining
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


class Blocks(nn.ModuleDict):
    """Some blocks of a model, stored under their numbers in the model, so that parameters keep their names."""

    def __iter__(self):
        return iter(self.values())


class Stage(nn.Module):
    """Consecutive blocks of a transformer. The first one also embeds the image, the last one applies the head."""

    def __init__(self, model: SplittableTransformer, numbers: Iterable[int], first: bool, last: bool):
        super().__init__()
        self.first = first
        self.last = last
        if first:
            self.patch_embed = model.patch_embed
            self.pos_embed = model.pos_embed
            self.pos_drop = model.pos_drop
        self.blocks = Blocks({str(i): model.blocks[i] for i in numbers})
        if last:
            self.norm = model.norm
            self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        """x: the image, or tokens (B, N, D) of the previous stage -> tokens (B, N, D), or the output of the head."""
        if self.first:
            tokens = self.patch_embed(x)  # (B, N, D)
            x = self.pos_drop(self.pos_embed(tokens))
        for block in self.blocks:
            x = block(x)
        if self.last:
            return self.head(self.norm(x))
        return x.contiguous()  # sending needs contiguous memory


def split_into_stages(model: SplittableTransformer, group: AnyGroup, schedule: str) -> list[Stage]:
    """Reduce a transformer, in place, to the stages of this rank, and return these stages in order.

    Parameters keep their names in the model. Raises ValueError if the blocks cannot be divided equally.
    """
    _, rank, size = as_group(group)
    per_rank = 2 if schedule == "interleaved" else 1
    stages = size * per_rank
    depth = len(model.blocks)
    if depth % stages:
        each = f" of which each rank holds {per_rank}" if per_rank > 1 else ""
        raise LayoutError(f"pipeline parallel: {depth} blocks cannot be shared by {stages} stages{each}")
    length = depth // stages
    _check_ties(model, length, stages)
    built = []
    for number in range(rank, stages, size):  # interleaved: stages are assigned to ranks in turn
        start = number * length
        is_first = number == 0
        is_last = number == stages - 1
        built.append(Stage(model, range(start, start + length), is_first, is_last))

    # The model keeps this rank's modules only, so that memory for the others is freed.
    kept: dict[str, nn.Module] = {}
    for stage in built:
        kept.update(stage.blocks.items())
    model.blocks = Blocks(kept)
    if not built[0].first:
        del model.patch_embed, model.pos_embed, model.pos_drop
    if not built[-1].last:
        del model.norm, model.head
    return built


def _check_ties(model, length, stages):
    """Raise LayoutError where a weight has names in two stages: no rank would have all of its gradient."""
    for names in tied_names(model):
        first = names[0]
        stage_of_first = _stage_of(first, length, stages)
        elsewhere = [name for name in names if _stage_of(name, length, stages) != stage_of_first]
        if elsewhere:
            raise LayoutError(
                f"pipeline parallel: '{first}' and '{elsewhere[0]}' are one weight, in two stages: train this model "
                "with train.py, or give the modules weights of their own"
            )


def _stage_of(name, length, stages):
    """The stage that holds the parameter of this name, with `length` blocks each."""
    kind, *rest = name.split(".")
    if kind == "blocks":
        number = int(rest[0])
        return number // length
    is_of_last = kind in ("norm", "head")
    return stages - 1 if is_of_last else 0


class Pipeline:
    """Runs training steps and forecasts through the stages of all ranks of `group`.

    stages: those of this rank; DDP or fully_shard may wrap them. micro_batches: number of parts of a batch.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        schedule: str,
        micro_batches: int,
        device: torch.device,
    ):
        from torch.distributed import pipelining  # slow to import

        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.first = self.rank == 0
        self.last = self.rank == self.size - 1
        self.device = device
        self.micro_batches = micro_batches
        count = self.size * len(stages)  # of all ranks
        self.stages = []
        for i, stage in enumerate(stages):
            number = self.rank + i * self.size
            self.stages.append(pipelining.PipelineStage(stage, number, count, device, group=group))
        # Only the interleaved schedule takes a list of stages.
        own = self.stages if len(stages) > 1 else self.stages[0]
        # The loss of a micro-batch is already its share of the loss of the batch.
        run_schedule = getattr(pipelining, SCHEDULES[schedule])
        self.schedule = run_schedule(own, micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, prediction, target):
        if self.loss is None:  # a forecast
            return prediction.new_zeros(())
        return self.loss(prediction, target)

    def step(
        self,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        scale: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Run forward and backward of all micro-batches. The first stage uses x, (B, ...); the last one uses y.

        loss: called as loss(prediction, target) on the last rank for every micro-batch. scale: applied to the loss
        before it is differentiated. Returns the losses of the micro-batches, on the last rank.
        """
        losses: list[Tensor] = []

        def scaled(prediction: Tensor, target: Tensor) -> Tensor:
            value = loss(prediction, target)
            losses.append(value.detach())
            return scale(value)

        self.loss: Callable[[Tensor, Tensor], Tensor] | None = scaled
        x = x.contiguous()  # each micro-batch has the strides of the first
        inputs = [x] if self.first else []
        target = y if self.last else None
        self.schedule.step(*inputs, target=target, return_outputs=False)
        return losses[-self.micro_batches :]  # the schedule tries the loss out first

    @torch.no_grad()
    def forecast(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Forecast of a batch, the same on every rank of the pipeline. shape: of the forecast, (B, C, H, W)."""
        # The schedule requires a loss and a target, though a forecast has neither.
        self.loss = None
        inputs = [x] if self.first else []
        target = torch.zeros(len(x)) if self.last else None
        prediction = self.schedule.eval(*inputs, target=target)

        # Every rank receives the forecast, in the default dtype rather than in the one of autocast.
        if self.last:
            wide = torch.get_default_dtype()
            prediction = prediction.to(wide).contiguous()
        else:
            prediction = torch.empty(shape, device=self.device)  # (B, C, H, W)
        dist.broadcast(prediction, group=self.group, group_src=self.size - 1)
        return prediction
