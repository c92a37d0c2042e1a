"""The model as the training step calls it, whatever it is split over."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule

from distributed.gradients import average_over_dp, clip_gradients
from distributed.tensor_parallel import reduce_partial_gradients
from distributed.tiles import joined
from utils import comm


@dataclass
class Split:
    """What model parallelism has made of a model."""

    dims: dict = field(default_factory=dict)  # {parameter: dim} of those split over tp in pieces
    stages: list = field(default_factory=list)  # of this rank in the pipeline
    specs: dict = field(default_factory=dict)  # {parameter: Spec} of those split over the domain ranks


class ParallelModel:
    """One step or forecast of a model on all its ranks.

    model: this rank's part, with the parameters' names of the whole. module: what is called, maybe DDP around it.
    pipeline: runs the stages of the model instead, or None. cuts: how images are split, see distributed/tiles.py.
    """

    def __init__(self, model, module, split, replicated, cuts, pipeline=None):
        self.model, self.module, self.split, self.pipeline = model, module, split, pipeline
        self.replicated, self.cuts = replicated, cuts  # replicated: by DDP

    def forward_backward(self, x, y, loss, micro_batches, forward_span, backward_span):
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

    def clip_gradients(self, max_norm):
        if comm.get_size("tp_pp") > 1 or self.split.specs:
            clip_gradients(self.model, self.split, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    @torch.no_grad()
    def forecast(self, x, out_channels):
        """Forecast of whole images of a batch, (B, C, H, W) each, on every rank that shares these samples.

        x: this rank's part of the input, (B, C_in, h, w).
        """
        if not self.pipeline:
            return self.whole_images(self.model(x))
        return self.whole_images(self.pipeline.forecast(x, (len(x), out_channels, *x.shape[2:])))

    def whole_images(self, band):
        """The parts of the images on all ranks that share them, joined: (B, C, h, w) -> (B, C, H, W)."""
        return joined(band, self.cuts)
