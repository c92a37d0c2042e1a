"""Seconds that a device takes for an operation: by the roofline of its data sheet, or as it was measured.

The roofline: Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

from dataclasses import dataclass

import torch

from tools.instruments.tracker import ATTENTION, Operation
from tools.planner.hardware import AttentionKernel, Gpu, Speeds
from utils.layout import Layout
from utils.schema import Config

# torch.compile fuses chains of elementwise operations: about every second tensor stays in registers.
COMPILED_TRAFFIC, COMPILED_LAUNCHES = 0.5, 0.5
HEAD_SIZES = 32, 64, 96, 128, 192, 256  # of the kernels of attention; other sizes are padded
CUDNN_HEAD = 256  # largest head of cuDNN's attention on Hopper; its size is a multiple of 8
LOW = (torch.float16, torch.bfloat16)

# An 8-bit product casts both of its inputs: it finds their largest number, scales them and rounds. Bytes moved for each
# byte of a 16-bit input. Compiled: as measured on an H100, where the reference model with an embedding size of 1024
# takes 290 ms a step in 8 bits and 242 ms in bf16. Eager: five passes read, and four of them write, an estimate, as is
# the number of kernels for both inputs.
CAST_TRAFFIC = {True: 4.0, False: 8.5}
CAST_KERNELS = {True: 4, False: 12}
INPUTS = 2 / 3  # of the bytes that a product moves, on average over the forward and the two backward ones


@dataclass(frozen=True)
class OperationTimes:
    """Seconds of operations on a GPU, for a config in a layout."""

    config: Config
    layout: Layout
    gpu: Gpu

    def seconds(self, operation: Operation, speeds: Speeds | None) -> float:
        """Seconds of an operation. speeds: of a measured machine, else the data sheet's count."""
        moved = operation.moved
        is_fused = self._is_fused(operation)
        if is_fused:
            moved *= COMPILED_TRAFFIC
        if speeds:
            return speeds.seconds(operation._replace(moved=moved), self._called(operation), self.head)
        seconds = moved / self._bandwidth
        if operation.flops:
            seconds = max(seconds, operation.flops / self.rate(operation))
        shortest = self.gpu.kernel * (COMPILED_LAUNCHES if is_fused else 1)
        seconds = max(seconds, shortest)
        if self._has_8_bits(operation):
            seconds += self._cast_seconds(operation)
        return seconds

    def rate(self, operation: Operation) -> float:
        """FLOP/s that an operation reaches."""
        gpu = self.gpu
        low = {torch.float16: gpu.fp16, torch.bfloat16: gpu.bf16}
        if operation.kind == ATTENTION:
            # In float32 each product is three in TF32 (CUTLASS, OpMultiplyAddFastF32), whatever enable_tf32 says.
            peak = low.get(operation.dtype, max(gpu.fp32, gpu.tf32 / 3))
            padded = next((size for size in HEAD_SIZES if size >= self.head), self.head)
            share = gpu.attention_share(self.attention_kernel(operation.dtype), self.head)
            return peak * share * self.head / padded
        if self._has_8_bits(operation):
            return self._fp8 * gpu.matmul_efficiency
        full = gpu.tf32 if self.config.enable_tf32 else gpu.fp32
        return low.get(operation.dtype, full) * gpu.matmul_efficiency

    def attention_kernel(self, dtype: torch.dtype) -> AttentionKernel:
        """The kernel that attention takes, where the GPU has both.

        cuDNN's computes in 16 bits and does not repeat its numbers; ring attention calls flash, which also returns the
        sums of exponentials; in float32 there is the memory-efficient kernel alone.
        """
        if dtype not in LOW:
            return "efficient"
        config, layout = self.config, self.layout
        rings_tokens = layout.cp > 1 and config.cp_method == "ring"
        rings_domain = max(layout.domain) > 1 and config.domain_method == "ring"
        can_take_cudnn = self.head <= CUDNN_HEAD and self.head % 8 == 0
        if rings_tokens or rings_domain or config.deterministic or not can_take_cudnn:
            return "flash"
        return "cudnn"

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.config.embed_dim // self.config.num_heads

    @property
    def _bandwidth(self) -> float:
        return self.gpu.bandwidth * self.gpu.memory_efficiency

    @property
    def _fp8(self) -> float:
        """Peak FLOP/s of 8-bit products; 0 where the config or the GPU has none."""
        return (self.gpu.fp8 or 0.0) if self.config.amp_mode == "fp8" else 0.0

    def _has_8_bits(self, operation: Operation) -> bool:
        """Tell whether it is a product in 8 bits: all are, since embedding and head, in bf16, are a few percent."""
        return operation.kind == "matmul" and self._fp8 > 0

    def _cast_seconds(self, operation: Operation) -> float:
        """Seconds for which the inputs of an 8-bit product are scaled and rounded."""
        compiled = self.config.enable_jit
        traffic = operation.moved * INPUTS * CAST_TRAFFIC[compiled] / self._bandwidth
        return max(traffic, CAST_KERNELS[compiled] * self.gpu.kernel)

    def _is_fused(self, operation: Operation) -> bool:
        return self.config.enable_jit and operation.kind == "pointwise" and operation.phase != "update"

    def _called(self, operation: Operation) -> str:
        """The type in which it computes, as the tables of a measured machine call it."""
        dtype = str(operation.dtype).removeprefix("torch.")
        takes_tf32 = dtype == "float32" and operation.kind == "matmul" and self.config.enable_tf32
        return "tf32" if takes_tf32 else dtype
