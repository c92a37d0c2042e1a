"""A training step recorded once as a CUDA graph and then replayed: one launch instead of one for every kernel.

Recorded is what the GPU does, NCCL's collectives included; Python and the host's C++ run once, in the capture. Method:
the CUDA graphs section of PyTorch's notes on CUDA semantics, with what it says of DistributedDataParallel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from utils import comm
from utils.device import capture_stream, on_capture_stream
from utils.errors import UsageError, reported_as_usage_error
from utils.host_random import host_generators
from utils.schema import Config

WARMUP_STEPS = 3  # run before the capture, so that libraries, communicators and the allocator have settled
DDP_WARMUP_STEPS = 11  # DistributedDataParallel times its first ten steps, which a capture would not bear


def check_capture(config: Config, device: torch.device, model: nn.Module) -> None:
    """Raise UsageError, naming the options, where a step on the ranks of this run cannot become a CUDA graph."""
    tp = comm.get_size("tp") > 1
    drops = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.p]
    dropout = config.dropout or bool(drops)
    sharded = config.data_parallel != "ddp" and comm.get_size("grad_reduce") > 1
    # Each entry has a condition, and the end of the sentence that refuses it.
    refused = [
        (device.type != "cuda", f"needs a GPU with CUDA or ROCm; this run is on {device}"),
        (
            config.data_loader_config == "dali",
            "goes without --data_loader_config=dali: DALI's threads use the device while the step is captured; use "
            "--data_loader_config=pytorch",
        ),
        (sharded, f"goes without --data_parallel={config.data_parallel}, whose step makes and frees memory: use ddp"),
        (comm.get_size("pp") > 1, "goes without pipeline_parallel, whose stages take turns on the host"),
        (comm.get_size("domain") > 1, "goes without domain_parallel, whose rules choose and draw on the host"),
        (tp and config.tp_backend != "native", "with tensor_parallel goes without tp_backend dtensor: use native"),
        (
            tp and dropout and not config.sequence_parallel,
            "with dropout and tensor_parallel needs sequence_parallel: without it every replay would drop the same",
        ),
        (
            dropout and config.activation_checkpointing != "none",
            "goes without activation_checkpointing where there is dropout: a capture cannot set a generator back",
        ),
    ]
    for holds, reason in refused:
        if holds:
            raise UsageError(f"--enable_cuda_graphs {reason}")


class CapturedStep:
    """captured(step, *inputs) -> its tensor: the step run a few times on the side, captured, and from then on replayed.

    The graph reads its inputs from static buffers, so every batch must have the shape of the first; the learning rate
    must be a tensor and the optimizer capturable. replicated: DistributedDataParallel reduces the gradients.
    The step is not kept: the step's owner owns this object too, and in a cycle the graph would outlive both.
    """

    def __init__(self, replicated: bool = False):
        self.warmup_left = DDP_WARMUP_STEPS if replicated else WARMUP_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] | None = None

    def __call__(self, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run the step, always the same, on `inputs`; returns the tensor that it returns."""
        if self.inputs is None:
            self.inputs = []
            for x in inputs:
                self.inputs.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        # The graph reads from where it was captured, so the batch is copied there.
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        # The first steps run as they are, on the stream of the capture.
        if self.warmup_left:
            self.warmup_left -= 1
            with on_capture_stream(), without_host_draws():
                return step(*self.inputs)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads go on: they copy batches ahead and write checkpoints.
            recording = torch.cuda.graph(self.graph, stream=capture_stream(), capture_error_mode="thread_local")
            named = reported_as_usage_error(RuntimeError, "--enable_cuda_graphs: this step cannot be captured")
            with without_host_draws(), named, recording:
                self.output = step(*self.inputs)
        # A capture computes nothing, so the first graph is replayed too.
        self.graph.replay()
        return self.output.clone()  # the next replay writes over it


@contextmanager
def without_host_draws() -> Iterator[None]:
    """Raise UsageError where random numbers were drawn on the host inside: a replay would repeat those of the capture.

    What a GPU's generator draws is drawn anew in every replay.
    """
    before = host_generators()
    yield
    if host_generators() != before:
        raise UsageError(
            "--enable_cuda_graphs: the step draws random numbers on the host (random, numpy, or torch on the CPU), and "
            "every replay would repeat one draw: draw on the GPU, or go without --enable_cuda_graphs"
        )
