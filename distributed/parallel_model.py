"""The model as the training step calls it, whatever it is split over."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distributed.gradients import average_over_dp, clip_gradients
from distributed.pipeline import Pipeline, Stage
from distributed.shard.spec import Spec
from distributed.tensor_parallel import reduce_partial_gradients
from utils import comm
from utils.tiles import Cut, joined


@dataclass
class Split:
    """What model parallelism has made of a model."""

    dims: dict[str, int] = field(default_factory=dict)  # by parameter, of those split over tp in pieces
    stages: list[Stage] = field(default_factory=list)  # of this rank in the pipeline
    specs: dict[str, Spec] = field(default_factory=dict)  # by parameter, of those split over the domain ranks


class ParallelModel:
    """One step or forecast of a model on all its ranks.

    model: this rank's part, with the parameters' names of the whole. module: what is called, maybe DDP around it.
    pipeline: runs the stages of the model instead, or None. cuts: how images are split, see utils/tiles.py.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        split: Split,
        replicated: bool,
        cuts: Sequence[Cut],
        pipeline: Pipeline | None = None,
    ):
        self.model, self.module, self.split, self.pipeline = model, module, split, pipeline
        self.replicated, self.cuts = replicated, cuts  # replicated: by DDP

    def forward_backward(
        self,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        micro_batches: int,
        forward_span: Callable[[], AbstractContextManager],
        backward_span: Callable[[], AbstractContextManager],
    ) -> None:
        """Gradients of the mean over micro-batches, reduced over the ranks once.

        loss: loss(prediction, target) of a micro-batch, what is differentiated.
        """
        if self.pipeline:
            self.pipeline.step(x, y, loss)
        else:
            for i, (x_part, y_part) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True), 1):
                with self._reduction(wanted=i == micro_batches):
                    with forward_span():
                        value = loss(self.module(x_part), y_part)
                    with backward_span():
                        value.backward()
        reduce_partial_gradients(self.model, comm.get_group("tp"))
        average_over_dp(self.model, self.split.specs)

    def _reduction(self, wanted):
        """Context of a micro-batch: only the last one of a step reduces gradients over the data-parallel ranks."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(wanted)
        elif self.replicated and not wanted:
            return self.module.no_sync()
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> None:
        """Scale all gradients so that their L2 norm, over all ranks, is at most max_norm."""
        if comm.get_size("tp_pp") > 1 or self.split.specs:
            clip_gradients(self.model, self.split, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    @torch.no_grad()
    def forecast(self, x: Tensor, out_channels: int) -> Tensor:
        """Forecast of whole images of a batch, (B, C, H, W) each, on every rank that shares these samples.

        x: this rank's part of the input, (B, C_in, h, w).
        """
        if not self.pipeline:
            return self.whole_images(self.model(x))
        return self.whole_images(self.pipeline.forecast(x, (len(x), out_channels, *x.shape[2:])))

    def whole_images(self, band: Tensor) -> Tensor:
        """The parts of the images on all ranks that share them, joined: (B, C, h, w) -> (B, C, H, W)."""
        return joined(band, self.cuts)
