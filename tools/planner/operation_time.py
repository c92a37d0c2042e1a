"""Seconds of an operation on a device, and of a collective by where its ranks stand: by data sheets, or as measured.

An operation: the roofline, Williams et al. 2009, doi:10.1145/1498765.1498785. A collective: latency, and bytes over
bandwidth, the alpha-beta model, Hockney 1994. Rings through all NICs of a group: Jeaugey 2019, "Massively Scale Your
Deep Learning Training with NCCL 2.4".
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
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


ROUNDS = {"all_reduce": 2}  # round the ring; others: 1


@cache
def node_shapes(
    ranks: tuple[int, ...],
    world_size: int,
    gpus_per_node: int,
) -> set[tuple[int, int]]:
    """{(nodes, fewest ranks on a node)} of every group of a world that is laid out like this one.

    Every group is this one, shifted: ranks are numbered in row-major order of the mesh.
    """
    offsets = np.array(ranks) - min(ranks)
    seen = np.zeros(world_size, dtype=bool)
    shapes: dict[int, tuple[int, int]] = {}
    while not seen.all():
        first = int(seen.argmin())
        members = first + offsets
        seen[members] = True
        place = first % gpus_per_node
        # Groups that start at the same place of a node are placed alike.
        if place not in shapes:
            _, ranks_on_nodes = np.unique(members // gpus_per_node, return_counts=True)
            shapes[place] = len(ranks_on_nodes), int(ranks_on_nodes.min())
    return set(shapes.values())


def collective_time(
    kind: str,
    sent: float,
    count: int,
    size: int,
    nodes: int,
    fewest: int,
    gpu: Gpu,
    ring: bool,
) -> float:
    """Seconds of `count` collectives in which a rank sends `sent` bytes altogether.

    size: ranks of the group. nodes: that the group spans. fewest: ranks of the group on a node, at least.
    ring: each message passes all ranks; else it goes to one other rank.
    """
    link = gpu.link * gpu.network_efficiency
    nic = gpu.nic * gpu.network_efficiency
    hop_inside = gpu.hop_inside
    hop_across = gpu.hop_across
    if gpu.measured:
        if size > nodes:
            link, hop_inside = _measured(kind, 1, ring, gpu)
        if nodes > 1:
            nic, hop_across = _measured(kind, nodes, ring, gpu)

    # The bytes.
    if nodes == 1:
        seconds = sent / link
    elif not ring:
        seconds = sent / nic
    elif kind == "all_to_all":
        # A rank on the node with the fewest ranks sends most to other nodes.
        share_that_leaves = (size - fewest) / (size - 1)
        seconds = sent * share_that_leaves / nic
    else:
        # Rings pass a node through the NICs of all ranks that the group has there.
        seconds = sent / min(link, nic * fewest)

    # The latencies of a round.
    if not ring:
        hops = hop_across if nodes > 1 else hop_inside
    else:
        hops = (size - nodes) * hop_inside + (nodes - 1) * hop_across
        if kind == "all_reduce":
            # Small messages take a tree of nodes.
            tree = (size / nodes - 1) * hop_inside + math.log2(nodes) * hop_across
            hops = min(hops, tree)
    rounds = ROUNDS.get(kind, 1)
    return count * rounds * hops + seconds


def _measured(kind, nodes, ring, gpu):
    """(bytes/s, latency of a hop) of a measured machine, with which its own groups take what was measured."""
    measured_as = kind if ring else "send"
    found = gpu.measured.collective(measured_as, nodes, gpu.name)
    # The measured latency is that of a whole collective.
    hops = ROUNDS.get(kind, 1) * (found.ranks - 1) if ring else 1
    return found.bandwidth, found.latency / hops
